"""What tenants store, counted in their rows; recent puts to queues."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

SUM = "(SELECT COALESCE(SUM({0}.size_bytes), 0) FROM {0} WHERE {0}.tenant = tenants.id)"
BLOBS = (
    "(SELECT COALESCE(SUM(blobs.size_bytes), 0) FROM blobs JOIN blob_owners "
    "ON blob_owners.digest = blobs.digest WHERE blob_owners.tenant = tenants.id)"
)


def upgrade() -> None:
    """Add the columns, with the sums of now, and the table."""
    for name in ("stored_bytes", "collection_bytes"):
        op.add_column(
            "tenants", sa.Column(name, sa.BigInteger(), nullable=False, server_default="0")
        )
    images, chunks, collections = (
        SUM.format(name) for name in ("images", "volume_chunks", "collections")
    )
    op.execute(
        f"UPDATE tenants SET collection_bytes = {collections}, "
        f"stored_bytes = {BLOBS} + {images} + {chunks} + {collections}"
    )
    op.create_table(
        "collection_puts",
        sa.Column("collection", sa.Text(), sa.ForeignKey("collections.id"), primary_key=True),
        sa.Column("id", sa.Text(), primary_key=True),
        sa.Column("at", sa.Double(), nullable=False),
    )
    op.create_index("ix_collection_puts_at", "collection_puts", ["at"])
