"""Commands executed beside an instance, managed by the shim. Standard library only; one thread, the
shim's loop."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from typing import Any

from snapshotter.shim import child, seqpacket
from snapshotter.shim.process import Process


class ExecProcesses:
    """Running commands by pid. `notify` sends `exec_exited` to the agent. Owner: the shim's
    loop."""

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self._running: dict[int, int] = {}

    def __repr__(self) -> str:
        return f"<ExecProcesses {len(self._running)} running>"

    def start(
        self,
        message: Mapping[str, Any],
        process: Process | None,
        confinement: child.Confinement | None,
        stdout: int,
        stderr: int,
    ) -> None:
        """Run a command with the instance's identity; fails if the instance does not run. Takes
        ownership of the descriptors."""
        try:
            if process is None or confinement is None or process.state not in ("forked", "ready"):
                self._notify({"event": "exec_exited", "exec": message["exec"], "status": None})
                return
            env = {**confinement.env, **process.env}
            pid = child.execute(
                message["argv"],
                confinement,
                env=env,
                cgroup=process.cgroup,
                stdout=stdout,
                stderr=stderr,
            )
            self._running[pid] = message["exec"]
        finally:
            seqpacket.close_all([stdout, stderr])

    def kill(self, exec_id: int | None = None) -> None:
        """SIGKILL one command with all its processes, or all commands."""
        for pid, known in self._running.items():
            if exec_id is None or known == exec_id:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)

    def on_reaped(self, pid: int, status: int) -> bool:
        """Handle a child's exit; False if it is not a command."""
        if pid not in self._running:
            return False
        self._notify({"event": "exec_exited", "exec": self._running.pop(pid), "status": status})
        return True
