"""What tenants store: when a blob was last used, which are being deleted, the size of images, which
revisions were pruned."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns. The size of images built before is unknown and counts as 0 until they are built
    again."""
    op.add_column("blobs", sa.Column("deleting_at", sa.Double(), nullable=True))
    op.create_index("ix_blobs_deleting_at", "blobs", ["deleting_at"], unique=False)
    op.add_column(
        "blob_owners", sa.Column("used_at", sa.Double(), server_default="0", nullable=False)
    )
    op.execute("UPDATE blob_owners SET used_at = created_at")
    op.create_index("ix_blob_owners_digest", "blob_owners", ["digest"], unique=False)
    op.add_column(
        "images", sa.Column("size_bytes", sa.BigInteger(), server_default="0", nullable=False)
    )
    op.add_column("revisions", sa.Column("pruned_at", sa.Double(), nullable=True))
