"""Due calls of each tenant in order, without reading their bodies; and the bytes kept of submitted
calls."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Replace the index of waiting due calls by a covering one for claims; clear the documents of
    claimed calls.

    Compute the size of submitted calls that are kept.
    """
    waits = sa.text("claimed_by IS NULL OR claimed_until IS NOT NULL")
    op.drop_index("ix_due_calls_waiting", table_name="due_calls")
    columns = ["tenant", "due_at", "id", "claimed_by", "claimed_until"]
    op.create_index(
        "ix_due_calls_free",
        "due_calls",
        columns,
        unique=False,
        sqlite_where=waits,
        postgresql_where=waits,
    )
    op.execute(
        "UPDATE due_calls SET document = '{}' WHERE claimed_by IS NOT NULL AND claimed_until IS NULL"
    )
    op.add_column(
        "calls", sa.Column("kept_bytes", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.execute("UPDATE calls SET kept_bytes = length(record) + coalesce(length(payload), 0)")
    op.create_table(
        "kept_calls",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("tenant"),
    )
    op.execute(
        "INSERT INTO kept_calls (tenant, bytes) SELECT tenant, sum(kept_bytes) FROM calls GROUP "
        "BY tenant"
    )
