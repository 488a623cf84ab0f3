"""The snapshots of this node: one directory each, named by its content, created atomically.

    <directory>/.lock                     held by the one agent that owns the directory
    <directory>/.tmp-…                    being written; removed when its writer dies
    <directory>/sn-…/images/, files.tar, manifest.json
    <directory>/quarantine/sn-….…/        moved aside, with its reason beside it in sn-….….json
    <directory>/hashes.json               files verified since this machine booted

Publishing: hash the files, write the manifest (temporary name, fsync(2), rename(2)), flush the file
system, rename the directory. A READY snapshot was proven, and the proof is in the signed manifest.
Before each use its files are compared with what was verified: by stat(2), and by hash if that
differs. A mismatch is moved aside and never served."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from pilotlight.core.disk_floor import DiskFloor, no_floor
from pilotlight.core.durability import write_durably
from snapshotter.errors import SnapshotUnknown
from snapshotter.linux import atomic_directory
from snapshotter.snapshots import manifest as manifests
from snapshotter.snapshots import quarantine
from snapshotter.snapshots.file_integrity import FileVerifier
from snapshotter.snapshots.hash_cache import HashCache
from snapshotter.snapshots.identity import Identity
from snapshotter.snapshots.manifest import (
    IMAGES,
    MANIFEST,
    Proof,
    SnapshotInvalid,
    SnapshotManifest,
)
from snapshotter.snapshots.mapped_files import BindMounts
from snapshotter.snapshots.quarantine import Quarantined
from snapshotter.snapshots.stored import (
    CatalogLocked,
    DiskBudgetExceeded,
    LibraryChanged,
    Snapshot,
    SnapshotCorrupt,
    SnapshotStaging,
    files_of,
)
from snapshotter.types import SnapshotInfo, SnapshotState

__all__ = [
    "Catalog",
    "CatalogLocked",
    "DiskBudgetExceeded",
    "LibraryChanged",
    "Snapshot",
    "SnapshotCorrupt",
    "SnapshotStaging",
]
T = TypeVar("T")
_log = logging.getLogger(__name__)
_HASHES = "hashes.json"
_QUARANTINE = "quarantine"


class Catalog:
    """The snapshots of this node. Owner: one event loop. The index changes only in synchronous code
    after the directory did; reading and writing is done in threads.

    `step` is called with each step of publishing (tests kill the process there).
    """

    def __init__(
        self,
        directory: Path,
        *,
        key: bytes,
        max_bytes: int | None,
        step: Callable[[str], None] = lambda _: None,
        floor: DiskFloor | None = None,
    ) -> None:
        """Lock the directory, clean up after a dead owner and index the snapshots. Blocking. Raises
        CatalogLocked, OSError.

        `max_bytes` None: a quarter of the free disk space, counting existing snapshots as free.
        `floor`: free disk space that snapshots must leave; None: none."""
        self._floor = floor or no_floor()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.chmod(0o700)
        self._lock = _own(directory)
        self._directory, self._key, self._step = directory, key, step
        self._memory = HashCache()
        self._verifier = FileVerifier(self._memory, key)
        self._snapshots: dict[str, Snapshot] = {}
        self._leases: dict[str, int] = {}
        self._failures: dict[str, int] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._dead: dict[str, Path] = {}
        self._sweep()
        room = (shutil.disk_usage(directory).free + self.used_bytes) // 4
        self.max_bytes = room if max_bytes is None else max_bytes

    def __repr__(self) -> str:
        ready = sum(s.state is SnapshotState.READY for s in self._snapshots.values())
        return (
            f"<Catalog {ready} ready of {len(self._snapshots)}, {len(self.quarantined)} "
            f"quarantined, {self.used_bytes} bytes>"
        )

    @property
    def directory(self) -> Path:
        """The directory that contains the snapshots."""
        return self._directory

    @property
    def memory(self) -> HashCache:
        """The known hashes; shared with the code that records mapped files."""
        return self._memory

    @property
    def key(self) -> bytes:
        """The key that signs manifests."""
        return self._key

    @property
    def used_bytes(self) -> int:
        """Disk space of snapshots, including quarantined ones."""
        return sum(s.manifest.image_bytes for s in self._snapshots.values()) + sum(
            q.image_bytes for q in self.quarantined
        )

    async def aclose(self) -> None:
        """Store the verified hashes for the next agent, and release the directory. Idempotent."""
        if self._lock < 0:
            return
        if self._removals:
            await asyncio.wait(self._removals)
        try:
            data = self._memory.dump(self._key)
            await asyncio.to_thread(write_durably, self._directory / _HASHES, data)
        except OSError as e:
            _log.warning("snapshots.hashes_not_kept error=%s", e)
        finally:
            os.close(self._lock)
            self._lock = -1

    # -- lookup ------------------------------------------------------------------------------------
    def candidate(self, identity: Identity) -> Snapshot | None:
        """The newest proven snapshot of this identity; the caller must still check its files
        (`is_fresh`)."""
        ready = (
            s
            for s in self._snapshots.values()
            if s.state is SnapshotState.READY and s.manifest.identity == identity
        )
        return max(ready, key=lambda s: s.manifest.created_at, default=None)

    def missed(self, identity: Identity) -> str | None:
        """The field that prevents the newest proven snapshot of this revision from being a
        candidate; None if there is no such snapshot."""
        ready = (
            s
            for s in self._snapshots.values()
            if s.state is SnapshotState.READY and s.manifest.revision == identity.revision
        )
        newest = max(ready, key=lambda s: s.manifest.created_at, default=None)
        return None if newest is None else newest.manifest.identity.first_difference(identity)

    def is_fresh(self, snapshot: Snapshot, binds: BindMounts | None) -> bool:
        """True if neither its files nor those it maps changed since they were verified. stat(2)
        only, some 5 µs per file."""
        return self._verifier.is_fresh(snapshot, binds)

    async def verify(self, snapshot: Snapshot, binds: BindMounts | None) -> None:
        """Hash all files that are not known to be unchanged. `binds` None skips the mapped files.

        Raises SnapshotCorrupt (the snapshot is quarantined), LibraryChanged (it stays: the file may
        be restored), SnapshotUnknown."""
        self.get(snapshot.id)
        try:
            await self._verifier.check_files(snapshot)
        except (SnapshotInvalid, OSError) as e:
            await self.quarantine(snapshot.id, str(e))
            raise SnapshotCorrupt(f"snapshot {snapshot.id} is damaged: {e}") from e
        if binds is not None:
            await self.check_mapped(snapshot.manifest, binds)

    async def check_mapped(self, manifest: SnapshotManifest, binds: BindMounts) -> None:
        """Raises LibraryChanged if a file that it maps differs on this host."""
        await self._verifier.check_mapped(manifest, binds)

    async def usable(self, identity: Identity, binds: BindMounts) -> Snapshot | None:
        """A snapshot that may be restored now, or None; `missed` says why. Damaged snapshots are
        quarantined.

        Raises LibraryChanged.
        """
        while (snapshot := self.candidate(identity)) is not None:
            if self.is_fresh(snapshot, binds):
                return snapshot
            try:
                await self.verify(snapshot, binds)
                return self._snapshots.get(snapshot.id)
            except (SnapshotCorrupt, SnapshotUnknown) as e:
                _log.warning("snapshot.unusable snapshot=%s error=%s", snapshot.id, e)
        return None

    # -- creation ----------------------------------------------------------------------------------
    @contextlib.asynccontextmanager
    async def stage(self) -> AsyncIterator[SnapshotStaging]:
        """A directory to create a snapshot in; unpublished content is removed."""
        place = atomic_directory.staging_directory(self._directory, label="snapshot")
        work = await atomic_directory.enter_in_thread(place)
        try:
            (work.directory / IMAGES).mkdir(mode=0o700)
            yield SnapshotStaging(work=work)
        finally:
            await asyncio.shield(asyncio.to_thread(place.__exit__, None, None, None))

    async def publish(
        self, stage: SnapshotStaging, draft: SnapshotManifest, *, now: float
    ) -> Snapshot:
        """Hash the files, write the manifest and rename the directory: PROVING unless `draft` has a
        proof.

        If cancelled, leaves nothing or the complete snapshot. Raises OSError, SnapshotInvalid,
        DiskBudgetExceeded."""
        here = stage.work.directory
        files = await asyncio.to_thread(files_of, here)
        _, marks = await asyncio.gather(  # what is left to flush at the end is the manifest
            asyncio.to_thread(stage.work.flush), self._memory.marks(files, settle=True)
        )
        full = draft.completed({str(path.relative_to(here)): mark for path, mark in marks.items()})
        return await self.admit(stage, full, now=now)

    async def admit(
        self, stage: SnapshotStaging, full: SnapshotManifest, *, now: float
    ) -> Snapshot:
        """Publish verified files with a complete manifest, such as a remote copy. Raises OSError,
        DiskBudgetExceeded."""
        self._step("hashed")
        await self.make_room(full.image_bytes)
        return await _to_its_end(self._place(stage, full, now))

    async def _place(self, stage: SnapshotStaging, full: SnapshotManifest, now: float) -> Snapshot:
        final = self._directory / full.id
        await asyncio.to_thread(self._write, stage, full, final)
        self._step("published")
        snapshot = self._snapshots.get(full.id) or Snapshot(
            manifest=full, directory=final, state=_state(full), last_used_at=now
        )
        self._snapshots[full.id] = snapshot
        await self._verifier.check_files(snapshot)  # by stat, because it was just hashed
        return snapshot

    def _write(self, stage: SnapshotStaging, full: SnapshotManifest, final: Path) -> None:
        write_durably(stage.work.directory / MANIFEST, manifests.sealed(full.to_json(), self._key))
        self._step("manifest_written")
        stage.work.publish(final)

    async def mark_proven(
        self, snapshot_id: str, proof: Proof, *, pages: str, phases_ms: Mapping[str, float]
    ) -> Snapshot:
        """Make it READY and delete older snapshots of the same identity. `phases_ms` is merged into
        the manifest's. Raises SnapshotUnknown, OSError."""
        old = self.get(snapshot_id)
        proven = replace(
            old.manifest,
            proof=proof,
            pages=pages,
            phases_ms={**old.manifest.phases_ms, **phases_ms},
        )
        snapshot = await _to_its_end(self._replace_manifest(proven))
        same = [
            s.id
            for s in self._snapshots.values()
            if s.manifest.identity == proven.identity and s.id != snapshot_id
        ]
        for older in same:
            await self.delete(older)
        return snapshot

    async def _replace_manifest(self, proven: SnapshotManifest) -> Snapshot:
        path = self.get(proven.id).directory / MANIFEST
        await asyncio.to_thread(write_durably, path, manifests.sealed(proven.to_json(), self._key))
        self._step("proof_written")
        snapshot = replace(self.get(proven.id), manifest=proven, state=_state(proven))
        self._snapshots[proven.id] = snapshot
        await self._verifier.check_files(snapshot)
        return snapshot

    # -- use ---------------------------------------------------------------------------------------
    def get(self, snapshot_id: str) -> Snapshot:
        """The snapshot. Raises SnapshotUnknown, also for quarantined ones."""
        found = self._snapshots.get(snapshot_id)
        if found is None:
            raise SnapshotUnknown(f"snapshot {snapshot_id} is not on this node")
        return found

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._snapshots.values()))

    def infos(self, labels: Mapping[str, str]) -> list[SnapshotInfo]:
        """Snapshots whose labels include `labels`, including quarantined ones, oldest first."""
        every = [
            *(s.info() for s in self._snapshots.values()),
            *(q.info() for q in self.quarantined),
        ]
        return sorted(
            (i for i in every if labels.items() <= i.labels.items()), key=lambda i: i.created_at
        )

    @contextlib.contextmanager
    def lease(self, snapshot_id: str) -> Iterator[Snapshot]:
        """Keep its files on disk while held, even if it is deleted. Raises SnapshotUnknown."""
        snapshot = self.get(snapshot_id)
        self._leases[snapshot_id] = self._leases.get(snapshot_id, 0) + 1
        try:
            yield snapshot
        finally:
            self._leases[snapshot_id] -= 1
            if not self._leases[snapshot_id]:
                del self._leases[snapshot_id]
                if (grave := self._dead.pop(snapshot_id, None)) is not None:
                    self._remove_later(grave)

    def used(self, snapshot_id: str, *, now: float) -> None:
        """Record that an instance or a Template was restored from it."""
        found = self._snapshots.get(snapshot_id)
        if found is not None:
            self._failures.pop(snapshot_id, None)
            self._snapshots[snapshot_id] = replace(
                found, last_used_at=now, restores=found.restores + 1
            )
            # determines only the eviction order after a restart
            with contextlib.suppress(OSError):
                os.utime(found.directory, (now, now))

    def failed(self, snapshot_id: str) -> int:
        """Record a failed restore; returns the number of consecutive failures. The caller
        quarantines it at its limit."""
        self._failures[snapshot_id] = self._failures.get(snapshot_id, 0) + 1
        return self._failures[snapshot_id]

    def mark_remote(self, snapshot_id: str, *, record: str, size_bytes: int = 0) -> None:
        """Record that a copy is in the object store, and the sha256 of its record; "" = none is."""
        if (found := self._snapshots.get(snapshot_id)) is not None:
            self._snapshots[snapshot_id] = replace(found, copy=record, copy_bytes=size_bytes)

    # -- removal -----------------------------------------------------------------------------------
    async def quarantine(self, snapshot_id: str, reason: str, *, now: float | None = None) -> None:
        """Move it aside with the reason; it is never served again. Idempotent."""
        found = self._forget(snapshot_id)
        if found is not None:
            _log.warning(
                "snapshot.quarantined snapshot=%s revision=%s reason=%s",
                snapshot_id,
                found.manifest.revision,
                reason,
            )
            await _to_its_end(self._move_aside(found, reason, now))

    async def _move_aside(self, found: Snapshot, reason: str, now: float | None) -> None:
        self.quarantined.append(
            await asyncio.to_thread(self._set_aside, found.directory, found.manifest, reason, now)
        )

    async def delete(self, snapshot_id: str) -> bool:
        """Remove it, quarantined or not; True if it existed. It disappears from the index at once;
        its files are removed when they are no longer in use."""
        found, aside = (
            self._forget(snapshot_id),
            [q for q in self.quarantined if q.id == snapshot_id],
        )
        if found is not None:
            await self._bury(found)
        for record in aside:
            await self._drop(record)
        return found is not None or bool(aside)

    async def delete_of(self, *, revision: str | None = None, function: str | None = None) -> int:
        """Remove all snapshots of a revision, or of a function id (the part of a revision's key
        before `@`); returns how many were removed."""
        every = [(s.id, s.manifest.revision) for s in self._snapshots.values()]
        every += [(q.id, q.manifest.revision) for q in self.quarantined if q.manifest is not None]
        wanted = {
            i
            for i, key in every
            if key == revision or (function is not None and key.partition("@")[0] == function)
        }
        return sum([await self.delete(snapshot_id) for snapshot_id in sorted(wanted)])

    async def make_room(self, needed_bytes: int, *, coming_bytes: int = 0) -> None:
        """Remove quarantined, then least recently used snapshots until `needed_bytes` fit and the
        disk floor is kept.

        `coming_bytes`: the part of them that is not on the disk yet. Raises DiskBudgetExceeded; if
        the budget is the reason, nothing is removed."""
        unused = sorted(
            (s for s in self._snapshots.values() if s.id not in self._leases),
            key=lambda s: s.last_used_at,
        )
        aside = sorted(self.quarantined, key=lambda q: q.at)
        held = (
            self.used_bytes
            - sum(s.manifest.image_bytes for s in unused)
            - sum(q.image_bytes for q in aside)
        )
        if held + needed_bytes > self.max_bytes:
            raise DiskBudgetExceeded(
                f"a snapshot of {needed_bytes} bytes does not fit: the limit for snapshots is "
                f"{self.max_bytes} bytes, {held} are in use"
            )
        while self.used_bytes + needed_bytes > self.max_bytes or any(
            self._floor.missing(coming_bytes)
        ):
            if not aside and not unused:
                raise DiskBudgetExceeded(
                    f"cannot keep a snapshot of {needed_bytes} bytes: "
                    f"{self._floor.describe(coming_bytes)}"
                )
            if aside:
                await self._drop(aside.pop(0))
                continue
            oldest = unused.pop(0)
            if oldest.id in self._snapshots and oldest.id not in self._leases:
                _log.info(
                    "snapshot.evicted snapshot=%s revision=%s bytes=%d",
                    oldest.id,
                    oldest.manifest.revision,
                    oldest.manifest.image_bytes,
                )
                await self.delete(oldest.id)

    def _forget(self, snapshot_id: str) -> Snapshot | None:
        self._verifier.forget(snapshot_id)
        self._failures.pop(snapshot_id, None)
        return self._snapshots.pop(snapshot_id, None)

    async def _bury(self, snapshot: Snapshot) -> None:
        grave = atomic_directory.rename_for_deletion(snapshot.directory)
        if snapshot.id in self._leases:
            self._dead[snapshot.id] = grave
        else:
            await asyncio.to_thread(atomic_directory.remove_tree, grave)

    def _remove_later(self, grave: Path) -> None:
        removal = asyncio.create_task(
            asyncio.to_thread(atomic_directory.remove_tree, grave), name=f"remove {grave.name}"
        )
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _drop(self, record: Quarantined) -> None:
        self.quarantined.remove(record)
        await asyncio.to_thread(quarantine.remove, record)

    def _set_aside(
        self, directory: Path, manifest: SnapshotManifest | None, reason: str, now: float | None
    ) -> Quarantined:
        return quarantine.move(
            directory, self._directory / _QUARANTINE, manifest=manifest, reason=reason, now=now
        )

    # -- after a restart ---------------------------------------------------------------------------
    def _sweep(self) -> None:
        atomic_directory.sweep(self._directory)
        try:
            self._memory.load((self._directory / _HASHES).read_bytes(), self._key)
        except FileNotFoundError:
            pass
        except SnapshotInvalid as e:
            _log.warning("snapshots.hashes_ignored error=%s", e)
        self.quarantined = quarantine.load(self._directory / _QUARANTINE, self._key)
        for directory in sorted(self._directory.glob("sn-*")):
            try:
                found = self._read(directory)
                self._snapshots[found.id] = found
            except (SnapshotInvalid, OSError) as e:
                _log.warning("snapshot.quarantined snapshot=%s reason=%s", directory.name, e)
                self.quarantined.append(self._set_aside(directory, None, str(e), None))

    def _read(self, directory: Path) -> Snapshot:
        """Read a snapshot of an earlier agent; its files are hashed before it is used. Raises
        SnapshotInvalid, OSError."""
        try:
            data = (directory / MANIFEST).read_bytes()
        except FileNotFoundError as e:
            raise SnapshotInvalid("it has no manifest") from e
        manifest = manifests.parse(data, self._key)
        if manifest.id != directory.name:
            raise SnapshotInvalid(f"{directory.name} contains the manifest of {manifest.id}")
        used_at = directory.stat().st_mtime
        return Snapshot(
            manifest=manifest, directory=directory, state=_state(manifest), last_used_at=used_at
        )


def _state(manifest: SnapshotManifest) -> SnapshotState:
    return SnapshotState.PROVING if manifest.proof is None else SnapshotState.READY


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Run to completion even if the caller is cancelled, because changes to the directory made by
    threads cannot be interrupted."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.warning("snapshots.abandoned error=%s", error)
        raise


def _own(directory: Path) -> int:
    lock = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as e:
        os.close(lock)
        raise CatalogLocked(f"{directory} is in use by another running agent") from e
    return lock
