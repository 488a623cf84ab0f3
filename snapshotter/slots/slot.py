"""The agent's view of slots: one connection per shim, its state mirrored, its events turned into
futures and callbacks.

The shim holds the authoritative state; a `Slot` can be rebuilt from it at any time (`Slot.adopt`),
as a restarted agent does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from snapshotter.linux import proc
from snapshotter.shim import messages, seqpacket
from snapshotter.slots.instance_process import ExitStatus, InstanceProcess
from snapshotter.slots.replies import (
    BootFailed,
    CriuRun,
    ExampleCheckResult,
    QuiesceResult,
    SlotConnectionLost,
    SnapshotPoint,
)
from snapshotter.slots.requests import SlotRequests
from snapshotter.slots.sockets import (
    connect,
    seen,
)
from snapshotter.types import InstanceId

_log = logging.getLogger(__name__)
_STATE_PATIENCE_S = 5.0
_MESSAGES_AT_ONCE = 16
"""Messages of one shim per iteration of the event loop, so that others are served in between."""
_NOT_OUR_PROTOCOL = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    asyncio.InvalidStateError,
)
"""Errors of reading an invalid message: missing keys, values of other types, unsolicited replies.
"""


class SlotListener(Protocol):
    """Receives the events of a slot."""

    def on_instance_exit(self, slot: Slot, running: InstanceProcess) -> None: ...

    def on_worker_exit(self, slot: Slot, status: int | None) -> None: ...

    def on_slot_lost(self, slot: Slot) -> None: ...

    def log_dropped(self, count: int) -> None: ...

    def on_parked(self, slot: Slot) -> None: ...

    def on_parked_exit(self, slot: Slot, name: str) -> None: ...


@dataclass(eq=False)
class Slot:
    """One shim. Owner: the event loop; every change happens in `_on_message`, between awaits, so no
    lock is needed.

    Attributes:
        worker: `empty`, `booting`, `furnished`, `resident`, `serving`, `frozen`, `proving` or
            `dead`, as reported by `shim.worker.ShimWorker`.
        worker_pid: host pid of the worker, 0 if there is none.
        point: the snapshot point once reached.
        parked: forks that wait for an assignment: name → host pid.
        owner: receives the slot's events; set when a worker is placed in it.
    """

    id: str
    directory: Path
    _socket: socket.socket
    _shim_pidfd: int
    worker: str = "empty"
    worker_pid: int = 0
    running: dict[InstanceId, InstanceProcess] = field(default_factory=dict)
    parked: dict[str, int] = field(default_factory=dict)
    is_lost: bool = False
    is_ending: bool = False
    owner: SlotListener | None = None

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._outbox = seqpacket.SendQueue(self._socket)
        self.point: asyncio.Future[SnapshotPoint] = self._loop.create_future()
        self.point.add_done_callback(seen)
        self._adopted: asyncio.Future[None] = self._loop.create_future()
        self._execs: dict[int, asyncio.Future[int | None]] = {}
        self._requests = SlotRequests(self._send)
        self._error: Mapping[str, Any] | None = None
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._on_readable)

    def __repr__(self) -> str:
        lost = ", lost" if self.is_lost else ""
        return (
            f"<Slot {self.id} worker {self.worker} pid {self.worker_pid}, {len(self.running)} "
            f"instances{lost}>"
        )

    @property
    def shim_pid(self) -> int:
        """Host pid of the shim; 0 when it has exited."""
        return proc.host_pid(self._shim_pidfd) if self._shim_pidfd >= 0 else 0

    # -- requests

    def boot(self, order: Mapping[str, Any], cgroup: Mapping[str, Any]) -> None:
        """Execute the worker; `point` completes at its snapshot point. Raises SlotConnectionLost,
        seqpacket.MessageTooLong."""
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
    ) -> InstanceProcess:
        """Fork an instance, assign a parked fork, or turn the worker into the instance. Takes
        ownership of `listener`.

        `parked`: the fork to assign; if it has exited, another one is forked into the same group.

        Raises SlotConnectionLost, seqpacket.MessageTooLong.
        """
        running = InstanceProcess(
            id=instance,
            note=note,
            ready=self._loop.create_future(),
            exited=self._loop.create_future(),
        )
        running.ready.add_done_callback(seen)
        order = {
            "op": "start",
            "instance": instance,
            "env": dict(env),
            "cgroup": cgroup,
            "note": dict(note),
            "in_place": in_place,
        }
        self._send({**order, "parked": parked}, [listener])
        self.running[instance] = running
        if in_place:
            self.worker = "serving"
        return running

    def park(self, name: str, cgroup: Mapping[str, Any]) -> None:
        """Fork ahead of time; `parked` contains the fork once it waits. Raises SlotConnectionLost,
        seqpacket.MessageTooLong."""
        self._send({"op": "park", "parked": name, "cgroup": cgroup})

    def unpark(self) -> None:
        """End all parked forks."""
        self._send_quietly({"op": "unpark"})

    def store_note(self, instance: InstanceId, note: Mapping[str, Any]) -> None:
        """Store metadata of this instance for the next agent."""
        self._send_quietly({"op": "note", "instance": instance, "note": dict(note)})

    def kill(self, instance: InstanceId) -> None:
        """SIGKILL the instance now, or as soon as it exists."""
        self._send_quietly({"op": "kill", "instance": instance})

    def kill_worker(self) -> None:
        """SIGKILL the worker: a Template needs no graceful shutdown."""
        self._send_quietly({"op": "kill_worker"})

    async def execute(
        self, instance: InstanceId, argv: list[str], stdout: int, stderr: int
    ) -> int | None:
        """Run a command beside the instance; returns its wait status. Cancelling kills it. Raises
        SlotConnectionLost.

        Takes ownership of the descriptors.
        """
        exec_id = max(self._execs, default=0) + 1
        done: asyncio.Future[int | None] = self._loop.create_future()
        self._execs[exec_id] = done
        try:
            self._send(
                {"op": "exec", "exec": exec_id, "instance": instance, "argv": argv},
                [stdout, stderr],
            )
            return await done
        finally:
            del self._execs[exec_id]
            if not done.done() or done.cancelled():
                self._send_quietly({"op": "exec_kill", "exec": exec_id})

    async def checkpoint(
        self, name: str, cgroup: Mapping[str, Any], *, in_place: bool, kdat: int | None = None
    ) -> QuiesceResult:
        """Quiesce a pristine fork, or the worker itself, for a dump, which consumes it. If there
        are obstacles it is not quiesced.

        `kdat`: CRIU's cached kernel features, as for `prepare_restore`; without them CRIU tests the
        kernel again, which takes 100 ms and uses tables of the host's firewall exclusively.

        Raises CheckpointFailed, SlotConnectionLost. On cancellation the process is killed.
        """
        quiesced = await self._requests.checkpoint(name, cgroup, in_place=in_place, kdat=kdat)
        if in_place and not quiesced.obstacles:
            self.worker = "frozen"
        return quiesced

    def end_checkpoint(self, name: str) -> None:
        """Kill the quiesced process, if the dump did not consume it."""
        self._requests.end_checkpoint(name)

    async def save_files(self, name: str, fd: int) -> int:
        """Write the slot's files of that checkpoint to `fd`, which the caller closes; returns
        bytes. Raises CheckpointFailed, SlotConnectionLost."""
        return await self._requests.save_files(name, fd)

    async def criu(self, run: str, argv: list[str], **options: Any) -> CriuRun:
        """Start CRIU in the slot (`criu.processes.CriuSlot`). Takes ownership of `fds`: images,
        work directory, more. Raises SlotConnectionLost."""
        return await self._requests.criu(run, argv, **options)

    async def serve_pages(
        self, run: str, *, cgroup: Mapping[str, Any], fds: list[int], record: bool
    ) -> CriuRun:
        """Start a page server in the slot (`criu.processes.CriuSlot`). Takes ownership of `fds`.
        Raises SlotConnectionLost."""
        return await self._requests.serve_pages(run, cgroup=cgroup, fds=fds, record=record)

    async def prepare_restore(self, order: Mapping[str, Any], kdat: int, files: int) -> None:
        """Make the tree, as `boot` does, and extract a snapshot's files into it. The caller keeps
        the descriptors (/dev/null: no files).

        Raises BootFailed, SlotConnectionLost.
        """
        await self._requests.prepare_restore(order, kdat, files)
        self.worker = "furnished"

    async def resume(self, pid: int, point: Mapping[str, Any], deadline_s: float) -> None:
        """Adopt a restored process as the worker, at its snapshot point. Raises BootFailed,
        SlotConnectionLost, TimeoutError."""
        try:
            reached = SnapshotPoint.from_json(point)
        except ValueError as e:
            raise BootFailed(f"the snapshot's point is invalid: {e}") from e
        self.worker_pid = await self._requests.resume(pid, point, deadline_s)
        self._reach_point(reached)

    async def boot_restored(self, pid: int, deadline_s: float) -> None:
        """Adopt a restored process without a function as the worker, and have it boot the function
        of this slot; `point` completes at its snapshot point. Raises BootFailed,
        SlotConnectionLost, TimeoutError."""
        self.worker = "booting"
        self.worker_pid = await self._requests.resume(pid, None, deadline_s)

    async def check_examples(
        self,
        deadline_s: float,
        *,
        answers: Mapping[str, Any] | None = None,
        records: bool = False,
    ) -> ExampleCheckResult:
        """Run the worker's examples again; the worker exits afterwards. `answers`: of another
        process, to compare with in place of its own. `records`: the worker serves them as well,
        and stays until the slot ends, so that the memory that it has used can be seen. Raises
        BootFailed, SlotConnectionLost, TimeoutError."""
        self.worker = "proving"
        return await self._requests.check_examples(deadline_s, answers or {}, records=records)

    async def end(self) -> None:
        """Kill everything in the slot, wait for its exit, remove its directory. A shim whose
        connection was lost may still run and is killed."""
        self.is_ending = True
        if self.is_lost:
            self._shut_down_lost()
        self._send_quietly({"op": "shutdown"})
        if self._shim_pidfd >= 0:
            await proc.wait_readable(self._shim_pidfd)
        self._lose()
        if self._shim_pidfd >= 0:
            os.close(self._shim_pidfd)
            self._shim_pidfd = -1
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)

    def _shut_down_lost(self) -> None:
        if self._shim_pidfd >= 0:
            proc.send_signal(self._shim_pidfd, signal.SIGKILL)
            return
        with contextlib.suppress(OSError), connect(self.directory / "shim.sock") as connection:
            connection.setblocking(False)
            seqpacket.send(connection, seqpacket.encode({"op": "shutdown"}))

    def close(self) -> None:
        """Close the connection without ending the slot: the next agent finds it unchanged."""
        self._loop.remove_reader(self._socket.fileno())
        self._outbox.clear()
        self._socket.close()
        self.is_lost = True

    async def adopt(self) -> None:
        """Fetch the shim's state and mirror it; verifies that a new shim has started. Raises
        SlotConnectionLost."""
        self._send({"op": "state"})
        try:
            async with asyncio.timeout(_STATE_PATIENCE_S):
                await self._adopted
        except TimeoutError:
            self._lose()
            raise SlotConnectionLost(f"slot {self.id}: its shim does not answer") from None

    def _send(self, message: Mapping[str, Any], fds: list[int] | None = None) -> None:
        if self.is_lost:
            seqpacket.close_all(fds or [])
            raise SlotConnectionLost(f"slot {self.id} was lost")
        try:
            self._outbox.push(message, fds or [])
        except OSError as e:
            raise SlotConnectionLost(f"slot {self.id}: its shim does not answer: {e}") from e
        if self._outbox:
            self._loop.add_writer(self._socket.fileno(), self._on_writable)

    def _send_quietly(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(SlotConnectionLost):
            self._send(message)

    # -- messages of the shim

    def _pid_of(self, pidfd: int) -> int:
        """Its host pid; 0 when it has exited. Raises ValueError for a process outside the slot,
        which must not be killed or stopped on its behalf."""
        pid, shim = proc.host_pid(pidfd), self.shim_pid
        if pid and shim and proc.pid_namespace(pid) not in (None, proc.pid_namespace(shim)):
            raise ValueError(f"process {pid} is not in slot {self.id}")
        return pid

    def _on_writable(self) -> None:
        with contextlib.suppress(OSError):  # the reader detects a lost peer as well
            self._outbox.flush()
        if not self._outbox:
            self._loop.remove_writer(self._socket.fileno())

    def _on_readable(self) -> None:
        try:
            for _ in range(_MESSAGES_AT_ONCE):
                if self.is_lost:
                    return
                message, fds = seqpacket.receive(self._socket)
                if message is None:
                    self._lose()
                    return
                try:
                    self._on_message(message, fds)
                finally:
                    seqpacket.close_all(fds)
        except BlockingIOError:
            return
        except (OSError, *_NOT_OUR_PROTOCOL) as e:
            _log.warning("shim.broken slot=%s error=%s: %s", self.id, type(e).__name__, e)
            # it may still run, and receives no further requests
            self._send_quietly({"op": "shutdown"})
            self._lose()

    def _on_message(self, message: Mapping[str, Any], fds: list[int]) -> None:
        event = message["event"]
        running = self.running.get(InstanceId(str(message.get("instance"))))
        if event == "booted":
            self.worker_pid = self._pid_of(fds[0])
        elif event == "boot_failed":
            self.worker = "dead"
            self._requests.boot_failed(message["message"])
            self._fail_boot(BootFailed(message["message"]))
        elif event == "snapshot_point":
            self._reach_point(SnapshotPoint.from_json(message))
        elif event == "failed":
            error = {**message["error"], "phase": message.get("phase")}
            if running is not None:
                running.error = error
            else:
                self._error = error
        elif event == "forked" and running is not None:
            running.pid = self._pid_of(fds[0])
            running.pidfd = os.dup(fds[0])
        elif event == "ready" and running is not None and not running.ready.done():
            running.ready.set_result(messages.phases_of(message["phases_ms"]))
        elif event == "exited" and running is not None:
            self._finish(
                running,
                ExitStatus(status=_status(message), lost=message["lost"] or running.pidfd < 0),
            )
            self._send_quietly({"op": "forget", "instance": running.id})
        else:
            self._on_slot_message(message, fds)

    def _on_slot_message(self, message: Mapping[str, Any], fds: list[int]) -> None:
        """Handle events that do not concern a single instance."""
        event = message["event"]
        if event == "worker_exited":
            self._worker_exited(message["status"])
        elif (
            event == "exec_exited"
            and (done := self._execs.get(message["exec"])) is not None
            and not done.done()
        ):
            done.set_result(message["status"])
        elif event == "log_dropped" and self.owner is not None:
            self.owner.log_dropped(message["bytes"])
        elif event == "parked" and self.owner is not None:
            self.parked[message["parked"]] = self._pid_of(fds[0])
            self.owner.on_parked(self)
        elif event == "parked_gone" and self.owner is not None:
            self.parked.pop(message["parked"], None)
            self.owner.on_parked_exit(self, message["parked"])
        elif event in ("state", "instance", "state_end"):
            self._on_state(message, fds)
        else:
            self._requests.on_message(message, fds)

    def _on_state(self, message: Mapping[str, Any], fds: list[int]) -> None:
        if message["event"] == "state":
            self.worker = message["worker"]
            if self._shim_pidfd < 0:
                self._shim_pidfd = os.dup(fds[0])
            self.worker_pid = self._pid_of(fds[1]) if len(fds) > 1 and self.worker != "dead" else 0
            if message["point"]:
                self._reach_point(
                    SnapshotPoint.from_json(message["point"]), is_resident=self.worker == "resident"
                )
            elif self.worker == "dead":
                self._fail_boot(
                    BootFailed("the worker exited during its start", status=message["status"])
                )
        elif message["event"] == "state_end":
            if not self._adopted.done():
                self._adopted.set_result(None)
        else:
            self._mirror(message, fds)

    def _mirror(self, message: Mapping[str, Any], fds: list[int]) -> None:
        instance = InstanceId(message["instance"])
        running = InstanceProcess(
            id=instance,
            note=message["note"],
            ready=self._loop.create_future(),
            exited=self._loop.create_future(),
        )
        running.ready.add_done_callback(seen)
        self.running[instance] = running
        if fds:
            running.pid = self._pid_of(fds[0])
            running.pidfd = os.dup(fds[0])
        if message["state"] == "ready":
            running.ready.set_result(messages.phases_of(message["phases_ms"]))
        if message["state"] == "gone":
            running.exited.set_result(ExitStatus(status=_status(message)))

    def remove_exited(self, running: InstanceProcess) -> None:
        """Remove an instance that had exited when this slot was adopted."""
        self.running.pop(running.id, None)
        self._send_quietly({"op": "forget", "instance": running.id})

    def _reach_point(self, point: SnapshotPoint, *, is_resident: bool = True) -> None:
        if is_resident:
            self.worker = "resident"
        if not self.point.done():
            self.point.set_result(point)

    def _fail_boot(self, failure: BootFailed) -> None:
        if not self.point.done():
            self.point.set_exception(failure)

    def _worker_exited(self, status: int | None) -> None:
        self.worker, self.worker_pid = "dead", 0
        self._requests.on_worker_exit(status)
        self._fail_boot(
            BootFailed("the worker exited during its start", error=self._error, status=status)
        )
        if self.owner is not None:
            self.owner.on_worker_exit(self, status)

    def _finish(self, running: InstanceProcess, how: ExitStatus) -> None:
        self.running.pop(running.id, None)
        if not running.exited.done():
            running.exited.set_result(how)
        running.ready.cancel()
        if running.pidfd >= 0:
            os.close(running.pidfd)
            running.pidfd = -1
        if self.owner is not None:
            self.owner.on_instance_exit(self, running)

    def _lose(self) -> None:
        """Handle the loss of the shim: its PID namespace ends with it; without one the known
        processes are killed."""
        if self.is_lost:
            return
        self.close()
        for running in list(self.running.values()):
            if running.pidfd >= 0:
                proc.send_signal(running.pidfd, signal.SIGKILL)
            self._finish(running, ExitStatus(status=None))
        for done in self._execs.values():
            if not done.done():
                done.set_result(None)
        self._requests.lost(self.id)
        if not self._adopted.done():
            self._adopted.set_exception(SlotConnectionLost(f"slot {self.id} was lost"))
            seen(self._adopted)
        self._fail_boot(BootFailed("the slot's shim has exited"))
        if self.owner is not None:
            self.owner.on_slot_lost(self)


def _status(message: Mapping[str, Any]) -> int | None:
    """Wait status of a process; None if unknown. Raises ValueError, KeyError."""
    return None if message["status"] is None else messages.status_of(message["status"])
