"""Prefetch: reads the rest of a mapped file into memory while its first tensors are in use.

A few threads run while there is something to read; files in the page cache need none. A process
that is about to be forked or dumped stops them (`stop_prefetching`): missing pages are then read on
access."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator

from weight_cache.tensors.pool import available_bytes

_STEP_BYTES = 16 * 1024 * 1024
"""Bytes between two checks for a stop: some milliseconds of disk time."""
_PROBES = 8
_MAX_THREADS = 4
_MADV_POPULATE_READ = 22  # madvise(2), since Linux 5.14
_RUNNING: set[FilePrefetcher] = set()


class FilePrefetcher:
    """Reads ranges (offset, length) of a mapping, in order, up to half of the free memory.

    Its threads share the remaining steps; the lock is held only while taking one.
    """

    def __init__(self, address: int, ranges: Iterable[tuple[int, int]], *, keep: object) -> None:
        self._address = address
        self._steps = _steps(ranges, (available_bytes() or 0) // 2)
        self._keep: object = keep  # keeps the mapping alive meanwhile
        self._lock = threading.Lock()
        self._stopped = False
        # a single thread does not saturate a fast disk
        count = max(2, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._left = count
        self._threads = [
            threading.Thread(target=self._run, name="read tensors ahead", daemon=True)
            for _ in range(count)
        ]

    def __repr__(self) -> str:
        return f"<FilePrefetcher {'running' if self.is_running else 'ended'}>"

    @property
    def is_running(self) -> bool:
        """Whether any of its threads is alive."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Start the threads. Call once."""
        _RUNNING.add(self)
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Wait until all ranges are read, or reading has stopped."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Stop the threads after their current step, and wait for them."""
        self._stopped = True
        self.wait()

    def _run(self) -> None:
        try:
            populate = ctypes.CDLL(None).madvise
            while (step := self._pop()) is not None:
                # fails on older kernels and if the file was truncated; pages are then read on
                # access
                if populate(
                    ctypes.c_void_p(self._address + step[0]),
                    ctypes.c_size_t(step[1]),
                    _MADV_POPULATE_READ,
                ):
                    self._stopped = True
        finally:
            self._end()

    def _pop(self) -> tuple[int, int] | None:
        with self._lock:
            return None if self._stopped else next(self._steps, None)

    def _end(self) -> None:
        """Release the mapping with the last thread."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self._keep = None
                _RUNNING.discard(self)


def stop_prefetching() -> None:
    """Stop all prefetch threads of this process."""
    for one in list(_RUNNING):
        one.stop()


def is_in_memory(descriptor: int, length_bytes: int) -> bool:
    """Whether a file is in the page cache, by probing a few bytes of it (preadv2(2),
    RWF_NOWAIT)."""
    byte = bytearray(1)
    try:
        for n in range(_PROBES):
            os.preadv(descriptor, [byte], (length_bytes - 1) * n // (_PROBES - 1), os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # not supported by the file system, most likely one in memory
        return True
    return True


def _steps(ranges: Iterable[tuple[int, int]], most_bytes: int) -> Iterator[tuple[int, int]]:
    page = os.sysconf("SC_PAGE_SIZE")
    for offset, length in ranges:
        begin, end = offset // page * page, offset + length
        while begin < end and most_bytes > 0:
            count = min(_STEP_BYTES, end - begin)
            yield begin, count
            begin, most_bytes = begin + count, most_bytes - count
