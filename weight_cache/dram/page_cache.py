"""The DRAM tier: measures how much of a file is in the page cache, and reads more into it.

The kernel evicts from it, least recently used pages first (mm/vmscan.c): weights are clean pages
of files, so nothing here removes them, and a model that is needed again is read from the disk.

Measured with cachestat(2) (Linux 6.5), else with mincore(2) over a mapping. Large models are
sampled in evenly spread windows, so that the cost is about the same for all.

Read with posix_fadvise(2), POSIX_FADV_WILLNEED. One call reads at most one device request or the
read-ahead window, whatever its length (`force_page_cache_ra` in mm/readahead.c; measured: 8 MiB of
256), so a piece is requested in small steps. The call does not wait; reading one byte of each step
does, to measure the bandwidth."""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weight_cache.types import Tier

WARM_SHARE = 0.9
"""A model with this share in memory starts at memory speed: the rest is read while the first layers
are in use."""
PIECE_BYTES = 16 * 1024**2
_STEP_BYTES = 256 * 1024
"""Smaller than the largest request of current cloud disks."""
_WINDOWS, _WINDOW_BYTES = 64, 16 * 1024**2
_CACHESTAT = 451
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Cachestat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """Page cache residency of files: `resident_bytes` of `total_bytes`, an estimate for large
    models."""

    resident_bytes: int
    total_bytes: int

    @property
    def tier(self) -> Tier:
        """The tier a read would find them in: DRAM or NVME. Empty files count as DRAM."""
        return Tier.DRAM if self.resident_bytes >= WARM_SHARE * self.total_bytes else Tier.NVME

    @property
    def absent_bytes(self) -> int:
        """Bytes that a start would have to read from the disk."""
        return self.total_bytes - self.resident_bytes


def measure_residency(files: Iterable[Path]) -> Residency:
    """Measure how much of these files is in memory. Blocking; about 0.1 ms. Missing files are
    skipped."""
    resident = total = looked = 0
    lengths = file_sizes(files)
    whole = sum(lengths.values())
    for path, size in lengths.items():
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            total += size
            for offset, length in _windows(size, whole):
                resident += cached_bytes(descriptor, offset, length)
                looked += length
        finally:
            os.close(descriptor)
    estimate = resident * total // looked if looked else 0
    return Residency(resident_bytes=min(estimate, total), total_bytes=total)


def cached_bytes(descriptor: int, offset: int, length: int) -> int:
    """Bytes of the range in the page cache (whole pages, at most `length`). Blocking."""
    found = _Cachestat()
    if (
        _libc.syscall(
            _CACHESTAT, descriptor, ctypes.byref(_Range(offset, length)), ctypes.byref(found), 0
        )
        == 0
    ):
        return min(int(found.cache) * mmap.PAGESIZE, length)
    return mapped_bytes(descriptor, offset, length)


def mapped_bytes(descriptor: int, offset: int, length: int) -> int:
    """As `cached_bytes`, for kernels before 6.5: mincore(2) over a mapping of the range. Returns 0
    if it cannot be mapped."""
    start = offset - offset % mmap.PAGESIZE
    span = offset + length - start
    address = _libc.mmap(None, span, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, start)
    if address is None or address == ctypes.c_void_p(-1).value:
        return 0
    try:
        pages = ctypes.create_string_buffer(-(-span // mmap.PAGESIZE))
        if _libc.mincore(address, span, pages) != 0:
            return 0
        return min(sum(page & 1 for page in pages.raw) * mmap.PAGESIZE, length)
    finally:
        _libc.munmap(address, span)


def available_bytes() -> int:
    """Memory available without swapping (MemAvailable, proc_meminfo(5)); 0 if unknown.
    Blocking."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAheadResult:
    """Result of a read-ahead: bytes that were not in memory before, its duration, and bytes skipped
    for lack of room."""

    size_bytes: int
    seconds: float
    left_bytes: int


def populate_page_cache(
    files: Iterable[Path], *, room_bytes: int, stopped: Callable[[], bool]
) -> ReadAheadResult:
    """Read files into the page cache, in order, until `room_bytes` of them are cached or
    `stopped()` is true. Blocking.

    Bytes that were cached before take room, too. Two pieces are in flight: one is requested while
    the previous one is awaited."""
    began, brought, left = time.perf_counter(), 0, 0
    for path, size in file_sizes(files).items():
        taken = min(size, room_bytes)
        room_bytes -= taken
        left += size - taken
        if taken and not stopped():
            brought += _populate_file(path, taken, stopped)
    return ReadAheadResult(size_bytes=brought, seconds=time.perf_counter() - began, left_bytes=left)


def _populate_file(path: Path, size: int, stopped: Callable[[], bool]) -> int:
    """Read a file into the page cache; return the bytes that were not in memory before. Errors are
    left to the actual reader of the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    brought, before = 0, range(0)
    try:
        for offset in range(0, size, PIECE_BYTES):
            if stopped():
                break
            length = min(PIECE_BYTES, size - offset)
            absent = length - cached_bytes(descriptor, offset, length)
            steps = range(offset, offset + length, _STEP_BYTES) if absent else range(0)
            for step in steps:
                os.posix_fadvise(
                    descriptor,
                    step,
                    min(_STEP_BYTES, offset + length - step),
                    os.POSIX_FADV_WILLNEED,
                )
            _await_steps(descriptor, before)
            brought, before = brought + absent, steps
        _await_steps(descriptor, before)
    except OSError:
        return brought
    finally:
        os.close(descriptor)
    return brought


def _await_steps(descriptor: int, steps: range) -> None:
    for step in steps:
        os.pread(descriptor, 1, step)


def file_sizes(files: Iterable[Path]) -> dict[Path, int]:
    """Length of each file in bytes; missing files are omitted."""
    found = {}
    for path in files:
        try:
            found[path] = path.stat().st_size
        except OSError:
            continue
    return found


def _windows(size: int, whole: int) -> Iterator[tuple[int, int]]:
    """Ranges of a file to inspect: all of it, or its share of `_WINDOWS` windows over all files."""
    if whole <= _WINDOWS * _WINDOW_BYTES:
        if size:
            yield 0, size
        return
    count = max(1, _WINDOWS * size // whole)
    stride = max(_WINDOW_BYTES, size // count)
    for offset in range(0, size, stride):
        yield offset, min(_WINDOW_BYTES, size - offset)
