"""Answers of recent operations on dicts and queues, beside the ids of recent puts."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rename the table, and add the columns."""
    op.drop_index("ix_collection_puts_at", table_name="collection_puts")
    op.rename_table("collection_puts", "collection_operations")
    op.add_column(
        "collection_operations",
        sa.Column("size_bytes", sa.BigInteger(), nullable=False, server_default="0"),
    )
    op.add_column(
        "collection_operations",
        sa.Column("answer", sa.LargeBinary(), nullable=False, server_default=sa.text("''")),
    )
    op.create_index("ix_collection_operations_at", "collection_operations", ["at"])
