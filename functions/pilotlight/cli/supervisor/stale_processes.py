"""Finds processes that outlived their supervisor, by pid file, and stops them.

The process must be the recorded one (`pilotlight.core.pid_file`), and its command line begin with
the expected module."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path

from pilotlight.core import pid_file


def find_stale_pid(file: Path, argv: Sequence[str]) -> int | None:
    """The pid of the process that a pid file records if it runs `-m <module>` as in `argv`; else
    None."""
    try:
        if (pid := pid_file.read(file)) is None:
            return None
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    # the paths of interpreter and configuration may differ
    wanted = [os.fsencode(word) for word in argv[1:3]]
    return pid if words[1:3] == wanted else None


def process_uid(pid: int | None) -> int | None:
    """The effective uid of a process; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("\nUid:")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


async def stop_stale_process(file: Path, *, argv: Sequence[str], grace_s: float) -> int | None:
    """Stop the process of a pid file if it matches `argv`, and return its pid. Always delete the
    file."""
    pid = find_stale_pid(file, argv)
    if pid is not None:
        await asyncio.to_thread(terminate, pid, grace_s=grace_s)
    await asyncio.to_thread(file.unlink, missing_ok=True)
    return pid


def terminate(pid: int, *, grace_s: float, first: signal.Signals = signal.SIGTERM) -> bool:
    """Send `first`, and SIGKILL after `grace_s`; return whether the process ended without SIGKILL.
    It need not be a child of this process (pidfd_open(2))."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        signal.pidfd_send_signal(pidfd, first)
        if poll.poll(grace_s * 1000):
            return True
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        poll.poll(5000)
        return False
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)
