"""How this process behaves on a machine that serves: set once, when it starts."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import sys
from pathlib import Path

from pilotlight.core.threads import NICENESS

SWITCH_S = 0.0005
"""A thread that hashes or reads hands the interpreter over within this time (5 ms by default): a
start waits for the loop's answer."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 * 1024**2


def tune_process() -> None:
    """All of them. What a machine does not offer is left out."""
    sys.setswitchinterval(SWITCH_S)
    lower_process_priority()
    retain_malloc_buffers()
    raise_open_file_limit()


def lower_process_priority() -> bool:
    """Lower the scheduling group of this process's session (sched(7), "The autogroup feature");
    whether there was one to lower.

    Without it the niceness of its threads counts for nothing against processes of other sessions:
    50 models on their way took a hot function's p99 from 4 ms to 54 ms on two cores, and with it to
    8 ms, in the same time. A group that others share is left alone."""
    if os.getsid(0) != os.getpid():
        return False
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(NICENESS))
        return True
    return False


def retain_malloc_buffers() -> None:
    """Have malloc keep the memory of chunks instead of giving it back each time (mallopt(3)).

    A fresh buffer of 16 MiB is 4,096 page faults, which took 6 % of an ingest. What is kept is
    bounded by what is in flight."""
    with contextlib.suppress(OSError, AttributeError):  # a C library without it
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 4 * _KEPT_BYTES)


def raise_open_file_limit() -> None:
    """Take the hard limit of open files: a lease is one (the pidfd of its holder), and the soft
    limit is often 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
