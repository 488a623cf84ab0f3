"""Usage of a language model's calls: cached tokens, why an answer ended, time to its first
token."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_OBSERVED = ("observation_minutes", "observation_hours")


def upgrade() -> None:
    """Add columns; existing records have no such values."""
    op.add_column("usage", sa.Column("finish", sa.Text(), server_default="", nullable=False))
    for name in ("tokens_cached", "first_token_ms"):
        op.add_column("usage", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))
    for table in _OBSERVED:
        for name in ("tokens_cached", "out_of_memory"):
            op.add_column(
                table, sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
            )
