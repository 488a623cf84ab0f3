"""Archives of usage records, and the sums of the records that are in them."""

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables. Nothing is archived yet."""
    op.create_table(
        "usage_archives",
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("sha256", "previous", "state")),
        sa.Column("records", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
    )
    op.create_table(
        "usage_archive_days",
        sa.Column(
            "archive", sa.BigInteger(), sa.ForeignKey("usage_archives.number"), nullable=False
        ),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("day", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("month", "currency")),
        sa.Column("has_customer", sa.Boolean(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in ("records", "high", "low")),
        sa.PrimaryKeyConstraint(
            *("archive", "tenant", "day", "month", "currency", "has_customer"),
            name="pk_usage_archive_days",
        ),
    )
    op.create_index("ix_usage_archive_days_tenant_day", "usage_archive_days", ["tenant", "day"])
