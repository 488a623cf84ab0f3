"""Reading ahead: the rest of a mapped file is brought into memory while its first tensors are in
use already.

A few threads, for as long as there is something to read; what is in the page cache needs none. A
process that is to be forked or dumped stops them (`stop_prefetching`): what is missing then is
read when it is touched."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator

from weight_cache.tensors.pool import available_bytes

_STEP_BYTES = 16 * 1024 * 1024
"""Between two looks at whether to stop: some milliseconds of a disk's time."""
_PROBES = 8
_MAX_THREADS = 4
_MADV_POPULATE_READ = 22  # madvise(2), since Linux 5.14
_RUNNING: set[FilePrefetcher] = set()


class FilePrefetcher:
    """Brings these ranges of a mapping (offset, length) in, in their order, at most half of the
    memory that is free.

    Its threads share the steps that are left; the lock is held for the taking only.
    """

    def __init__(self, address: int, ranges: Iterable[tuple[int, int]], *, keep: object) -> None:
        self._address = address
        self._steps = _steps(ranges, (available_bytes() or 0) // 2)
        self._keep: object = keep  # the mapping must not go away meanwhile
        self._lock = threading.Lock()
        self._stopped = False
        # one alone does not keep a fast disk busy
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
        """Whether any thread of it is left."""
        return any(thread.is_alive() for thread in self._threads)

    def start(self) -> None:
        """Begin. Once."""
        _RUNNING.add(self)
        for thread in self._threads:
            thread.start()

    def wait(self) -> None:
        """Until everything is in, or nothing more comes."""
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """Wait until its threads have ended, which they do after the step they are at."""
        self._stopped = True
        self.wait()

    def _run(self) -> None:
        try:
            populate = ctypes.CDLL(None).madvise
            while (step := self._take()) is not None:
                # Fails on an older kernel, and where the file ends early; then pages come when they
                # are touched.
                if populate(
                    ctypes.c_void_p(self._address + step[0]),
                    ctypes.c_size_t(step[1]),
                    _MADV_POPULATE_READ,
                ):
                    self._stopped = True
        finally:
            self._end()

    def _take(self) -> tuple[int, int] | None:
        with self._lock:
            return None if self._stopped else next(self._steps, None)

    def _end(self) -> None:
        """The last one lets go of the mapping."""
        with self._lock:
            self._left -= 1
            if not self._left:
                self._keep = None
                _RUNNING.discard(self)


def stop_prefetching() -> None:
    """Leave no thread of this kind."""
    for one in list(_RUNNING):
        one.stop()


def is_in_memory(descriptor: int, length_bytes: int) -> bool:
    """Whether a file is in the page cache, as far as a few bytes of it tell (preadv2(2),
    RWF_NOWAIT)."""
    byte = bytearray(1)
    try:
        for n in range(_PROBES):
            os.preadv(descriptor, [byte], (length_bytes - 1) * n // (_PROBES - 1), os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:  # a file system that cannot tell: most likely one that is memory
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
