"""An index of the answers that are kept of operations on dicts and queues."""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the index."""
    kept = sa.text("size_bytes > 0")
    op.create_index(
        "ix_collection_operations_answers",
        "collection_operations",
        ["collection"],
        sqlite_where=kept,
        postgresql_where=kept,
    )
