"""The platform's id, which labels its objects in a cluster, and the ids of platforms whose objects
it took over."""

import secrets
import time

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create both tables, and the id."""
    platform = op.create_table(
        "platform",
        sa.Column("id", sa.Text(), primary_key=True, nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
    )
    op.bulk_insert(platform, [{"id": f"p-{secrets.token_hex(8)}", "created_at": time.time()}])
    op.create_table(
        "adopted_platforms",
        sa.Column("id", sa.Text(), primary_key=True, nullable=False),
        sa.Column("adopted_at", sa.Double(), nullable=False),
        sa.Column("adopted_by", sa.Text(), nullable=False),
    )
