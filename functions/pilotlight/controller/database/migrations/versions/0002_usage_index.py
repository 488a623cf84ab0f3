"""Drop the index of usage by function: every report is cut by time, and each index costs each call
a write."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop it."""
    op.drop_index("ix_usage_tenant_environment_app_function_started_at", table_name="usage")
