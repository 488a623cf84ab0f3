"""Leases of apps: an app with one is deleted when nothing renews it."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; apps from before have no lease."""
    op.add_column("apps", sa.Column("lease_s", sa.Double(), nullable=True))
    op.add_column("apps", sa.Column("expires_at", sa.Double(), nullable=True))
    op.create_index("ix_apps_expiry", "apps", ["expires_at"])
