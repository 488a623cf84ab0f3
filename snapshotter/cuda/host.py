"""The machine as the sequence sees it: what is there, what a process holds, and the end of a
process that is lost."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snapshotter.cuda.gpu_usage import CudaNode, GpuUsage, cuda_node, holdings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHandle:
    """A process, so that a later one with the same pid is not mistaken for it. `started_ticks`:
    field 22 of proc(5)'s `stat`."""

    pid: int
    started_ticks: int


class Machine(Protocol):
    """What of the machine is needed."""

    def node(self) -> CudaNode:
        """Driver and GPUs."""
        ...

    def holdings(self, pid: int) -> GpuUsage:
        """What a process holds of them; OSError when it is gone."""
        ...

    def victim(self, pid: int) -> ProcessHandle:
        """Who that is; OSError when it is gone."""
        ...

    def kill(self, victim: ProcessHandle) -> None:
        """SIGKILL; one that is gone is no error."""
        ...


class ThisMachine:
    """Machine over /proc. Stateless."""

    def __init__(self, *, proc: Path = Path("/proc")) -> None:
        self._proc = proc

    def node(self) -> CudaNode:
        """As Machine says."""
        return cuda_node(proc=self._proc)

    def holdings(self, pid: int) -> GpuUsage:
        """As Machine says."""
        return holdings_of(pid, proc=self._proc)

    def victim(self, pid: int) -> ProcessHandle:
        """As Machine says."""
        fields = (self._proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return ProcessHandle(pid=pid, started_ticks=int(fields[19]))

    def kill(self, victim: ProcessHandle) -> None:
        """As Machine says: the pidfd first, then the comparison, so that what is compared is what
        is signalled."""
        try:
            pidfd = os.pidfd_open(victim.pid)
        except ProcessLookupError:
            return
        try:
            if self.victim(victim.pid) == victim:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except (ProcessLookupError, FileNotFoundError):
            return
        finally:
            os.close(pidfd)
