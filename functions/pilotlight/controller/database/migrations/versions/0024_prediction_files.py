"""Files of prediction logs."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "prediction_files",
        sa.Column("id", sa.Text(), primary_key=True),
        *(
            sa.Column(name, sa.Text(), nullable=False)
            for name in ("tenant", "environment", "app", "function", "function_id")
        ),
        sa.Column("hour", sa.Double(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("rows", "size_bytes")),
        *(sa.Column(name, sa.Double(), nullable=False) for name in ("created_at", "expires_at")),
    )
    op.create_index(
        "ix_prediction_files_hour",
        "prediction_files",
        ["tenant", "environment", "app", "function", "hour"],
    )
    op.create_index("ix_prediction_files_expires_at", "prediction_files", ["expires_at"])
