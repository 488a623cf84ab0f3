"""Names of weights: the manifest of a name in an environment, its source, and whether the node pins
it."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "weights",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("environment", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("manifest", sa.Text(), nullable=False),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False),
        sa.Column("files", sa.BigInteger(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=True),
        sa.Column("is_pinned", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["tenant", "environment"],
            ["environments.tenant", "environments.name"],
            name=op.f("fk_weights_tenant_environment"),
        ),
        sa.PrimaryKeyConstraint("tenant", "environment", "name", name=op.f("pk_weights")),
    )
    op.create_index("ix_weights_manifest", "weights", ["manifest"], unique=False)
