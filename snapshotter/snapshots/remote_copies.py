"""Copies of snapshots in an object store: pushed when proven, fetched by nodes whose identity
matches.

    chunks/<2>/<sha256 of the compressed chunk>
    snapshots/<digest of the identity>/<id>.json      manifest and chunks, signed; written last

Equal chunks of two snapshots are stored once. Only data covered by the record's signature is
trusted: a fetched snapshot passes every check of a local one before it is published on this node.
At most `at_once` chunks are in memory, 32 MiB each in both forms."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pilotlight.core.object_store import ObjectStore
from snapshotter.errors import SnapshotUnknown
from snapshotter.snapshots.catalog import Catalog, Snapshot, SnapshotCorrupt, SnapshotStaging
from snapshotter.snapshots.chunks import CHUNK_BYTES, Chunk, offsets, pack, unpack
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

__all__ = ["RemoteCopies", "RemoteError", "UploadedSnapshot"]
T = TypeVar("T")
_log = logging.getLogger(__name__)
_MAX_RECORD_BYTES = 2 * MAX_MANIFEST_BYTES
"""A manifest, and 200 bytes per 16 MiB."""
_SETTLE_ROUNDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedSnapshot:
    """The result of a push: chunks sent, their compressed bytes, chunks that already existed."""

    sent: int
    sent_bytes: int
    reused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """A manifest and the chunks of its files, in order."""

    manifest: SnapshotManifest
    chunks: Mapping[str, tuple[Chunk, ...]]

    def to_json(self) -> dict[str, Any]:
        return {
            "manifest": self.manifest.to_json(),
            "chunks": {name: [c.to_json() for c in cs] for name, cs in self.chunks.items()},
        }


class RemoteCopies:
    """Pushes, fetches and deletes copies. Owner: the event loop. Two nodes may push the same
    snapshot; fetching one that another node deletes fails cleanly. `catalog`: the snapshots of this
    node."""

    def __init__(
        self,
        store: ObjectStore,
        catalogue: Catalog,
        *,
        at_once: int = 4,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        self._store = RemoteObjects(store)
        self.catalog = catalogue
        self._at_once = at_once
        self._chunk_bytes = chunk_bytes

    def __repr__(self) -> str:
        return f"<RemoteCopies {self._store!r}>"

    async def aclose(self) -> None:
        """Close the store."""
        await self._store.aclose()

    # -- push --------------------------------------------------------------------------------------
    async def push(self, snapshot: Snapshot) -> UploadedSnapshot:
        """Send the missing chunks, then the record; delete older snapshots of the same identity.

        Raises RemoteError, SnapshotCorrupt, SnapshotUnknown, OSError. After cancellation or
        failure, the next push resumes."""
        with self.catalog.lease(snapshot.id):
            await self.catalog.verify(snapshot, None)
            key = _record_key(snapshot.manifest)
            sent = reused = sent_bytes = 0
            # existing chunks may have been deleted with another snapshot in the meantime
            for _ in range(_SETTLE_ROUNDS):
                record, news = await self._send(snapshot)
                await self._store.put(key, sealed(record.to_json(), self.catalog.key))
                sent, sent_bytes = sent + len(news), sent_bytes + sum(c.packed_bytes for c in news)
                reused = max(reused, sum(map(len, record.chunks.values())) - len(news))
                if await self._is_complete(record):
                    break
        self.catalog.mark_remote(snapshot.id)
        await self._forget(
            [k for k in await self._store.keys(f"{key.rpartition('/')[0]}/") if k != key]
        )
        return UploadedSnapshot(sent=sent, sent_bytes=sent_bytes, reused=reused)

    async def push_quietly(self, snapshot: Snapshot) -> bool:
        """Push in the background: failures are only logged. Returns whether it succeeded."""
        try:
            pushed = await self.push(snapshot)
        except (RemoteError, SnapshotCorrupt, SnapshotUnknown, OSError) as e:
            _log.warning(
                "snapshot.not_pushed snapshot=%s store=%r error=%s", snapshot.id, self._store, e
            )
            return False
        _log.info(
            "snapshot.pushed snapshot=%s store=%r pushed=%s", snapshot.id, self._store, pushed
        )
        return True

    async def _send(self, snapshot: Snapshot) -> tuple[_Record, list[Chunk]]:
        wanted = [
            (name, offset)
            for name, mark in snapshot.manifest.files.items()
            for offset in offsets(mark.bytes, self._chunk_bytes)
        ]
        limit = asyncio.Semaphore(self._at_once)
        seen: set[str] = set()
        results = await _all(
            self._send_one(snapshot.directory / name, offset, limit, seen)
            for name, offset in wanted
        )
        chunks: dict[str, tuple[Chunk, ...]] = dict.fromkeys(snapshot.manifest.files, ())
        for (name, _), (chunk, _) in zip(wanted, results, strict=True):
            chunks[name] += (chunk,)
        return _Record(manifest=snapshot.manifest, chunks=chunks), [
            chunk for chunk, is_new in results if is_new
        ]

    async def _send_one(
        self, path: Path, offset: int, limit: asyncio.Semaphore, seen: set[str]
    ) -> tuple[Chunk, bool]:
        """`seen`: keys sent by this push; equal chunks are sent once."""
        async with limit:
            chunk, packed = await asyncio.to_thread(pack, path, offset, self._chunk_bytes)
            if chunk.key in seen:
                return chunk, False
            seen.add(chunk.key)
            if await self._store.size(chunk.key) == chunk.packed_bytes:
                return chunk, False
            await self._store.put(chunk.key, packed)
            return chunk, True

    async def _is_complete(self, record: _Record) -> bool:
        limit = asyncio.Semaphore(self._at_once)

        async def is_there(chunk: Chunk) -> bool:
            async with limit:
                return await self._store.size(chunk.key) == chunk.packed_bytes

        return all(
            await _all(is_there(chunk) for chunks in record.chunks.values() for chunk in chunks)
        )

    # -- fetch -------------------------------------------------------------------------------------
    async def fetch(
        self, identity: Identity, binds: BindMounts | None = None, *, now: float | None = None
    ) -> Snapshot | None:
        """Fetch the newest copy of this identity to this node; None if there is none that is not
        quarantined here.

        With `binds`, compares the mapped files before the transfer. Raises RemoteError with the
        reason if a copy is incomplete, altered or of another identity; LibraryChanged,
        DiskBudgetExceeded, OSError."""
        newest = await self._newest(identity)
        if newest is None:
            return None
        if binds is not None:
            await self.catalog.check_mapped(newest.manifest, binds)
        snapshot = await self._receive(
            newest, now=newest.manifest.created_at if now is None else now
        )
        self.catalog.mark_remote(snapshot.id)
        return self.catalog.get(snapshot.id)

    async def _newest(self, identity: Identity) -> _Record | None:
        """The newest valid record. Invalid records are skipped; raises RemoteError if no record is
        valid."""
        aside = {record.id for record in self.catalog.quarantined}
        found: list[_Record] = []
        doubts: list[RemoteError] = []
        for key in await self._store.keys(f"snapshots/{identity.digest()}/"):
            try:
                record = await self._record(key, identity)
            except RemoteError as e:
                _log.warning("snapshot.copy_refused key=%s error=%s", key, e)
                doubts.append(e)
                continue
            if (
                record is not None
                and record.manifest.proof is not None
                and record.manifest.id not in aside
            ):
                found.append(record)
        if not found and doubts:
            raise doubts[0]
        return max(found, key=lambda r: r.manifest.created_at, default=None)

    async def _record(self, key: str, identity: Identity) -> _Record | None:
        """Raises RemoteError if the record is invalid; None if it was deleted in the meantime."""
        try:
            data = await self._store.get(key, max_bytes=_MAX_RECORD_BYTES)
        except CopyMissing:
            return None
        record = _parsed(key, data, self.catalog.key)
        if (field := record.manifest.identity.first_difference(identity)) is not None:
            raise RemoteError(f"{key} has another identity: {field} differs")
        if key != _record_key(record.manifest):
            raise RemoteError(f"{key} is the record of {record.manifest.id}")
        return record

    async def _receive(self, record: _Record, *, now: float) -> Snapshot:
        manifest = record.manifest
        await self.catalog.make_room(manifest.image_bytes, coming_bytes=manifest.image_bytes)
        async with self.catalog.stage() as stage:
            limit = asyncio.Semaphore(self._at_once)
            await _all(self._receive_one(*piece, limit) for piece in _places(stage, record))
            paths = {name: stage.work.directory / name for name in manifest.files}
            marks = await self.catalog.memory.marks(paths.values(), settle=True)
            try:
                compare(manifest.files, {name: marks[path] for name, path in paths.items()})
            except SnapshotInvalid as e:
                raise RemoteError(f"the copy of {manifest.id} does not match: {e}") from e
            return await self.catalog.admit(stage, manifest, now=now)

    async def _receive_one(
        self, chunk: Chunk, path: Path, offset: int, limit: asyncio.Semaphore
    ) -> None:
        async with limit:
            packed = await self._store.get(chunk.key, max_bytes=chunk.packed_bytes)
            await asyncio.to_thread(unpack, chunk, packed, path, offset)

    # -- deletion ----------------------------------------------------------------------------------
    async def forget(self, manifest: SnapshotManifest) -> None:
        """Delete a copy, and the chunks that no other copy references. Idempotent. Raises
        RemoteError."""
        await self._forget([_record_key(manifest)])

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

    async def _forget(self, keys: list[str]) -> None:
        """Delete records first, so that no node begins to fetch them."""
        if not keys:
            return
        named = set().union(*[_chunk_keys(await self._glance(key)) for key in keys])
        for key in keys:
            await self._store.delete(key)
        for key in await self._store.keys("snapshots/"):
            named -= _chunk_keys(await self._glance(key))
        for chunk_key in sorted(named):
            await self._store.delete(chunk_key)

    async def _glance(self, key: str) -> dict[str, Any]:
        """A record without verification, to find the chunks it references: this also protects the
        chunks of another platform's snapshots."""
        try:
            body = json.loads(await self._store.get(key, max_bytes=_MAX_RECORD_BYTES))
        except (CopyMissing, ValueError):
            return {}
        return body if isinstance(body, dict) else {}


def _record_key(manifest: SnapshotManifest) -> str:
    return f"snapshots/{manifest.identity.digest()}/{manifest.id}.json"


def _parsed(key: str, data: bytes, signing_key: bytes) -> _Record:
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
    return _Record(manifest=manifest, chunks=chunks)


def _places(stage: SnapshotStaging, record: _Record) -> Iterable[tuple[Chunk, Path, int]]:
    """Each chunk with its file (created here, empty) and its offset."""
    for name, chunks in record.chunks.items():
        path, offset = stage.work.directory / name, 0
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        for chunk in chunks:
            yield chunk, path, offset
            offset += chunk.plain_bytes


def _chunk_keys(body: Mapping[str, Any]) -> set[str]:
    """Keys of the chunks that a record references; none if it is malformed."""
    try:
        return {Chunk.from_json(c).key for cs in body.get("chunks", {}).values() for c in cs}
    except (ValueError, TypeError, AttributeError):
        return set()


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
