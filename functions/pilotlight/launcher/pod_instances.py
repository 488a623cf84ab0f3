"""The instances of a pod: the worker itself, in place, or forks of it while it stays as the
Template.

    starting ──(ready)──▶ ready ──▶ ended
        └──(failed, or not ready in time)──▲

The Template reports the ends of its forks. After its own end they are orphans: children of the
launcher, which reaps them as the container's first process. Messages come over a channel that user
code shares, and can do harm to this pod only."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pilotlight.launcher.worker_process import WorkerProcess

MAX_FORKS = 15
"""Instances besides the first one, at most: each has a port, and these follow the first one's."""
_BACKLOG = 2048
"""Connections that wait for an instance that starts, as in `pilotlight.worker.http.server`."""
_REMEMBERED = 32
"""Number of ended instances that are still reported."""
_TEXT = 1024


@dataclass(slots=True, kw_only=True)
class PodInstance:
    """One instance.

    Attributes:
        pid: 0 until it exists. pidfd: -1 for one in place.
        status: of waitpid(2); None if unknown.
        error: what its user code raised while it started.
        kill_at: monotonic time at which it is killed.
        is_stopping: it was asked to end.
    """

    name: str
    port: int
    pid: int
    began: float
    kill_at: float | None
    pidfd: int = -1
    state: str = "starting"
    status: int | None = None
    error: Mapping[str, str] = field(default_factory=dict)
    is_stopping: bool = False

    def signal(self, number: int) -> None:
        """Send it a signal, if it exists."""
        with contextlib.suppress(OSError):  # it has ended, or the descriptor is none of a process
            if self.pidfd >= 0:
                signal.pidfd_send_signal(self.pidfd, number)
            elif self.pid:
                os.kill(self.pid, number)

    def to_json(self) -> dict[str, Any]:
        """As the control port reports it."""
        body: dict[str, Any] = {"instance": self.name, "port": self.port, "state": self.state}
        if self.state == "ended":
            body |= {"status": exit_status(self.status), "error": dict(self.error)}
        return body


