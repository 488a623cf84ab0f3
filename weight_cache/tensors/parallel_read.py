"""Pieces of a file, read by several threads at once (preadv(2), which lets go of the interpreter's
lock).

Threads live no longer than the call: a process that is to be forked or dumped afterwards has none
of them."""

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


class ReadCancelled(Exception):
    """Raised by a read that was told to stop."""


def default_reader_threads() -> int:
    """One per core this process may use, at least two (one waits for the disk while the other
    copies), at most `MAX_THREADS`."""
    return min(MAX_THREADS, max(2, len(os.sched_getaffinity(0))))


def read_exactly(descriptor: int, buffer: memoryview, offset_bytes: int, *, name: str) -> None:
    """Fill `buffer` from `offset_bytes`; preadv may give less than is asked for. Raises
    TensorsInvalid where the file ends before."""
    done = 0
    while done < len(buffer):
        count = os.preadv(descriptor, [buffer[done:]], offset_bytes + done)
        if not count:
            raise TensorsInvalid(
                f"{name} ends at byte {offset_bytes + done}, before its last tensor does: it was "
                f"cut off"
            )
        done += count


class PieceQueue:
    """What is left to read. Threads take from it; the lock is held for the taking only."""

    def __init__(self, pieces: Iterable[ReadPiece], cancelled: threading.Event | None) -> None:
        self._left = iter(pieces)
        self._cancelled = cancelled
        self._lock = threading.Lock()
        self._stopped = False

    def take(self) -> ReadPiece | None:
        """The next one; None when there is none, or somebody failed. Raises ReadCancelled."""
        if self._cancelled is not None and self._cancelled.is_set():
            raise ReadCancelled("reading tensors was cancelled")
        with self._lock:
            return None if self._stopped else next(self._left, None)

    def stop(self) -> None:
        """Nobody takes another one."""
        self._stopped = True


def run_readers(pieces: PieceQueue, workers: Sequence[Callable[[PieceQueue], None]]) -> None:
    """Run every worker in a thread of its own until the pieces are gone; the first to fail stops
    the others, and is raised.

    An interrupt of the waiting thread stops them too; either way no thread is left.
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
        traceback.clear_frames(failure.__traceback__)  # their frames hold memory of the pool
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
        pieces.stop()  # the pieces are gone, or this one failed


def _join(thread: threading.Thread) -> None:
    """Wait for its end, also when an interrupt came in the middle of `start`: until that is done it
    cannot be joined."""
    while thread in threading.enumerate():
        try:
            thread.join()
        except RuntimeError:
            time.sleep(0.001)


def open_tensor_file(path: Path, *, least_bytes: int) -> int:
    """A descriptor of `path`, which must have that many bytes. Raises TensorsInvalid, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    size = os.fstat(descriptor).st_size
    if size < least_bytes:
        os.close(descriptor)
        raise TensorsInvalid(
            f"{path} has {size} bytes, its tensors end at {least_bytes}: it was cut off"
        )
    return descriptor
