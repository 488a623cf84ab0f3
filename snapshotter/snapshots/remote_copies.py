"""Copies of snapshots in an object store: pushed when proven, fetched by nodes whose identity
matches.

    chunks/<tenant>/<2>/<sha256 of the encrypted chunk>
    snapshots/<tenant>/<digest of the identity>/<id>.json
                                  manifest and chunks, signed; written last

Equal chunks of two snapshots of a tenant are stored once; tenants share none. Only data covered by
the record's signature is trusted: a fetched snapshot passes every check of a local one before it is
published on this node. At most `at_once` chunks are in memory, 32 MiB each in both forms.

On a cluster all nodes have the key that signs, so the signature says only that some node wrote the
record. There the controller records which copy of an identity is restored (`approved`), by the
sha256 of its record; nodes fetch that one and no other.

The proof of a copy is accepted, without another one on this node. The identity is equal, so kernel,
processor, CRIU, interpreter, image and uid are those of the node that proved it, and the bytes are
those that it proved. Another proof would restore the same worker twice more, while the start for
which the copy was fetched waits. If the first restore here fails, the same start continues COLD,
and three failures in a row quarantine the snapshot, on all nodes of a cluster."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pilotlight.core.object_store import ObjectStore, is_key
from pilotlight.core.threads import LowPriorityThreads
from snapshotter.errors import SnapshotUnknown
from snapshotter.node_reports import ApprovedCopy
from snapshotter.snapshots.catalog import Catalog, Snapshot, SnapshotStaging
from snapshotter.snapshots.chunks import CHUNK_BYTES, Chunk, ChunkCipher, offsets, pack, unpack
from snapshotter.snapshots.file_integrity import compare
from snapshotter.snapshots.identity import Identity
from snapshotter.snapshots.manifest import (
    MAX_MANIFEST_BYTES,
    SnapshotInvalid,
    SnapshotManifest,
    checked_manifest,
    opened,
    sealed,
)
from snapshotter.snapshots.mapped_files import BindMounts
from snapshotter.snapshots.remote_objects import CopyMissing, RemoteError, RemoteObjects
from weight_cache.peers.bandwidth_limit import BandwidthLimiter

__all__ = ["RemoteCopies", "RemoteError", "RemoteSnapshot", "UploadedSnapshot"]
T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_RECORD_BYTES = 2 * MAX_MANIFEST_BYTES
"""A manifest, and 200 bytes per 16 MiB."""
_SETTLE_ROUNDS = 3
_PUSHED_AT_ONCE = 2
"""One chunk is packed while another one is sent."""
_USUAL_BYTES_PER_S = 200e6
"""Expected rate of the first transfer, in bytes of the image: they are received (a quarter of them,
compressed), unpacked, written and hashed."""
_NEWEST_PART = 0.5
"""Weight of the last transfer in the expected rate."""
ORPHANED_S = 6 * 3600.0
"""How long no record may name a chunk before it is deleted: an upload names its chunks when it has
sent them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedSnapshot:
    """The result of a push: chunks sent, and chunks that already existed."""

    sent: int
    reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSnapshot:
    """A copy in the store: a manifest, and the chunks of its files, in order. `digest`: sha256 of
    its record, "" before it is written."""

    manifest: SnapshotManifest
    chunks: Mapping[str, tuple[Chunk, ...]]
    digest: str = ""

    @property
    def packed_bytes(self) -> int:
        """Bytes that a fetch transfers."""
        return sum(chunk.packed_bytes for chunks in self.chunks.values() for chunk in chunks)

    def to_json(self) -> dict[str, Any]:
        """The body of its record."""
        return {
            "manifest": self.manifest.to_json(),
            "chunks": {name: [c.to_json() for c in cs] for name, cs in self.chunks.items()},
        }


