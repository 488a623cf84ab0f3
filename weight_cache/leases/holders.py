"""Watches processes that hold leases until they exit, with pidfd_open(2), which becomes readable on
exit.

A pid may have been reused: the start time (proc_pid_stat(5), field 22) distinguishes processes, and
is read again after the pidfd was opened, since the pidfd then refers to the process of that
time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from weight_cache.errors import LeaseUnknown, StoreFailed


def process_start_ticks(pid: int) -> int | None:
    """Start time of the process in clock ticks since boot; None if it does not exist or is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None


class LeaseHolder:
    """One watched process. Owner: one event loop.

    Attributes:
        pid, started: identify the process.
    """

    def __init__(self, pid: int, started: int, pidfd: int) -> None:
        self.pid = pid
        self.started = started
        self._pidfd = pidfd

    def __repr__(self) -> str:
        return f"<LeaseHolder pid {self.pid}{'' if self._pidfd >= 0 else ', not watched'}>"

    @classmethod
    def find(cls, pid: int, *, started: int | None = None) -> LeaseHolder:
        """Open the process with that pid, and with that start time if given.

        Raises LeaseUnknown if it does not exist, StoreFailed if it cannot be watched."""
        gone = LeaseUnknown(
            f"process {pid} does not exist, and its leases have ended: open the lease for a live process"
        )
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError as e:
            raise gone from e
        except OSError as e:
            raise StoreFailed(
                f"process {pid} cannot be watched: {e.strerror}. Let the weight cache open more "
                f"files (LimitNOFILE)"
            ) from e
        now = process_start_ticks(pid)
        if now is None or started not in (None, now):
            os.close(pidfd)
            raise gone
        return cls(pid, now, pidfd)

    def on_exit(self, tell: Callable[[], None]) -> None:
        """Call `tell` once, from the event loop, when the process has exited."""

        def ended() -> None:
            self.close()
            tell()

        asyncio.get_running_loop().add_reader(self._pidfd, ended)

    def close(self) -> None:
        """Stop watching. Idempotent."""
        if self._pidfd >= 0:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
