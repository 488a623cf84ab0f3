"""Tables of volumes."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole

volumes = sa.Table(
    "volumes",
    metadata,
    text("id", key=True),
    text("tenant"),
    text("environment"),
    text("name"),
    whole("version"),
    whole("entries"),
    whole("size_bytes"),
    time("created_at"),
    time("updated_at"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment"], ["environments.tenant", "environments.name"]
    ),
    sa.Index("ix_volumes_name", "tenant", "environment", "name", unique=True),
)

volume_entries = sa.Table(
    "volume_entries",
    metadata,
    text("volume", sa.ForeignKey("volumes.id"), key=True),
    text("path", key=True),
    whole("size_bytes"),
    text("entry"),
)

volume_chunks = sa.Table(
    "volume_chunks",
    metadata,
    text("tenant", sa.ForeignKey("tenants.id"), key=True),
    text("digest", key=True),
    whole("size_bytes"),
    text("state"),
    time("used_at"),
)
