"""Customers of tenants: on records, in sums of their own, of keys and of batches."""

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


def upgrade() -> None:
    """Add the columns and the tables. Earlier records name no customer."""
    for table in ("usage", "batches"):
        op.add_column(table, sa.Column("customer", sa.Text(), nullable=False, server_default=""))
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
