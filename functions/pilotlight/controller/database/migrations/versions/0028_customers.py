"""Customers of tenants: on records, in sums of their own, of keys, batches, budgets and quotas."""

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

GROUPS = (
    *("environment", "app", "function", "function_id", "revision", "key", "caller", "kind"),
    *("start_kind", "price_version", "currency", "month", "gpu"),
)
WHOLES = (
    *("records", "errors", "queued_ms", "start_ms", "exec_ms", "billed_ns"),
    *("tokens_in", "tokens_out", "bytes_in", "bytes_out", "high", "low"),
)
FLOATS = ("cpu_core_s", "memory_byte_s", "gpu_s")


def _customer() -> sa.Column[str]:
    return sa.Column("customer", sa.Text(), nullable=False, server_default="")


def upgrade() -> None:
    """Add the columns and the tables. Earlier records name no customer."""
    for table in ("usage", "batches"):
        op.add_column(table, _customer())
    op.add_column("api_keys", sa.Column("customer", sa.Text(), nullable=True))
    op.create_index(
        "ix_usage_tenant_customer",
        "usage",
        ["tenant", "customer", "started_at", "id"],
        sqlite_where=sa.text("customer <> ''"),
        postgresql_where=sa.text("customer <> ''"),
    )
    for table, unit in (("customer_hours", "hour"), ("customer_days", "day")):
        op.create_table(
            table,
            sa.Column("tenant", sa.Text(), nullable=False),
            sa.Column(unit, sa.BigInteger(), nullable=False),
            *(sa.Column(name, sa.Text(), nullable=False) for name in ("customer", *GROUPS)),
            *(sa.Column(name, sa.BigInteger(), nullable=False) for name in WHOLES),
            *(sa.Column(name, sa.Double(), nullable=False) for name in FLOATS),
            sa.PrimaryKeyConstraint("tenant", "customer", unit, *GROUPS, name=f"pk_{table}"),
        )
        op.create_index(f"ix_{table}_tenant", table, ["tenant", unit])
    op.create_table(
        "customer_quotas",
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("customer", sa.Text(), primary_key=True),
        sa.Column("quotas", sa.Text(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        op.add_column(
            "budgets", sa.Column("customer", sa.Text(), nullable=False, server_default="")
        )
        op.add_column("budgets", sa.Column("parent", sa.Text(), nullable=True))
        (unique,) = sa.inspect(op.get_bind()).get_unique_constraints("budgets")
        op.drop_constraint(str(unique["name"]), "budgets")
    else:
        _make_budgets_again()
    reach = ["tenant", "customer", "environment", "app", "function", "period", "currency"]
    op.create_index("ix_budgets_reach", "budgets", reach, unique=True)
    op.create_index("ix_budgets_parent", "budgets", ["parent"])


BUDGETS = (
    *("id", "tenant", "environment", "app", "function", "period", "amount", "currency"),
    *("hard", "alerts", "webhook", "sealed_secret", "created_at", "updated_at"),
)
ALERTS = (
    *("id", "budget", "tenant", "period", "percent", "spent", "at"),
    *("delivered_at", "next_attempt_at", "attempts", "error"),
)


def _make_budgets_again() -> None:
    """Copy both tables, because SQLite drops no constraint. Alerts refer to budgets, and would go
    with them."""
    op.drop_index("ix_budget_alerts_next_attempt_at", "budget_alerts")
    for table in ("budget_alerts", "budgets"):
        op.rename_table(table, f"{table}_0027")
    op.create_table(
        "budgets",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.id"), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in BUDGETS[2:8]),
        sa.Column("hard", sa.Boolean(), nullable=False),
        sa.Column("alerts", sa.Text(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=True) for name in ("webhook", "sealed_secret")),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("created_at", "updated_at")),
        _customer(),
        sa.Column("parent", sa.Text(), nullable=True),
    )
    op.create_table(
        "budget_alerts",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column(
            "budget", sa.Text(), sa.ForeignKey("budgets.id", ondelete="CASCADE"), nullable=False
        ),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("tenant", "period")),
        sa.Column("percent", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        *(sa.Column(name, sa.Double(), nullable=True) for name in ALERTS[7:9]),
        sa.Column("attempts", sa.BigInteger(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.UniqueConstraint("budget", "period", "percent"),
    )
    for table, names in (("budgets", BUDGETS), ("budget_alerts", ALERTS)):
        columns = ", ".join(f'"{name}"' for name in names)
        op.execute(f"INSERT INTO {table} ({columns}) SELECT {columns} FROM {table}_0027")
    for table in ("budget_alerts", "budgets"):
        op.drop_table(f"{table}_0027")
    op.create_index("ix_budget_alerts_next_attempt_at", "budget_alerts", ["next_attempt_at"])
