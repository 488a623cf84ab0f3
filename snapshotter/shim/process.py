"""An instance as its shim knows it. Standard library only."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snapshotter.shim.child import Cgroup
from snapshotter.shim.log_pipe import LogFile, LogPipe


@dataclass(kw_only=True)
class Process:
    """An instance as its shim knows it. Owner: the shim's loop.

    Attributes:
        state: asked → forked → ready → gone.
        has_failed: its failure was told; a process has one.
        doomed: to be killed as soon as its pid is known.
        parked: what the Template calls it, if it was forked ahead; "" otherwise.
        desk: our end of where it was assigned, if it was forked ahead; kept until it is ready.
        note: what the agent wants back after its own restart.
    """

    id: str
    env: Mapping[str, str]
    note: Mapping[str, Any]
    cgroup: Cgroup
    log: LogFile
    pipes: list[LogPipe]
    go: int = -1
    parked: str = ""
    desk: socket.socket | None = None
    state: str = "asked"
    pid: int = 0
    pidfd: int = -1
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    has_failed: bool = False
    doomed: bool = False
    dead_at: float | None = None
    status: int | None = None

    def leave_desk(self) -> bool:
        """Close `api`; whether nobody there had taken the assignment up: whoever died so died
        parked, and never was the instance.

        That it was read proves nothing: the kernel may hand it to a process that has been killed
        and does not know it yet."""
        desk, self.desk = self.desk, None
        if desk is None:
            return False
        with desk:
            try:
                return not desk.recv(1, socket.MSG_DONTWAIT)
            except OSError:  # unread (ECONNRESET), or no word yet
                return True
