"""Controls whether other processes of this uid may read and change this process' memory
(PR_SET_DUMPABLE, prctl(2)).

Instances run as the uid of their Template and see it in /proc, so a call could write to
/proc/<pid>/mem of the Template, and thereby into all later forks and the snapshot. Only root can
trace a process that is not dumpable, or open its memory. A fork inherits this; parked forks and
those that become a snapshot keep it, an instance gives it up when it gets its identity."""

from __future__ import annotations

import ctypes
import os

_PR_SET_DUMPABLE = 4


def forbid() -> None:
    """Forbid access by processes of this uid. Raises OSError."""
    _set(0)


def allow() -> None:
    """Allow access by processes of this uid, the default after execve(2). Raises OSError."""
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
