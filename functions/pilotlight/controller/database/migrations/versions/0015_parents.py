"""The attempt that made a call, of calls that functions make."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; calls so far were made by callers outside."""
    op.add_column("usage", sa.Column("parent", sa.Text(), server_default="", nullable=False))
