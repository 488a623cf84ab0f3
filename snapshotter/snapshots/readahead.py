"""Read-ahead of files in the background, before they are needed: posix_fadvise(2),
POSIX_FADV_WILLNEED.

One call reads at most the size of one device request, or of the read-ahead window, regardless of
its length argument (`force_page_cache_ra` in mm/readahead.c; measured: 8 MiB of 64 on one disk, 128
KiB on others), so it is called in small steps. Pieces that appear to be in the page cache already
(preadv2(2), RWF_NOWAIT, of a few bytes) are skipped: that check takes 0.3 ms for 300 MB."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path

_PIECE_BYTES = 16 * 1024**2
"""The unit that is probed, and skipped or read; between steps the thread can be stopped."""
_STEP_BYTES = 256 * 1024
_PROBES = 4


class ReadAhead:
    """Reads files ahead in one thread. Owner: the event loop; the thread reads only `_stopped` of
    the mutable state."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = list(paths)
        self._began = time.perf_counter()
        self._stopped = False
        self._ms: float | None = None
        self._task = asyncio.create_task(asyncio.to_thread(self._run), name="read ahead")

    def ms(self) -> float:
        """Duration, or time so far."""
        return self._ms if self._ms is not None else (time.perf_counter() - self._began) * 1000

    def stop(self) -> None:
        """Stop; the remaining files are not read ahead."""
        self._stopped = True

    def _run(self) -> None:
        for path in self._paths:
            for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
                if self._stopped:
                    return
                self._ask(file)
        self._ms = (time.perf_counter() - self._began) * 1000

    def _ask(self, file: Path) -> None:
        """Read a file ahead. Ignores one that cannot be opened: the reader will report it."""
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
    """Whether a few bytes of the range, including its last, can be read without waiting for the
    disk."""
    probe = [bytearray(1)]
    try:
        for number in range(1, _PROBES + 1):
            os.preadv(fd, probe, offset + length * number // _PROBES - 1, os.RWF_NOWAIT)
    except OSError:
        return False  # EAGAIN, or the file system does not support it: read ahead anyway
    return True
