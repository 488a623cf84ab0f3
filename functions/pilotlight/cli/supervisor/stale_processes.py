"""Finds processes that outlived their supervisor, by pid file, and stops them.

A pid alone proves nothing, because it may have been reused: the process must have started when the
file says (proc(5), `starttime`), and its command line begin with the expected module."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Sequence
from pathlib import Path


def write_pid_file(pid_file: Path, pid: int) -> None:
    """Record a process: its pid, and its start in clock ticks since boot."""
    pid_file.write_text(f"{pid} {_start_ticks(pid) or 0}\n")


def find_stale_pid(pid_file: Path, argv: Sequence[str]) -> int | None:
    """The pid in `pid_file` if it is that process and runs `-m <module>` as in `argv`; else
    None."""
    try:
        pid, ticks = map(int, pid_file.read_text().split()[:2])
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return None
    # the paths of interpreter and configuration may differ
    wanted = [os.fsencode(word) for word in argv[1:3]]
    return pid if words[1:3] == wanted and ticks == _start_ticks(pid) else None


def _start_ticks(pid: int) -> int | None:
    """When a process started; None if it has exited."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def process_uid(pid: int | None) -> int | None:
    """The effective uid of a process; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/status").read_text().partition("\nUid:")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


async def stop_stale_process(pid_file: Path, *, argv: Sequence[str], grace_s: float) -> int | None:
    """Stop the process in `pid_file` if it matches `argv`, and return its pid. Always delete the
    pid file."""
    pid = find_stale_pid(pid_file, argv)
    if pid is not None:
        await asyncio.to_thread(terminate, pid, grace_s=grace_s)
    await asyncio.to_thread(pid_file.unlink, missing_ok=True)
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
