"""Chunks of volumes: which a tenant has in the blob store.

A row is made before the bytes are sent (`pending`), so that no object is without a row, and counts
in `stored_bytes` from then on. A commit refers to chunks that are `stored` only. A chunk to which
no manifest refers is marked (`deleting`) before its object goes, and its row goes last: whatever is
interrupted, a chunk that a manifest refers to is there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Set as AbstractSet

import sqlalchemy as sa

from pilotlight.controller.database import bulk, tables
from pilotlight.controller.database.store import Write
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.weights import storage_usage
from pilotlight.core.volumes.entries import Entry
from pilotlight.spec.quotas import Plan

PENDING, STORED, DELETING = "pending", "stored", "deleting"
_CHUNKS = tables.volume_chunks


def sizes_of(put: Collection[Entry]) -> dict[str, int]:
    """Digest → size in bytes of the chunks of these entries."""
    return {
        digest: one.chunk_bytes(index) for one in put for index, digest in enumerate(one.chunks)
    }


def reserve(
    write: Write, plan: Plan, *, tenant: str, sizes: Mapping[str, int], coming_bytes: int = 0
) -> list[str]:
    """Record the use of chunks; returns those that must be uploaded. `coming_bytes` belong to
    uploads of blobs in progress. Raises StorageQuotaExceeded when the chunks do not fit."""
    rows = _rows(write.sql, tenant=tenant, digests=sizes)
    new = [digest for digest in sizes if digest not in rows]
    if new:
        more = sum(sizes[digest] for digest in new)
        storage_usage.require_room(
            write.sql, plan, tenant=tenant, more_bytes=more, coming_bytes=coming_bytes
        )
        stored_bytes.count(write, tenant=tenant, more_bytes=more)
    again = [digest for digest, (_, state) in rows.items() if state != STORED]
    same = {"tenant": tenant, "state": PENDING, "used_at": write.now}
    for part in bulk.parts(new):  # together: the database's only writer is held meanwhile
        values = [{**same, "digest": digest, "size_bytes": sizes[digest]} for digest in part]
        write.sql.execute(sa.insert(_CHUNKS), values)
    _update(write, tenant=tenant, digests=rows, used_at=write.now)
    _update(write, tenant=tenant, digests=again, state=PENDING)
    return [*new, *again]


def mark_stored(write: Write, *, tenant: str, digests: Collection[str]) -> None:
    """Record that the bytes of chunks are in the store."""
    _update(write, tenant=tenant, digests=digests, state=STORED, used_at=write.now)


def missing(sql: sa.Connection, *, tenant: str, sizes: Mapping[str, int]) -> list[str]:
    """Those chunks that the tenant has not stored with this size."""
    rows = _rows(sql, tenant=tenant, digests=sizes)
    return sorted(digest for digest, size in sizes.items() if rows.get(digest) != (size, STORED))


def mark_unused(
    write: Write,
    *,
    tenant: str,
    before: float,
    referenced: AbstractSet[str],
    only: Collection[str] | None = None,
) -> list[str]:
    """Mark chunks for deletion that are not `referenced` by a manifest, and were not used since
    `before` (of these `only`); returns all that are marked."""
    query = sa.select(_CHUNKS.c.digest, _CHUNKS.c.state, _CHUNKS.c.used_at)
    found = [
        row.digest
        for row in write.sql.execute(query.where(_CHUNKS.c.tenant == tenant))
        if row.digest not in referenced
        and (
            row.state == DELETING or (row.used_at < before and (only is None or row.digest in only))
        )
    ]
    _update(write, tenant=tenant, digests=found, state=DELETING)
    return found


def forget(write: Write, *, tenant: str, digests: Collection[str]) -> None:
    """Delete the rows of chunks whose objects were deleted."""
    for part in bulk.parts(digests):
        gone = (*_are(tenant, part), _CHUNKS.c.state == DELETING)
        sizes = write.sql.execute(sa.delete(_CHUNKS).where(*gone).returning(_CHUNKS.c.size_bytes))
        stored_bytes.count(write, tenant=tenant, more_bytes=-sum(sizes.scalars()))


def tenants(sql: sa.Connection) -> list[str]:
    """Tenants that have chunks."""
    return sorted(sql.execute(sa.select(_CHUNKS.c.tenant).distinct()).scalars())


def _rows(
    sql: sa.Connection, *, tenant: str, digests: Collection[str]
) -> dict[str, tuple[int, str]]:
    found: dict[str, tuple[int, str]] = {}
    for part in bulk.parts(digests):
        query = sa.select(_CHUNKS.c.digest, _CHUNKS.c.size_bytes, _CHUNKS.c.state)
        for row in sql.execute(query.where(*_are(tenant, part))):
            found[row.digest] = (row.size_bytes, row.state)
    return found


def _update(write: Write, *, tenant: str, digests: Collection[str], **values: object) -> None:
    for part in bulk.parts(digests):
        write.sql.execute(sa.update(_CHUNKS).where(*_are(tenant, part)).values(**values))


def _are(tenant: str, digests: list[str]) -> tuple[sa.ColumnElement[bool], ...]:
    return _CHUNKS.c.tenant == tenant, _CHUNKS.c.digest.in_(digests)
