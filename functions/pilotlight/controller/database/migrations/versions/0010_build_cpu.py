"""The CPU time that building an image took."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column; 0 for images built before."""
    op.add_column(
        "images", sa.Column("build_cpu_ns", sa.BigInteger(), server_default="0", nullable=False)
    )
