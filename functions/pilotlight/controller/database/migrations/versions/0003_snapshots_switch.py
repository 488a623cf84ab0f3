"""Whether a function may be stored as a snapshot: an operator's switch, on for existing
functions."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column(
        "functions", sa.Column("snapshots", sa.Boolean(), server_default=sa.true(), nullable=False)
    )
