"""Files of prediction logs, and drift: sketches, references, scores and reports."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole

prediction_files = sa.Table(
    "prediction_files",
    metadata,
    text("id", key=True),
    *(text(name) for name in ("tenant", "environment", "app", "function", "function_id")),
    time("hour"),
    whole("rows"),
    whole("size_bytes"),
    time("created_at"),
    time("expires_at"),
    sa.Column("is_sketched", sa.Boolean, nullable=False, server_default=sa.false()),
    sa.Index("ix_prediction_files_hour", "tenant", "environment", "app", "function", "hour"),
    sa.Index("ix_prediction_files_expires_at", "expires_at"),
)
"""A row outlives its function, so it refers to none: its object is deleted when its window ends."""

drift_sketches = sa.Table(
    "drift_sketches",
    metadata,
    text("function_id", key=True),
    text("revision", key=True),
    sa.Column("hour", sa.BigInteger, primary_key=True, autoincrement=False),
    text("tenant"),
    whole("rows"),
    text("features"),
    time("expires_at"),
    sa.Index("ix_drift_sketches_expires_at", "expires_at"),
    sa.Index("ix_drift_sketches_hour", "hour"),
)
"""What was counted in an hour of one revision; `features`: name → sketch, as JSON, which counts in
`stored_bytes`."""

drift_scores = sa.Table(
    "drift_scores",
    metadata,
    text("tenant", key=True),
    text("call", key=True),
    *(text(name) for name in ("function_id", "revision")),
    time("at"),
    sa.Column("score", sa.Double, nullable=True),
    text("label", null=True),
    text("slices"),
    time("expires_at"),
    sa.Index("ix_drift_scores_at", "function_id", "at"),
    sa.Index("ix_drift_scores_expires_at", "expires_at"),
)
"""Predictions that feedback is compared with: a number or a label."""

drift_references = sa.Table(
    "drift_references",
    metadata,
    text("function_id", key=True),
    text("tenant"),
    whole("rows"),
    text("features"),
    text("source"),
    text("created_by"),
    time("created_at"),
)

drift_reports = sa.Table(
    "drift_reports",
    metadata,
    text("function_id", key=True),
    sa.Column("until", sa.BigInteger, primary_key=True, autoincrement=False),
    text("tenant"),
    text("status"),
    text("report"),
    time("created_at"),
    sa.Index("ix_drift_reports_created_at", "created_at"),
)
"""A window that was judged: it ended at `until` (hours since the epoch)."""
