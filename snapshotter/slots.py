"""Slots as the agent holds them: one connection per shim, its state mirrored, its events turned into futures and callbacks.

The shim keeps the truth; a `Slot` can be rebuilt from it at any time (`Slot.adopt`), which is what a restarted agent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshotter import processes, wire
from snapshotter.running import Exit, Owner, Running
from snapshotter.types import InstanceId

_log = logging.getLogger(__name__)
_BACKLOG = 4096
"""Connections that wait in the kernel while an instance comes up (bounded further by net.core.somaxconn)."""

_STATE_PATIENCE_S = 5.0


class SlotLost(Exception):
    """Raised when a slot's shim is gone, or does not answer."""


class BootFailed(Exception):
    """Raised when a worker ended, or reported a failure, before its snapshot point."""

    def __init__(self, message: str, *, error: Mapping[str, Any] | None = None, status: int | None = None) -> None:
        super().__init__(message)
        self.error = error
        self.status = status


@dataclass(frozen=True, kw_only=True)
class SnapshotPoint:
    """A worker that waits for orders: names of its surplus threads, and how long it took to get there."""

    threads: tuple[str, ...]
    phases_ms: Mapping[str, float]


@dataclass(eq=False)
class Slot:
    """One shim. Owner: the event loop; every change happens in `_on_message`, between awaits, so no lock is needed.

    Attributes:
        worker: `empty`, `booting`, `resident`, `serving` or `dead`, as the shim says.
        worker_pid: host pid of the worker, 0 when there is none.
        point: the snapshot point once reached.
        parked: forks that wait for an assignment: name → host pid.
        owner: who is told; set by whoever puts a worker in.
    """

    id: str
    directory: Path
    _socket: socket.socket
    _shim_pidfd: int
    worker: str = "empty"
    worker_pid: int = 0
    running: dict[InstanceId, Running] = field(default_factory=dict)
    parked: dict[str, int] = field(default_factory=dict)
    is_lost: bool = False
    is_ending: bool = False
    owner: Owner | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = wire.Outbox(self._socket)
        self.point: asyncio.Future[SnapshotPoint] = self._loop.create_future()
        self.point.add_done_callback(seen)
        self._adopted: asyncio.Future[None] = self._loop.create_future()
        self._execs: dict[int, asyncio.Future[int | None]] = {}
        self._error: Mapping[str, Any] | None = None
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def __repr__(self) -> str:
        lost = ", lost" if self.is_lost else ""
        return f"<Slot {self.id} worker {self.worker} pid {self.worker_pid}, {len(self.running)} instances{lost}>"

    # -- orders

    def boot(self, order: Mapping[str, Any], cgroup: Mapping[str, Any]) -> None:
        """Execute the worker; `point` tells when it is ready for orders. Raises SlotLost, wire.MessageTooLong."""
        self.worker = "booting"
        self._send({**order, "cgroup": cgroup})

    def start(
        self,
        instance: InstanceId,
        *,
        env: Mapping[str, str],
        cgroup: Mapping[str, Any],
        note: Mapping[str, Any],
        in_place: bool,
        listener: int,
        parked: str | None = None,
    ) -> Running:
        """Fork an instance, assign a parked fork, or turn the worker into it. Takes ownership of `listener`.

        `parked`: the fork to assign; if it is gone by then, another one is forked, into the same group.

        Raises SlotLost, wire.MessageTooLong.
        """
        running = Running(id=instance, note=note, ready=self._loop.create_future(), gone=self._loop.create_future())
        running.ready.add_done_callback(seen)
        order = {"op": "start", "instance": instance, "env": dict(env), "cgroup": cgroup, "note": dict(note), "in_place": in_place}
        self._send({**order, "parked": parked}, [listener])
        self.running[instance] = running
        if in_place:
            self.worker = "serving"
        return running

    def park(self, name: str, cgroup: Mapping[str, Any]) -> None:
        """Fork one ahead; `parked` holds it once it waits. Raises SlotLost, wire.MessageTooLong."""
        self._send({"op": "park", "parked": name, "cgroup": cgroup})

    def unpark(self) -> None:
        """End all that are parked."""
        self._send_quietly({"op": "unpark"})

    def note(self, instance: InstanceId, note: Mapping[str, Any]) -> None:
        """What to give back to the next agent about this instance."""
        self._send_quietly({"op": "note", "instance": instance, "note": dict(note)})

    def kill(self, instance: InstanceId) -> None:
        """SIGKILL the instance now, or as soon as it exists."""
        self._send_quietly({"op": "kill", "instance": instance})

    def kill_worker(self) -> None:
        """SIGKILL the worker: a Template has nothing to say good-bye to."""
        self._send_quietly({"op": "kill_worker"})

    async def execute(self, instance: InstanceId, argv: list[str], stdout: int, stderr: int) -> int | None:
        """Run a command beside the instance; its wait status. Cancelling kills it. Raises SlotLost.

        Takes ownership of the descriptors.
        """
        exec_id = max(self._execs, default=0) + 1
        done: asyncio.Future[int | None] = self._loop.create_future()
        self._execs[exec_id] = done
        try:
            self._send({"op": "exec", "exec": exec_id, "instance": instance, "argv": argv}, [stdout, stderr])
            return await done
        finally:
            del self._execs[exec_id]
            if not done.done() or done.cancelled():
                self._send_quietly({"op": "exec_kill", "exec": exec_id})

    async def end(self) -> None:
        """Kill everything in the slot, wait until it is gone, remove its directory."""
        self.is_ending = True
        self._send_quietly({"op": "shutdown"})
        if self._shim_pidfd >= 0:
            await processes.wait_gone(self._shim_pidfd)
        self._lose()
        if self._shim_pidfd >= 0:
            os.close(self._shim_pidfd)
            self._shim_pidfd = -1
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)

    def close(self) -> None:
        """Let go of the slot without ending it: the next agent finds it as it is."""
        self._loop.remove_reader(self._socket.fileno())
        self._outbox.clear()
        self._socket.close()
        self.is_lost = True

    async def adopt(self) -> None:
        """Ask the shim for its state and mirror it. Raises SlotLost."""
        self._send({"op": "state"})
        try:
            async with asyncio.timeout(_STATE_PATIENCE_S):
                await self._adopted
        except TimeoutError:
            self._lose()
            raise SlotLost(f"slot {self.id}: its shim does not answer") from None

    def _send(self, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
        if self.is_lost:
            wire.close_all(fds or [])
            raise SlotLost(f"slot {self.id} is gone")
        try:
            self._outbox.push(message, fds or [])
        except OSError as e:
            raise SlotLost(f"slot {self.id}: its shim does not answer: {e}") from e
        if self._outbox:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def _send_quietly(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(SlotLost):
            self._send(message)

    # -- what the shim says

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):  # the reader hears of a lost peer as well
            self._outbox.flush()
        if not self._outbox:
            self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            while not self.is_lost:
                message, fds = wire.receive(self._socket)
                if message is None:
                    self._lose()
                    return
                try:
                    self._on_message(message, fds)
                finally:
                    wire.close_all(fds)
        except BlockingIOError:
            return
        except (OSError, ValueError) as e:
            _log.warning("shim.broken slot=%s error=%s", self.id, e)
            self._lose()

    def _on_message(self, message: Mapping[str, Any], fds: list[int]) -> None:
        event = message["event"]
        running = self.running.get(InstanceId(str(message.get("instance"))))
        if event == "booted":
            self.worker_pid = processes.host_pid(fds[0])
        elif event == "boot_failed":
            self.worker = "dead"
            self._fail_boot(BootFailed(message["message"]))
        elif event == "snapshot_point":
            self._reach_point(message)
        elif event == "failed":
            error = {**message["error"], "phase": message.get("phase")}
            if running is not None:
                running.error = error
            else:
                self._error = error
        elif event == "forked" and running is not None:
            running.pidfd, running.pid = os.dup(fds[0]), processes.host_pid(fds[0])
        elif event == "ready" and running is not None and not running.ready.done():
            running.ready.set_result(message["phases_ms"])
        elif event == "exited" and running is not None:
            self._finish(running, Exit(status=message["status"], lost=message["lost"] or running.pidfd < 0))
            self._send_quietly({"op": "forget", "instance": running.id})
        else:
            self._on_slot_message(message, fds)

    def _on_slot_message(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """What is not about one instance."""
        event = message["event"]
        if event == "worker_exited":
            self._worker_exited(message["status"])
        elif event == "exec_exited" and (done := self._execs.get(message["exec"])) is not None and not done.done():
            done.set_result(message["status"])
        elif event == "log_dropped" and self.owner is not None:
            self.owner.log_dropped(message["bytes"])
        elif event == "parked" and self.owner is not None:
            self.parked[message["parked"]] = processes.host_pid(fds[0])
            self.owner.parked(self)
        elif event == "parked_gone" and self.owner is not None:
            self.parked.pop(message["parked"], None)
            self.owner.parked_gone(self, message["parked"])
        elif event in ("state", "instance", "state_end"):
            self._on_state(message, fds)

    def _on_state(self, message: Mapping[str, Any], fds: list[int]) -> None:
        if message["event"] == "state":
            self.worker = message["worker"]
            self._shim_pidfd = os.dup(fds[0])
            self.worker_pid = processes.host_pid(fds[1]) if len(fds) > 1 and self.worker != "dead" else 0
            if message["point"]:
                self._reach_point(message["point"], resident=self.worker == "resident")
            elif self.worker == "dead":
                self._fail_boot(BootFailed("the worker ended while it started", status=message["status"]))
        elif message["event"] == "state_end":
            if not self._adopted.done():
                self._adopted.set_result(None)
        else:
            self._mirror(message, fds)

    def _mirror(self, message: Mapping[str, Any], fds: list[int]) -> None:
        instance = InstanceId(message["instance"])
        running = Running(id=instance, note=message["note"], ready=self._loop.create_future(), gone=self._loop.create_future())
        running.ready.add_done_callback(seen)
        self.running[instance] = running
        if fds:
            running.pidfd, running.pid = os.dup(fds[0]), processes.host_pid(fds[0])
        if message["state"] == "ready":
            running.ready.set_result(message["phases_ms"])
        if message["state"] == "gone":
            running.gone.set_result(Exit(status=message["status"]))

    def forget(self, running: Running) -> None:
        """Drop an instance that was found dead when this slot was adopted."""
        self.running.pop(running.id, None)
        self._send_quietly({"op": "forget", "instance": running.id})

    def _reach_point(self, message: Mapping[str, Any], *, resident: bool = True) -> None:
        if resident:
            self.worker = "resident"
        if not self.point.done():
            self.point.set_result(SnapshotPoint(threads=tuple(message["threads"]), phases_ms=message["phases_ms"]))

    def _fail_boot(self, failure: BootFailed) -> None:
        if not self.point.done():
            self.point.set_exception(failure)

    def _worker_exited(self, status: int | None) -> None:
        self.worker, self.worker_pid = "dead", 0
        self._fail_boot(BootFailed("the worker ended while it started", error=self._error, status=status))
        if self.owner is not None:
            self.owner.worker_gone(self, status)

    def _finish(self, running: Running, how: Exit) -> None:
        self.running.pop(running.id, None)
        if not running.gone.done():
            running.gone.set_result(how)
        running.ready.cancel()
        if running.pidfd >= 0:
            os.close(running.pidfd)
            running.pidfd = -1
        if self.owner is not None:
            self.owner.instance_gone(self, running)

    def _lose(self) -> None:
        """The shim is gone: with its PID namespace everything in it is; without one we end who we know."""
        if self.is_lost:
            return
        self.close()
        for running in list(self.running.values()):
            if running.pidfd >= 0:
                processes.send_signal(running.pidfd, signal.SIGKILL)
            self._finish(running, Exit(status=None))
        for done in self._execs.values():
            if not done.done():
                done.set_result(None)
        if not self._adopted.done():
            self._adopted.set_exception(SlotLost(f"slot {self.id} is gone"))
            seen(self._adopted)
        self._fail_boot(BootFailed("the slot's shim is gone"))
        if self.owner is not None:
            self.owner.slot_gone(self)


def seen(future: asyncio.Future[Any]) -> None:
    """A future that nobody happened to wait for is no defect."""
    if future.done() and not future.cancelled():
        future.exception()


def listen(path: Path) -> socket.socket:
    """An instance's listening socket, 0600, made by us so that connections queue before the worker accepts."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect(path: Path) -> socket.socket:
    """A connection to a shim. Raises OSError when nobody listens."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection


def write_json(path: Path, body: Mapping[str, Any], mode: int = 0o600) -> None:
    """Write a small file of a slot, with exactly this mode. No fsync: a slot does not outlive the machine."""
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, mode)
    with os.fdopen(fd, "w") as f:
        os.fchmod(fd, mode)
        json.dump(body, f)
