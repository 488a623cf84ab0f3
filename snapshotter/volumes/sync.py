"""Merges a volume's newest manifest into its tree on the node.

A path of the tree that was changed since the last commit or sync keeps its change; all others get
what the manifest says, file by file: a file is fetched beside the tree and renamed into its place,
so that an open file stays as it was, and no reader sees half of one."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from pilotlight.core.volumes.entries import CHUNK_BYTES, Entry, EntryKind, chunk_key
from snapshotter.volumes import tree
from snapshotter.volumes.tree import Stamp, TreeRefused

if TYPE_CHECKING:
    from pilotlight.core.object_store import ObjectStore

FETCHES_AT_ONCE = 8
"""Chunks in memory, of 16 MiB each."""
FILES_AT_ONCE = 16
_NOT_EMPTY = (errno.ENOTEMPTY, errno.EEXIST)
_IN_THE_WAY = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.ELOOP)


def open_order_store(order: Mapping[str, Any]) -> ObjectStore:
    """Open the blob store that an order names."""
    from pilotlight.core.object_store import open_store

    given = order["store"]
    return open_store(given["where"], setting="platform.blobs", client=given["client"])


@dataclass(slots=True, kw_only=True)
class Merge:
    """One merge. Owner: the process that makes it.

    Attributes:
        root, incoming: descriptors of the tree and of the directory of files on their way.
        uid: owner of what is created; None: this process.
        base: the manifest of the last commit or sync.
        stamps: those of `base`, afterwards those of `head`.
        head: the newest manifest.
        kept: paths that keep a change that is not committed.
    """

    root: int
    incoming: int
    uid: int | None
    base: Mapping[str, Entry]
    stamps: dict[str, Stamp]
    head: Mapping[str, Entry]
    kept: list[str] = field(default_factory=list)
    fetched_bytes: int = 0
    _changed: dict[str, bool] = field(default_factory=dict)

    async def run(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        """Merge. Raises TreeRefused, OSError, ObjectStoreError; what was done until then stays, and
        counts as not committed."""
        wanted = [e for path, e in self.head.items() if self._is_wanted(path, e)]
        self._remove([p for p in self.base if p not in self.head and not self._is_changed(p)])
        files = [e for e in wanted if e.kind is EntryKind.FILE]
        self._require_space(sum(e.size_bytes for e in files), int(order["floor_bytes"]))
        for entry in sorted(wanted, key=lambda e: e.path):
            if entry.kind is EntryKind.DIRECTORY:
                self._place(entry, partial(self._make_directory, entry))
        await self._fetch_all(files, order)
        for entry in wanted:
            if entry.kind is EntryKind.LINK:
                self._place(entry, partial(self._make_link, entry))
        self.stamps = {p: s for p, s in self.stamps.items() if p in self.head}
        return {
            "fetched_bytes": self.fetched_bytes,
            "changed": len(wanted),
            "kept": sorted(set(self.kept))[:20],
        }

    def _is_wanted(self, path: str, entry: Entry) -> bool:
        """Whether the tree has to get this entry."""
        was = self.base.get(path)
        if was == entry and not self._is_changed(path):
            return False
        if was is None and tree.status_of(self.root, path) is None:
            return True
        if self._is_changed(path):
            if was != entry:
                self.kept.append(path)
            self.stamps.pop(path, None)
            return False
        return True

    def _is_changed(self, path: str) -> bool:
        """Whether the tree differs from `base` there."""
        if path not in self._changed:
            self._changed[path] = self._find_change(path)
        return self._changed[path]

    def _find_change(self, path: str) -> bool:
        was, now = self.base.get(path), tree.status_of(self.root, path)
        if was is None or now is None:
            return (was is None) != (now is None)
        if was.kind is EntryKind.DIRECTORY:
            return not stat.S_ISDIR(now.st_mode) or now.st_mode & 0o777 != was.mode
        if was.kind is EntryKind.FILE:
            return not stat.S_ISREG(now.st_mode) or self._is_other_file(was, now)
        if not stat.S_ISLNK(now.st_mode):
            return True
        with tree.open_parent(self.root, path) as (folder, name):
            return os.readlink(name, dir_fd=folder) != was.target

    def _is_other_file(self, was: Entry, now: os.stat_result) -> bool:
        if self.stamps.get(was.path) == tree.stamp_of(now):
            return now.st_mode & 0o777 != was.mode
        known = (was.size_bytes, was.mode, was.modified_ns)
        if known != (now.st_size, now.st_mode & 0o777, now.st_mtime_ns):
            return True
        # no stamp: it was written just before it was read, or the machine was started anew
        opened = self.open_known(was.path)
        if opened is None:
            return True
        try:
            return any(
                hashlib.sha256(tree.read_chunk(opened, index * CHUNK_BYTES)).hexdigest() != digest
                for index, digest in enumerate(was.chunks)
            )
        finally:
            os.close(opened)

    def open_known(self, path: str) -> int | None:
        """Open a file of the tree; None if it cannot be read."""
        try:
            return tree.open_file(self.root, path)
        except (OSError, TreeRefused):
            return None

    def _remove(self, paths: list[str]) -> None:
        for path in sorted(paths, reverse=True):  # what is in a directory before it
            with (
                contextlib.suppress(FileNotFoundError, NotADirectoryError),
                tree.open_parent(self.root, path) as (folder, name),
            ):
                if self.base[path].kind is not EntryKind.DIRECTORY:
                    os.unlink(name, dir_fd=folder)
                    continue
                try:
                    os.rmdir(name, dir_fd=folder)
                except OSError as e:
                    if e.errno not in _NOT_EMPTY:
                        raise
                    self.kept.append(path)  # it has files that are not committed

    def _require_space(self, more_bytes: int, floor_bytes: int) -> None:
        disk = os.fstatvfs(self.root)
        free = disk.f_bavail * disk.f_frsize
        if more_bytes and free - more_bytes < floor_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{more_bytes} bytes of the volume do not fit on the node's disk: {free} are free, "
                f"of which {floor_bytes} are reserved (platform.disk_floor_bytes)",
            )

    def _place(self, entry: Entry, make: Callable[[int, str], None]) -> None:
        """Create an entry in the directory that contains it; a change of the tenant that is in the
        way stays."""
        try:
            with self._parent(entry.path) as (folder, name):
                make(folder, name)
        except OSError as e:
            if e.errno not in _IN_THE_WAY:
                raise
            self.kept.append(entry.path)
            self.stamps.pop(entry.path, None)

    @contextlib.contextmanager
    def _parent(self, path: str) -> Iterator[tuple[int, str]]:
        """The directory that contains `path`, made where the tenant removed it."""
        for depth in range(path.count("/")):
            above = "/".join(path.split("/")[: depth + 1])
            if tree.status_of(self.root, above) is None:
                with tree.open_parent(self.root, above) as (folder, name):
                    self._make_directory(self.head.get(above), folder, name)
        with tree.open_parent(self.root, path) as found:
            yield found

    def _make_directory(self, entry: Entry | None, folder: int, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
        opened = os.open(
            name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder
        )
        try:
            self._own(opened, 0o755 if entry is None else entry.mode)
        finally:
            os.close(opened)

    def _make_link(self, entry: Entry, folder: int, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.base.get(entry.path) is not None:
                os.unlink(name, dir_fd=folder)
        os.symlink(entry.target, name, dir_fd=folder)
        if self.uid is not None:
            os.chown(name, self.uid, self.uid, dir_fd=folder, follow_symlinks=False)

    def _own(self, opened: int, mode: int) -> None:
        if self.uid is not None and os.geteuid() == 0:
            os.fchown(opened, self.uid, self.uid)
        os.fchmod(opened, mode)

    async def _fetch_all(self, files: list[Entry], order: Mapping[str, Any]) -> None:
        if not files:
            return
        from pilotlight.core.threads import run_concurrently

        store = open_order_store(order)
        fetch = _Fetch(self, store, str(order["tenant"]))
        jobs = (partial(fetch.file, number, entry) for number, entry in enumerate(files))
        try:
            await run_concurrently(jobs, at_once=FILES_AT_ONCE)
        finally:
            await store.aclose()

    def finish_file(self, entry: Entry, temporary: str, opened: int) -> None:
        """Put a complete file into its place."""
        os.ftruncate(opened, entry.size_bytes)
        self._own(opened, entry.mode)
        os.utime(opened, ns=(entry.modified_ns, entry.modified_ns))

        def rename(folder: int, name: str) -> None:
            os.rename(temporary, name, src_dir_fd=self.incoming, dst_dir_fd=folder)
            status = os.stat(name, dir_fd=folder, follow_symlinks=False)
            self.stamps[entry.path] = tree.stamp_of(status)

        self._place(entry, rename)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=self.incoming)


class _Fetch:
    """Fetches files: chunks that the file on the node has already are copied from there."""

    def __init__(self, merge: Merge, store: ObjectStore, tenant: str) -> None:
        self._merge = merge
        self._store = store
        self._tenant = tenant
        self._turns = asyncio.Semaphore(FETCHES_AT_ONCE)

    async def file(self, number: int, entry: Entry) -> None:
        """Fetch one file. Raises ObjectStoreError, TreeRefused, OSError."""
        merge, temporary = self._merge, str(number)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        opened = os.open(temporary, flags, 0o600, dir_fd=merge.incoming)
        was = merge.base.get(entry.path)
        old = await asyncio.to_thread(merge.open_known, entry.path) if was is not None else None
        try:
            async with asyncio.TaskGroup() as group:
                for index, digest in enumerate(entry.chunks):
                    await self._turns.acquire()
                    chunk = _Chunk(path=entry.path, digest=digest, size=entry.chunk_bytes(index))
                    group.create_task(
                        self._turn(opened, index, chunk, self._copy(old, was, digest))
                    )
            await asyncio.to_thread(merge.finish_file, entry, temporary, opened)
        except ExceptionGroup as e:
            raise e.exceptions[0] from e
        finally:
            os.close(opened)
            if old is not None:
                os.close(old)

    @staticmethod
    def _copy(old: int | None, was: Entry | None, digest: str) -> tuple[int, int] | None:
        """Descriptor and offset of a chunk that is on the node already."""
        if old is None or was is None or digest not in was.chunks:
            return None
        return old, was.chunks.index(digest) * CHUNK_BYTES

    async def _turn(
        self, opened: int, index: int, chunk: _Chunk, copy: tuple[int, int] | None
    ) -> None:
        try:
            data: bytes | bytearray | memoryview | None = None
            if copy is not None:
                data = await asyncio.to_thread(tree.read_chunk, *copy)
            if data is None or not await asyncio.to_thread(chunk.matches, data):
                data = await self._fetched(chunk)
            await asyncio.to_thread(_write, opened, data, index * CHUNK_BYTES)
        finally:
            self._turns.release()

    async def _fetched(self, chunk: _Chunk) -> bytes | memoryview:
        key = chunk_key(self._tenant, chunk.digest)
        data = await self._store.read(key, offset_bytes=0, length_bytes=chunk.size)
        if not await asyncio.to_thread(chunk.matches, data):
            raise TreeRefused(
                f"{chunk.path}: chunk {chunk.digest[:12]} of the blob store is damaged: write the "
                f"file again and commit"
            )
        self._merge.fetched_bytes += chunk.size
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunk:
    """A chunk of the file at `path`: what its bytes must be."""

    path: str
    digest: str
    size: int

    def matches(self, data: bytes | bytearray | memoryview) -> bool:
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.digest


def _write(opened: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(opened, view, offset)
        view, offset = view[written:], offset + written
