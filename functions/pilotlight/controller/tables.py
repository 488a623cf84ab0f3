"""Every table of the control plane, as SQLAlchemy Core. `docs/data-model.md` tells what each is for.

The same definitions serve SQLite and PostgreSQL. Times are seconds since the epoch (double), JSON is canonical text,
money is kept twice: the text that was sent, and whole picounits, in which databases can add exactly.
"""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.observations import COUNTS

NAMING = {"ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s",
          "fk": "fk_%(table_name)s_%(column_0_N_name)s"}  # fmt: skip
metadata = sa.MetaData(naming_convention=NAMING)


def _text(name: str, *args: sa.ForeignKey, null: bool = False, key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text, *args, nullable=null, primary_key=key)


def _time(name: str, *, null: bool = False) -> sa.Column[float]:
    return sa.Column(name, sa.Double, nullable=null)


def _whole(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger, nullable=null)


tenants = sa.Table(
    "tenants",
    metadata,
    _text("id", key=True),
    sa.Column("name", sa.Text, nullable=False, unique=True),
    sa.Column("uid", sa.BigInteger, unique=True),
    _time("created_at"),
    sa.Column("plan", sa.Text, nullable=False, server_default="enterprise"),
    sa.Column("overrides", sa.Text, nullable=False, server_default="{}"),
    _time("suspended_at", null=True),
)

environments = sa.Table(
    "environments", metadata, _text("tenant", sa.ForeignKey("tenants.id"), key=True), _text("name", key=True), _time("created_at")
)

apps = sa.Table(
    "apps",
    metadata,
    _text("tenant", key=True),
    _text("environment", key=True),
    _text("name", key=True),
    _whole("version"),
    sa.Column("stopped", sa.Boolean, nullable=False),
    _time("created_at"),
    _time("updated_at"),
    _time("deleted_at", null=True),
    sa.Column("policy", sa.Text, nullable=False, server_default="{}"),
    sa.ForeignKeyConstraint(["tenant", "environment"], ["environments.tenant", "environments.name"]),
)
"""`policy`: how its releases are guarded: {"approvals": n, ...}; set by administrators, not by a deploy."""

deployments = sa.Table(
    "deployments",
    metadata,
    _text("tenant", key=True),
    _text("environment", key=True),
    _text("app", key=True),
    sa.Column("version", sa.BigInteger, primary_key=True, autoincrement=False),
    _text("action"),
    _time("created_at"),
    _text("created_by"),
    _text("message"),
    _text("labels"),
    _text("functions"),
    sa.ForeignKeyConstraint(["tenant", "environment", "app"], ["apps.tenant", "apps.environment", "apps.name"]),
)

functions = sa.Table(
    "functions",
    metadata,
    _text("id", key=True),
    _text("tenant"),
    _text("environment"),
    _text("app"),
    _text("name"),
    _whole("revisions"),
    _time("created_at"),
    _time("removed_at", null=True),
    sa.Column("snapshots", sa.Boolean, nullable=False, server_default=sa.true()),
    sa.Column("document", sa.Text, nullable=False, server_default="{}"),
    sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"),
    sa.ForeignKeyConstraint(["tenant", "environment", "app"], ["apps.tenant", "apps.environment", "apps.name"]),
    sa.UniqueConstraint("tenant", "environment", "app", "name"),
)

revisions = sa.Table(
    "revisions",
    metadata,
    _text("function", sa.ForeignKey("functions.id"), key=True),
    _text("name", key=True),
    _text("digest"),
    _whole("ordinal"),
    _text("spec"),
    _time("created_at"),
    *(sa.Column(name, sa.Text, nullable=False, server_default="{}") for name in ("lineage", "evaluation")),
    sa.Column("created_by", sa.Text, nullable=False, server_default=""),
    _time("served_at", null=True),
    sa.UniqueConstraint("function", "digest"),
)
"""`spec` is what the revision is; `lineage` and `evaluation` are what was told of it, which its digest does not cover.

`served_at`: when it first took traffic; null = it never did."""

approvals = sa.Table(
    "approvals",
    metadata,
    _text("function", key=True),
    _text("revision", key=True),
    _text("actor", key=True),
    _time("at"),
    _text("note"),
    sa.ForeignKeyConstraint(["function", "revision"], ["revisions.function", "revisions.name"]),
)