class RemoteCopies:
    """Pushes, fetches and deletes copies. Owner: the event loop. Two nodes may push the same
    snapshot; fetching one that another node deletes fails cleanly.

    Attributes:
        catalog: the snapshots of this node.
        approved: of a cluster: digest of an identity → the copy that the controller recorded for
            it. None: there is no controller, and the newest copy that is signed is fetched.
    """

    def __init__(
        self,
        store: ObjectStore,
        catalogue: Catalog,
        *,
        at_once: int = 4,
        chunk_bytes: int = CHUNK_BYTES,
        approved: dict[str, ApprovedCopy] | None = None,
        bytes_per_s: int = 0,
    ) -> None:
        """`bytes_per_s`: limit of pushes; 0: none."""
        self._store = RemoteObjects(store)
        self.catalog = catalogue
        self.approved = approved
        self._at_once = at_once
        self._chunk_bytes = chunk_bytes
        self._pace = BandwidthLimiter(bytes_per_s, clock=time.monotonic)
        self._threads = LowPriorityThreads(1)
        self._received_per_s = _USUAL_BYTES_PER_S
        self._tenants: set[str] = set()
        self._orphans: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<RemoteCopies {self._store!r}>"

    async def aclose(self) -> None:
        """Close the store."""
        self._threads.close()
        await self._store.aclose()

    # -- push --------------------------------------------------------------------------------------
    async def push(self, snapshot: Snapshot) -> UploadedSnapshot:
        """Send the missing chunks, then the record; delete older snapshots of the same identity.

        Raises RemoteError, SnapshotCorrupt, SnapshotUnknown (also if it was deleted or quarantined
        meanwhile, which leaves no copy), OSError. After cancellation or failure, the next push
        resumes."""
        key, sent, named = _record_key(snapshot.manifest), list[Chunk](), set[str]()
        try:
            with self.catalog.lease(snapshot.id):
                await self.catalog.verify(snapshot, None)
                # existing chunks may have been deleted with another snapshot in the meantime
                for _ in range(_SETTLE_ROUNDS):
                    record = await self._send(snapshot, named, sent)
                    data = sealed(record.to_json(), self.catalog.key)
                    self.catalog.get(snapshot.id)
                    await self._store.put(key, data)
                    self.catalog.get(snapshot.id)
                    if await self._is_complete(record):
                        break
        except (SnapshotUnknown, FileNotFoundError):
            await self._take_back(snapshot, key, named)
            raise
        self.catalog.mark_remote(snapshot.id, record=_sha256(data), size_bytes=record.packed_bytes)
        if self.approved is None:
            await self._forget(
                [k for k in await self._store.keys(f"{key.rpartition('/')[0]}/") if k != key]
            )
        reused = sum(map(len, record.chunks.values())) - len(sent)
        return UploadedSnapshot(sent=len(sent), reused=reused)

    async def _take_back(self, snapshot: Snapshot, key: str, chunks: set[str]) -> None:
        """Remove what was sent of a snapshot that was deleted or quarantined meanwhile. Raises
        SnapshotUnknown in this case."""
        if any(there.id == snapshot.id for there in self.catalog):
            return
        await self._store.delete(key)
        await self._delete_unnamed(_folder_of(snapshot.manifest), chunks)
        self.catalog.get(snapshot.id)

    async def confirm(self, snapshot: Snapshot) -> bool:
        """Whether the store has its copy already; if so, this is recorded. Raises RemoteError."""
        try:
            found = await self._record(_record_key(snapshot.manifest), snapshot.manifest.identity)
        except RemoteError as e:
            if isinstance(e.__cause__, SnapshotInvalid):
                return False  # written with another key, or damaged: push it again
            raise
        if found is None:
            return False
        self.catalog.mark_remote(snapshot.id, record=found.digest, size_bytes=found.packed_bytes)
        return True

    async def _send(self, snapshot: Snapshot, named: set[str], sent: list[Chunk]) -> RemoteSnapshot:
        """Send the chunks that the store does not have. `named`: receives the keys of all, `sent`:
        the chunks that were sent."""
        wanted = [
            (name, offset)
            for name, mark in snapshot.manifest.files.items()
            for offset in offsets(mark.bytes, self._chunk_bytes)
        ]
        limit = asyncio.Semaphore(min(_PUSHED_AT_ONCE, self._at_once))
        tenant, looked = _folder_of(snapshot.manifest), set[str]()
        self._tenants.add(tenant)

        async def send(name: str, offset: int) -> Chunk:
            async with limit:
                chunk, packed = await self._threads.run(
                    pack,
                    snapshot.directory / name,
                    offset,
                    self._chunk_bytes,
                    self._cipher(tenant),
                )
                key = chunk.key(tenant)
                if key not in looked:  # equal chunks are sent once
                    looked.add(key)
                    named.add(key)
                    if await self._store.size(key) != chunk.packed_bytes:
                        await self._pace.take(chunk.packed_bytes)
                        await self._store.put(key, packed)
                        sent.append(chunk)
                return chunk

        results = await _all(send(name, offset) for name, offset in wanted)
        chunks: dict[str, tuple[Chunk, ...]] = dict.fromkeys(snapshot.manifest.files, ())
        for (name, _), chunk in zip(wanted, results, strict=True):
            chunks[name] += (chunk,)
        return RemoteSnapshot(manifest=snapshot.manifest, chunks=chunks)

    async def _is_complete(self, record: RemoteSnapshot) -> bool:
        limit, tenant = asyncio.Semaphore(self._at_once), _folder_of(record.manifest)

        async def is_there(chunk: Chunk) -> bool:
            async with limit:
                return await self._store.size(chunk.key(tenant)) == chunk.packed_bytes

        return all(
            await _all(is_there(chunk) for chunks in record.chunks.values() for chunk in chunks)
        )

    def _cipher(self, tenant: str) -> ChunkCipher:
        return ChunkCipher(self.catalog.key, tenant)

    # -- fetch -------------------------------------------------------------------------------------
    async def find(self, identity: Identity, *, tenant: str = "") -> RemoteSnapshot | None:
        """The copy of this identity that would be fetched: on a cluster the approved one, otherwise
        the newest; None if there is none that is not quarantined here.

        Raises RemoteError with the reason if a copy is altered or of another identity."""
        aside = {record.id for record in self.catalog.quarantined}
        digest = identity.digest()
        if self.approved is None:
            return await self._newest(
                identity, f"snapshots/{_folder(tenant)}/{digest}/", without=aside
            )
        copy = self.approved.get(digest)
        if copy is None or copy.snapshot in aside or copy.tenant != tenant:
            return None
        found = await self._approved(copy)
        if found is not None and (field := found.manifest.identity.first_difference(identity)):
            raise RemoteError(f"{copy.snapshot} has another identity: {field} differs")
        return found

    async def fetch(
        self,
        identity: Identity,
        binds: BindMounts | None = None,
        *,
        tenant: str = "",
        now: float | None = None,
    ) -> Snapshot | None:
        """Find and receive the copy of this identity; None if there is none."""
        found = await self.find(identity, tenant=tenant)
        return None if found is None else await self.receive(found, binds, now=now)

    async def prefetch(self, copy: ApprovedCopy, *, now: float) -> Snapshot | None:
        """Receive an approved copy before a start needs it; None if the store has none, or if
        another snapshot would have to go for it. Mapped files are checked when it is used. Raises
        as `receive`."""
        found = await self._approved(copy)
        catalog = self.catalog
        if found is None or catalog.used_bytes + found.manifest.image_bytes > catalog.max_bytes:
            return None
        return await self.receive(found, None, now=now)

    async def receive(
        self, found: RemoteSnapshot, binds: BindMounts | None = None, *, now: float | None = None
    ) -> Snapshot:
        """Transfer a copy to this node. With `binds`, compares the mapped files before. Raises
        RemoteError with the reason if it is incomplete or altered; LibraryChanged,
        DiskBudgetExceeded, OSError."""
        if binds is not None:
            await self.catalog.check_mapped(found.manifest, binds)
        began = time.monotonic()
        snapshot = await self._receive(found, now=found.manifest.created_at if now is None else now)
        rate = found.manifest.image_bytes / max(1e-3, time.monotonic() - began)
        self._received_per_s += _NEWEST_PART * (rate - self._received_per_s)
        self.catalog.mark_remote(snapshot.id, record=found.digest, size_bytes=found.packed_bytes)
        return self.catalog.get(snapshot.id)

    def expected_ms(self, found: RemoteSnapshot) -> float:
        """How long a transfer is expected to take, from the rate of recent ones."""
        return found.manifest.image_bytes / self._received_per_s * 1000

    async def _approved(self, copy: ApprovedCopy) -> RemoteSnapshot | None:
        """The copy that the controller recorded. Raises RemoteError if it is another one."""
        key = _key(copy.tenant, copy.identity, copy.snapshot)
        found = await self._record(key, None)
        if found is not None and found.digest != copy.record:
            raise RemoteError(f"{key} is not the copy that the controller recorded")
        return found

    async def _newest(
        self, identity: Identity, prefix: str, *, without: set[str]
    ) -> RemoteSnapshot | None:
        """The newest valid record. Invalid records are skipped; raises RemoteError if no record is
        valid."""
        found: list[RemoteSnapshot] = []
        doubts: list[RemoteError] = []
        for key in await self._store.keys(prefix):
            try:
                record = await self._record(key, identity)
            except RemoteError as e:
                _log.warning("snapshot.copy_refused key=%s error=%s", key, e)
                doubts.append(e)
                continue
            if (
                record is not None
                and record.manifest.proof is not None
                and record.manifest.id not in without
            ):
                found.append(record)
        if not found and doubts:
            raise doubts[0]
        return max(found, key=lambda r: r.manifest.created_at, default=None)

    async def _record(self, key: str, identity: Identity | None) -> RemoteSnapshot | None:
        """Raises RemoteError if the record is invalid; None if there is none. `identity`: that it
        must have."""
        try:
            data = await self._store.get(key, max_bytes=_MAX_RECORD_BYTES)
        except CopyMissing:
            return None
        record = _parsed(key, data, self.catalog.key)
        field = None if identity is None else record.manifest.identity.first_difference(identity)
        if field is not None:
            raise RemoteError(f"{key} has another identity: {field} differs")
        if key != _record_key(record.manifest):
            raise RemoteError(f"{key} is the record of {record.manifest.id}")
        return record

    async def _receive(self, record: RemoteSnapshot, *, now: float) -> Snapshot:
        manifest = record.manifest
        tenant = _folder_of(manifest)
        await self.catalog.make_room(manifest.image_bytes, coming_bytes=manifest.image_bytes)
        async with self.catalog.stage() as stage:
            limit = asyncio.Semaphore(self._at_once)
            await _all(self._receive_one(*piece, tenant, limit) for piece in _places(stage, record))
            paths = {name: stage.work.directory / name for name in manifest.files}
            marks = await self.catalog.memory.marks(paths.values(), settle=True)
            try:
                compare(manifest.files, {name: marks[path] for name, path in paths.items()})
            except SnapshotInvalid as e:
                raise RemoteError(f"the copy of {manifest.id} does not match: {e}") from e
            return await self.catalog.admit(stage, manifest, now=now)

    async def _receive_one(
        self, chunk: Chunk, path: Path, offset: int, tenant: str, limit: asyncio.Semaphore
    ) -> None:
        async with limit:
            packed = await self._store.get(chunk.key(tenant), max_bytes=chunk.packed_bytes)
            await asyncio.to_thread(unpack, chunk, packed, path, offset, self._cipher(tenant))

    # -- deletion ----------------------------------------------------------------------------------
    async def forget(self, manifest: SnapshotManifest) -> None:
        """Delete a copy, and the chunks that no other copy references. Idempotent. Raises
        RemoteError."""
        await self._forget([_record_key(manifest)])

    async def forget_copy(self, copy: ApprovedCopy) -> None:
        """The same, of a copy whose manifest is not known here."""
        await self._forget([_key(copy.tenant, copy.identity, copy.snapshot)])

    async def forget_of(self, *, revision: str | None = None, function: str | None = None) -> int:
        """Delete the copies of a revision, or of a function id (the part of a revision's key before
        `@`); returns how many. Raises RemoteError."""
        gone = []
        for key in await self._store.keys("snapshots/"):
            body = await self._glance(key)
            of = str(body.get("manifest", {}).get("identity", {}).get("revision", ""))
            if of and (of == revision or of.partition("@")[0] == function):
                gone.append(key)
        await self._forget(gone)
        return len(gone)

    async def sweep(self, *, now: float) -> int:
        """Delete chunks of this node's tenants that an upload left that was never finished; returns
        how many. Raises RemoteError.

        Only those go that no record named for ORPHANED_S, as far as this process has seen."""
        orphans: dict[str, float] = {}
        self._tenants |= {_folder_of(snapshot.manifest) for snapshot in self.catalog}
        for tenant in sorted(self._tenants):
            chunks = set(await self._store.keys(f"chunks/{tenant}/"))
            chunks -= await self._named(tenant)
            orphans |= {key: self._orphans.get(key, now) for key in chunks}
        old = [key for key, since in orphans.items() if now - since >= ORPHANED_S]
        for key in sorted(old):
            await self._store.delete(key)
            del orphans[key]
        self._orphans = orphans
        return len(old)

    async def _forget(self, keys: list[str]) -> None:
        """Delete records first, so that no node begins to fetch them."""
        tenants: dict[str, set[str]] = {}
        for key in keys:
            tenant = key.split("/")[1]
            tenants.setdefault(tenant, set()).update(_chunk_keys(await self._glance(key), tenant))
        for key in keys:
            await self._store.delete(key)
        for tenant, chunks in tenants.items():
            await self._delete_unnamed(tenant, chunks)

    async def _delete_unnamed(self, tenant: str, chunks: set[str]) -> None:
        """Delete those of the chunks that no record of the tenant references."""
        if chunks:
            for key in sorted(chunks - await self._named(tenant)):
                await self._store.delete(key)

    async def _named(self, tenant: str) -> set[str]:
        """Keys of the chunks that a tenant's records reference."""
        named = set[str]()
        for key in await self._store.keys(f"snapshots/{tenant}/"):
            named |= _chunk_keys(await self._glance(key), tenant)
        return named

    async def _glance(self, key: str) -> dict[str, Any]:
        """A record without verification, to find the chunks it references: this also protects the
        chunks of another platform's snapshots."""
        try:
            body = json.loads(await self._store.get(key, max_bytes=_MAX_RECORD_BYTES))
        except (CopyMissing, ValueError):
            return {}
        return body if isinstance(body, dict) else {}


