"""A directory that appears whole or not at all.

Work happens in `<parent>/.tmp-…`, which its maker holds locked (flock(2)); publishing is one rename(2) after the
file system was flushed, so a directory under its final name is complete, whatever was killed and when. A temporary
directory whose lock is free belongs to nobody: its maker died, and `sweep` removes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

_PREFIX = ".tmp-"
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def staged(final: Path) -> Iterator[Path]:
    """Yield an empty directory beside `final`; on success it becomes `final`, on any error it is removed.

    When `final` exists already at the end, the older one stays and ours is dropped: both were made from the same name.
    """
    with workplace(final.parent, label=final.name[:16]) as work:
        yield work.directory
        work.publish(final)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workplace:
    """A temporary directory whose final name is not known yet, as that of what is named by its content.

    Attributes:
        directory: empty at first, 0700.
        lock: descriptor of the directory, locked for as long as its maker lives.
    """

    directory: Path
    lock: int

    def publish(self, final: Path) -> None:
        """Flush the file system, then give the directory its name; an older one of that name stays. Raises OSError."""
        _flush(self.lock)
        _publish(self.directory, final)


@contextlib.contextmanager
def workplace(parent: Path, *, label: str) -> Iterator[Workplace]:
    """An empty directory in `parent`, which is removed at the end unless it was published."""
    parent.mkdir(parents=True, exist_ok=True)
    temp = parent / f"{_PREFIX}{label}-{secrets.token_hex(4)}"
    temp.mkdir(mode=0o700)
    lock = os.open(temp, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Workplace(directory=temp, lock=lock)
    finally:
        if temp.exists():
            remove_tree(temp)
        os.close(lock)


@contextlib.asynccontextmanager
async def staged_in_thread(final: Path) -> AsyncIterator[Path]:
    """`staged` for work that awaits: flushing and removing, which block, happen in a thread."""
    stage = staged(final)
    temp = await asyncio.to_thread(stage.__enter__)
    try:
        yield temp
    except BaseException as e:
        await asyncio.to_thread(stage.__exit__, type(e), e, e.__traceback__)
        raise
    await asyncio.to_thread(stage.__exit__, None, None, None)


def _publish(temp: Path, final: Path) -> None:
    try:
        temp.rename(final)
    except OSError as e:
        if e.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def sweep(parent: Path) -> int:
    """Remove temporary directories that dead makers left in `parent`; returns how many."""
    swept = 0
    for temp in parent.glob(f"{_PREFIX}*") if parent.exists() else ():
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(temp, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_tree(temp)
                swept += 1
            except BlockingIOError:
                pass  # its maker lives
            finally:
                os.close(lock)
    return swept


def discard(directory: Path) -> None:
    """Remove a published directory: it loses its name first, so a kill half-way leaves a temporary one, never a half one."""
    remove_tree(bury(directory))


def bury(directory: Path) -> Path:
    """The first half of `discard`, for what is still in use: its temporary name, to be given to `remove_tree` later."""
    grave = directory.parent / f"{_PREFIX}gone-{secrets.token_hex(4)}"
    directory.rename(grave)
    return grave


def remove_tree(directory: Path) -> None:
    """Remove `directory`, read-only directories included (their own owner may not write into them without root)."""
    for folder, _, _ in os.walk(directory):
        os.chmod(folder, 0o700)
    shutil.rmtree(directory)


def freeze(directory: Path, *, owner_uid: int | None = None) -> None:
    """Make everything in `directory` read-only and world-readable; set-id bits go.

    With `owner_uid` the tree was written by that uid: it becomes ours. Whatever another one owns was linked in from
    elsewhere and is refused (ValueError names it), as are sockets, pipes and devices.
    """
    allowed = os.geteuid() if owner_uid is None else owner_uid
    for folder, folders, files in os.walk(directory):
        for name in [*folders, *files]:
            path = os.path.join(folder, name)
            _freeze_entry(path, os.lstat(path), allowed)
    os.chmod(directory, 0o555)  # what lies in it is meant to be read; its parents are private


def _freeze_entry(path: str, status: os.stat_result, allowed: int) -> None:
    mode = status.st_mode
    if status.st_uid != allowed:
        raise ValueError(f"{path} belongs to uid {status.st_uid}, who had no part in making it")
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
        raise ValueError(f"{path} is neither a file, a directory nor a link")
    if status.st_uid != os.geteuid():
        os.lchown(path, os.geteuid(), os.getegid())
    if stat.S_ISDIR(mode):
        os.chmod(path, 0o555)
    elif stat.S_ISREG(mode):
        os.chmod(path, 0o555 if mode & 0o100 else 0o444)


def _flush(descriptor: int) -> None:
    """syncfs(2): one call for thousands of small files; without it a power cut could leave a name over empty files."""
    if _libc.syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"syncfs: {os.strerror(code)}")
