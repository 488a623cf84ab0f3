"""Drop the index of usage by function: every report selects by time, and each index costs every
call a write."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the index."""
    op.drop_index("ix_usage_tenant_environment_app_function_started_at", table_name="usage")
