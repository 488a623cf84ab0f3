"""mount(2), with errors that name source and target. Standard library only."""

from __future__ import annotations

import ctypes
import os

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, MOVE, REC, PRIVATE, SLAVE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    8192,
    16384,
    1 << 18,
    1 << 19,
)
"""Flags (sys/mount.h)."""
_libc = ctypes.CDLL(None, use_errno=True)


_SYS_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE, _AT_EMPTY_PATH = 442, -100, 0x8000, 0x1000
_ATTRIBUTES = {RDONLY: 1, NOSUID: 2, NODEV: 4, NOEXEC: 8}
"""Flags of mount(2) as MOUNT_ATTR_* (linux/mount.h)."""


class _Attributes(ctypes.Structure):
    """struct mount_attr."""

    _fields_ = [
        (name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")
    ]


def bind_tree(source: str, target: str, flags: int) -> None:
    """Bind a directory with all mounts below it, all of them with `flags`: mount_setattr(2), Linux
    5.12. Raises OSError."""
    mount(source, target, None, BIND | REC)
    _set_attributes(_AT_FDCWD, target, _AT_RECURSIVE, flags)


def restrict_detached(fd: int, flags: int) -> None:
    """Give a detached mount (open_tree(2)), and all below it, these flags before anything can see
    it: mount_setattr(2). Raises OSError."""
    _set_attributes(fd, "", _AT_RECURSIVE | _AT_EMPTY_PATH, flags)


def _set_attributes(directory: int, path: str, at_flags: int, flags: int) -> None:
    attributes = _Attributes(attr_set=sum(bit for flag, bit in _ATTRIBUTES.items() if flags & flag))
    arguments = (
        directory,
        path.encode(),
        at_flags,
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    if _libc.syscall(_SYS_MOUNT_SETATTR, *arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount_setattr on {path or 'a mount'}: {os.strerror(code)}")


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """mount(2). Raises OSError that names source and target."""
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    if _libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")
