"""Deployed source code, unpacked once per node: read-only directories that slots bind, each named
by the sha256 of its archive in the blob store (`bundle_unpacking`).

Unpacked bundles stay for later starts until the disk is short or there are too many. Then unused
bundles are removed, least recently requested first, and unpacked again when a start needs them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from pilotlight.core.disk_floor import BelowFloor, DiskFloor, no_floor
from pilotlight.core.object_store import DirectoryStore, ObjectStore
from snapshotter.errors import BundleUnavailable
from snapshotter.images.blob_archives import Archive, local_archive
from snapshotter.images.bundle_unpacking import (
    BLOCK_OF_ENTRY,
    MAX_UNPACKED_BYTES,
    UNPACKING,
    UnpackedSize,
    unpack,
)
from snapshotter.linux.atomic_directory import (
    freeze,
    remove_tree,
    rename_for_deletion,
    staged,
    sweep,
)

_log = logging.getLogger(__name__)

KEPT_BYTES = 8 * 1024**3
KEPT_ENTRIES = 500_000
"""Limits for all unused bundles together."""
KEPT_S = 60.0
"""A bundle requested more recently is about to be used."""
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")


class Bundles:
    """The unpacked bundles below `<home>/node/code`.

    Owner: one event loop. `_flights` changes only between awaits, so that concurrent requests share
    one unpacking task per digest."""

    def __init__(
        self,
        home: Path,
        *,
        blobs: ObjectStore | None = None,
        max_bytes: int = MAX_UNPACKED_BYTES,
        floor: DiskFloor | None = None,
        kept_bytes: int = KEPT_BYTES,
        kept_entries: int = KEPT_ENTRIES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`blobs` None: the directory `<home>/blobs`. `floor`: free disk space that bundles must
        leave; None: none.

        `kept_bytes`, `kept_entries`: limits for unused bundles.
        """
        self._blobs = DirectoryStore(home / "blobs") if blobs is None else blobs
        self._code = home / "node" / "code"
        self._max_bytes = max_bytes
        self._floor = floor or no_floor()
        self._kept = UnpackedSize(kept_bytes, kept_entries)
        self._clock = clock
        self._flights: dict[str, asyncio.Task[Path]] = {}
        self._asked_at: dict[str, float] = {}
        self._sizes: dict[str, UnpackedSize] = {}
        self._needed: Callable[[], Collection[str]] | None = None
        self._making_room = asyncio.Lock()
        self._swept = False

    def __repr__(self) -> str:
        return f"<Bundles {self._code} unpacking={len(self._flights)}>"

    async def ensure(self, digest: str) -> Path:
        """The read-only directory of bundle `digest`, unpacked if necessary. Raises
        BundleUnavailable.

        Cancelling a caller does not cancel the unpacking; it is short and its result is kept."""
        target = self._code / _check(digest)
        self._asked_at[digest] = self._clock()
        if target.exists():
            return target
        flight = self._flights.get(digest)
        if flight is None:
            flight = asyncio.create_task(self._fetch(digest, target), name=f"unpack {digest[:12]}")
            self._flights[digest] = flight
            flight.add_done_callback(lambda _: self._flights.pop(digest, None))
        return await asyncio.shield(flight)

    def needed_by(self, needed: Callable[[], Collection[str]]) -> None:
        """Set `needed`, which returns the digests of bundles in use by slots; until then none is
        removed."""
        self._needed = needed

    async def make_room(self, more_bytes: int = 0) -> int:
        """Remove unused bundles while the disk lacks room for `more_bytes` or there are too many of
        them; returns how many were removed.

        The least recently requested go first. The archives stay in the blob store.
        """
        removed = 0
        if self._needed is None:
            return removed
        async with self._making_room:
            present = await UNPACKING.run(self._scan)
            self._asked_at = {
                digest: at
                for digest, at in self._asked_at.items()
                if digest in present or digest in self._flights
            }
            self._sizes = present
            while (digest := self._victim(present, more_bytes)) is not None:
                # rename before any await: from here on a request must unpack it again
                grave = rename_for_deletion(self._code / digest)
                del present[digest]
                await UNPACKING.run(remove_tree, grave)
                removed += 1
        if removed:
            _log.info("bundles.removed count=%d", removed)
        return removed

    def _victim(self, present: Mapping[str, UnpackedSize], more_bytes: int) -> str | None:
        """The next bundle to remove; None if enough were removed or the rest is in use."""
        if self._needed is None:
            return None
        needed, lately = {*self._needed(), *self._flights}, self._clock() - KEPT_S
        idle = [
            digest
            for digest in present
            if digest not in needed and self._asked_at.get(digest, lately) <= lately
        ]
        held = UnpackedSize(
            sum(present[d].size_bytes for d in idle), sum(present[d].entries for d in idle)
        )
        is_short = (
            any(self._floor.missing(more_bytes))
            or held.size_bytes > self._kept.size_bytes
            or held.entries > self._kept.entries
        )
        return (
            min(idle, key=lambda digest: self._asked_at.get(digest, -math.inf))
            if is_short and idle
            else None
        )

    def _scan(self) -> dict[str, UnpackedSize]:
        """Sizes of the unpacked bundles, oldest first; bundles unpacked by another process are
        measured once."""
        entries = os.scandir(self._code) if self._code.exists() else ()
        found = [
            (entry.stat(follow_symlinks=False).st_mtime_ns, entry.name)
            for entry in entries
            if _DIGEST.match(entry.name)
        ]
        return {
            name: self._sizes.get(name) or _measured(self._code / name) for _, name in sorted(found)
        }

    async def _fetch(self, digest: str, target: Path) -> Path:
        if not self._swept:
            self._swept = True
            await UNPACKING.run(sweep, self._code)
        await self.make_room()
        try:
            try:
                await self._fetch_and_unpack(digest, target)
            except BelowFloor:
                if not await self.make_room(self._max_bytes):
                    raise
                await self._fetch_and_unpack(digest, target)
        except OSError as e:
            raise BundleUnavailable(
                f"cannot unpack bundle {digest[:12]} to {target}: {e.strerror or e}"
            ) from e
        return target

    async def _fetch_and_unpack(self, digest: str, target: Path) -> None:
        async with local_archive(
            self._blobs, digest, beside=self._code, floor=self._floor
        ) as archive:
            self._sizes[digest] = await UNPACKING.run(self._unpack, archive, digest, target)

    def _unpack(self, archive: Archive, digest: str, target: Path) -> UnpackedSize:
        with staged(target) as temp:
            size = unpack(archive, digest, temp, max_bytes=self._max_bytes, floor=self._floor)
            freeze(temp)
        return size


def _measured(directory: Path) -> UnpackedSize:
    size_bytes = entries = 0
    for folder, folders, files in os.walk(directory):
        entries += len(folders) + len(files)
        with contextlib.suppress(OSError):  # it is being removed
            size_bytes += sum(os.lstat(Path(folder, name)).st_size for name in files)
    return UnpackedSize(size_bytes + entries * BLOCK_OF_ENTRY, entries)


def _check(digest: str) -> str:
    if not _DIGEST.match(digest):
        raise BundleUnavailable(
            f"{digest!r} does not name a bundle: expected the 64 hex digits of a sha256"
        )
    return digest