class PodInstances:
    """Owner: the launcher's loop."""

    def __init__(self, host: str, first_port: int) -> None:
        self._host = host
        self._first_port = first_port
        self._offset = -1
        self._living: dict[str, PodInstance] = {}
        self._ended: deque[PodInstance] = deque(maxlen=_REMEMBERED)

    def __repr__(self) -> str:
        return f"<PodInstances {len(self._living)} living>"

    def __len__(self) -> int:
        return len(self._living)

    def get(self, name: str) -> PodInstance | None:
        """The living instance of that name."""
        return self._living.get(name)

    def to_json(self) -> list[dict[str, Any]]:
        """All that live, then the last that have ended."""
        return [one.to_json() for one in (*self._living.values(), *self._ended)]

    # -- starts

    def listen(self) -> socket.socket:
        """A socket at a free port, in which connections wait for the instance. A port is used again
        as late as possible. Raises OSError."""
        taken = {one.port for one in self._living.values()}
        for _ in range(MAX_FORKS):
            self._offset = (self._offset + 1) % MAX_FORKS
            port = self._first_port + 1 + self._offset
            if port in taken:
                continue
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            try:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                listener.bind((self._host, port))
                listener.listen(_BACKLOG)
            except OSError as e:
                listener.close()
                if e.errno != errno.EADDRINUSE:  # user code may listen there
                    raise
            else:
                return listener
        raise OSError(errno.EADDRINUSE, "no port is free")

    def start(
        self,
        worker: WorkerProcess,
        name: str,
        listener: socket.socket,
        env: Mapping[str, str],
        *,
        start: Mapping[str, Any],
        in_place: bool,
        within_s: float,
    ) -> None:
        """Make the worker, or a fork of it, become the instance. One that is not ready after
        `within_s` is killed. Raises OSError as `WorkerProcess.become`."""
        worker.become("serve" if in_place else "fork", name, listener, env, start=start)
        now = time.monotonic()
        self._living[name] = PodInstance(
            name=name,
            port=int(listener.getsockname()[1]),
            pid=worker.pid if in_place else 0,
            began=now,
            kill_at=now + within_s,
        )

    def on_message(self, message: Mapping[str, Any], fds: list[int]) -> PodInstance | None:
        """Handle a message of the worker; returns the instance that is ready, or has ended, by it.
        Takes what it keeps out of `fds`. Raises KeyError, TypeError, ValueError, AttributeError."""
        one = self._living.get(str(message.get("instance")))
        if one is None:
            return None
        match message.get("event"):
            case "forked" if not one.pid and fds:
                one.pid, one.pidfd = int(message["pid"]), fds.pop(0)
                if one.is_stopping:
                    one.signal(signal.SIGTERM)
            case "failed" if not one.error:
                error, phase = message["error"], str(message.get("phase"))[:_TEXT]
                one.error = {"phase": phase} | {
                    name: str(error.get(name))[:_TEXT] for name in ("type", "message")
                }
                if phase == "fork":  # no process was made
                    return self._end(one, None)
            case "ready" if one.state == "starting":
                one.state = "ready"
                if not one.is_stopping:
                    one.kill_at = None
                return one
            case "exited":
                status = message["status"]
                return self._end(one, status if isinstance(status, int) else None)
        return None

    # -- ends

    def stop(self, port: int, grace_s: float) -> bool:
        """Ask the instance at that port to finish its calls and to exit; it is killed after
        `grace_s`. False if there is none."""
        one = next((one for one in self._living.values() if one.port == port), None)
        if one is None:
            return False
        kill_at = time.monotonic() + grace_s
        one.kill_at = kill_at if one.kill_at is None else min(kill_at, one.kill_at)
        if not one.is_stopping:
            one.is_stopping = True
            one.signal(signal.SIGTERM)
        return True

    def signal_all(self, number: int) -> None:
        """Pass a signal on to all; those that do not exist yet get SIGTERM when they do."""
        for one in self._living.values():
            one.is_stopping = True
            one.signal(number)

    def on_reaped(self, pid: int, status: int) -> PodInstance | None:
        """Handle the end of a child of this process; returns the instance that it was."""
        one = next((one for one in self._living.values() if one.pid == pid), None)
        return self._end(one, status) if one is not None else None

    def end_unmade(self) -> list[PodInstance]:
        """The Template has ended: end the forks that it was asked for and did not make."""
        return [self._end(one, None) for one in list(self._living.values()) if not one.pid]

    def pidfds(self) -> list[int]:
        """Descriptors that become readable when an orphan ends (pidfd_open(2))."""
        return [one.pidfd for one in self._living.values() if one.pidfd >= 0]

    def end_orphan(self, pidfd: int) -> PodInstance | None:
        """Handle the end of an orphan; where another process has reaped it, its status is
        unknown."""
        one = next((one for one in self._living.values() if one.pidfd == pidfd), None)
        if one is None:
            return None
        try:
            pid, status = os.waitpid(one.pid, os.WNOHANG)
        except ChildProcessError:
            return self._end(one, None)
        return self._end(one, status if pid else None)

    def next_at(self) -> float | None:
        """When `kill_overdue` has something to do."""
        return min((one.kill_at for one in self._living.values() if one.kill_at), default=None)

    def kill_overdue(self, now: float) -> None:
        """Kill those that did not become ready, or did not end, in time."""
        for one in self._living.values():
            if one.kill_at is not None and one.kill_at <= now:
                one.kill_at, one.is_stopping = None, True
                one.signal(signal.SIGKILL)

    def _end(self, one: PodInstance, status: int | None) -> PodInstance:
        del self._living[one.name]
        self._ended.append(one)
        one.state, one.status = "ended", status
        if one.pidfd >= 0:
            os.close(one.pidfd)
            one.pidfd = -1
        return one


def exit_status(status: int | None) -> int | None:
    """The exit status of a status of waitpid(2): 128 and the signal's number for one that a signal
    ended."""
    if status is None:
        return None
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