def _folder(tenant: str) -> str:
    """The part of a key that separates tenants: their id."""
    return tenant if is_key(tenant) and "/" not in tenant else "none"


def _folder_of(manifest: SnapshotManifest) -> str:
    return _folder(manifest.labels.get("tenant", ""))


def _key(tenant: str, identity: str, snapshot: str) -> str:
    return f"snapshots/{_folder(tenant)}/{identity}/{snapshot}.json"


def _record_key(manifest: SnapshotManifest) -> str:
    return _key(manifest.labels.get("tenant", ""), manifest.identity.digest(), manifest.id)


def _parsed(key: str, data: bytes, signing_key: bytes) -> RemoteSnapshot:
    try:
        body = opened(data, signing_key, max_bytes=_MAX_RECORD_BYTES)
        manifest = checked_manifest(body["manifest"])
        chunks = {
            name: tuple(Chunk.from_json(c) for c in cs) for name, cs in body["chunks"].items()
        }
    except (SnapshotInvalid, ValueError, TypeError, KeyError, AttributeError) as e:
        raise RemoteError(f"the record {key} is invalid: {e}") from e
    sizes = {name: sum(c.plain_bytes for c in cs) for name, cs in chunks.items()}
    if sizes != {name: mark.bytes for name, mark in manifest.files.items()}:
        raise RemoteError(f"the record {key} is invalid: its chunks do not match its files")
    return RemoteSnapshot(manifest=manifest, chunks=chunks, digest=_sha256(data))


def _places(stage: SnapshotStaging, record: RemoteSnapshot) -> Iterable[tuple[Chunk, Path, int]]:
    """Each chunk with its file (created here, empty) and its offset."""
    for name, chunks in record.chunks.items():
        path, offset = stage.work.directory / name, 0
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        for chunk in chunks:
            yield chunk, path, offset
            offset += chunk.plain_bytes


def _chunk_keys(body: Mapping[str, Any], tenant: str) -> set[str]:
    """Keys of the chunks that a record references; none if it is malformed."""
    try:
        return {
            Chunk.from_json(c).key(tenant) for cs in body.get("chunks", {}).values() for c in cs
        }
    except (ValueError, TypeError, AttributeError):
        return set()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


async def _all(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first failure cancels the others and is raised unchanged."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
