"""Bytes that a tenant stores. What stores or deletes calls `count` in its transaction, so that a
check does not depend on how much there is.

Blobs and images are addressed by content, and two tenants may have the same ones. **Each tenant
that has a blob or an image counts its full size**: the usage of one tenant does not depend on
another, a deletion frees what was counted, and usage reveals nothing about other tenants. Within
one tenant a blob counts once, however many revisions, images and names of weights refer to it. An
upload counts from its first byte; an image counts once it is built. Chunks of volumes are each
tenant's own, and count once in all its volumes. Of dicts and queues keys and values count."""

from __future__ import annotations

from dataclasses import dataclass

import sqlalchemy as sa

from pilotlight.controller.database import tables
from pilotlight.controller.database.store import Write


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageUsage:
    """Storage usage of one tenant, in bytes.

    Attributes:
        total_bytes: what `stored_bytes` of a plan limits.
        collection_bytes: the part of it in dicts and queues.
    """

    total_bytes: int
    collection_bytes: int


def usage_of_tenant(sql: sa.Connection, *, tenant: str) -> StorageUsage:
    """Current storage usage of `tenant`."""
    return _usage(sql.execute(sa.select(*_USAGE).where(tables.tenants.c.id == tenant)))


def count(
    write: Write, *, tenant: str, more_bytes: int, in_collections: bool = False
) -> StorageUsage:
    """Count bytes in the transaction that stores them, or deletes them (below 0); returns the usage
    with them. `in_collections`: they are values of dicts and queues."""
    values = {"of": tenant, "more": more_bytes, "of_them": more_bytes if in_collections else 0}
    return _usage(write.sql.execute(_COUNT, values))


_C = tables.tenants.c
_USAGE = (_C.stored_bytes, _C.collection_bytes)
_COUNT = (
    sa.update(tables.tenants)
    .where(_C.id == sa.bindparam("of"))
    .values(
        stored_bytes=_C.stored_bytes + sa.bindparam("more"),
        collection_bytes=_C.collection_bytes + sa.bindparam("of_them"),
    )
    .returning(*_USAGE)
)
"""Made once: a put to a dict takes as long to make such a statement as to execute it."""


def _usage(rows: sa.CursorResult[int, int]) -> StorageUsage:
    total_bytes, collection_bytes = rows.one()
    return StorageUsage(total_bytes=total_bytes, collection_bytes=collection_bytes)
