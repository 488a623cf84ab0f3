"""Verification that a snapshot matches its manifest and that the files it maps are unchanged.

Before each use: stat(2) only. If that is inconclusive, files are hashed again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from snapshotter.snapshots import mapped_files
from snapshotter.snapshots.hash_cache import HashCache
from snapshotter.snapshots.manifest import (
    MANIFEST,
    FileMark,
    SnapshotInvalid,
    SnapshotManifest,
    parse,
)
from snapshotter.snapshots.mapped_files import BindMounts
from snapshotter.snapshots.stored import LibraryChanged, Snapshot, has_nothing_else


class FileVerifier:
    """Verifies snapshots and remembers the results. Owner: the event loop."""

    def __init__(self, memory: HashCache, key: bytes) -> None:
        self._memory = memory
        self._key = key
        self._manifests: dict[str, FileMark] = {}

    def __repr__(self) -> str:
        return f"<FileVerifier of {len(self._manifests)} snapshots>"

    def is_fresh(self, snapshot: Snapshot, binds: BindMounts | None) -> bool:
        """True if neither its files nor those it maps changed since they were verified; some 5 µs
        per file."""
        here, knows = f"{snapshot.directory}/", self._memory.knows
        manifest = snapshot.manifest
        return (
            snapshot.id in self._manifests
            and knows(here + MANIFEST, self._manifests[snapshot.id])
            and has_nothing_else(snapshot)
            and all(knows(here + name, mark) for name, mark in manifest.files.items())
            and (
                binds is None
                or all(
                    mapped_files.is_known(path, mark, binds, self._memory)
                    for path, mark in manifest.mapped.items()
                )
            )
        )

    async def check_files(self, snapshot: Snapshot) -> None:
        """Raises SnapshotInvalid with the first file that does not match the manifest, or
        OSError."""
        path = snapshot.directory / MANIFEST
        mark = (await self._memory.marks([path], settle=True))[path]
        if parse(await asyncio.to_thread(path.read_bytes), self._key) != snapshot.manifest:
            raise SnapshotInvalid("the manifest changed since it was read")
        if not has_nothing_else(snapshot):
            raise SnapshotInvalid("there are more or fewer files than the manifest lists")
        wanted = snapshot.manifest.files
        found = await self._memory.marks(
            [snapshot.directory / name for name in wanted], settle=True
        )
        compare(wanted, {str(p.relative_to(snapshot.directory)): m for p, m in found.items()})
        self._manifests[snapshot.id] = mark

    async def check_mapped(self, manifest: SnapshotManifest, binds: BindMounts) -> None:
        """Raises LibraryChanged with the first mapped file that differs on this host."""
        for path, mark in manifest.mapped.items():
            if not mapped_files.is_known(
                path, mark, binds, self._memory
            ) and not await mapped_files.is_same(path, mark, binds, self._memory):
                raise LibraryChanged(path)

    def forget(self, snapshot_id: str) -> None:
        """Forget a removed snapshot."""
        self._manifests.pop(snapshot_id, None)


def compare(marks: Mapping[str, FileMark], found: Mapping[str, FileMark]) -> None:
    """Raises SnapshotInvalid with the first file whose size or content differs."""
    for name, mark in marks.items():
        there = found[name]
        if there.bytes != mark.bytes:
            raise SnapshotInvalid(
                f"{name} has {there.bytes} bytes, but the manifest says {mark.bytes}"
            )
        if there.sha256 != mark.sha256:
            raise SnapshotInvalid(
                f"{name} does not have the content in the manifest (sha256 {there.sha256[:12]}…, "
                f"not {mark.sha256[:12]}…)"
            )
