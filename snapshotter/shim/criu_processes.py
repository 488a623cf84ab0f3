"""CRIU processes of a slot, managed by the shim. Standard library only; one thread, the shim's
loop.

A process with an RPC socket (`swrk`) belongs to the agent that requested it and ends with the
agent's connection; a page server (`page_server`) belongs to the processes that it serves.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from snapshotter.shim import child, seqpacket
from snapshotter.shim.pages import page_server_process


@dataclass(frozen=True, kw_only=True)
class _Run:
    name: str
    pid: int
    has_socket: bool


class CriuProcesses:
    """Running CRIU processes by pid. `notify` sends `criu` and `criu_exited` to the agent. Owner:
    the shim's loop.

    `stdio`: creates pipes for the output of a restored tree, and returns the write ends. `ended`:
    called when a process with an RPC socket has exited. `pages_lost`: called when a page server has
    failed.
    """

    def __init__(
        self,
        notify: Callable[..., None],
        *,
        stdio: Callable[[], list[int]],
        ended: Callable[[], None],
        pages_lost: Callable[[], None],
    ) -> None:
        self._notify = notify
        self._stdio = stdio
        self._ended = ended
        self._pages_lost = pages_lost
        self._running: dict[int, _Run] = {}

    def __repr__(self) -> str:
        return f"<CriuProcesses {len(self._running)} running>"

    def start(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """Start CRIU. The caller keeps the descriptors."""
        pair = (
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) if message["socket"] else None
        )
        ends: list[int] = []
        numbers: list[int] = []
        try:
            if message.get("stdio"):
                ends = self._stdio()
                numbers = [child.FIRST_CRIU_FD + len(fds) + i for i in range(len(ends))]
            cgroup, theirs = child.Cgroup(**message["cgroup"]), pair[1].fileno() if pair else None
            pid = child.execute_criu(
                message["argv"], [*fds, *ends], uid=message["uid"], cgroup=cgroup, connection=theirs
            )
            self._running[pid] = _Run(name=message["run"], pid=pid, has_socket=pair is not None)
            pidfd = os.pidfd_open(pid)
            ours = [pair[0].fileno()] if pair else []
            self._notify(
                {"event": "criu", "run": message["run"], "pid": pid, "stdio": numbers}, *ours, pidfd
            )
            os.close(pidfd)
        except OSError as e:
            self._notify(
                {"event": "criu_exited", "run": message["run"], "status": None, "message": str(e)}
            )
        finally:
            seqpacket.close_all(ends)
            for end in pair or ():
                end.close()

    def serve_pages(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """Start a page server; it listens when this returns. The caller keeps the descriptors:
        images, work directory, working set, and the end of a pipe (`page_server_process.fork`)."""
        images, work, working_set, brought = fds
        cgroup = child.Cgroup(**message["cgroup"])
        try:
            pid = page_server_process.fork(
                images=images,
                work=work,
                working_set=working_set,
                record=bool(message["record"]),
                ready=brought,
                enter=lambda: child.enter(cgroup.tasks or cgroup.procs, 0),
            )
            self._running[pid] = _Run(name=message["run"], pid=pid, has_socket=False)
            pidfd = os.pidfd_open(pid)
            self._notify({"event": "criu", "run": message["run"], "pid": pid, "stdio": []}, pidfd)
            os.close(pidfd)
        except OSError as e:
            self._notify(
                {"event": "criu_exited", "run": message["run"], "status": None, "message": str(e)}
            )

    def kill(self, name: str) -> None:
        """SIGKILL one with its helpers; no error if it has exited."""
        for run in self._running.values():
            if run.name == name:
                _kill(run)

    def kill_connected(self) -> None:
        """SIGKILL all processes with an RPC socket: their agent has disconnected."""
        for run in self._running.values():
            if run.has_socket:
                _kill(run)

    def on_reaped(self, pid: int, status: int) -> bool:
        """Handle a child's exit; False if it is not a CRIU process."""
        run = self._running.pop(pid, None)
        if run is None:
            return False
        if os.WIFSIGNALED(status):
            _kill_helpers(run)  # they would keep the connection and the traced processes
        if run.has_socket:
            self._ended()
        elif status:
            self._pages_lost()
        self._notify({"event": "criu_exited", "run": run.name, "status": status})
        return True


def _kill(run: _Run) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(run.pid, signal.SIGKILL)  # until setsid it is in our process group
    _kill_helpers(run)


def _kill_helpers(run: _Run) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
