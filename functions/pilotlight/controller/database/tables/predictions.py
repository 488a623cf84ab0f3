"""Files of prediction logs."""

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
    sa.Index("ix_prediction_files_hour", "tenant", "environment", "app", "function", "hour"),
    sa.Index("ix_prediction_files_expires_at", "expires_at"),
)
"""A row outlives its function, so it refers to none: its object is deleted when its window ends."""