aliases = sa.Table(
    "aliases",
    metadata,
    _text("function", key=True),
    _text("name", key=True),
    _text("revision"),
    _text("updated_by"),
    _time("updated_at"),
    sa.ForeignKeyConstraint(["function", "revision"], ["revisions.function", "revisions.name"]),
)

rollouts = sa.Table(
    "rollouts",
    metadata,
    _text("id", key=True),
    _text("tenant"),
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), nullable=False),
    *(_text(name) for name in ("candidate", "stable", "plan", "state", "reason", "created_by")),
    _whole("step"),
    _time("step_began_at", null=True),
    _time("created_at"),
    _time("updated_at"),
    _time("finished_at", null=True),
    sa.Index("ix_rollouts_function", "function", "created_at"),
    sa.Index("ix_rollouts_tenant", "tenant", "created_at"),
)

rollout_decisions = sa.Table(
    "rollout_decisions",
    metadata,
    sa.Column("rollout", sa.Text, sa.ForeignKey("rollouts.id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    _time("at"),
    _whole("step"),
    *(_text(name) for name in ("verdict", "action", "reasons", "evidence")),
)


def _observed(name: str, unit: str) -> sa.Table:
    """Counts of what calls looked like; by function and time first, because that is how they are asked for."""
    return sa.Table(
        name,
        metadata,
        _text("function_id", key=True),
        sa.Column(unit, sa.BigInteger, primary_key=True, autoincrement=False),
        *(_text(part, key=True) for part in ("revision", "arm")),
        _text("tenant"),
        *(_whole(count) for count in COUNTS),
        sa.Index(f"ix_{name}_{unit}", unit),
    )


def _buckets(name: str, unit: str) -> sa.Table:
    """Histograms of observed clocks (`clock` of `pilotlight.observations.CLOCKS`), and overruns of stages as `over:<stage>`, bucket 0."""
    return sa.Table(
        name,
        metadata,
        _text("function_id", key=True),
        sa.Column(unit, sa.BigInteger, primary_key=True, autoincrement=False),
        *(_text(part, key=True) for part in ("revision", "arm", "clock")),
        sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
        _whole("calls"),
        sa.Index(f"ix_{name}_{unit}", unit),
    )


observation_minutes = _observed("observation_minutes", "minute")
"""What activators observed, added up (`pilotlight.observations`); kept for some days."""
observation_hours = _observed("observation_hours", "hour")
observation_minute_buckets = _buckets("observation_minute_buckets", "minute")
observation_hour_buckets = _buckets("observation_hour_buckets", "hour")

observers = sa.Table("observers", metadata, _text("activator", key=True), _text("life"), _whole("sequence"), _time("at"))
"""The last post of each activator, so that one that is sent twice counts once."""

slo_alerts = sa.Table(
    "slo_alerts",
    metadata,
    _text("id", key=True),
    _text("tenant"),
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), nullable=False),
    *(_text(name) for name in ("sli", "severity", "window", "document")),
    _time("began_at"),
    _time("ended_at", null=True),
    sa.Index("ix_slo_alerts_function", "function", "began_at"),
    sa.Index("ix_slo_alerts_tenant", "tenant", "began_at"),
)

experiments = sa.Table(
    "experiments",
    metadata,
    _text("id", key=True),
    _text("tenant"),
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), nullable=False),
    *(_text(name) for name in ("name", "document", "state", "reason", "created_by")),
    _time("created_at"),
    _time("began_at", null=True),
    _time("ended_at", null=True),
    sa.UniqueConstraint("function", "name"),
)

EXPOSURE_COUNTS = (
    "calls", "errors", "degraded", "mistagged", "cold", "warm", "warm_ms", "exec_ms", "cost_picos", "tokens_in", "tokens_out",
)  # fmt: skip
exposures = sa.Table(
    "exposures",
    metadata,
    sa.Column("experiment", sa.Text, sa.ForeignKey("experiments.id"), primary_key=True),
    _text("unit", key=True),
    _text("arm", key=True),
    _time("first_at"),
    *(_whole(name) for name in EXPOSURE_COUNTS),
)
"""A unit that met an experiment, once; more than one arm for a unit is a defect of the assignment, and counted as one."""

