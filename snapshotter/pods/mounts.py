"""Moves mounts from our mount namespace to a pod's: open_tree(2) in ours, setns(2), move_mount(2)
in the pod's.

The source of a bind mount must be in the caller's namespace, but a detached copy, made before
entering, need not be. Runs in the process that enters pods, as root; standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Sequence

from snapshotter.shim.sandbox import mounts
from snapshotter.shim.sandbox.mount import BIND, NODEV, NOSUID, RDONLY, REMOUNT, mount

_OPEN_TREE, _MOVE_MOUNT = 428, 429  # the same on every architecture (asm-generic/unistd.h)
_AT_FDCWD = -100
_CLONE, _CLOEXEC, _RECURSIVE = 1, os.O_CLOEXEC, 0x8000
_EMPTY_PATH = 0x4
"""MOVE_MOUNT_F_EMPTY_PATH: use the descriptor itself."""
NAMESPACES = 0x00020000 | 0x08000000 | 0x04000000 | 0x40000000 | 0x20000000
"""Mount, IPC, UTS, network, and PID for the next child."""
_libc = ctypes.CDLL(None, use_errno=True)


def take(path: str) -> int:
    """A descriptor of a detached copy of `path`. Raises OSError."""
    fd: int = _libc.syscall(_OPEN_TREE, _AT_FDCWD, path.encode(), _CLONE | _CLOEXEC | _RECURSIVE)
    return _checked(fd, f"open_tree {path}")


def put(fd: int, target: str) -> None:
    """Attach it read-only at `target`, which is created. Takes ownership of `fd`. Raises
    OSError."""
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o444))
        _checked(
            _libc.syscall(_MOVE_MOUNT, fd, b"", _AT_FDCWD, target.encode(), _EMPTY_PATH),
            f"move_mount to {target}",
        )
    finally:
        os.close(fd)
    mount(None, target, None, BIND | REMOUNT | RDONLY | NOSUID | NODEV)


def enter(pidfd: int) -> None:
    """Enter the namespaces of the process of `pidfd`, all at once; the next child is in its PID
    namespace. Raises OSError."""
    _checked(_libc.setns(pidfd, NAMESPACES), "setns into the pod")


def build(held: Sequence[tuple[int, str]], *, uid: int, writable_bytes: int) -> None:
    """Build the tree of a slot (`snapshotter.shim.sandbox.mounts`) in a pod, with the paths that a
    restored worker expects. Raises OSError.

    `held`: (descriptor of `take`, name below the tree's root). `writable_bytes`: size of each of
    its temporary file systems.
    """
    demand_places()
    options = f"size={writable_bytes}"
    mount("tmpfs", "/run", "tmpfs", NOSUID | NODEV, f"{options},mode=755")
    for fd, name in held:
        put(fd, f"{mounts.ROOT}/{name}")
    os.makedirs(mounts.ROOT, exist_ok=True)
    for name, mode in (("work", 0o700), ("tmp", 0o1777)):
        os.mkdir(f"{mounts.ROOT}/{name}")
        os.chmod(f"{mounts.ROOT}/{name}", mode)
    os.chown(f"{mounts.ROOT}/work", uid, uid)
    os.symlink(f"{mounts.ROOT}/tmp", "/run/lock")
    mount("tmpfs", "/dev/shm", "tmpfs", NOSUID | NODEV, f"{options},mode=1777")
    for shared in ("/tmp", "/var/tmp"):
        if os.path.isdir(shared):
            mount(f"{mounts.ROOT}/tmp", shared, None, BIND)


def demand_places(root: str = "/") -> None:
    """Raises OSError if a mount point of `build` is a symbolic link.

    The image is the tenant's. A link could be redirected between our mount and the start of CRIU,
    which runs as root.
    """
    for place in ("run", "dev/shm", "tmp", "var/tmp"):
        path = os.path.join(root, place)
        if os.path.realpath(path) != os.path.join(os.path.realpath(root), place):
            raise OSError(
                errno.ELOOP,
                f"{path} is a symbolic link in this pod's image: cannot restore into it",
            )


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result
