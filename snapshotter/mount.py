"""mount(2), with errors that name what was to be mounted where. Standard library only."""

from __future__ import annotations

import ctypes
import os

RDONLY, NOSUID, NODEV, NOEXEC, REMOUNT, BIND, REC, PRIVATE, SLAVE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18, 1 << 19
"""Flags (sys/mount.h)."""
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    """mount(2). Raises OSError that names source and target."""
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    if _libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"mount {source} on {target}: {os.strerror(code)}")