exposure_latency = sa.Table(
    "exposure_latency",
    metadata,
    sa.Column("experiment", sa.Text, sa.ForeignKey("experiments.id"), primary_key=True),
    *(_text(name, key=True) for name in ("arm", "unit")),
    sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
    _whole("calls"),
)
"""A histogram of each unit's warm calls (`pilotlight.observations.bucket_of`): percentiles whose intervals know who called."""

feedback = sa.Table(
    "feedback",
    metadata,
    _text("tenant", key=True),
    _text("call", key=True),
    _text("metric", key=True),
    sa.Column("value", sa.Double, nullable=True),
    _text("label"),
    *(_text(name) for name in ("function_id", "revision", "experiment", "arm", "unit")),
    _time("called_at"),
    _time("at"),
    sa.Column("reach", sa.Text, nullable=False, server_default="{}"),
    sa.Index("ix_feedback_function_id", "function_id", "metric", "called_at"),
    sa.Index("ix_feedback_experiment", "experiment", "metric"),
)
"""`called_at` 0 and `function_id` "": the call's record is not there yet; `reach` is what the key that told of it may touch."""

schedules = sa.Table(
    "schedules",
    metadata,
    sa.Column("function", sa.Text, sa.ForeignKey("functions.id"), primary_key=True),
    sa.Column("number", sa.BigInteger, primary_key=True, autoincrement=False),
    _text("tenant"),
    _text("document"),
    sa.Column("is_paused", sa.Boolean, nullable=False),
    _time("next_at", null=True),
    _time("last_at", null=True),
    _time("updated_at"),
    sa.Index("ix_schedules_next_at", "next_at"),
)

due_calls = sa.Table(
    "due_calls",
    metadata,
    _text("id", key=True),
    _text("tenant"),
    _text("document"),
    _time("due_at"),
    _text("claimed_by", null=True),
    _time("claimed_until", null=True),
    sa.Index("ix_due_calls_due_at", "due_at"),
)
"""Submitted calls that the control plane began, until an activator has them in its journal."""

idempotency_keys = sa.Table(
    "idempotency_keys",
    metadata,
    _text("tenant", key=True),
    _text("key", key=True),
    *(_text(name) for name in ("request_hash", "content_type", "answer")),
    _whole("status"),
    _time("created_at"),
    _time("expires_at"),
    sa.Index("ix_idempotency_keys_expires_at", "expires_at"),
)

webhooks = sa.Table(
    "webhooks",
    metadata,
    _text("tenant", key=True),
    _text("environment", key=True),
    _text("name", key=True),
    *(_text(name) for name in ("url", "sealed_secret", "events", "created_by")),
    _time("created_at"),
    sa.ForeignKeyConstraint(["tenant", "environment"], ["environments.tenant", "environments.name"]),
)

deliveries = sa.Table(
    "deliveries",
    metadata,
    _text("id", key=True),
    *(_text(name) for name in ("tenant", "environment", "webhook", "event", "body")),
    _time("at"),
    _time("delivered_at", null=True),
    _time("next_attempt_at", null=True),
    _whole("attempts"),
    _text("error", null=True),
    sa.Index("ix_deliveries_next_attempt_at", "next_attempt_at"),
    sa.Index("ix_deliveries_tenant", "tenant", "at"),
)

traces = sa.Table(
    "traces",
    metadata,
    _text("tenant", key=True),
    _text("id", key=True),
    _text("call", key=True),
    *(_text(name) for name in ("environment", "app", "function", "revision", "arm", "start_kind", "kept_for", "document")),
    _whole("status"),
    sa.Column("duration_ms", sa.Double, nullable=False),
    _time("at"),
    sa.Index("ix_traces_tenant_at", "tenant", "at"),
    sa.Index("ix_traces_tenant_call", "tenant", "call"),
)

traffic = sa.Table(
    "traffic",
    metadata,
    _text("function", key=True),
    _text("revision", key=True),
    _whole("weight"),
    sa.ForeignKeyConstraint(["function", "revision"], ["revisions.function", "revisions.name"]),
)

