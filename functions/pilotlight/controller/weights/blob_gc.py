"""Garbage collection of blobs: mark and sweep, in two steps that are both safe to interrupt.

1. **Release** (one transaction per tenant): the tenant releases blobs that none of its revisions,
   names of weights and images refers to. A blob that no tenant owns then is marked `deleting_at`.
   The transaction reads the references itself, and every transaction that adds a reference checks
   that the tenant owns the blobs: in either order, no reference is left without its bytes.
2. **Delete**: delete the bytes of marked blobs, then their rows. After a crash in between the mark
   is still there, and the next sweep continues. An upload of a marked blob removes the mark; a blob
   that is being uploaded is not deleted, and uploads of a blob wait while it is being deleted.

The periodic sweep releases only blobs that were not used during `controller.blob_grace_s`: a client
that uploads a blob, or checks whether it exists, is about to refer to it. Deleting a model, an
image or an app releases at once what only that referred to."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass

import anyio.to_thread
import sqlalchemy as sa

from pilotlight.controller.database import audit_trail, bulk, tables
from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.database.transactions import in_read
from pilotlight.controller.identity import stored_bytes
from pilotlight.controller.weights.blob_upload import STORE_RETRY_S, store_errors
from pilotlight.controller.weights.blobs import BlobStore
from pilotlight.controller.weights.gc_roots import GcRoots, RevisionReferenceCache, find_roots
from pilotlight.core.object_store import blob_key
from pilotlight.core.object_store.errors import ObjectNotFound
from pilotlight.errors import PilotlightError, Unavailable
from weight_cache import manifest
from weight_cache.errors import ManifestInvalid

log = logging.getLogger(__name__)

MAX_LISTED = 1000
"""Maximum number of digests in a response."""
_LONGEST_EVER_BYTES = 64 * 1024 * 1024
"""Size limit of a manifest in earlier releases. A manifest longer than today's limit refers to no
blobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedBlobs:
    """Blobs that a tenant released: `digests` (sorted), their bytes, and how many of them have no
    owner now."""

    digests: tuple[str, ...] = ()
    size_bytes: int = 0
    orphaned: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletedBlobs:
    """Number and bytes of blobs that a sweep deleted from the blob store."""

    blobs: int = 0
    size_bytes: int = 0


