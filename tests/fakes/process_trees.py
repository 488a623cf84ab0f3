"""Ends processes together with all that they started."""

from __future__ import annotations

import contextlib
import os
import signal

from snapshotter import processes


def kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, stopped first so that none forks meanwhile. The caller reaps its own child."""
    processes.stop_tree(pid)
    for one in processes.tree(pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
