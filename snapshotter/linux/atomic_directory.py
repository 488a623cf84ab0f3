"""Directories that appear completely or not at all.

Work happens in `<parent>/.tmp-…`, which its creator keeps locked (flock(2)); publishing is one
rename(2) after a flush of the file system, so a directory under its final name is complete, even
after a crash at any time. A temporary directory whose lock is free is abandoned: its creator has
exited, and `sweep` removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

_T = TypeVar("_T")
_PREFIX = ".tmp-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_AT_EMPTY_PATH = 0x1000
_MAX_DEPTH = 100
"""Maximum depth of a published tree: more than any package has, and few open descriptors at one per
level."""
_MAX_PASSES = 10
"""Passes over a directory that changes during its removal; an unchanged one needs one."""
_libc = ctypes.CDLL(None, use_errno=True)


class TooManyEntries(ValueError):
    """Raised when a tree exceeds its limit of entries; names the directory in which the limit was
    exceeded."""


class _Modes(NamedTuple):
    """Modes of directories, executable files and other files."""

    folder: int
    program: int
    file: int


_READ_ONLY = _Modes(0o555, 0o555, 0o444)
_READABLE = _Modes(0o755, 0o755, 0o644)


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Yield an empty directory beside `final`; on success it is renamed to `final`, on any error
    removed.

    If `final` exists at the end, the existing one is kept and the new one discarded: both were made
    from the same name.
    """
    with staging_directory(final.parent, label=final.name[:16]) as work:
        yield work.directory
        work.publish(final)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingDirectory:
    """A temporary directory whose final name is not known yet, for example because its content
    determines it.

    Attributes:
        directory: empty at first, 0700.
        lock: descriptor of the directory, locked as long as its creator runs.
    """

    directory: Path
    lock: int

    def flush(self) -> None:
        """Begin early with what `publish` does: write to the disk what is there. Raises OSError."""
        _flush(self.lock)

    def publish(self, final: Path) -> None:
        """Flush the file system, then rename the directory; an existing one of that name is kept.
        Raises OSError."""
        _flush(self.lock)
        _publish(self.directory, final)


