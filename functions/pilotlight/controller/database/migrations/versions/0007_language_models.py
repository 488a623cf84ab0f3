"""What a language model's calls used: tokens that were cached, why an answer ended, when its first
token came."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_OBSERVED = ("observation_minutes", "observation_hours")


def upgrade() -> None:
    """Add columns; of what is there already nothing of the kind is known."""
    op.add_column("usage", sa.Column("finish", sa.Text(), server_default="", nullable=False))
    for name in ("tokens_cached", "first_token_ms"):
        op.add_column("usage", sa.Column(name, sa.BigInteger(), server_default="0", nullable=False))
    for table in _OBSERVED:
        for name in ("tokens_cached", "out_of_memory"):
            op.add_column(
                table, sa.Column(name, sa.BigInteger(), server_default="0", nullable=False)
            )
