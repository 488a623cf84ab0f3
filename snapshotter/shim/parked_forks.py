"""Parked forks, managed by the shim: children of the Template that are forked ahead and wait for an
assignment.

A parked fork is in its cgroups already and has done all identity-independent work; it has no
instance id, secret or listener until it is assigned, over a separate channel that bypasses the
Template. Standard library only; one thread, the shim's loop.
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
from snapshotter.shim.event_loop import Peer, Poller


@dataclass(kw_only=True)
class ParkedFork:
    """One parked fork.

    Attributes:
        name: its name in the Template.
        channel: channel of its assignment.
        go: pipe that releases it after the fork; -1 afterwards.
        ready: whether it waits for its assignment.
    """

    name: str
    cgroup: child.Cgroup
    channel: socket.socket
    go: int
    joins: bool
    pid: int = 0
    pidfd: int = -1
    ready: bool = False

    def close(self) -> None:
        """Close its descriptors: without its channel it exits."""
        self.channel.close()
        for fd in (self.go, self.pidfd):
            if fd >= 0:
                os.close(fd)
        self.go = self.pidfd = -1


class ParkedForks:
    """All parked forks of one slot. `notify` sends `parked` and `parked_gone` to the agent. Owner:
    the shim's loop."""

    def __init__(self, poller: Poller, notify: Callable[..., None]) -> None:
        self._poller = poller
        self._notify = notify
        self._parked: dict[str, ParkedFork] = {}

    def __repr__(self) -> str:
        return (
            f"<ParkedForks {sum(p.ready for p in self._parked.values())}/{len(self._parked)} ready>"
        )

    def park(self, name: str, worker: Peer, cgroup: child.Cgroup, *, joins: bool) -> None:
        """Request a fork from the Template. Raises OSError if the request cannot be sent."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        go_read, go = os.pipe2(os.O_CLOEXEC)
        parked = ParkedFork(name=name, cgroup=cgroup, channel=ours, go=go, joins=joins)
        descriptors = [theirs.detach(), go_read]
        try:
            if joins:
                descriptors += cgroup.open_tasks()
            message, given = {"op": "park", "instance": name, "env": {}}, descriptors
            descriptors = []
            worker.push(message, given)
        except OSError:
            seqpacket.close_all(descriptors)
            parked.close()
            raise
        self._parked[name] = parked

    def on_message(self, message: Mapping[str, Any], fds: list[int]) -> bool:
        """Handle a message of the worker; False if it does not concern a parked fork. Raises
        KeyError, TypeError, ValueError, OSError."""
        parked = self._parked.get(str(message.get("instance")))
        if parked is None:
            return False
        event = message["event"]
        if event == "forked" and parked.pidfd < 0:
            # done once for each requested fork, as in `instances`
            with self._poller.unmetered():
                self._on_forked(parked, child.pid_of(fds[0]), os.dup(fds[0]))
        elif event == "parked" and parked.pidfd >= 0 and not parked.ready:
            parked.ready = True
            self._notify({"event": "parked", "parked": parked.name}, parked.pidfd)
        elif event == "failed":
            self._drop(parked)
        return True

    def pop(self, name: str) -> ParkedFork | None:
        """Remove and return the parked fork of that name; None if it does not exist or is not
        ready: the caller then forks."""
        parked = self._parked.get(name)
        if parked is None or not parked.ready:
            return None
        del self._parked[name]
        self._poller.unwatch(parked.pidfd)
        return parked

    def clear(self) -> None:
        """End all parked forks."""
        for parked in list(self._parked.values()):
            self._drop(parked)

    def _on_forked(self, parked: ParkedFork, pid: int, pidfd: int) -> None:
        parked.pid, parked.pidfd = pid, pidfd
        self._poller.watch(pidfd, lambda _: self._drop(parked))
        try:
            if not parked.joins:
                child.enter_group(parked.cgroup, pidfd)
            os.write(parked.go, b"\n")
        except OSError:
            self._drop(parked)  # it must not run without its limits
            return
        os.close(parked.go)
        parked.go = -1

    def _drop(self, parked: ParkedFork) -> None:
        if self._parked.pop(parked.name, None) is None:
            return
        if parked.pidfd >= 0:
            self._poller.unwatch(parked.pidfd)
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(parked.pidfd, signal.SIGKILL)
        parked.close()
        self._notify({"event": "parked_gone", "parked": parked.name})
