"""Batch files and batches."""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None


def _texts(*names: str, null: bool = False) -> list[sa.Column[str]]:
    return [sa.Column(name, sa.Text(), nullable=null) for name in names]


def _wholes(*names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, sa.BigInteger(), nullable=False) for name in names]


def _times(*names: str) -> list[sa.Column[float]]:
    return [sa.Column(name, sa.Double(), nullable=False) for name in names]


def _flags(*names: str) -> list[sa.Column[bool]]:
    return [sa.Column(name, sa.Boolean(), nullable=False) for name in names]


def upgrade() -> None:
    """Add the tables, and the cancellation of due calls."""
    op.create_table(
        "batch_files",
        sa.Column("id", sa.Text(), primary_key=True),
        *_texts("tenant", "environment", "key", "filename", "purpose", "status"),
        *_wholes("size_bytes", "parts"),
        *_times("created_at", "expires_at"),
    )
    op.create_index(
        "ix_batch_files_tenant_created_at", "batch_files", ["tenant", "environment", "created_at"]
    )
    op.create_index("ix_batch_files_expires_at", "batch_files", ["expires_at"])
    op.create_table(
        "batches",
        sa.Column("id", sa.Text(), primary_key=True),
        *_texts("tenant", "environment", "key", "endpoint", "input_file"),
        *_texts("metadata", "completion_window", "status", "problems", "times"),
        *_texts("stop", "output_file", "error_file", null=True),
        *_wholes("total", "completed", "failed", "position", "line"),
        *_times("created_at", "expires_at"),
        *_flags("is_active"),
    )
    op.create_index(
        "ix_batches_tenant_created_at", "batches", ["tenant", "environment", "created_at"]
    )
    op.create_index("ix_batches_is_active", "batches", ["is_active", "created_at"])
    op.create_table(
        "batch_lines",
        sa.Column("batch", sa.Text(), primary_key=True),
        sa.Column("line", sa.BigInteger(), primary_key=True, autoincrement=False),
        *_texts("call", "custom_id", "record", "result"),
        *_flags("is_done", "is_failed"),
    )
    op.create_index("ix_batch_lines_call", "batch_lines", ["call"])
    op.add_column("due_calls", sa.Column("cancel_at", sa.Double(), nullable=True))
    op.create_index(
        "ix_due_calls_cancel",
        "due_calls",
        ["claimed_by", "cancel_at"],
        sqlite_where=sa.text("cancel_at IS NOT NULL"),
        postgresql_where=sa.text("cancel_at IS NOT NULL"),
    )