api_keys = sa.Table(
    "api_keys",
    metadata,
    _text("id", key=True),
    sa.Column("hash", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False, index=True),
    _text("environment", null=True),
    _text("scope"),
    _text("name"),
    _text("created_by"),
    _time("created_at"),
    _time("expires_at", null=True),
    _time("revoked_at", null=True),
    _text("app", null=True),
    _text("function", null=True),
    sa.Column("quotas", sa.Text, nullable=False, server_default="{}"),
    _text("replaces", null=True),
)

function_quotas = sa.Table(
    "function_quotas",
    metadata,
    *(_text(name, key=True) for name in ("tenant", "environment", "app", "function")),
    _text("quotas"),
    _time("updated_at"),
    sa.ForeignKeyConstraint(["tenant", "environment"], ["environments.tenant", "environments.name"]),
)

budgets = sa.Table(
    "budgets",
    metadata,
    _text("id", key=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    *(_text(name) for name in ("environment", "app", "function", "period", "amount", "currency")),
    sa.Column("hard", sa.Boolean, nullable=False),
    _text("alerts"),
    _text("webhook", null=True),
    _text("sealed_secret", null=True),
    _time("created_at"),
    _time("updated_at"),
    sa.UniqueConstraint("tenant", "environment", "app", "function", "period", "currency"),
)

budget_alerts = sa.Table(
    "budget_alerts",
    metadata,
    _text("id", key=True),
    sa.Column("budget", sa.Text, sa.ForeignKey("budgets.id", ondelete="CASCADE"), nullable=False),
    _text("tenant"),
    _text("period"),
    _whole("percent"),
    _text("spent"),
    _time("at"),
    _time("delivered_at", null=True),
    _time("next_attempt_at", null=True),
    _whole("attempts"),
    _text("error", null=True),
    sa.UniqueConstraint("budget", "period", "percent"),
    sa.Index("ix_budget_alerts_next_attempt_at", "next_attempt_at"),
)

secrets = sa.Table(
    "secrets",
    metadata,
    _text("tenant", key=True),
    _text("environment", key=True),
    _text("name", key=True),
    _text("sealed"),
    _text("variables"),
    _time("created_at"),
    _time("updated_at"),
    sa.ForeignKeyConstraint(["tenant", "environment"], ["environments.tenant", "environments.name"]),
)

images = sa.Table(
    "images",
    metadata,
    _text("tenant", sa.ForeignKey("tenants.id"), key=True),
    _text("digest", key=True),
    _text("spec"),
    _time("created_at"),
)

blobs = sa.Table("blobs", metadata, _text("digest", key=True), _whole("size_bytes"), _time("created_at"))

blob_owners = sa.Table(
    "blob_owners",
    metadata,
    _text("tenant", sa.ForeignKey("tenants.id"), key=True),
    _text("digest", sa.ForeignKey("blobs.digest"), key=True),
    _time("created_at"),
)

weights = sa.Table(
    "weights",
    metadata,
    _text("tenant", key=True),
    _text("environment", key=True),
    _text("name", key=True),
    _text("manifest"),
    _whole("size_bytes"),
    _whole("files"),
    _text("source"),
    _text("app", null=True),
    sa.Column("is_pinned", sa.Boolean, nullable=False),
    _time("created_at"),
    _time("updated_at"),
    sa.ForeignKeyConstraint(["tenant", "environment"], ["environments.tenant", "environments.name"]),
    sa.Index("ix_weights_manifest", "manifest"),
)

feed = sa.Table(
    "feed",
    metadata,
    _text("kind", key=True),
    _text("key", key=True),
    sa.Column("seq", sa.BigInteger, nullable=False, unique=True),
    _text("value", null=True),
    _time("changed_at"),
)

feed_state = sa.Table(
    "feed_state",
    metadata,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=False),
    _whole("head"),
    _whole("purged"),
    _whole("generation"),
)

