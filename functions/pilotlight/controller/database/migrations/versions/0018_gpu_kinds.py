"""Rollups of usage by the kind of GPU that was granted."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

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
WHOLES = (
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
FLOATS = ("cpu_core_s", "memory_byte_s", "gpu_s")


def upgrade() -> None:
    """Add the kind to the key of both rollups.

    Until now all GPUs of a revision were recorded as one kind, so the records of a revision name
    the kind of its sums."""
    for table, unit in (("usage_days", "day"), ("usage_hours", "hour")):
        old = f"{table}_0016"
        if table == "usage_days":
            op.drop_index("ix_usage_days_tenant_month", table)
        op.rename_table(table, old)
        _create(table, unit)
        columns = ", ".join(f'"{name}"' for name in ("tenant", unit, *GROUPS, *WHOLES, *FLOATS))
        op.execute(f"INSERT INTO {table} ({columns}, gpu) SELECT {columns}, '' FROM {old}")
        op.drop_table(old)
    op.create_index("ix_usage_days_tenant_month", "usage_days", ["tenant", "month"])
    _name_kinds()


def _create(table: str, unit: str) -> None:
    keys = ("tenant", unit, *GROUPS, "gpu")
    op.create_table(
        table,
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column(unit, sa.BigInteger(), autoincrement=False, nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in (*GROUPS, "gpu")),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in WHOLES),
        *(sa.Column(name, sa.Double(), nullable=False) for name in FLOATS),
        sa.PrimaryKeyConstraint(*keys, name=f"{table}_by_gpu_pkey"),
    )


def _name_kinds() -> None:
    names = ("function_id", "revision", "kind", "gpu")
    usage = sa.table("usage", *(sa.column(name) for name in names))
    query = (
        sa.select(usage.c.function_id, usage.c.revision, usage.c.kind, usage.c.gpu)
        .where(usage.c.gpu.is_not(None))
        .distinct()
    )
    connection = op.get_bind()
    found = connection.execute(query).all()
    for table in ("usage_days", "usage_hours"):
        rollup = sa.table(table, *(sa.column(name) for name in names))
        for function_id, revision_name, kind, gpu in found:
            connection.execute(
                sa.update(rollup)
                .where(
                    rollup.c.function_id == function_id,
                    rollup.c.revision == revision_name,
                    rollup.c.kind == kind,
                )
                .values(gpu=gpu)
            )
