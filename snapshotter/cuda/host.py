"""The machine as the sequence sees it: devices, their use by a process, and killing a process."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from snapshotter.cuda.gpu_usage import CudaNode, GpuUsage, cuda_node, holdings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessHandle:
    """A process handle that does not match a later process with the same pid. `started_ticks`:
    field 22 of proc(5)'s `stat`."""

    pid: int
    started_ticks: int


class Machine(Protocol):
    """The required operations of the machine."""

    def node(self) -> CudaNode:
        """Driver and GPUs."""

    def holdings(self, pid: int) -> GpuUsage:
        """A process's use of devices. Raises OSError if it has exited."""

    def victim(self, pid: int) -> ProcessHandle:
        """The handle of a process. Raises OSError if it has exited."""

    def kill(self, victim: ProcessHandle) -> None:
        """Send SIGKILL; no error if it has exited."""


class ThisMachine:
    """Machine over /proc. Stateless."""

    def node(self) -> CudaNode:
        """Driver and GPUs."""
        return cuda_node()

    def holdings(self, pid: int) -> GpuUsage:
        """A process's use of devices. Raises OSError if it has exited."""
        return holdings_of(pid)

    def victim(self, pid: int) -> ProcessHandle:
        """The handle of a process. Raises OSError if it has exited."""
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
        return ProcessHandle(pid=pid, started_ticks=int(fields[19]))

    def kill(self, victim: ProcessHandle) -> None:
        """Send SIGKILL. Opens the pidfd before comparing, so that the compared process is the
        signalled one."""
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
