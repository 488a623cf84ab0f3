"""Tables of collections: dicts and queues."""

from __future__ import annotations

import sqlalchemy as sa

from pilotlight.controller.database.tables.columns import metadata, text, time, whole

collections = sa.Table(
    "collections",
    metadata,
    text("id", key=True),
    text("tenant"),
    text("environment"),
    text("kind"),
    text("name"),
    whole("entries"),
    whole("size_bytes"),
    whole("position"),
    time("created_at"),
    time("updated_at"),
    sa.ForeignKeyConstraint(
        ["tenant", "environment"], ["environments.tenant", "environments.name"]
    ),
    sa.Index("ix_collections_name", "tenant", "environment", "kind", "name", unique=True),
)

collection_values = sa.Table(
    "collection_values",
    metadata,
    text("collection", sa.ForeignKey("collections.id"), key=True),
    text("key", key=True),
    sa.Column("position", sa.BigInteger, nullable=False, primary_key=True),
    whole("size_bytes"),
    sa.Column("value", sa.LargeBinary, nullable=False),
)

collection_operations = sa.Table(
    "collection_operations",
    metadata,
    text("collection", sa.ForeignKey("collections.id"), key=True),
    text("id", key=True),
    time("at"),
    sa.Column("size_bytes", sa.BigInteger, nullable=False, server_default="0"),
    sa.Column("answer", sa.LargeBinary, nullable=False, server_default=sa.text("''")),
    sa.Index("ix_collection_operations_at", "at"),
    sa.Index(
        "ix_collection_operations_answers",
        "collection",
        sqlite_where=sa.text("size_bytes > 0"),
        postgresql_where=sa.text("size_bytes > 0"),
    ),
)
