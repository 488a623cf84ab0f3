"""Deletion of tenants: since when they are deleted, and how far that is."""

import sqlalchemy as sa
from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column and the table. No tenant is deleted."""
    op.add_column("tenants", sa.Column("deleted_at", sa.Double(), nullable=True))
    op.create_table(
        "tenant_deletions",
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("state", "requested_by", "counts", "waiting_for")
        ),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("began_at", "updated_at")),
        sa.Column("finished_at", sa.Double(), nullable=True),
    )
    op.create_index("ix_tenant_deletions_state", "tenant_deletions", ["state"])
