"""What of a file is in memory, and how to get it out: posix_fadvise(2) and mincore(2).

A dropped page cache is checked, not believed: pages that are dirty, or mapped by another process,
stay. The host below a virtual machine may have a cache of its own, which nothing here can drop;
numbers are as cold as this machine can make them."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Iterable
from pathlib import Path

STAYED_SHARE = 0.01
"""A first page or two may come back with the check itself."""
PREFETCH_BYTES = 16 * 1024**2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


class StillCached(Exception):
    """Raised when a file would not leave the page cache: what follows would not be a cold read."""


def drop(paths: Iterable[Path], *, within_s: float = 10.0) -> None:
    """Take these files out of the page cache. Raises StillCached, naming the file and what stayed.

    Pages that are being read, or belong to a process that is just ending, can only be asked again:
    for `within_s`."""
    deadline = time.monotonic() + within_s
    for path in paths:
        while (share := _drop(path)) > STAYED_SHARE:
            if time.monotonic() > deadline:
                why = (
                    "it lies on a tmpfs: set TMPDIR to a directory on a disk"
                    if is_on_tmpfs(path)
                    else "another process has it mapped"
                )
                raise StillCached(f"{path}: {share:.0%} stayed in the page cache; {why}")
            time.sleep(0.05)


def is_on_tmpfs(path: Path) -> bool:
    """Whether a file lies in memory (tmpfs(5)): /tmp does on many systems."""
    device = path.stat().st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return any(
        fields[2] == wanted and fields[fields.index("-") + 1] == "tmpfs" for fields in mounts
    )


def _drop(path: Path) -> float:
    """Try it; returns the share that stayed."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)  # dirty pages cannot be dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return resident_share(path)


def warm(paths: Iterable[Path]) -> None:
    """Bring these files into the page cache by reading them."""
    buffer = bytearray(PREFETCH_BYTES)
    for path in paths:
        with path.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def resident_share(path: Path) -> float:
    """The part of a file that is in the page cache, 0 to 1; an empty file is there. Raises
    OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        return _resident_pages(descriptor, size) / -(-size // mmap.PAGESIZE) if size else 1.0
    finally:
        os.close(descriptor)


def _resident_pages(descriptor: int, size: int) -> int:
    """By mincore: mapping a file brings none of it in."""
    address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap failed")
    try:
        pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
        if _libc.mincore(address, size, pages) != 0:
            raise OSError(ctypes.get_errno(), "mincore failed")
        return bytes(pages).translate(_LOWEST_BIT).count(1)
    finally:
        _libc.munmap(address, size)


_LOWEST_BIT = bytes(value & 1 for value in range(256))
"""mincore(2) says only of the lowest bit what it means."""
