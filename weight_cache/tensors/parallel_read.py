"""Parallel reads of a file's pieces by several threads (preadv(2), which releases the GIL).

The threads end with the call, so that the process can be forked or dumped afterwards."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from weight_cache.errors import TensorsInvalid
from weight_cache.tensors.read_plan import ReadPiece

MAX_THREADS = 8


def default_reader_threads() -> int:
    """One per core available to this process; at least two, so that one copies while the other
    waits for the disk; at most `MAX_THREADS`."""
    return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0))))


def read_exactly(descriptor: int, buffer: memoryview, offset_bytes: int, *, name: str) -> None:
    """Fill `buffer` from `offset_bytes`; preadv may return less than requested. Raises
    TensorsInvalid if the file is too short."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset_bytes + done)
        if not count:
            raise TensorsInvalid(
                f"{name} ends at byte {offset_bytes + done}, before its last tensor does: it is "
                f"cut off"
            )
        done += count


class PieceQueue:
    """The pieces left to read, taken by several threads. The lock is held only while taking."""

    def __init__(self, pieces: Iterable[ReadPiece]) -> None:
        self._left = iter(pieces)
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> ReadPiece | None:
        """The next piece; None if there is none or a reader failed."""
        with self._lock:
            return None if self._stopped else next(self._left, None)

    def stop(self) -> None:
        """Hand out no further pieces."""
        self._stopped = True


def run_readers(pieces: PieceQueue, workers: Sequence[Callable[[PieceQueue], None]]) -> None:
    """Run each worker in its own thread until all pieces are read; the first failure stops the
    others and is raised.

    An interrupt of the calling thread stops them too. No thread outlives the call.
    """
    failures: list[Exception] = []
    threads = [
        threading.Thread(
            target=_run, args=(pieces, worker, failures), name=f"read tensors {n}", daemon=True
        )
        for n, worker in enumerate(workers)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        pieces.stop()
        for thread in threads:
            _join(thread)
    for failure in failures:
        traceback.clear_frames(failure.__traceback__)  # their frames refer to pool memory
    if failures:
        raise failures[0]


def _run(
    pieces: PieceQueue, worker: Callable[[PieceQueue], None], failures: list[Exception]
) -> None:
    try:
        worker(pieces)
    except Exception as e:  # noqa: BLE001 - raised in the thread that waits
        failures.append(e)
    finally:
        pieces.stop()  # all pieces are read, or this worker failed


def _join(thread: threading.Thread) -> None:
    """Wait for its end, even if an interrupt occurred during `start`, until which it cannot be
    joined."""
    while thread in threading.enumerate():
        try:
            thread.join()
        except RuntimeError:
            time.sleep(0.001)


def open_tensor_file(path: Path, *, least_bytes: int) -> int:
    """Open `path`, which must have at least that many bytes. Raises TensorsInvalid, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(descriptor).st_size
    if size < least_bytes:
        os.close(descriptor)
        raise TensorsInvalid(
            f"{path} has {size} bytes, but its tensors end at {least_bytes}: it is cut off"
        )
    return descriptor
