"""Reading ahead: the rest of a mapped file is brought into memory while its first tensors are in use already.

One thread per model, for as long as there is something to read; what is in the page cache needs none. A process that is to be forked
or dumped stops them (`stop_reading_ahead`): what is missing then is read when it is touched.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterable, Iterator

from weight_cache.tensors.pool import available_bytes

_STEP_BYTES = 16 * 1024 * 1024
"""Between two looks at whether to stop: some milliseconds of a disk's time."""
_PROBES = 8
_MADV_POPULATE_READ = 22  # madvise(2), since Linux 5.14
_RUNNING: set[ReadAhead] = set()


class ReadAhead(threading.Thread):
    """Brings these ranges of a mapping (offset, length) in, in their order, at most half of the memory that is free."""

    def __init__(self, address: int, ranges: Iterable[tuple[int, int]], keep: object) -> None:
        super().__init__(name="read tensors ahead", daemon=True)
        self._address = address
        self._ranges = list(ranges)
        self._keep = keep  # the mapping must not go away meanwhile
        self._stopped = threading.Event()

    def start(self) -> None:
        """See Thread."""
        _RUNNING.add(self)
        super().start()

    def run(self) -> None:
        """See Thread."""
        try:
            populate = ctypes.CDLL(None).madvise
            for offset, length in _steps(self._ranges, (available_bytes() or 0) // 2):
                # Fails on an older kernel, and where the file ends early; then pages come when they are touched.
                if self._stopped.is_set() or populate(
                    ctypes.c_void_p(self._address + offset), ctypes.c_size_t(length), _MADV_POPULATE_READ
                ):
                    return
        finally:
            self._keep = None
            _RUNNING.discard(self)

    def stop(self) -> None:
        """Wait until it has ended, which it does after the step it is at."""
        self._stopped.set()
        self.join()


def stop_reading_ahead() -> None:
    """Leave no thread of this kind."""
    for one in list(_RUNNING):
        one.stop()


def is_in_memory(descriptor: int, length_bytes: int) -> bool:
    """Whether a file is in the page cache, as far as a few bytes of it tell (preadv2(2), RWF_NOWAIT)."""
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