@contextlib.contextmanager
def staging_directory(parent: Path, *, label: str) -> Iterator[StagingDirectory]:
    """An empty directory in `parent`, which is removed at the end unless it was published."""
    parent.mkdir(parents=True, exist_ok=True)
    temp = parent / f"{_PREFIX}{label}-{secrets.token_hex(4)}"
    temp.mkdir(mode=0o700)
    lock = os.open(temp, _DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield StagingDirectory(directory=temp, lock=lock)
    finally:
        if temp.exists():
            remove_tree(temp)
        os.close(lock)


@contextlib.asynccontextmanager
async def staged_in_thread(final: Path) -> AsyncIterator[Path]:
    """`staged` for async work: blocking flushes and removals run in a thread."""
    stage = staged(final)
    temp = await enter_in_thread(stage)
    try:
        yield temp
    except BaseException as e:
        await asyncio.to_thread(stage.__exit__, type(e), e, e.__traceback__)
        raise
    await asyncio.to_thread(stage.__exit__, None, None, None)


async def enter_in_thread(stage: contextlib.AbstractContextManager[_T]) -> _T:
    """Run the blocking `stage.__enter__()` in a thread; if the caller is cancelled, the stage is
    exited again."""
    entering = asyncio.create_task(asyncio.to_thread(stage.__enter__))
    try:
        return await asyncio.shield(entering)
    except asyncio.CancelledError as e:
        await asyncio.wait([entering])  # the thread cannot be cancelled
        if not entering.cancelled() and entering.exception() is None:
            await asyncio.to_thread(stage.__exit__, type(e), e, e.__traceback__)
        raise


def _publish(temp: Path, final: Path) -> None:
    try:
        temp.rename(final)
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def sweep(parent: Path) -> int:
    """Remove temporary directories of exited creators in `parent`; returns how many."""
    swept = 0
    for temp in parent.glob(f"{_PREFIX}*") if parent.exists() else ():
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(temp, _DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(temp)
                swept += 1
            except BlockingIOError:
                pass  # its creator is still running
            finally:
                os.close(lock)
    return swept


def delete_atomically(directory: Path) -> None:
    """Remove a published directory. It is renamed first, so that a crash leaves a temporary
    directory, never a partial one."""
    remove_tree(rename_for_deletion(directory))


def rename_for_deletion(directory: Path) -> Path:
    """The first half of `delete_atomically`, for a directory that is in use: returns its temporary
    name, for a later `remove_tree`."""
    renamed = directory.parent / f"{_PREFIX}gone-{secrets.token_hex(4)}"
    directory.rename(renamed)
    return renamed


def remove_tree(directory: Path) -> None:
    """Remove `directory`, read-only directories included (without root their owner cannot write to
    them).

    Works on descriptors and follows no link, so concurrent writers to the tree are harmless. Each
    subdirectory is moved to the top before it is emptied, so that the depth of a tree costs neither
    descriptors nor stack.
    """
    parent = os.open(directory.parent, _DIRECTORY)
    try:
        top = os.open(directory.name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(directory.name, dir_fd=parent)
    finally:
        os.close(parent)


def _empty(top: int) -> None:
    """Empty `top`. Subdirectories are moved to `top` under numbers and emptied in that order, so
    that their number costs no memory."""
    prefix, count, done = f".remove-{secrets.token_hex(4)}-", 0, 0
    os.fchmod(top, 0o700)
    count = _strip(top, top, prefix, count)
    while done < count:
        done += 1
        folder = _open_to_change(f"{prefix}{done}", top)
        try:
            count = _strip(folder, top, prefix, count)
        finally:
            os.close(folder)
        os.rmdir(f"{prefix}{done}", dir_fd=top)


def _strip(folder: int, top: int, prefix: str, count: int) -> int:
    """Remove the files of a directory and move its subdirectories to `top`; returns the number of
    directories moved so far."""
    for _ in range(_MAX_PASSES):
        is_stripped = True
        with os.scandir(folder) as entries:
            for entry in entries:
                if folder == top and entry.name.startswith(prefix):
                    continue
                is_stripped = False
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.name, dir_fd=folder)
                    continue
                os.close(_open_to_change(entry.name, folder))
                count += 1
                os.rename(entry.name, f"{prefix}{count}", src_dir_fd=folder, dst_dir_fd=top)
        if is_stripped:
            break
    return count


def _open_to_change(name: str, folder: int) -> int:
    """A descriptor of a directory, changed to 0700; works for one that its owner cannot read."""
    held = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.chmod(f"/proc/self/fd/{held}", 0o700)
        return os.open(f"/proc/self/fd/{held}", _DIRECTORY)
    finally:
        os.close(held)


def freeze(directory: Path, *, owners: range | None = None, max_entries: int | None = None) -> int:
    """Make everything in `directory` read-only and world-readable, and clear set-id bits. Returns
    the number of entries.

    With `owners` the tree was written by these uids and is chowned to ours. An entry of another uid
    was linked in from elsewhere and is rejected (ValueError names it), as are sockets, pipes and
    devices, and more than `max_entries`. Works on descriptors and follows no link; keeps one entry
    at a time in memory, plus the inode numbers of files with several hard links.
    """
    return _set_modes(directory, _READ_ONLY, owners, max_entries)


def expose(directory: Path) -> None:
    """Make everything in `directory`, which we wrote, world-readable and keep it writable by us."""
    _set_modes(directory, _READABLE, None, None)


def _set_modes(
    directory: Path, modes: _Modes, owners: range | None, max_entries: int | None
) -> int:
    top = os.open(directory, _DIRECTORY | os.O_NOFOLLOW)
    try:
        allowed = range(os.geteuid(), os.geteuid() + 1) if owners is None else owners
        if os.fstat(top).st_uid not in allowed and os.fstat(top).st_uid != os.geteuid():
            raise ValueError(
                f"{directory} belongs to uid {os.fstat(top).st_uid}, which did not create it"
            )
        walk = _Walk(modes, allowed, max_entries)
        walk.below(top, str(directory), depth=1)
        os.fchown(top, os.geteuid(), os.getegid())
        os.fchmod(top, modes.folder)  # its content may be read; its parents are private
        return walk.entries
    finally:
        os.close(top)


class _Walk:
    """One walk through a tree that sets modes and owners. Owner: the walking thread."""

    def __init__(self, modes: _Modes, allowed: range, max_entries: int | None) -> None:
        self._modes = modes
        self._allowed = allowed
        self._max_entries = max_entries
        self._taken: set[tuple[int, int]] = set()
        self.entries = 0

    def below(self, folder: int, shown: str, *, depth: int) -> None:
        if depth > _MAX_DEPTH:
            raise OSError(
                errno.ENAMETOOLONG, f"directories are nested deeper than {_MAX_DEPTH}", shown
            )
        with os.scandir(folder) as found:
            for entry in found:
                self.entries += 1
                if self._max_entries is not None and self.entries > self._max_entries:
                    raise TooManyEntries(shown)
                held = os.open(entry.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                try:
                    self._entry(held, f"{shown}/{entry.name}", depth=depth)
                finally:
                    os.close(held)

    def _entry(self, held: int, shown: str, *, depth: int) -> None:
        status = os.fstat(held)
        mode = status.st_mode
        if status.st_nlink > 1 and (status.st_dev, status.st_ino) in self._taken:
            return  # another hard link of a file that this walk has already chowned
        if status.st_uid not in self._allowed:
            raise ValueError(f"{shown} belongs to uid {status.st_uid}, which did not create it")
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            raise ValueError(f"{shown} is neither a file, a directory nor a link")
        if status.st_uid != os.geteuid():
            _own(held)
        if stat.S_ISDIR(mode):
            self._folder(held, shown, depth=depth)
            return
        if status.st_nlink > 1:
            self._taken.add((status.st_dev, status.st_ino))
        if stat.S_ISREG(mode):
            os.chmod(
                f"/proc/self/fd/{held}", self._modes.program if mode & 0o100 else self._modes.file
            )

    def _folder(self, held: int, shown: str, *, depth: int) -> None:
        os.chmod(f"/proc/self/fd/{held}", 0o700)
        readable = os.open(f"/proc/self/fd/{held}", _DIRECTORY)
        try:
            self.below(readable, shown, depth=depth + 1)
        finally:
            os.close(readable)
        os.chmod(f"/proc/self/fd/{held}", self._modes.folder)


def _own(held: int) -> None:
    """Chown the object of this descriptor (O_PATH) to us: fchownat(2) with AT_EMPTY_PATH, which
    does not follow a link."""
    if _libc.fchownat(held, b"", os.geteuid(), os.getegid(), _AT_EMPTY_PATH) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"fchownat: {os.strerror(code)}")


def _flush(descriptor: int) -> None:
    """syncfs(2): one call for thousands of small files; without it a power failure could leave a
    final name with empty files."""
    if _libc.syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"syncfs: {os.strerror(code)}")