class BlobCollector:
    """Releases and deletes blobs. Owner: the controller's event loop. Caches the file lists of
    manifests, which never change."""

    def __init__(self, files: BlobStore, store: Store) -> None:
        self._files = files
        self._store = store
        self._named: dict[str, frozenset[str]] = {}
        self._revisions = RevisionReferenceCache()

    async def collect(
        self,
        *,
        tenant: str,
        unused_since: float,
        dry_run: bool = False,
        actor: str = audit_trail.PLATFORM,
        request: str = "",
    ) -> ReleasedBlobs:
        """Release blobs without references that were not used since `unused_since`. Raises
        Unavailable when the store does not answer."""
        return await self._release(
            tenant=tenant,
            unused_since=unused_since,
            only=None,
            dry_run=dry_run,
            actor=actor,
            request=request,
        )

    async def give_up(
        self,
        *,
        tenant: str,
        digests: Collection[str],
        manifests: Collection[str] = (),
        actor: str,
        request: str,
    ) -> ReleasedBlobs:
        """Release those of `digests`, and of the files of the manifests among them, that are not
        referenced.

        `manifests`: digests known to be manifests although no name or revision refers to them
        now."""
        wanted = {*digests, *manifests}
        for digest in await self._manifests_among(tenant, wanted, known=set(manifests)):
            wanted |= self._named[digest]
        return await self._release(
            tenant=tenant,
            unused_since=float("inf"),
            only=wanted,
            dry_run=False,
            actor=actor,
            request=request,
        )

    async def delete_marked(self) -> DeletedBlobs:
        """Delete the bytes of every blob without an owner. Raises ObjectStoreError; blobs that
        were not deleted stay marked."""
        count, size_bytes = 0, 0
        for digest in await anyio.to_thread.run_sync(self._marked, None):
            with self._files.gate.deleting(digest) as is_free:
                if not is_free or not await anyio.to_thread.run_sync(self._marked, digest):
                    continue  # an upload of it is running, or has ended meanwhile
                await self._files.objects.delete(blob_key(digest))
                size_bytes += await anyio.to_thread.run_sync(self._delete, digest)
                count += 1
        if count:
            log.info("event=blobs_deleted count=%d bytes=%d", count, size_bytes)
        return DeletedBlobs(blobs=count, size_bytes=size_bytes)

    async def _release(
        self,
        *,
        tenant: str,
        unused_since: float,
        only: set[str] | None,
        dry_run: bool,
        actor: str,
        request: str,
    ) -> ReleasedBlobs:
        def attempt(write: Write, *, changes: bool) -> ReleasedBlobs | set[str]:
            return self._give_up(
                write,
                tenant=tenant,
                unused_since=unused_since,
                only=only,
                dry_run=not changes,
                actor=actor,
                request=request,
            )

        def look() -> ReleasedBlobs | set[str]:
            with self._store.read() as sql:
                return attempt(Write(sql=sql, now=0.0), changes=False)

        def change() -> ReleasedBlobs | set[str]:
            with self._store.write() as write:
                return attempt(write, changes=True)

        # a dry run first: most rounds release nothing and need no write lock
        found = await self._knowing(look)
        return found if dry_run or not found.digests else await self._knowing(change)

    async def _knowing(self, attempt: Callable[[], ReleasedBlobs | set[str]]) -> ReleasedBlobs:
        """Repeat the attempt until the file lists of all manifests that it needs are loaded. Raises
        Unavailable."""
        while True:  # manifests may be added between two attempts
            done = await anyio.to_thread.run_sync(attempt)
            if isinstance(done, ReleasedBlobs):
                return done
            if missing := sorted(await self._load(done)):
                raise Unavailable(
                    f"manifest {missing[0]} of weights in use is missing or damaged in the blob "
                    f"store: nothing was collected, because "
                    "its files are not known; deploy or push those weights again",
                    retry_after_s=STORE_RETRY_S,
                    manifest=missing[0],
                )

    def _give_up(
        self,
        write: Write,
        *,
        tenant: str,
        unused_since: float,
        only: set[str] | None,
        dry_run: bool,
        actor: str,
        request: str,
    ) -> ReleasedBlobs | set[str]:
        """Release blobs, or return the manifests whose file lists must be loaded first."""
        removed_before = float("inf") if only is not None else unused_since
        found = find_roots(write.sql, self._revisions, tenant=tenant, removed_before=removed_before)
        owned = _owned(write.sql, tenant=tenant)
        gone = {
            digest
            for digest, (_, used_at) in owned.items()
            if digest not in found.blobs
            and used_at < unused_since
            and (only is None or digest in only)
        }
        # files are kept as long as any manifest that lists them, so a revision has all of its
        # weights or not even the manifest
        kept = found.manifests & owned.keys() - gone
        if unknown := kept - self._named.keys():
            return unknown
        for digest in kept:
            gone -= self._named[digest]
        size_bytes = sum(owned[digest][0] for digest in gone)
        if dry_run or not gone:
            return ReleasedBlobs(digests=tuple(sorted(gone)), size_bytes=size_bytes)
        orphaned = drop(write, tenant=tenant, digests=gone)
        _mark_revisions(write, found, gone)
        after = {"blobs": len(gone), "size_bytes": size_bytes}
        audit_trail.record(
            write,
            tenant=tenant,
            actor=actor,
            action="blob.collect",
            subject=tenant,
            after=after,
            request=request,
        )
        return ReleasedBlobs(digests=tuple(sorted(gone)), size_bytes=size_bytes, orphaned=orphaned)

    async def _manifests_among(
        self, tenant: str, digests: set[str], *, known: set[str]
    ) -> set[str]:
        """Those of `digests` that are manifests of the tenant; loads their file lists."""

        def look(sql: sa.Connection) -> set[str]:
            found = find_roots(
                sql, self._revisions, tenant=tenant, removed_before=float("inf")
            ).manifests
            return (found | known) & _owned(sql, tenant=tenant).keys() & digests

        found = await in_read(self._store, look)
        return found - await self._load(found - self._named.keys())

    async def _load(self, digests: set[str]) -> set[str]:
        """Load the file lists of these manifests; returns those that are missing or damaged. Raises
        Unavailable when the store does not answer."""
        missing: set[str] = set()
        for digest in digests:
            with store_errors():
                try:
                    raw = await self._files.objects.get(
                        blob_key(digest), max_bytes=_LONGEST_EVER_BYTES
                    )
                    self._named[digest] = await anyio.to_thread.run_sync(_files_of, digest, raw)
                except (ObjectNotFound, _Damaged):
                    missing.add(digest)
        return missing

    def _marked(self, digest: str | None) -> list[str]:
        table, owners = tables.blobs, tables.blob_owners
        query = sa.select(table.c.digest).where(table.c.deleting_at.is_not(None))
        query = query.where(~sa.exists().where(owners.c.digest == table.c.digest))
        with self._store.read() as sql:
            return list(
                sql.execute(
                    query if digest is None else query.where(table.c.digest == digest)
                ).scalars()
            )

    def _delete(self, digest: str) -> int:
        table = tables.blobs
        with self._store.write() as write:
            row = sa.delete(table).where(table.c.digest == digest, table.c.deleting_at.is_not(None))
            return int(write.sql.execute(row.returning(table.c.size_bytes)).scalar() or 0)


