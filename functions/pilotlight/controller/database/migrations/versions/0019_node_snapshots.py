"""The register of the snapshots of a cluster's nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "node_snapshots",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("function", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("changed_at", sa.Double(), nullable=False),
        sa.Column("document", sa.Text(), nullable=False),
    )
