"""A mount namespace in which a process without root can reach only the directories that it needs,
at their usual paths.

A directory that its uid cannot enter, such as /root or the platform's home, is covered by an empty
tmpfs, in which the needed subdirectories are bind-mounted. The rest of the covered directory is
invisible. Sources: mount_namespaces(7), mount(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from snapshotter.shim.sandbox.mount import BIND, NODEV, NOSUID, REC, SLAVE, mount

_NEWNS = 0x00020000
_libc = ctypes.CDLL(None, use_errno=True)


def enter(needed: Collection[Path], *, uid: int) -> None:
    """Move this process, single-threaded and root, into such a namespace for `uid` (its gid is the
    same number). Raises OSError.

    `needed`: absolute paths of existing directories. Later mounts of the host are propagated.
    """
    if _libc.unshare(_NEWNS) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"unshare(CLONE_NEWNS): {os.strerror(code)}")
    mount(None, "/", None, REC | SLAVE)
    every = sorted(
        {*needed, *(path.resolve() for path in needed)}, key=lambda path: len(path.parts)
    )
    with contextlib.ExitStack() as stack:
        held = [(path, _hold(path, stack)) for path in every]
        for path in every:
            while (closed := _first_closed(path, uid)) is not None:
                _cover(closed, held)


def _first_closed(path: Path, uid: int) -> Path | None:
    """The first directory above `path` that `uid` cannot enter."""
    return next(
        (folder for folder in reversed(path.parents) if not may_enter(folder.stat(), uid)), None
    )


def may_enter(status: os.stat_result, uid: int) -> bool:
    """Whether the mode of a directory allows `uid`, whose only group has the same number, to pass
    through it."""
    if status.st_uid == uid:
        return bool(status.st_mode & stat.S_IXUSR)
    if status.st_gid == uid:
        return bool(status.st_mode & stat.S_IXGRP)
    return bool(status.st_mode & stat.S_IXOTH)


def _cover(closed: Path, held: Sequence[tuple[Path, int]]) -> None:
    if closed == Path("/"):
        raise OSError("/ is closed to other users")
    mount("tmpfs", str(closed), "tmpfs", NOSUID | NODEV, "size=1m,mode=711")
    umask = os.umask(0o066)
    try:
        # shorter paths first: a mount includes what is below it
        for path, descriptor in held:
            if closed in path.parents and not _is_there(path, descriptor):
                path.mkdir(parents=True, exist_ok=True)
                mount(f"/proc/self/fd/{descriptor}", str(path), None, BIND | REC)
    finally:
        os.umask(umask)


def _is_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _hold(path: Path, stack: contextlib.ExitStack) -> int:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    stack.callback(os.close, descriptor)
    return descriptor
