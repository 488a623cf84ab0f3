"""The instances of a slot, managed by the shim. Standard library only; one thread, the shim's
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

from snapshotter.shim import child, messages, seqpacket
from snapshotter.shim.event_loop import Poller
from snapshotter.shim.log_capture import LogCapture
from snapshotter.shim.parked_forks import ParkedFork, ParkedForks
from snapshotter.shim.process import Process
from snapshotter.shim.worker import ShimWorker

_MAX_TEXT = 48 * 1024
_STATUS_PATIENCE_S = 1.0
"""How long the Template may take to report the exit status of a child before the status counts as
unknown."""


class ShimInstances:
    """Instances by id, until the agent acknowledges their exit. `notify` sends `forked`, `ready`
    and `exited` to the agent. Owner: the shim's loop."""

    def __init__(
        self,
        shim_worker: ShimWorker,
        parked_forks: ParkedForks,
        *,
        poller: Poller,
        recorder: LogCapture,
        notify: Callable[..., None],
    ) -> None:
        self._shim_worker = shim_worker
        self._parked_forks = parked_forks
        self._poller = poller
        self._recorder = recorder
        self._notify = notify
        self._processes: dict[str, Process] = {}

    def __repr__(self) -> str:
        return (
            f"<ShimInstances {sum(p.state != 'gone' for p in self._processes.values())} instances>"
        )

    def get(self, instance: str) -> Process | None:
        """The instance of that id, or None."""
        return self._processes.get(instance)

    def report(self) -> None:
        """Report all instances to a newly connected agent."""
        for p in self._processes.values():
            body = {
                "instance": p.id,
                "state": p.state,
                "note": p.note,
                "phases_ms": p.phases_ms,
                "status": p.status,
            }
            self._notify({"event": "instance", **body}, p.pidfd)

    def store_note(self, message: Mapping[str, Any]) -> None:
        """Store metadata of an instance for the next agent."""
        if process := self._processes.get(message["instance"]):
            process.note = message["note"]

    def acknowledge_exit(self, instance: str) -> None:
        """Remove an instance whose exit the agent has acknowledged."""
        process = self._processes.get(instance)
        if process is not None and process.state == "gone":
            del self._processes[instance]

    # -- start

    def start(self, message: Mapping[str, Any], listener: int) -> None:
        """Fork an instance, assign a parked fork, or turn the worker into it. Takes ownership of
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
            self._notify({"event": "exited", "instance": instance, "status": None, "lost": True})
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
        parked = self._parked_forks.pop(message["parked"]) if message.get("parked") else None
        try:
            ends = self._recorder.pipes_into(log, process.pipes)
            if parked is not None:
                self._assign(process, parked, [listener, *ends])
                return
            theirs = _make_go_channel(process)
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
        """Turn a parked fork into the instance. Takes ownership of both. Raises OSError,
        seqpacket.MessageTooLong after killing it."""
        process.parked, process.pid, process.pidfd = parked.name, parked.pid, os.dup(parked.pidfd)
        try:
            seqpacket.send(
                parked.channel,
                seqpacket.encode({"op": "assign", "instance": process.id, "env": process.env}),
                fds,
            )
            process.channel = parked.channel.dup()
        except (OSError, seqpacket.MessageTooLong):
            _signal(process.pidfd)
            raise
        finally:
            seqpacket.close_all(fds)
            parked.close()
        self._on_forked(process, parked.pid, process.pidfd, joined=True)

    def on_message(self, message: Mapping[str, Any], fds: list[int]) -> bool:
        """Handle a message of the worker; False if it does not concern an instance. Raises
        KeyError, TypeError, ValueError, OSError.

        Work that is done once for each ordered instance is our own and does not count against the
        worker's budget.
        """
        event, name = message["event"], str(message.get("instance"))
        process = self._processes.get(name) or self._of_parked(name)
        if process is None:
            return False
        if event == "failed" and not process.has_failed:
            process.has_failed = True
            self._notify(failure_of(message))
        elif event == "forked" and process.state == "asked":
            with self._poller.unmetered():
                self._on_forked(
                    process, child.pid_of(fds[0]), os.dup(fds[0]), joined=self._joins(process)
                )
        elif event == "ready" and process.state == "forked" and self._is_outside_groups(process):
            print(
                f"instance {process.id} did not enter its cgroups: killing it",
                file=sys.stderr,
                flush=True,
            )
            _signal(process.pidfd)
        elif event == "ready" and process.state == "forked":
            phases_ms = messages.phases_of(message["phases_ms"])
            with self._poller.unmetered():
                process.state, process.phases_ms = "ready", phases_ms
                process.close_channel()
                self._notify({"event": "ready", "instance": process.id, "phases_ms": phases_ms})
        elif event == "exited" and process.dead_at is not None:
            status = messages.status_of(message["status"])
            with self._poller.unmetered():
                self._finish(process, status)
        elif event == "exited":
            # the report arrived before the pidfd event
            process.status = messages.status_of(message["status"])
        return True

    def _of_parked(self, name: str) -> Process | None:
        """The instance that was this parked fork: the Template knows it only by the fork's name."""
        return next((p for p in self._processes.values() if p.parked == name), None)

    def _on_forked(self, process: Process, pid: int, pidfd: int, *, joined: bool) -> None:
        process.state, process.pid, process.pidfd = "forked", pid, pidfd
        self._poller.watch(pidfd, lambda _: self._on_exit(process))
        self._notify({"event": "forked", "instance": process.id}, pidfd)
        try:
            if not joined:
                child.enter_group(process.cgroup, pidfd)
        except OSError:
            # it must not run without its limits; a process that has exited takes the same path
            process.doomed = True
        if process.doomed:
            _signal(pidfd)
        if process.go >= 0:
            _send_environment(process)

    def _joins(self, process: Process) -> bool:
        """Whether the fork enters its groups itself (the worker announced it, and the groups
        support it)."""
        return self._shim_worker.joins and bool(process.cgroup.tasks)

    def _is_outside_groups(self, process: Process) -> bool:
        """Whether a fork that had to enter its groups itself is elsewhere: another group would be
        limited and billed."""
        return (
            process.pid != self._shim_worker.pid
            and self._joins(process)
            and not child.is_in(process.cgroup, process.pid)
        )

    # -- exit

    def kill(self, instance: str) -> None:
        """SIGKILL it now, or as soon as it exists."""
        process = self._processes.get(instance)
        if process is not None:
            process.doomed = True
            if process.pidfd >= 0:
                _signal(process.pidfd)

    def kill_all(self) -> None:
        """SIGKILL all instances."""
        for process in self._processes.values():
            if process.pidfd >= 0:
                _signal(process.pidfd)

    def on_reaped(self, pid: int, status: int) -> None:
        """Handle the exit of a child of the shim."""
        for process in list(self._processes.values()):
            if process.pid == pid and process.state != "gone":
                self._finish(process, status)

    def on_worker_exit(self) -> None:
        """Fail pending forks: the worker has exited."""
        for process in list(self._processes.values()):
            if process.state == "asked":
                self._finish(process, None)

    def poll_timeout_s(self) -> float | None:
        """How long the loop may wait; None: without limit."""
        return (
            0.1
            if any(p.dead_at is not None and p.state != "gone" for p in self._processes.values())
            else None
        )

    def finish_overdue(self, now: float) -> None:
        """Finish instances whose exit status was not reported in time; it is unknown."""
        for process in list(self._processes.values()):
            if (
                process.state != "gone"
                and process.dead_at is not None
                and now - process.dead_at > _STATUS_PATIENCE_S
            ):
                self._finish(process, None)

    def _on_exit(self, process: Process) -> None:
        """Handle the pidfd event of an exit. The parent knows the status: the shim, or the
        Template, which reports it."""
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
        self._notify(
            {
                "event": "exited",
                "instance": process.id,
                "status": status,
                "lost": process.close_channel(),
            }
        )


def failure_of(message: Mapping[str, Any]) -> dict[str, Any]:
    """The failure event of a message, with texts truncated to their last KiB. Raises KeyError,
    AttributeError for an invalid message."""
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


def _make_go_channel(process: Process) -> int:
    """Create the channel on which the process receives `go` once it is in its cgroups; returns its
    end. Raises OSError."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(
        False
    )  # the process may not read for a while; one message fits into the buffer
    process.go = ours.detach()
    return theirs.detach()


def _send_environment(process: Process) -> None:
    """Send the environment to the process directly: the Template's memory would keep traces of it
    for all later forks."""
    try:
        os.write(process.go, seqpacket.encode({"env": dict(process.env)}))
    except ConnectionError:
        pass  # it has exited
    except (OSError, seqpacket.MessageTooLong):
        _signal(process.pidfd)  # it must not run without its environment
    finally:
        os.close(process.go)
        process.go = -1


def _signal(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