class _Damaged(Exception):
    """Raised when a blob does not match its digest."""


def _files_of(digest: str, raw: bytes) -> frozenset[str]:
    """The files that a manifest lists; none for an obsolete version, which no node accepts."""
    if hashlib.sha256(raw).hexdigest() != digest:
        raise _Damaged(digest)
    try:
        return frozenset(manifest.parse(raw).blobs())
    except ManifestInvalid:
        return frozenset()


def _owned(sql: sa.Connection, *, tenant: str) -> dict[str, tuple[int, float]]:
    """The tenant's blobs: size in bytes, and time of the last upload or check."""
    table, owners = tables.blobs, tables.blob_owners
    query = sa.select(owners.c.digest, table.c.size_bytes, owners.c.used_at).join(
        table, table.c.digest == owners.c.digest
    )
    return {
        row.digest: (row.size_bytes, row.used_at)
        for row in sql.execute(query.where(owners.c.tenant == tenant))
    }


def drop(write: Write, *, tenant: str, digests: set[str]) -> int:
    """Delete the tenant's ownership rows, whatever refers to these blobs, and mark those that have
    no owner now; returns the number of marked blobs."""
    table, owners = tables.blobs, tables.blob_owners
    marked = 0
    for part in bulk.parts(sorted(digests)):
        theirs = (owners.c.tenant == tenant, owners.c.digest.in_(part))
        size = sa.select(sa.func.coalesce(sa.func.sum(table.c.size_bytes), 0))
        size = size.join(owners, owners.c.digest == table.c.digest).where(*theirs)
        freed = int(write.sql.execute(size).scalar_one())
        stored_bytes.count(write, tenant=tenant, more_bytes=-freed)
        write.sql.execute(sa.delete(owners).where(*theirs))
        without = ~sa.exists().where(owners.c.digest == table.c.digest)
        mark = (
            sa.update(table).where(table.c.digest.in_(part), without).values(deleting_at=write.now)
        )
        marked += write.sql.execute(mark).rowcount
    return marked


def _mark_revisions(write: Write, found: GcRoots, gone: set[str]) -> None:
    """Mark revisions whose blobs are released as pruned: they cannot serve until they are deployed
    again. Deletes their aliases."""
    table, aliases = tables.revisions, tables.aliases
    for (function, name), named in found.given_up.items():
        if named & gone:
            write.sql.execute(
                sa.delete(aliases).where(aliases.c.function == function, aliases.c.revision == name)
            )
            lost = sa.update(table).where(
                table.c.function == function, table.c.name == name, table.c.pruned_at.is_(None)
            )
            write.sql.execute(lost.values(pruned_at=write.now))


async def collect_garbage(
    collector: BlobCollector, store: Store, *, unused_since: float
) -> tuple[ReleasedBlobs, DeletedBlobs]:
    """Collect for every tenant, then delete. A tenant whose collection fails keeps all its blobs.
    Raises ObjectStoreError."""
    owners = sa.select(tables.blob_owners.c.tenant).distinct()
    tenants = await in_read(store, lambda sql: sorted(sql.execute(owners).scalars()))
    size_bytes, orphaned = 0, 0
    digests: set[str] = set()
    for tenant in tenants:
        try:
            done = await collector.collect(tenant=tenant, unused_since=unused_since)
        except PilotlightError as e:
            log.warning("event=blobs_not_collected tenant=%s error=%r", tenant, e)
            continue
        digests |= set(done.digests)
        size_bytes += done.size_bytes
        orphaned += done.orphaned
    collected = ReleasedBlobs(
        digests=tuple(sorted(digests)), size_bytes=size_bytes, orphaned=orphaned
    )
    return collected, await collector.delete_marked()
