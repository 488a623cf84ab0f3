"""Dashboard sessions that were signed out of: they stay ended when the controller restarts."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table; earlier sign-outs were only in memory."""
    op.create_table(
        "ended_sessions",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("id", "key")),
        sa.Column("until", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_ended_sessions")),
    )
    op.create_index("ix_ended_sessions_key_until", "ended_sessions", ["key", "until"])
    op.create_index("ix_ended_sessions_until", "ended_sessions", ["until"])
