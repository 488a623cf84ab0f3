"""Processes that hold leases, watched until they end: pidfd_open(2), which becomes readable then.

A pid may be another process's by the time we look: the start time (proc_pid_stat(5), field 22)
tells them apart, and is read again after the pidfd was opened, for the pidfd then stands for the
process of that time."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from weight_cache.errors import LeaseUnknown, StoreFailed


def process_start_ticks(pid: int) -> int | None:
    """When the process began, in clock ticks since boot; None when there is none, or it is a
    zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[19]) if fields[0] not in "ZX" else None


class LeaseHolder:
    """One process, watched. Owner: one event loop.

    Attributes:
        pid, started: who it is.
    """

    def __init__(self, pid: int, started: int, pidfd: int) -> None:
        self.pid = pid
        self.started = started
        self._pidfd = pidfd

    def __repr__(self) -> str:
        return f"<LeaseHolder pid {self.pid}{'' if self._pidfd >= 0 else ', not watched'}>"

    @classmethod
    def find(cls, pid: int, *, started: int | None = None) -> LeaseHolder:
        """The process of that pid, and of that start time if one is given.

        Raises LeaseUnknown when it is gone (it holds nothing), StoreFailed when it cannot be
        watched."""
        gone = LeaseUnknown(
            f"process {pid} is gone, and what it held with it: open the lease for a process that lives"
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
        """Call `tell` once, from the loop, when the process has ended."""

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
