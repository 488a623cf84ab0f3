"""Files that will be read in a moment are asked for now, while something else goes on:
posix_fadvise(2), POSIX_FADV_WILLNEED.

One call reads at most what one request to the device, or the read-ahead window, holds, whatever its
length says (`force_page_cache_ra` in mm/readahead.c; measured: 8 MiB of 64 on one disk, 128 KiB on
others), so it is asked for in small steps. Pieces that look as if they were in the page cache
already (preadv2(2), RWF_NOWAIT, of a few bytes) are left out: that is 0.3 ms for 300 MB."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path

_PIECE_BYTES = 16 * 1024**2
"""What is looked at, and left out or asked for, as one; between steps the thread can be stopped."""
_STEP_BYTES = 256 * 1024
_PROBES = 4


class ReadAhead:
    """One thread's worth of reading ahead. Owner: the event loop; `_stopped` is the only thing that
    the thread looks at."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._began = time.perf_counter()
        self._stopped = False
        self._ms: float | None = None
        self._task = asyncio.create_task(asyncio.to_thread(self._run), name="read ahead")

    def ms(self) -> float:
        """How long it took, or takes until now."""
        return self._ms if self._ms is not None else (time.perf_counter() - self._began) * 1000

    def stop(self) -> None:
        """What was not asked for yet is not wanted any more."""
        self._stopped = True

    def _run(self) -> None:
        for path in self._paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if self._stopped:
                    return
                self._ask(file)
        self._ms = (time.perf_counter() - self._began) * 1000

    def _ask(self, file: Path) -> None:
        """One that cannot be opened is the business of whoever needs it."""
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            return
        try:
            size = os.fstat(fd).st_size
            for offset in range(0, size, _PIECE_BYTES):
                length = min(_PIECE_BYTES, size - offset)
                if not _looks_resident(fd, offset, length):
                    self._ask_piece(fd, offset, length)
        except OSError:
            return  # a directory, a pipe: nothing to read ahead
        finally:
            os.close(fd)

    def _ask_piece(self, fd: int, offset: int, length: int) -> None:
        for step in range(offset, offset + length, _STEP_BYTES):
            if self._stopped:
                return
            os.posix_fadvise(
                fd, step, min(_STEP_BYTES, offset + length - step), os.POSIX_FADV_WILLNEED
            )


def _looks_resident(fd: int, offset: int, length: int) -> bool:
    """Whether a few bytes of the range, its last among them, can be had without waiting for the
    disk."""
    probe = [bytearray(1)]
    try:
        for number in range(1, _PROBES + 1):
            os.preadv(fd, probe, offset + length * number // _PROBES - 1, os.RWF_NOWAIT)
    except OSError:
        return False  # EAGAIN; or a file system that cannot say: then asking is all there is
    return True
