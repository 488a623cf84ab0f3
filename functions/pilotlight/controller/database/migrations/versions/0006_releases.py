"""Releases: traffic documents, aliases, approvals, rollouts, experiments, feedback, schedules,
webhooks, observations, traces."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

COUNTS = (
    "answered",
    "failed",
    "refused",
    "cancelled",
    "degraded",
    "cold",
    "raised",
    "invalid",
    "crashed",
    "late",
    "starts",
    "starts_failed",
    "streams",
    "streams_completed",
    "calls_billed",
    "cost_picos",
    "tokens_in",
    "tokens_out",
    "exec_ms",
    "compared",
    "matched",
    "skipped",
)


def upgrade() -> None:
    """Create the tables and columns."""
    for unit in ("minute", "hour"):
        _observations(f"observation_{unit}s", unit)
        _buckets(f"observation_{unit}_buckets", unit)
    op.create_table(
        "deliveries",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("webhook", sa.Text(), nullable=False),
        sa.Column("event", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("next_attempt_at", sa.Double(), nullable=True),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_deliveries")),
    )
    op.create_index(
        "ix_deliveries_next_attempt_at", "deliveries", ["next_attempt_at"], unique=False
    )
    op.create_index("ix_deliveries_tenant", "deliveries", ["tenant", "at"], unique=False)
    op.create_table(
        "due_calls",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("due_at", sa.Double(), nullable=False),
        sa.Column("claimed_by", sa.Text(), nullable=True),
        sa.Column("claimed_until", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_due_calls")),
    )
    op.create_index("ix_due_calls_due_at", "due_calls", ["due_at"], unique=False)
    op.create_table(
        "feedback",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("value", sa.Double(), nullable=True),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("function_id", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("experiment", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("called_at", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("reach", sa.Text(), server_default="{}", nullable=False),
        sa.PrimaryKeyConstraint("tenant", "call", "metric", name=op.f("pk_feedback")),
    )
    op.create_index("ix_feedback_experiment", "feedback", ["experiment", "metric"], unique=False)
    op.create_index(
        "ix_feedback_function_id", "feedback", ["function_id", "metric", "called_at"], unique=False
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.Text(), nullable=False),
        sa.Column("content_type", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_index(
        "ix_idempotency_keys_expires_at", "idempotency_keys", ["expires_at"], unique=False
    )
    op.create_table(
        "observers",
        sa.Column("activator", sa.Text(), nullable=False),
        sa.Column("life", sa.Text(), nullable=False),
        sa.Column("sequence", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("activator", name=op.f("pk_observers")),
    )
    op.create_table(
        "traces",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("start_kind", sa.Text(), nullable=False),
        sa.Column("kept_for", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("status", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "id", "call", name=op.f("pk_traces")),
    )
    op.create_index("ix_traces_tenant_at", "traces", ["tenant", "at"], unique=False)
    op.create_index("ix_traces_tenant_call", "traces", ["tenant", "call"], unique=False)
    op.create_table(
        "webhooks",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("url", sa.Text(), nullable=False),
        sa.Column("sealed_secret", sa.Text(), nullable=False),
        sa.Column("events", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "environment"],
            ["environments.tenant", "environments.name"],
            name=op.f("fk_webhooks_tenant_environment"),
        ),
        sa.PrimaryKeyConstraint("tenant", "environment", "name", name=op.f("pk_webhooks")),
    )
    op.create_table(
        "experiments",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["function"], ["functions.id"], name=op.f("fk_experiments_function")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_experiments")),
        sa.UniqueConstraint("function", "name", name=op.f("uq_experiments_function_name")),
    )
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("candidate", sa.Text(), nullable=False),
        sa.Column("stable", sa.Text(), nullable=False),
        sa.Column("plan", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("step_began_at", sa.Double(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.Column("finished_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["function"], ["functions.id"], name=op.f("fk_rollouts_function")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
    )
    op.create_index("ix_rollouts_function", "rollouts", ["function", "created_at"], unique=False)
    op.create_index("ix_rollouts_tenant", "rollouts", ["tenant", "created_at"], unique=False)
    op.create_table(
        "schedules",
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("is_paused", sa.Boolean(), nullable=False),
        sa.Column("next_at", sa.Double(), nullable=True),
        sa.Column("last_at", sa.Double(), nullable=True),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["function"], ["functions.id"], name=op.f("fk_schedules_function")),
        sa.PrimaryKeyConstraint("function", "number", name=op.f("pk_schedules")),
    )
    op.create_index("ix_schedules_next_at", "schedules", ["next_at"], unique=False)
    op.create_table(
        "slo_alerts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("sli", sa.Text(), nullable=False),
        sa.Column("severity", sa.Text(), nullable=False),
        sa.Column("window", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("began_at", sa.Double(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["function"], ["functions.id"], name=op.f("fk_slo_alerts_function")
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_slo_alerts")),
    )
    op.create_index("ix_slo_alerts_function", "slo_alerts", ["function", "began_at"], unique=False)
    op.create_index("ix_slo_alerts_tenant", "slo_alerts", ["tenant", "began_at"], unique=False)
    op.create_table(
        "aliases",
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("updated_by", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["function", "revision"],
            ["revisions.function", "revisions.name"],
            name=op.f("fk_aliases_function_revision"),
        ),
        sa.PrimaryKeyConstraint("function", "name", name=op.f("pk_aliases")),
    )
    op.create_table(
        "approvals",
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("revision", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["function", "revision"],
            ["revisions.function", "revisions.name"],
            name=op.f("fk_approvals_function_revision"),
        ),
        sa.PrimaryKeyConstraint("function", "revision", "actor", name=op.f("pk_approvals")),
    )
    op.create_table(
        "exposures",
        sa.Column("experiment", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("first_at", sa.Double(), nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.Column("errors", sa.BigInteger(), nullable=False),
        sa.Column("degraded", sa.BigInteger(), nullable=False),
        sa.Column("mistagged", sa.BigInteger(), nullable=False),
        sa.Column("cold", sa.BigInteger(), nullable=False),
        sa.Column("warm", sa.BigInteger(), nullable=False),
        sa.Column("warm_ms", sa.BigInteger(), nullable=False),
        sa.Column("exec_ms", sa.BigInteger(), nullable=False),
        sa.Column("cost_picos", sa.BigInteger(), nullable=False),
        sa.Column("tokens_in", sa.BigInteger(), nullable=False),
        sa.Column("tokens_out", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment"], ["experiments.id"], name=op.f("fk_exposures_experiment")
        ),
        sa.PrimaryKeyConstraint("experiment", "unit", "arm", name=op.f("pk_exposures")),
    )
    op.create_table(
        "exposure_latency",
        sa.Column("experiment", sa.Text(), nullable=False),
        sa.Column("arm", sa.Text(), nullable=False),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["experiment"], ["experiments.id"], name=op.f("fk_exposure_latency_experiment")
        ),
        sa.PrimaryKeyConstraint(
            "experiment", "arm", "unit", "bucket", name=op.f("pk_exposure_latency")
        ),
    )
    op.create_table(
        "rollout_decisions",
        sa.Column("rollout", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("verdict", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("reasons", sa.Text(), nullable=False),
        sa.Column("evidence", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["rollout"], ["rollouts.id"], name=op.f("fk_rollout_decisions_rollout")
        ),
        sa.PrimaryKeyConstraint("rollout", "number", name=op.f("pk_rollout_decisions")),
    )
    op.add_column("apps", sa.Column("policy", sa.Text(), server_default="{}", nullable=False))
    op.add_column(
        "functions", sa.Column("document", sa.Text(), server_default="{}", nullable=False)
    )
    op.add_column(
        "functions", sa.Column("generation", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.add_column("revisions", sa.Column("lineage", sa.Text(), server_default="{}", nullable=False))
    op.add_column(
        "revisions", sa.Column("evaluation", sa.Text(), server_default="{}", nullable=False)
    )
    op.add_column(
        "revisions", sa.Column("created_by", sa.Text(), server_default="", nullable=False)
    )
    op.add_column("revisions", sa.Column("served_at", sa.Double(), nullable=True))
    # until now, a deployed revision received all traffic at once
    op.execute("UPDATE revisions SET served_at = created_at")
    op.add_column("calls", sa.Column("payload", sa.Text(), nullable=True))
    for name in ("experiment", "arm", "unit", "degraded"):
        op.add_column("usage", sa.Column(name, sa.Text(), server_default="", nullable=False))
    _waiting()


def _observations(name: str, unit: str) -> None:
    """Counts of calls per revision and arm; `unit` is the whole minute or hour since the epoch."""
    op.create_table(
        name,
        sa.Column("function_id", sa.Text(), nullable=False),
        sa.Column(unit, sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(part, sa.Text(), nullable=False) for part in ("revision", "arm", "tenant")),
        *(sa.Column(count, sa.BigInteger(), nullable=False) for count in COUNTS),
        sa.PrimaryKeyConstraint("function_id", unit, "revision", "arm", name=op.f(f"pk_{name}")),
    )
    op.create_index(f"ix_{name}_{unit}", name, [unit])


def _buckets(name: str, unit: str) -> None:
    """Histograms of the calls' clocks."""
    op.create_table(
        name,
        sa.Column("function_id", sa.Text(), nullable=False),
        sa.Column(unit, sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(part, sa.Text(), nullable=False) for part in ("revision", "arm", "clock")),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "function_id", unit, "revision", "arm", "clock", "bucket", name=op.f(f"pk_{name}")
        ),
    )
    op.create_index(f"ix_{name}_{unit}", name, [unit])


def _waiting() -> None:
    """Partial indices of the few pending rows, however many finished ones are kept."""
    for name, table, columns, where in (
        (
            "ix_deliveries_waiting",
            "deliveries",
            ["tenant", "next_attempt_at", "id"],
            "next_attempt_at IS NOT NULL",
        ),
        (
            "ix_due_calls_waiting",
            "due_calls",
            ["due_at"],
            "claimed_by IS NULL OR claimed_until IS NOT NULL",
        ),
    ):
        op.create_index(
            name,
            table,
            columns,
            unique=False,
            sqlite_where=sa.text(where),
            postgresql_where=sa.text(where),
        )
