"""Commits, uploads and deletion of volumes: what goes over the database, the blob store and the
node agent.

A commit of a function: the agent says what changed, the missing chunks are reserved, the agent
uploads them, and one transaction makes them the manifest. Killed anywhere before it, the manifest
is the one from before, and the next commit finds and uploads what is left; killed after it, the
next commit finds no difference."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from functools import partial
from typing import Any, NoReturn, TypeVar

import sqlalchemy as sa

from pilotlight.controller.database.store import Store, Write
from pilotlight.controller.registry.app_ref import EnvironmentRef
from pilotlight.controller.server.node_backend import NodeBackend
from pilotlight.controller.server.tenant_threads import TenantThreads
from pilotlight.controller.volumes import chunks, volumes
from pilotlight.controller.volumes.volumes import Volume
from pilotlight.controller.weights import storage_usage
from pilotlight.controller.weights.blob_upload import STORE_RETRY_S, store_errors
from pilotlight.controller.weights.blobs import BlobStore, check_digest
from pilotlight.core.volumes.entries import CHUNK_BYTES, Entry, EntryKind, chunk_key
from pilotlight.errors import Conflict, InvalidInput, NotFound, StorageFull, Unavailable
from pilotlight.spec.quotas import Plan
from snapshotter.errors import SnapshotterError, VolumeFailed, VolumeUnknown
from snapshotter.volumes.api import MAX_DIGESTS

log = logging.getLogger(__name__)
T = TypeVar("T")
_READ_AHEAD = 2
"""Chunks of a download that are read at once, 16 MiB each."""


class VolumeService:
    """Operations on volumes. Owner: the controller's event loop.

    `_turns`: one commit or reload of a tenant at once, so that a tenant has one process on the node
    for all its volumes."""

    def __init__(
        self,
        *,
        files: BlobStore,
        store: Store,
        agent: Callable[[], NodeBackend],
        plans: Mapping[str, Plan],
        threads: TenantThreads,
        uploads: TenantThreads,
        downloads: TenantThreads,
    ) -> None:
        """`uploads`, `downloads`: transfers that each tenant may have at once."""
        self._files = files
        self._store = store
        self._agent = agent
        self._plans = plans
        self._threads = threads
        self._turns: dict[str, asyncio.Lock] = {}
        self._uploads = uploads
        self._downloads = downloads

    def __repr__(self) -> str:
        return f"<VolumeService {self._files.objects!r}>"

    async def commit_node(self, scope: EnvironmentRef, name: str) -> Mapping[str, Any]:
        """Commit what functions wrote on the node. Raises NotFound, Conflict, StorageQuotaExceeded,
        StorageFull, Unavailable; then nothing was committed."""
        tenant = scope.tenant
        async with self._turn(tenant), self._chunks_kept(tenant):
            volume = await self.read(tenant, partial(volumes.find, scope=scope, name=name))
            put, remove = await self._scan(volume)
            sizes = await asyncio.to_thread(chunks.sizes_of, put)
            wanted = await self.write(
                tenant,
                partial(self._reserve, tenant=tenant, sizes=sizes),
            )
            for begin in range(0, len(wanted), MAX_DIGESTS):
                await self._upload(volume, wanted[begin : begin + MAX_DIGESTS])
            version = await self.write(
                tenant,
                lambda write: self._apply(write, volume, put=put, remove=remove, sizes=sizes),
            )
            try:
                await self._agent().commit_volume(volume.id, version=version)
            except SnapshotterError as e:
                # the next commit names the same changes again
                log.warning("event=volume_commit_not_told volume=%s error=%r", volume.id, e)
        return {
            "version": version,
            "changed": len(put),
            "removed": len(remove),
            "uploaded_bytes": sum(sizes[digest] for digest in wanted),
        }

    async def reload_node(self, scope: EnvironmentRef, name: str) -> Mapping[str, Any]:
        """Bring the node's directory up to date. Raises NotFound, Conflict, StorageFull,
        Unavailable."""
        async with self._turn(scope.tenant):
            volume = await self.read(scope.tenant, partial(volumes.find, scope=scope, name=name))
            try:
                return await self._agent().reload_volume(volume.id)
            except SnapshotterError as e:
                _raise(volume, e)

    async def commit_client(
        self,
        scope: EnvironmentRef,
        name: str,
        *,
        put: list[Entry],
        remove: list[str],
        remove_trees: list[str],
    ) -> tuple[int | None, list[str]]:
        """Commit what a client uploaded: the version; or None, and the chunks that are missing.
        Raises NotFound, StorageQuotaExceeded."""
        sizes, tenant = chunks.sizes_of(put), scope.tenant

        def change(write: Write) -> tuple[int | None, list[str]]:
            volume = volumes.find(write.sql, scope, name=name)
            if absent := chunks.missing(write.sql, tenant=tenant, sizes=sizes):
                return None, absent
            plan = self._plan(write, tenant)
            version = volumes.commit(
                write, volume, plan, put=put, remove=remove, remove_trees=remove_trees
            )
            volumes.record_commit(write, scope, name, version)
            return version, []

        async with self._chunks_kept(tenant):
            return await self.write(tenant, change)

    async def upload(self, tenant: str, digest: str, pieces: AsyncIterator[bytes]) -> int:
        """Store a chunk that a client sends; returns its size. Raises InvalidInput, TooLarge,
        StorageQuotaExceeded, StorageFull, Unavailable."""
        check_digest(digest)
        async with (
            self._uploads.share(tenant),
            self._chunks_kept(tenant),
            self._files.received(digest, pieces, limit_bytes=CHUNK_BYTES) as (file, size),
        ):
            if not size:
                raise InvalidInput("the body is empty: a chunk has at least one byte")
            wanted = await self.write(
                tenant, partial(self._reserve, tenant=tenant, sizes={digest: size})
            )
            if wanted:
                with store_errors():
                    await self._files.objects.put_file(
                        chunk_key(tenant, digest), file, may_move=True
                    )
                await self.write(tenant, partial(chunks.mark_stored, tenant=tenant, digests=wanted))
        return size

    async def delete(self, scope: EnvironmentRef, name: str) -> Volume:
        """Delete a volume, and the chunks that no other manifest refers to. Raises NotFound."""
        tenant = scope.tenant

        def look(sql: sa.Connection) -> set[str]:
            return volumes.chunks_of_volume(sql, volumes.find(sql, scope, name=name))

        unused = await self.read(tenant, look)
        volume = await self.write(tenant, partial(volumes.delete, scope=scope, name=name))
        try:
            await self._agent().drop_volume(volume.id)
        except SnapshotterError as e:
            log.warning("event=volume_not_dropped volume=%s error=%r", volume.id, e)
        try:
            await self.collect(tenant, before=float("inf"), only=unused)
        except Unavailable as e:
            log.warning("event=volume_chunks_not_deleted tenant=%s error=%r", tenant, e)
        return volume

    async def collect(self, tenant: str, *, before: float, only: set[str] | None = None) -> int:
        """Delete chunks to which no manifest refers and that were not used since `before`; returns
        their number. Nothing while the tenant commits or uploads. Raises Unavailable."""
        with self._files.gate.deleting(_gate(tenant)) as may_delete:
            if not may_delete:
                return 0
            # no manifest of the tenant gets more chunks meanwhile, and writers do not wait for this
            referenced = await self.read(tenant, partial(volumes.chunks_of_tenant, tenant=tenant))
            marked = await self.write(
                tenant,
                partial(
                    chunks.mark_unused,
                    tenant=tenant,
                    before=before,
                    referenced=referenced,
                    only=only,
                ),
            )
            for digest in marked:
                with store_errors():
                    await self._files.objects.delete(chunk_key(tenant, digest))
            await self.write(tenant, partial(chunks.forget, tenant=tenant, digests=marked))
        return len(marked)

    async def collect_all(self, *, before: float) -> int:
        """Collect for every tenant. Raises Unavailable."""

        def find() -> list[str]:
            with self._store.read() as sql:
                return chunks.tenants(sql)

        return sum([await self.collect(t, before=before) for t in await asyncio.to_thread(find)])

    async def content(self, scope: EnvironmentRef, name: str, path: str) -> tuple[Entry, Any]:
        """An entry of a file, and its content piece by piece. Raises InvalidInput, NotFound."""

        def look(sql: Any) -> Entry:
            volume = volumes.find(sql, scope, name=name)
            found = volumes.entry(sql, volume, path)
            assert found is not None
            if found.kind is not EntryKind.FILE:
                raise InvalidInput(
                    f"{found.path!r} is a {found.kind}, not a file", parameter="path"
                )
            return found

        found = await self.read(scope.tenant, look)
        return found, self._pieces(scope.tenant, found)

    async def _pieces(self, tenant: str, found: Entry) -> AsyncGenerator[bytes, None]:
        """The content; reads one chunk ahead. Raises ObjectStoreError."""
        objects = self._files.objects

        async def read(digest: str) -> bytes:
            data = await objects.get(chunk_key(tenant, digest), max_bytes=CHUNK_BYTES)
            actual = await asyncio.to_thread(lambda: hashlib.sha256(data).hexdigest())
            if actual != digest:
                raise ObjectDamaged(f"chunk {digest[:12]} of {found.path} is damaged")
            return data

        async with self._downloads.share(tenant):  # each has chunks in memory
            tasks: list[asyncio.Task[bytes]] = []
            try:
                for digest in found.chunks:
                    task = asyncio.create_task(read(digest), name=f"read chunk {digest[:12]}")
                    tasks.append(task)
                    if len(tasks) >= _READ_AHEAD:
                        yield await tasks.pop(0)
                while tasks:
                    yield await tasks.pop(0)
            finally:
                for task in tasks:
                    if not task.cancel() and not task.cancelled():
                        task.exception()

    async def _scan(self, volume: Volume) -> tuple[list[Entry], list[str]]:
        plan = await self.read(
            volume.tenant,
            lambda sql: storage_usage.plan_of(sql, self._plans, tenant=volume.tenant),
        )
        put: list[Entry] = []
        remove: list[str] = []
        parts = self._agent().scan_volume(volume.id, max_entries=volumes.max_files(plan))
        size_bytes = 0
        try:
            async for part in parts:
                found = await asyncio.to_thread(volumes.parse_entries, part.get("put", ()))
                size_bytes += sum(one.size_bytes for one in found)
                volumes.require_size(volume, size_bytes)  # each has a list of its chunks
                put += found
                remove += volumes.parse_paths(part.get("remove", ()))
        except SnapshotterError as e:
            _raise(volume, e)
        return put, remove

    async def _upload(self, volume: Volume, digests: list[str]) -> None:
        try:
            await self._agent().upload_volume(volume.id, digests)
        except SnapshotterError as e:
            _raise(volume, e)
        await self.write(
            volume.tenant, partial(chunks.mark_stored, tenant=volume.tenant, digests=digests)
        )

    def _apply(
        self,
        write: Write,
        volume: Volume,
        *,
        put: list[Entry],
        remove: list[str],
        sizes: Mapping[str, int],
    ) -> int:
        if absent := chunks.missing(write.sql, tenant=volume.tenant, sizes=sizes):
            raise Conflict(f"chunk {absent[0][:12]} is not stored: commit again")
        plan = self._plan(write, volume.tenant)
        return volumes.commit(write, volume, plan, put=put, remove=remove)

    def _reserve(self, write: Write, *, tenant: str, sizes: Mapping[str, int]) -> list[str]:
        coming_bytes = self._files.gate.coming_bytes(tenant)
        plan = self._plan(write, tenant)
        return chunks.reserve(write, plan, tenant=tenant, sizes=sizes, coming_bytes=coming_bytes)

    def _plan(self, write: Write, tenant: str) -> Plan:
        return storage_usage.plan_of(write.sql, self._plans, tenant=tenant)

    async def read(self, tenant: str, query: Callable[[sa.Connection], T]) -> T:
        """Run `query` in a read transaction, in one of the tenant's threads."""

        def run() -> T:
            with self._store.read() as sql:
                return query(sql)

        return await self._threads.run(tenant, run)

    async def write(self, tenant: str, change: Callable[[Write], T]) -> T:
        """Run `change` in a write transaction, in one of the tenant's threads."""

        def run() -> T:
            with self._store.write() as write:
                return change(write)

        return await self._threads.run(tenant, run)

    def _turn(self, tenant: str) -> asyncio.Lock:
        return self._turns.setdefault(tenant, asyncio.Lock())

    def _chunks_kept(self, tenant: str) -> Any:
        return self._files.gate.using(_gate(tenant))


class ObjectDamaged(Exception):
    """Raised when an object does not match its digest; the response ends."""


def _gate(tenant: str) -> str:
    return f"volumes/{tenant}"


def _raise(volume: Volume, e: SnapshotterError) -> NoReturn:
    """Raise what the node agent said as an error of the API."""
    if isinstance(e, VolumeUnknown):
        raise NotFound(
            f"volume {volume.name!r} is mounted nowhere on this node: commit() and reload() are "
            f"for functions that mount it",
            name=volume.name,
        ) from e
    reason = e.detail.get("reason") if isinstance(e, VolumeFailed) else ""
    message = f"volume {volume.name!r}: {e}; nothing was committed"
    if reason == "refused":
        raise Conflict(message) from e
    if reason == "disk_full":
        raise StorageFull(message, retry_after_s=STORE_RETRY_S) from e
    raise Unavailable(message, retry_after_s=STORE_RETRY_S) from e
