"""Preallocated memory: a shared mapping (memfd_create(2)) with every page populated, in huge pages
if available.

Reads into it cause no page faults, and a device can read it directly once it is *pinned*
(registered with the driver). Memory taken from a pool is a tensor of bytes; it returns to the pool
when the last tensor that refers to it is freed.

A pool must not be mapped when its process is dumped, or the snapshot would contain all of it.
`release_pools` unmaps unused pools (they are mapped again on the next use) and returns the
others."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol, Self

from weight_cache.errors import PoolFull

if TYPE_CHECKING:
    import torch

HUGE_BYTES = 2 * 1024 * 1024
ALIGNMENT_BYTES = 4096
_MFD_HUGETLB = 4  # memfd_create(2)
_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # madvise(2); the latter since Linux 5.14
_POOLS: weakref.WeakSet[Pool] = weakref.WeakSet()
"""All existing pools, for checkpoints."""


class Pin(Protocol):
    """Registers memory with a device driver."""

    def register(self, address: int, length_bytes: int) -> bool:
        """Register memory; whether the driver accepted it."""

    def unregister(self, address: int) -> None:
        """Undo `register`; never raises."""


class Pool:
    """`size_bytes` of memory, mapped at once. Thread-safe: a lock guards `take`; returning memory
    needs none.

    `pin`: registers the memory with a device; `is_pinned`: whether the driver accepted it. Raises
    PoolFull if the machine lacks the memory."""

    def __init__(self, size_bytes: int, *, pin: Pin | None = None) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a pool of {size_bytes} bytes: expected at least 1")
        self.size_bytes = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
        self.is_pinned = False
        self.pages = ""
        self._pin = pin
        # offset → length. Each operation on it is atomic, so a finalizer may run at any time
        self._taken: dict[int, int] = {}
        self._lock = threading.Lock()
        self._mapping: mmap.mmap | None = None
        self._unpin: weakref.finalize[[int], Pool] | None = None
        self._closed = False
        self._map()
        _POOLS.add(self)

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else "unmapped"
            if self._mapping is None
            else f"{self.pages}{', pinned' if self.is_pinned else ''}"
        )
        return f"<Pool {self.used_bytes} of {self.size_bytes} bytes taken, {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def used_bytes(self) -> int:
        """Bytes of live tensors."""
        return sum(list(self._taken.values()))

    @property
    def is_mapped(self) -> bool:
        """Whether its memory is mapped in this process."""
        return self._mapping is not None

    def take(self, length_bytes: int) -> torch.Tensor:
        """Take that many bytes, page-aligned, as a uint8 tensor with undefined content.

        Raises PoolFull with both sizes, and ValueError if the pool is closed.
        """
        import torch

        with self._lock:
            if self._closed:
                raise ValueError("the pool is closed: create a new one")
            mapping = self._mapping or self._map()
            offset = self._room(length_bytes)
            memory = (ctypes.c_char * length_bytes).from_buffer(mapping, offset)
            self._taken[offset] = length_bytes
        weakref.finalize(memory, self._release, offset).atexit = False
        # the tensor's storage keeps `memory` alive, which keeps the mapping alive
        return torch.frombuffer(memory, dtype=torch.uint8)

    def let_go(self) -> bool:
        """Unmap the pool until the next `take`; False without effect while tensors use it."""
        with self._lock:
            if not self._taken:
                self._unmap()
            return self._mapping is None

    def close(self) -> None:
        """Refuse further use; the memory is released with the last tensor on it, at once if there
        is none."""
        self._closed = True
        self._go_if_unused()

    def _release(self, offset: int) -> None:
        del self._taken[offset]
        if self._closed:
            self._go_if_unused()

    def _go_if_unused(self) -> None:
        if not self._taken:
            self._unmap()

    def _room(self, length_bytes: int) -> int:
        """Offset of the first free range of that size, in whole pages."""
        if length_bytes <= 0:
            raise ValueError(f"{length_bytes} bytes of a pool: expected at least 1")
        end = 0
        for offset, length in sorted(self._taken.copy().items()):
            if offset - end >= length_bytes:
                return end
            end = offset + -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self.size_bytes - end < length_bytes:
            raise PoolFull(
                f"{length_bytes} bytes do not fit into a pool of {self.size_bytes} bytes, of which "
                f"{self.used_bytes} are taken"
            )
        return end

    def _map(self) -> mmap.mmap:
        mapping, self.pages = _huge(self.size_bytes) or _ordinary(self.size_bytes)
        address = _address(mapping)
        self.is_pinned = self._pin is not None and self._pin.register(address, self.size_bytes)
        if self.is_pinned and self._pin is not None:
            # also if the pool is never closed
            self._unpin = weakref.finalize(self, self._pin.unregister, address)
            self._unpin.atexit = False  # the driver may be unloaded by then
        self._mapping = mapping
        return mapping

    def _unmap(self) -> None:
        """Unmap. Idempotent. The mapping is released with its last reference, which a tensor being
        freed may still hold."""
        mapping, self._mapping = self._mapping, None
        if self._unpin is not None:
            self._unpin()
        self.is_pinned = False
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()


def release_pools() -> list[Pool]:
    """Unmap all unused pools of this process; return those in use."""
    return [pool for pool in list(_POOLS) if not pool.let_go()]


def pools_in_use() -> list[Pool]:
    """Pools with live tensors."""
    return [pool for pool in list(_POOLS) if pool.is_mapped and pool.used_bytes]


def available_bytes() -> int | None:
    """Memory available without swapping (proc(5), MemAvailable); None if unknown."""
    try:
        with open("/proc/meminfo") as file:
            rows = (line.split() for line in file)
            return next((int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:"), None)
    except OSError:
        return None


def _huge(size_bytes: int) -> tuple[mmap.mmap, str] | None:
    """Map preallocated huge pages (`vm.nr_hugepages`); None if there are not enough."""
    try:
        with _memory_file(size_bytes, _MFD_HUGETLB) as descriptor:
            mapping = mmap.mmap(descriptor, size_bytes)
    except OSError:
        return None
    _populate(mapping)
    return mapping, "huge pages"


def _ordinary(size_bytes: int) -> tuple[mmap.mmap, str]:
    """Map ordinary pages, as transparent huge pages where enabled
    (`transparent_hugepage/shmem_enabled`)."""
    available = available_bytes()
    if available is not None and size_bytes > available:
        raise PoolFull(f"a pool of {size_bytes} bytes: this machine has {available} available")
    try:
        with _memory_file(size_bytes, 0) as descriptor:
            mapping = mmap.mmap(descriptor, size_bytes)
    except OSError as e:
        raise PoolFull(f"a pool of {size_bytes} bytes: the kernel refused it: {e}") from e
    with contextlib.suppress(OSError):  # not supported by the kernel
        mapping.madvise(_MADV_HUGEPAGE)
    _populate(mapping)
    return mapping, "ordinary pages"


@contextlib.contextmanager
def _memory_file(size_bytes: int, flags: int) -> Iterator[int]:
    descriptor = os.memfd_create("pilotlight-pool", os.MFD_CLOEXEC | flags)
    try:
        os.ftruncate(descriptor, size_bytes)
        yield descriptor
    finally:
        os.close(descriptor)


def _populate(mapping: mmap.mmap) -> None:
    """Populate every page. ctypes releases the GIL meanwhile, unlike `mmap.madvise`."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = len(mapping)
    if (
        libc.madvise(
            ctypes.c_void_p(_address(mapping)), ctypes.c_size_t(size), _MADV_POPULATE_WRITE
        )
        == 0
    ):
        return
    for offset in range(0, size, ALIGNMENT_BYTES):  # older kernels: touch each page
        mapping[offset] = 0


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