usage = sa.Table(
    "usage",
    metadata,
    _text("id", key=True),
    *(_text(name) for name in ("kind", "call", "tenant", "environment", "app", "function", "function_id", "method", "revision")),
    *(_text(name) for name in ("instance", "key", "start_kind", "outcome", "price_version", "currency", "rate_per_s", "cost")),
    _text("gpu", null=True),
    *(_whole(name) for name in ("attempt", "queued_ms", "start_ms", "exec_ms", "billed_ns", "memory_bytes", "gpu_count")),
    *(_whole(name) for name in ("tokens_in", "tokens_out", "bytes_in", "bytes_out", "status")),
    *(_time(name) for name in ("cpu", "started_at", "received_at")),
    _whole("cost_picos"),
    _whole("day"),
    *(sa.Column(name, sa.Text, nullable=False, server_default="") for name in ("caller", "corrects", "note", "month")),
    *(sa.Column(name, sa.Text, nullable=False, server_default="") for name in ("experiment", "arm", "unit", "degraded")),
    sa.Index("ix_usage_tenant_started_at", "tenant", "started_at"),
    sa.Index("ix_usage_tenant_call", "tenant", "call"),
)
"""`month` is the month ("2026-11", UTC) whose invoice has the record: that of `started_at`, or the first one not yet issued."""


ROLLUP_GROUPS = (
    "environment", "app", "function", "function_id", "revision", "key", "caller", "kind", "start_kind", "price_version", "currency",
    "month",
)  # fmt: skip
ROLLUP_SUMS = (
    "records", "errors", "queued_ms", "start_ms", "exec_ms", "billed_ns", "tokens_in", "tokens_out", "bytes_in", "bytes_out", "high", "low",
)  # fmt: skip
"""`high` and `low`: of the cost in picounits, what is above 10**9 and the rest, summed apart. `errors`: calls answered 500 or above."""
ROLLUP_FLOATS = ("cpu_core_s", "memory_byte_s", "gpu_s")


def _rollup(name: str, unit: str, *indexes: sa.Index) -> sa.Table:
    """Sums of records by everything that bills and pages group by; `unit` is the whole hour or day since the epoch."""
    return sa.Table(
        name,
        metadata,
        _text("tenant", key=True),
        sa.Column(unit, sa.BigInteger, primary_key=True, autoincrement=False),
        *(_text(part, key=True) for part in ROLLUP_GROUPS),
        *(_whole(part) for part in ROLLUP_SUMS),
        *(_time(part) for part in ROLLUP_FLOATS),
        *indexes,
    )


usage_hours = _rollup("usage_hours", "hour")
usage_days = _rollup("usage_days", "day", sa.Index("ix_usage_days_tenant_month", "tenant", "month"))

latency_hours = sa.Table(
    "latency_hours",
    metadata,
    _text("tenant", key=True),
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    *(_text(name, key=True) for name in ("environment", "function_id", "start_kind", "clock")),
    sa.Column("bucket", sa.BigInteger, primary_key=True, autoincrement=False),
    _whole("calls"),
)
"""A histogram of each clock (`total`, `queue`, `start`, `exec`) in buckets that grow by a tenth: bucket b holds up to 1.1**b ms."""

invoices = sa.Table(
    "invoices",
    metadata,
    _text("id", key=True),
    sa.Column("tenant", sa.Text, sa.ForeignKey("tenants.id"), nullable=False),
    *(_text(name) for name in ("month", "currency", "total", "document")),
    _time("issued_at"),
    sa.UniqueConstraint("tenant", "month", "currency"),
)

prices = sa.Table("prices", metadata, _text("version", key=True), _text("document"), _time("first_seen_at"))

calls = sa.Table(
    "calls",
    metadata,
    _text("tenant", key=True),
    _text("id", key=True),
    _text("environment"),
    _text("app"),
    _text("function"),
    _text("state"),
    _whole("sequence"),
    _time("submitted_at"),
    _time("expires_at"),
    _text("record"),
    _text("payload", null=True),
    sa.Index("ix_calls_tenant_submitted_at", "tenant", "submitted_at"),
    sa.Index("ix_calls_expires_at", "expires_at"),
)
"""`payload`: of a dead letter what its function was given, as an activator's journal had it; null = the call is none."""

audit = sa.Table(
    "audit",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    _time("at"),
    _text("tenant"),
    _text("actor"),
    _text("action"),
    _text("subject"),
    _text("before", null=True),
    _text("after", null=True),
    _text("request"),
    sa.Column("address", sa.Text, nullable=False, server_default=""),
    sa.Index("ix_audit_tenant_id", "tenant", "id"),
)
