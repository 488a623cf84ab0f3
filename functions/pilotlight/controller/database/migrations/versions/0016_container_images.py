"""The container images in a registry that functions of a cluster are made of."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "container_images",
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("environment", sa.Text(), primary_key=True),
        sa.Column("app", sa.Text(), primary_key=True),
        sa.Column("digest", sa.Text(), primary_key=True),
        sa.Column("reference", sa.Text(), nullable=False),
        sa.Column("pushed_at", sa.Double(), nullable=False),
        sa.Column("pushed_by", sa.Text(), nullable=False),
    )
