"""Ends processes together with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from snapshotter.linux import proc


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, stopped first so that none forks meanwhile. The
    caller reaps its own child.

    One that was about to end is gone before its children are killed: they are in no tree any
    longer, but were stopped with it."""
    for one in proc.stop_tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process of another parent has not ended; it may not be reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
