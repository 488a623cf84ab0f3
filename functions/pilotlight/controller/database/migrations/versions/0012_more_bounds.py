"""Columns that limit what tenants store: the size of responses to idempotency keys, and which
revisions bills are grouped by."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add and fill both columns, and index what each change queries, so that it reads no response
    and no spec."""
    op.add_column(
        "idempotency_keys",
        sa.Column("kept_bytes", sa.BigInteger(), server_default="0", nullable=False),
    )
    op.execute("UPDATE idempotency_keys SET kept_bytes = 1024 + length(answer)")
    op.create_index(
        "ix_idempotency_keys_tenant",
        "idempotency_keys",
        ["tenant", "created_at", "kept_bytes"],
        unique=False,
    )
    op.add_column(
        "revisions", sa.Column("has_tags", sa.Boolean(), server_default=sa.true(), nullable=False)
    )
    op.execute(
        """UPDATE revisions SET has_tags = false WHERE spec LIKE '%,"tags":{},"variants":[%'"""
    )
    op.create_index(
        "ix_revisions_age",
        "revisions",
        ["function", "created_at", "pruned_at", "has_tags", "name"],
        unique=False,
    )
