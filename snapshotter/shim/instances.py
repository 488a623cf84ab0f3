"""The instances of a slot, as its shim knows them. Standard library only; one thread, the shim's
loop."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from snapshotter import reports
from snapshotter.shim import child, seqpacket
from snapshotter.shim.event_loop import Poller
from snapshotter.shim.log_capture import LogCapture
from snapshotter.shim.parked_forks import ParkedFork, ParkedForks
from snapshotter.shim.process import Process
from snapshotter.shim.worker import ShimWorker

_MAX_TEXT = 48 * 1024
_STATUS_PATIENCE_S = 1.0
"""How long the Template may take to report the status of a child that is gone before it counts as
unknown."""


class ShimInstances:
    """Instances by id, until the agent forgets them. `tell` informs it of `forked`, `ready` and
    `exited`. Owner: the shim's loop."""

    def __init__(
        self,
        shim_worker: ShimWorker,
        lot: ParkedForks,
        *,
        poller: Poller,
        recorder: LogCapture,
        tell: Callable[..., None],
    ) -> None:
        self._shim_worker = shim_worker
        self._lot = lot
        self._poller = poller
        self._recorder = recorder
        self._tell = tell
        self._processes: dict[str, Process] = {}

    def __repr__(self) -> str:
        return (
            f"<ShimInstances {sum(p.state != 'gone' for p in self._processes.values())} instances>"
        )

    def get(self, instance: str) -> Process | None:
        """One of them."""
        return self._processes.get(instance)

    def report(self) -> None:
        """Tell an agent that has just come."""
        for p in self._processes.values():
            body = {
                "instance": p.id,
                "state": p.state,
                "note": p.note,
                "phases_ms": p.phases_ms,
                "status": p.status,
            }
            self._tell({"event": "instance", **body}, p.pidfd)

    def note(self, message: Mapping[str, Any]) -> None:
        """What to give back to the next agent about one of them."""
        if process := self._processes.get(message["instance"]):
            process.note = message["note"]

    def forget(self, instance: str) -> None:
        """The agent knows that it is gone."""
        process = self._processes.get(instance)
        if process is not None and process.state == "gone":
            del self._processes[instance]

    # -- how one comes to be

    def start(self, message: Mapping[str, Any], listener: int) -> None:
        """Fork one, assign a parked one, or turn the worker into it. Takes ownership of
        `listener`."""
        instance, in_place, shim_worker = (
            message["instance"],
            message["in_place"],
            self._shim_worker,
        )
        if (
            shim_worker.state != "resident"
            or shim_worker.peer is None
            or instance in self._processes
        ):
            os.close(listener)
            self._tell({"event": "exited", "instance": instance, "status": None, "lost": True})
            return
        log = self._recorder.open(instance)
        process = Process(
            id=instance,
            env=message["env"],
            note=message["note"],
            cgroup=child.Cgroup(**message["cgroup"]),
            log=log,
            pipes=[],
        )
        self._processes[instance] = process
        parked = self._lot.take(message["parked"]) if message.get("parked") else None
        try:
            ends = self._recorder.pipes_into(log, process.pipes)
            if parked is not None:
                self._assign(process, parked, [listener, *ends])
                return
            theirs = _give_go(process)
            groups = process.cgroup.open_tasks() if self._joins(process) and not in_place else []
            op = "serve" if in_place else "fork"
            shim_worker.peer.push(
                {"op": op, "instance": instance, "env": {}}, [listener, *ends, theirs, *groups]
            )
        except (OSError, seqpacket.MessageTooLong):
            self._finish(process, None)
            return
        if in_place:
            shim_worker.serve()
            self._on_forked(process, shim_worker.pid, os.dup(shim_worker.pidfd), joined=True)

    def _assign(self, process: Process, parked: ParkedFork, fds: list[int]) -> None:
        """A parked fork becomes the instance. Takes ownership of both. Raises OSError,
        wire.MessageTooLong; then it dies."""
        process.parked, process.pid, process.pidfd = parked.name, parked.pid, os.dup(parked.pidfd)
        try:
            seqpacket.send(
                parked.channel,
                seqpacket.encode({"op": "assign", "instance": process.id, "env": process.env}),
                fds,
            )
            process.desk = parked.channel.dup()
        except (OSError, seqpacket.MessageTooLong):
            _signal(process.pidfd)
            raise
        finally:
            seqpacket.close_all(fds)
            parked.close()
        self._on_forked(process, parked.pid, process.pidfd, joined=True)

    def hear(self, message: Mapping[str, Any], fds: list[int]) -> bool:
        """What the worker says; False when it is about none of these. Raises KeyError, TypeError,
        ValueError, OSError.

        What follows once for each instance that was ordered is our own work, and not counted as the
        worker's."""
        event, name = message["event"], str(message.get("instance"))
        process = self._processes.get(name) or self._once_parked(name)
        if process is None:
            return False
        if event == "failed" and not process.has_failed:
            process.has_failed = True
            self._tell(failure_of(message))
        elif event == "forked" and process.state == "asked":
            with self._poller.free_of_charge():
                self._on_forked(
                    process, child.pid_of(fds[0]), os.dup(fds[0]), joined=self._joins(process)
                )
        elif event == "ready" and process.state == "forked" and self._strayed(process):
            print(
                f"instance {process.id} did not enter its cgroups: it is ended",
                file=sys.stderr,
                flush=True,
            )
            _signal(process.pidfd)
        elif event == "ready" and process.state == "forked":
            phases_ms = reports.phases_of(message["phases_ms"])
            with self._poller.free_of_charge():
                process.state, process.phases_ms = "ready", phases_ms
                process.leave_desk()
                self._tell({"event": "ready", "instance": process.id, "phases_ms": phases_ms})
        elif event == "exited" and process.dead_at is not None:
            status = reports.status_of(message["status"])
            with self._poller.free_of_charge():
                self._finish(process, status)
        elif event == "exited":
            # it came before the pidfd's own news
            process.status = reports.status_of(message["status"])
        return True

    def _once_parked(self, name: str) -> Process | None:
        """The instance that the parked fork of that name became: the Template knows it by no
        other."""
        return next((p for p in self._processes.values() if p.parked == name), None)

    def _on_forked(self, process: Process, pid: int, pidfd: int, *, joined: bool) -> None:
        process.state, process.pid, process.pidfd = "forked", pid, pidfd
        self._poller.watch(pidfd, lambda _: self._on_gone(process))
        self._tell({"event": "forked", "instance": process.id}, pidfd)
        try:
            if not joined:
                child.enter_group(process.cgroup, pidfd)
        except OSError:
            # without its limits it must not run; a pid that is gone already ends the same way
            process.doomed = True
        if process.doomed:
            _signal(pidfd)
        if process.go >= 0:
            _let_wake(process)

    def _joins(self, process: Process) -> bool:
        """Whether the fork enters its groups by itself (the worker said that it can, the groups are
        of the kind)."""
        return self._shim_worker.joins and bool(process.cgroup.tasks)

    def _strayed(self, process: Process) -> bool:
        """Whether a fork that had to enter its groups by itself is elsewhere: its limits and its
        bill would be another's."""
        return (
            process.pid != self._shim_worker.pid
            and self._joins(process)
            and not child.is_in(process.cgroup, process.pid)
        )

    # -- how one ends

    def kill(self, instance: str) -> None:
        """SIGKILL it now, or as soon as it exists."""
        process = self._processes.get(instance)
        if process is not None:
            process.doomed = True
            if process.pidfd >= 0:
                _signal(process.pidfd)

    def kill_all(self) -> None:
        """SIGKILL."""
        for process in self._processes.values():
            if process.pidfd >= 0:
                _signal(process.pidfd)

    def reaped(self, pid: int, status: int) -> None:
        """A child of the shim ended."""
        for process in list(self._processes.values()):
            if process.pid == pid and process.state != "gone":
                self._finish(process, status)

    def orphaned(self) -> None:
        """The worker is gone: what it was asked for will not come."""
        for process in list(self._processes.values()):
            if process.state == "asked":
                self._finish(process, None)

    def patience_s(self) -> float | None:
        """How long the loop may wait; None for ever."""
        return (
            0.1
            if any(p.dead_at is not None and p.state != "gone" for p in self._processes.values())
            else None
        )

    def give_up_waiting(self, now: float) -> None:
        """Of those whose status nobody has told in time, it is not known."""
        for process in list(self._processes.values()):
            if (
                process.state != "gone"
                and process.dead_at is not None
                and now - process.dead_at > _STATUS_PATIENCE_S
            ):
                self._finish(process, None)

    def _on_gone(self, process: Process) -> None:
        """The pidfd says that it is dead. Its parent knows the status: we, or the Template, which
        reports it."""
        self._poller.unwatch(process.pidfd)
        process.dead_at = time.monotonic()
        if process.status is not None:
            self._finish(process, process.status)

    def _finish(self, process: Process, status: int | None) -> None:
        if process.state == "gone":
            return
        process.state, process.status, process.env = "gone", status, {}
        self._recorder.finish(process.log, process.pipes)
        for fd in (process.go, process.pidfd):
            if fd >= 0:
                self._poller.unwatch(fd)
                os.close(fd)
        process.pidfd = process.go = -1
        self._tell(
            {
                "event": "exited",
                "instance": process.id,
                "status": status,
                "lost": process.leave_desk(),
            }
        )


def failure_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """What is told of a failure: its texts cut to a few KiB, their ends kept. Raises KeyError,
    AttributeError for none of ours."""
    error = {
        str(key)[:64]: value[-_MAX_TEXT:]
        for key, value in [*message["error"].items()][:16]
        if isinstance(value, str)
    }
    return {
        "event": "failed",
        "instance": message.get("instance"),
        "phase": str(message.get("phase"))[:64],
        "error": error,
    }


def _give_go(process: Process) -> int:
    """Where the process will read `go`, once it is in its cgroups: the other end is its own. Raises
    OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)  # nobody may read for a while; a message of ours fits into the buffer
    process.go = ours.detach()
    return theirs.detach()


def _let_wake(process: Process) -> None:
    """Send what it wakes with: past the Template, in whose memory the environment would leave
    traces for all later forks."""
    try:
        os.write(process.go, seqpacket.encode({"env": dict(process.env)}))
    except ConnectionError:
        pass  # it is gone already
    except (OSError, seqpacket.MessageTooLong):
        _signal(process.pidfd)  # without its environment it must not run
    finally:
        os.close(process.go)
        process.go = -1


def _signal(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
