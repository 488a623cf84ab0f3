"""State of an instance in the shim. Standard library only."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from snapshotter.shim.child import Cgroup
from snapshotter.shim.log_file import LogFile
from snapshotter.shim.log_pipe import LogPipe


@dataclass(kw_only=True)
class Process:
    """State of an instance in the shim. Owner: the shim's loop.

    Attributes:
        state: asked → forked → ready → gone.
        has_failed: its failure was reported; only the first is.
        doomed: kill it as soon as its pid is known.
        parked: its name in the Template, if it was a parked fork; "" otherwise.
        channel: our end of its assignment channel, if it was a parked fork; open until it is ready.
        note: metadata for a restarted agent.
    """

    id: str
    env: Mapping[str, str]
    note: Mapping[str, Any]
    cgroup: Cgroup
    log: LogFile
    pipes: list[LogPipe]
    go: int = -1
    parked: str = ""
    channel: socket.socket | None = None
    state: str = "asked"
    pid: int = 0
    pidfd: int = -1
    phases_ms: Mapping[str, float] = field(default_factory=dict)
    has_failed: bool = False
    doomed: bool = False
    dead_at: float | None = None
    status: int | None = None

    def close_channel(self) -> bool:
        """Close the assignment channel. Returns whether the assignment was never acknowledged: a
        process that exited before that was never the instance.

        A read by the peer is not sufficient: the kernel may deliver to a process that was killed
        but has not exited yet.
        """
        channel, self.channel = self.channel, None
        if channel is None:
            return False
        with channel:
            try:
                return not channel.recv(1, socket.MSG_DONTWAIT)
            except OSError:  # unread (ECONNRESET), or no reply yet
                return True
