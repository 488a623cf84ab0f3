"""Whether other processes of this uid may read and change this process' memory (PR_SET_DUMPABLE,
prctl(2)).

Instances run as the uid of their Template and see it in /proc, so one call could write into
/proc/<pid>/mem of the Template: into all forks to come, and into the snapshot. A process that is
not dumpable is traced, and its memory is opened, by root alone. A fork inherits that; parked forks
and those that become a snapshot keep it, an instance gives it up when it gets its identity."""

from __future__ import annotations

import ctypes
import os

_PR_SET_DUMPABLE = 4


def forbid() -> None:
    """No process of this uid may from now on. Raises OSError."""
    _set(0)


def allow() -> None:
    """Back to what execve(2) leaves: processes of this uid may. Raises OSError."""
    _set(1)


def _set(value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.prctl(
            _PR_SET_DUMPABLE,
            ctypes.c_ulong(value),
            ctypes.c_ulong(0),
            ctypes.c_ulong(0),
            ctypes.c_ulong(0),
        )
        != 0
    ):
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_DUMPABLE): {os.strerror(code)}")
