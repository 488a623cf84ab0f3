"""The loop of a process that computes with what strangers sent (`process`): it answers
requests from standard input on standard output, with bounded time and memory.

Both are frames: four bytes of length, then the data. A request is two frames, what to do and the
data; its answer is one. SIGALRM ends the process when a request exceeds its time, even if the
parent has ended: a decoder or a validator lets no Python code run meanwhile."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import BinaryIO, Final

MAX_MEMORY_BYTES: Final = 2 * 1024**3
"""Documents of 10 MiB take some hundred MiB once they are decoded."""
NICENESS: Final = 10
"""Lower CPU priority than the parent."""
_PR_SET_DUMPABLE: Final = 4


def serve(answer_of: Callable[[bytes, bytes], bytes], seconds_of: Callable[[bytes], float]) -> None:
    """Answer requests until standard input ends. `seconds_of`: how long a request may take, by its
    first frame."""
    # processes of the same uid must not read this one's memory
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0)
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    _write_frame(answers, b"ready")
    while (head := _read_frame(requests)) is not None:
        data = _read_frame(requests)
        if data is None:
            return
        signal.setitimer(signal.ITIMER_REAL, seconds_of(head))
        answer = answer_of(head, data)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write_frame(answers, answer)


def _read_frame(source: BinaryIO) -> bytes | None:
    """The next frame; None where the input has ended."""
    head = source.read(4)
    if len(head) < 4:
        return None
    size = int.from_bytes(head, "big")
    data = source.read(size)
    return data if len(data) == size else None


def _write_frame(sink: BinaryIO, data: bytes) -> None:
    sink.write(len(data).to_bytes(4, "big") + data)
    sink.flush()
