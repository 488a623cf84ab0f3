"""Batch files and batches."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole

batch_files = sa.Table(
    "batch_files",
    metadata,
    text("id", key=True),
    *(text(name) for name in ("tenant", "environment", "key", "filename", "purpose", "status")),
    *(whole(name) for name in ("size_bytes", "parts")),
    *(time(name) for name in ("created_at", "expires_at")),
    sa.Index("ix_batch_files_tenant_created_at", "tenant", "environment", "created_at"),
    sa.Index("ix_batch_files_expires_at", "expires_at"),
)
"""A file is the objects `batch-files/<tenant>/<id>.0` to `parts` - 1. A row outlives its end
(`expires_at`) until its objects are deleted."""

batches = sa.Table(
    "batches",
    metadata,
    text("id", key=True),
    *(text(name) for name in ("tenant", "environment", "key", "endpoint", "input_file")),
    *(text(name) for name in ("metadata", "completion_window", "status", "problems", "times")),
    text("stop", null=True),
    *(text(name, null=True) for name in ("output_file", "error_file")),
    *(whole(name) for name in ("total", "completed", "failed", "position", "line")),
    *(time(name) for name in ("created_at", "expires_at")),
    sa.Column("is_active", sa.Boolean, nullable=False),
    sa.Column("customer", sa.Text, nullable=False, server_default=""),
    sa.Index("ix_batches_tenant_created_at", "tenant", "environment", "created_at"),
    sa.Index("ix_batches_is_active", "is_active", "created_at"),
)
"""`position`, `line`: how many bytes and lines of the input file have become rows of `batch_lines`.
`stop`: why the remaining lines are not run, as JSON; null = they are. `times`: when it entered its
states, by name, as JSON."""

batch_lines = sa.Table(
    "batch_lines",
    metadata,
    text("batch", key=True),
    sa.Column("line", sa.BigInteger, primary_key=True, autoincrement=False),
    *(text(name) for name in ("call", "custom_id", "record", "result")),
    *(sa.Column(name, sa.Boolean, nullable=False) for name in ("is_done", "is_failed")),
    sa.Index("ix_batch_lines_call", "call"),
)
"""Lines of running batches whose calls run, or whose answers are not in a file yet."""
