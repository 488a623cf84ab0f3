"""Memory that is there before it is needed: a shared mapping (memfd_create(2)) with every page in
place, in huge pages where they can be had.

Reading into it costs no page faults, and a device may fetch from it directly once it is *pinned*
(registered with the driver; only then is it called that). What is taken from a pool is a tensor of
bytes; it gives its room back when the last tensor on it dies.

A pool must not be mapped when its process is dumped: a snapshot would carry all of it.
`release_pools` unmaps those that nobody uses (they map themselves again when something is taken),
and names the others."""

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
"""All that are there, so that a checkpoint finds them."""


class Pin(Protocol):
    """Registers memory with a device's driver."""

    def register(self, address: int, length_bytes: int) -> bool:
        """Whether the driver took it."""

    def unregister(self, address: int) -> None:
        """The reverse; never raises."""


class Pool:
    """`size_bytes` of memory, mapped now. Any thread may take from it; a lock guards taking, giving
    back needs none.

    `pin`: registers the memory with a device; `is_pinned` says whether the driver took it. Raises
    PoolFull when the machine lacks the memory."""

    def __init__(self, size_bytes: int, *, pin: Pin | None = None) -> None:
        if size_bytes <= 0:
            raise ValueError(f"a pool of {size_bytes} bytes: expected at least 1")
        self.size_bytes = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
        self.is_pinned = False
        self.pages = ""
        self._pin = pin
        # offset → length. Single operations on it are atomic, so a finalizer may come at any time
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
        """Of tensors that are alive."""
        return sum(list(self._taken.values()))

    @property
    def is_mapped(self) -> bool:
        """Whether its memory is part of this process."""
        return self._mapping is not None

    def take(self, length_bytes: int) -> torch.Tensor:
        """That many bytes as a tensor of uint8, at a page's begin; what is in them is left from
        before.

        Raises PoolFull with both numbers, and ValueError when the pool was closed.
        """
        import torch

        with self._lock:
            if self._closed:
                raise ValueError("the pool is closed: make a new one")
            mapping = self._mapping or self._map()
            offset = self._room(length_bytes)
            memory = (ctypes.c_char * length_bytes).from_buffer(mapping, offset)
            self._taken[offset] = length_bytes
        weakref.finalize(memory, self._give_back, offset).atexit = False
        # the tensor's storage keeps `memory`, and that the mapping
        return torch.frombuffer(memory, dtype=torch.uint8)

    def let_go(self) -> bool:
        """Unmap it until something is taken again; False, and nothing happens, while tensors are on
        it."""
        with self._lock:
            if not self._taken:
                self._unmap()
            return self._mapping is None

    def close(self) -> None:
        """Nothing is taken any more; the memory goes with the last tensor on it, now when there is
        none."""
        self._closed = True
        self._go_if_unused()

    def _give_back(self, offset: int) -> None:
        del self._taken[offset]
        if self._closed:
            self._go_if_unused()

    def _go_if_unused(self) -> None:
        if not self._taken:
            self._unmap()

    def _room(self, length_bytes: int) -> int:
        """Where that much is free: the first place, in whole pages."""
        if length_bytes <= 0:
            raise ValueError(f"{length_bytes} bytes of a pool: expected at least 1")
        end = 0
        for offset, length in sorted(self._taken.copy().items()):
            if offset - end >= length_bytes:
                return end
            end = offset + -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self.size_bytes - end < length_bytes:
            raise PoolFull(
                f"{length_bytes} bytes do not fit into a pool of {self.size_bytes} bytes, "
                f"{self.used_bytes} of them taken"
            )
        return end

    def _map(self) -> mmap.mmap:
        mapping, self.pages = _huge(self.size_bytes) or _ordinary(self.size_bytes)
        address = _address(mapping)
        self.is_pinned = self._pin is not None and self._pin.register(address, self.size_bytes)
        if self.is_pinned and self._pin is not None:
            # also where nobody closes the pool
            self._unpin = weakref.finalize(self, self._pin.unregister, address)
            self._unpin.atexit = False  # the driver may be gone by then
        self._mapping = mapping
        return mapping

    def _unmap(self) -> None:
        """Idempotent. The mapping itself goes with its last reference: a tensor that dies just now
        may still have one."""
        mapping, self._mapping = self._mapping, None
        if self._unpin is not None:
            self._unpin()
        self.is_pinned = False
        if mapping is not None:
            with contextlib.suppress(BufferError):
                mapping.close()


def release_pools() -> list[Pool]:
    """Unmap all pools of this process that nobody uses; those that are in use are returned."""
    return [pool for pool in list(_POOLS) if not pool.let_go()]


def pools_in_use() -> list[Pool]:
    """Pools with tensors on them."""
    return [pool for pool in list(_POOLS) if pool.is_mapped and pool.used_bytes]


def available_bytes() -> int | None:
    """Memory that can be had without swapping (proc(5), MemAvailable); None where that is not
    told."""
    try:
        with open("/proc/meminfo") as file:
            rows = (line.split() for line in file)
            return next((int(row[1]) * 1024 for row in rows if row[0] == "MemAvailable:"), None)
    except OSError:
        return None


def _huge(size_bytes: int) -> tuple[mmap.mmap, str] | None:
    """Of the pages that an operator set aside (`vm.nr_hugepages`); None where there are not
    enough."""
    try:
        with _memory_file(size_bytes, _MFD_HUGETLB) as descriptor:
            mapping = mmap.mmap(descriptor, size_bytes)
    except OSError:
        return None
    _populate(mapping)
    return mapping, "huge pages"


def _ordinary(size_bytes: int) -> tuple[mmap.mmap, str]:
    """Huge pages too where the kernel makes them from ordinary ones
    (`transparent_hugepage/shmem_enabled`)."""
    available = available_bytes()
    if available is not None and size_bytes > available:
        raise PoolFull(f"a pool of {size_bytes} bytes: this machine has {available} available")
    try:
        with _memory_file(size_bytes, 0) as descriptor:
            mapping = mmap.mmap(descriptor, size_bytes)
    except OSError as e:
        raise PoolFull(f"a pool of {size_bytes} bytes: the kernel refuses them: {e}") from e
    with contextlib.suppress(OSError):  # a kernel without them
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
    """Put every page in place. ctypes lets go of the interpreter's lock meanwhile, `mmap.madvise`
    would not."""
    libc = ctypes.CDLL(None, use_errno=True)
    size = len(mapping)
    if (
        libc.madvise(
            ctypes.c_void_p(_address(mapping)), ctypes.c_size_t(size), _MADV_POPULATE_WRITE
        )
        == 0
    ):
        return
    for offset in range(0, size, ALIGNMENT_BYTES):  # an older kernel: touch them
        mapping[offset] = 0


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))
