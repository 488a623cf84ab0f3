"""Plans, quotas and budgets of tenants; rollups of usage, latency histograms, invoices and the
price lists that were in effect."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

MONTH = {
    "sqlite": "strftime('%Y-%m', day * 86400, 'unixepoch')",
    "postgresql": "to_char(to_timestamp(day * 86400) AT TIME ZONE 'UTC', 'YYYY-MM')",
}
"""By whole days: with timestamps, SQLite would round the last half millisecond of a month into the
next one."""

GROUPS = (
    "environment",
    "app",
    "function",
    "function_id",
    "revision",
    "key",
    "caller",
    "kind",
    "start_kind",
    "price_version",
    "currency",
    "month",
)
SUMS = (
    "records",
    "errors",
    "queued_ms",
    "start_ms",
    "exec_ms",
    "billed_ns",
    "tokens_in",
    "tokens_out",
    "bytes_in",
    "bytes_out",
    "high",
    "low",
)


def upgrade() -> None:
    """Create the tables and columns. The controller's start computes rollups of existing
    records."""
    op.create_table(
        "latency_hours",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("hour", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("function_id", sa.Text(), nullable=False),
        sa.Column("start_kind", sa.Text(), nullable=False),
        sa.Column("clock", sa.Text(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("calls", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint(
            "tenant",
            "hour",
            "environment",
            "function_id",
            "start_kind",
            "clock",
            "bucket",
            name=op.f("pk_latency_hours"),
        ),
    )
    op.create_table(
        "prices",
        sa.Column("version", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("first_seen_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("version", name=op.f("pk_prices")),
    )
    _rollup("usage_days", "day")
    op.create_index("ix_usage_days_tenant_month", "usage_days", ["tenant", "month"], unique=False)
    _rollup("usage_hours", "hour")
    op.create_table(
        "budgets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("amount", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("alerts", sa.Text(), nullable=False),
        sa.Column("webhook", sa.Text(), nullable=True),
        sa.Column("sealed_secret", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_budgets_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budgets")),
        sa.UniqueConstraint(
            "tenant",
            "environment",
            "app",
            "function",
            "period",
            "currency",
            name=op.f("uq_budgets_tenant_environment_app_function_period_currency"),
        ),
    )
    op.create_table(
        "invoices",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("month", sa.Text(), nullable=False),
        sa.Column("currency", sa.Text(), nullable=False),
        sa.Column("total", sa.Text(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
        sa.Column("issued_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.id"], name=op.f("fk_invoices_tenant")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_invoices")),
        sa.UniqueConstraint(
            "tenant", "month", "currency", name=op.f("uq_invoices_tenant_month_currency")
        ),
    )
    op.create_table(
        "budget_alerts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("budget", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("percent", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("delivered_at", sa.Double(), nullable=True),
        sa.Column("next_attempt_at", sa.Double(), nullable=True),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["budget"], ["budgets.id"], name=op.f("fk_budget_alerts_budget"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_budget_alerts")),
        sa.UniqueConstraint(
            "budget", "period", "percent", name=op.f("uq_budget_alerts_budget_period_percent")
        ),
    )
    op.create_index(
        "ix_budget_alerts_next_attempt_at", "budget_alerts", ["next_attempt_at"], unique=False
    )
    op.create_table(
        "function_quotas",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("quotas", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "environment"],
            ["environments.tenant", "environments.name"],
            name=op.f("fk_function_quotas_tenant_environment"),
        ),
        sa.PrimaryKeyConstraint(
            "tenant", "environment", "app", "function", name=op.f("pk_function_quotas")
        ),
    )
    op.add_column("api_keys", sa.Column("app", sa.Text(), nullable=True))
    op.add_column("api_keys", sa.Column("function", sa.Text(), nullable=True))
    op.add_column("api_keys", sa.Column("quotas", sa.Text(), server_default="{}", nullable=False))
    op.add_column("api_keys", sa.Column("replaces", sa.Text(), nullable=True))
    op.add_column("audit", sa.Column("address", sa.Text(), server_default="", nullable=False))
    op.add_column(
        "tenants", sa.Column("plan", sa.Text(), server_default="enterprise", nullable=False)
    )
    op.add_column("tenants", sa.Column("overrides", sa.Text(), server_default="{}", nullable=False))
    op.add_column("tenants", sa.Column("suspended_at", sa.Double(), nullable=True))
    op.add_column("usage", sa.Column("caller", sa.Text(), server_default="", nullable=False))
    op.add_column("usage", sa.Column("corrects", sa.Text(), server_default="", nullable=False))
    op.add_column("usage", sa.Column("note", sa.Text(), server_default="", nullable=False))
    op.add_column("usage", sa.Column("month", sa.Text(), server_default="", nullable=False))
    op.execute(f"UPDATE usage SET month = {MONTH[op.get_bind().dialect.name]}")


def _rollup(name: str, unit: str) -> None:
    """Sums of usage by all columns that bills group by; `unit` is the whole hour or day."""
    op.create_table(
        name,
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column(unit, sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(group, sa.Text(), nullable=False) for group in GROUPS),
        *(sa.Column(total, sa.BigInteger(), nullable=False) for total in SUMS),
        *(
            sa.Column(total, sa.Double(), nullable=False)
            for total in ("cpu_core_s", "memory_byte_s", "gpu_s")
        ),
        sa.PrimaryKeyConstraint("tenant", unit, *GROUPS, name=op.f(f"pk_{name}")),
    )
