"""Volumes: their manifests, one row for each path, and the chunks of their files."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "volumes",
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("entries", sa.BigInteger(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "environment"], ["environments.tenant", "environments.name"]
        ),
    )
    op.create_index("ix_volumes_name", "volumes", ["tenant", "environment", "name"], unique=True)
    op.create_table(
        "volume_entries",
        sa.Column("volume", sa.Text(), sa.ForeignKey("volumes.id"), primary_key=True),
        sa.Column("path", sa.Text(), primary_key=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.Text(), nullable=False),
    )
    op.create_table(
        "volume_chunks",
        sa.Column("tenant", sa.Text(), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("digest", sa.Text(), primary_key=True),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("used_at", sa.Double(), nullable=False),
    )
