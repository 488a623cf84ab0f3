"""Reads and changes the tree of a volume by descriptors, without following a symbolic link.

The files are written by a tenant's code, which may change them at the same time. Nothing is opened
by a path: each directory is opened below the descriptor of the one above, and a descriptor cannot
be replaced. Runs in `mover` only. Sources: openat2(2), path_resolution(7)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial

from pilotlight.core.openat2 import open_beneath
from pilotlight.core.volumes.entries import (
    CHUNK_BYTES,
    MAX_DEPTH,
    MAX_FILE_BYTES,
    Entry,
    EntryInvalid,
    EntryKind,
    check_path,
)

RECENT_NS = 2_000_000_000
"""A file that was changed this shortly before it was read is read again next time: a later change
might not change its times (as git's "racy" entries)."""
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_OTHERS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}
_ATTEMPTS = 3

Stamp = tuple[int, int, int, int]
"""Inode, size, modification and change time of a file: equal as long as it was not changed."""


class TreeRefused(Exception):
    """Raised when a volume's tree has what a volume cannot have; the message names it."""


class StoreFailed(Exception):
    """Raised when the blob store does not do what it was asked."""


@dataclass(slots=True, kw_only=True)
class Walk:
    """One reading of a tree.

    Attributes:
        root: descriptor of the directory.
        max_entries: bound on files, directories and links.
        entries: number found so far.
    """

    root: int
    max_entries: int
    entries: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[tuple[str, str, int, os.stat_result]]:
        """Yield (path, name, descriptor of its directory, status), a directory before what it
        contains. Raises TreeRefused, OSError."""
        device = os.fstat(self.root).st_dev
        stack = [(os.dup(self.root), "", self._names(self.root))]
        try:
            while stack:
                folder, prefix, names = stack[-1]
                name = next(names, None)
                if name is None:
                    os.close(stack.pop()[0])
                    continue
                path = f"{prefix}{name}"
                try:
                    status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                except FileNotFoundError:
                    continue  # removed meanwhile
                self._count(path)
                if status.st_dev != device:
                    raise TreeRefused(f"{path} is a mount point")
                yield path, name, folder, status
                if stat.S_ISDIR(status.st_mode):
                    if len(stack) >= MAX_DEPTH:
                        raise TreeRefused(f"{path}: more than {MAX_DEPTH} directories deep")
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        below = os.open(name, _DIRECTORY, dir_fd=folder)
                        stack.append((below, f"{path}/", self._names(below)))
        finally:
            for folder, _, _ in stack:
                os.close(folder)

    def _count(self, path: str) -> None:
        self.entries += 1
        if self.entries > self.max_entries:
            raise TreeRefused(
                f"more than {self.max_entries} files, directories and links, which is the bound "
                f"(volume_files of the plan); the first one beyond it is {path[:200]!a}"
            )

    @staticmethod
    def _names(folder: int) -> Iterator[str]:
        with os.scandir(folder) as found:
            for one in found:
                yield one.name


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a file's status."""
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def scan(
    walk: Walk, known: Mapping[str, tuple[Stamp, Entry]], pool: Executor, *, now_ns: int
) -> Iterator[tuple[Entry, Stamp | None]]:
    """Yield every entry of the tree, and its stamp if the content may be taken as known next time.

    `known`: path → what an earlier scan found; a file with the same stamp is not read. Raises
    TreeRefused, OSError."""
    for path, name, folder, status in walk:
        try:
            check_path(path)
            if stat.S_ISREG(status.st_mode):
                was = known.get(path)
                if was is not None and was[0] == stamp_of(status):
                    yield was[1], was[0]
                else:
                    yield _file(path, name, folder, pool, now_ns=now_ns)
            else:
                yield _other(path, name, folder, status), None
        except EntryInvalid as e:
            raise TreeRefused(str(e)) from e
        except FileNotFoundError:
            continue  # removed meanwhile


def _other(path: str, name: str, folder: int, status: os.stat_result) -> Entry:
    if stat.S_ISDIR(status.st_mode):
        return Entry(path=path, kind=EntryKind.DIRECTORY, mode=status.st_mode & 0o777)
    if stat.S_ISLNK(status.st_mode):
        return Entry(path=path, kind=EntryKind.LINK, target=os.readlink(name, dir_fd=folder))
    what = _OTHERS.get(stat.S_IFMT(status.st_mode), "no file")
    raise TreeRefused(
        f"{path} is {what}: a volume has files, directories and symbolic links only: remove it"
    )


def _file(
    path: str, name: str, folder: int, pool: Executor, *, now_ns: int
) -> tuple[Entry, Stamp | None]:
    for _ in range(_ATTEMPTS):
        try:
            opened = os.open(name, _FILE, dir_fd=folder)
        except PermissionError as e:
            raise TreeRefused(f"{path} cannot be read by its owner: chmod u+r") from e
        try:
            before = os.fstat(opened)
            if not stat.S_ISREG(before.st_mode):
                raise TreeRefused(f"{path} changed while it was read: commit again")
            if before.st_size > MAX_FILE_BYTES:  # sparse, perhaps: it is not read first
                raise TreeRefused(
                    f"{path}: {before.st_size} bytes; a file of a volume has at most "
                    f"{MAX_FILE_BYTES}"
                )
            chunks = tuple(pool.map(partial(_hash, opened), _offsets(before.st_size)))
            after = os.fstat(opened)
        finally:
            os.close(opened)
        if stamp_of(before) == stamp_of(after):
            entry = Entry(
                path=path,
                kind=EntryKind.FILE,
                size_bytes=after.st_size,
                mode=after.st_mode & 0o777,
                modified_ns=after.st_mtime_ns,
                chunks=chunks,
            )
            newest = max(after.st_mtime_ns, after.st_ctime_ns)
            return entry, stamp_of(after) if newest < now_ns - RECENT_NS else None
    raise TreeRefused(f"{path} is written to while it is committed: commit when it is complete")


def _offsets(size_bytes: int) -> range:
    return range(0, size_bytes, CHUNK_BYTES)


def _hash(opened: int, offset: int) -> str:
    return hashlib.sha256(read_chunk(opened, offset)).hexdigest()


def read_chunk(opened: int, offset: int) -> bytearray:
    """Read one chunk of an open file; shorter at its end."""
    wanted = max(0, min(CHUNK_BYTES, os.fstat(opened).st_size - offset))
    data = bytearray(wanted)
    view, size = memoryview(data), 0
    while size < wanted:
        read = os.preadv(opened, [view[size:]], offset + size)
        if not read:
            break
        size += read
    view.release()
    del data[size:]
    return data


def open_file(root: int, path: str) -> int:
    """Open a regular file below `root` for reading. Raises TreeRefused, OSError."""
    opened = open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise TreeRefused(f"{path} changed while it was committed: commit again")
    return opened


@contextlib.contextmanager
def open_parent(root: int, path: str) -> Iterator[tuple[int, str]]:
    """The descriptor of the directory that contains `path`, and its name there. Raises OSError:
    ELOOP where a link is in between, ENOENT, ENOTDIR."""
    parent, _, name = path.rpartition("/")
    folder = open_beneath(root, parent, _DIRECTORY) if parent else os.dup(root)
    try:
        yield folder, name
    finally:
        os.close(folder)


def status_of(root: int, path: str) -> os.stat_result | None:
    """Status of `path`, itself if it is a link; None if it is not there. Raises OSError."""
    try:
        with open_parent(root, path) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except (FileNotFoundError, NotADirectoryError):
        return None
