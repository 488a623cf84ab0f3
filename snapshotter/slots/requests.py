"""Asynchronous requests to a slot: the snapshot part of `slots.slot.Slot`, which turns events into
awaitable replies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket as sockets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from snapshotter.linux import proc
from snapshotter.shim import messages, seqpacket
from snapshotter.slots.replies import (
    BootFailed,
    CheckpointFailed,
    CriuRun,
    ExampleCheckResult,
    QuiesceResult,
    SlotConnectionLost,
)

T = TypeVar("T")
Send = Callable[[Mapping[str, Any], list[int]], None]


class _Pending(Generic[T]):
    """Pending replies by name."""

    def __init__(self) -> None:
        self._futures: dict[str, asyncio.Future[T]] = {}

    async def wait(self, name: str, ask: Callable[[], None], deadline_s: float | None = None) -> T:
        """Send a request and wait for its reply. Raises the errors of `send` and of the reply,
        TimeoutError."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        if name in self._futures:
            raise SlotConnectionLost(f"a request {name} is already pending")
        self._futures[name] = future
        try:
            ask()
            async with asyncio.timeout(deadline_s):
                return await future
        finally:
            del self._futures[name]

    def answer(self, name: str, value: T) -> bool:
        """Deliver a reply; False if there is no waiter."""
        future = self._futures.get(name)
        if future is None or future.done():
            return False
        future.set_result(value)
        return True

    def fail(self, name: str, error: Exception) -> None:
        """Fail one pending request."""
        future = self._futures.get(name)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: Exception) -> None:
        """Fail all pending requests."""
        for name in self._futures:
            self.fail(name, error)


class SlotRequests:
    """Requests to one slot. Owner: the event loop; changed in `on_message` and between awaits.
    `send` raises SlotConnectionLost."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._checkpoints: _Pending[QuiesceResult] = _Pending()
        self._files: _Pending[int] = _Pending()
        self._criu_processes: _Pending[CriuRun] = _Pending()
        self._proofs: _Pending[ExampleCheckResult] = _Pending()
        self._moves: _Pending[Mapping[str, Any]] = _Pending()
        self._exits: dict[str, asyncio.Future[int | None]] = {}

    def __repr__(self) -> str:
        return f"<SlotRequests {len(self._exits)} CRIU runs>"

    async def checkpoint(
        self, name: str, cgroup: Mapping[str, Any], *, in_place: bool, kdat: int | None
    ) -> QuiesceResult:
        """Quiesce a process. Raises CheckpointFailed, SlotConnectionLost. On cancellation the
        quiesced process is killed."""
        try:
            order = {"op": "checkpoint", "checkpoint": name, "cgroup": cgroup, "in_place": in_place}
            return await self._checkpoints.wait(
                name, lambda: self._send(order, [] if kdat is None else [os.dup(kdat)])
            )
        except asyncio.CancelledError:
            self.end_checkpoint(name)
            raise

    def end_checkpoint(self, name: str) -> None:
        """Kill the quiesced process, if it still exists."""
        with contextlib.suppress(SlotConnectionLost):
            self._send({"op": "checkpoint_end", "checkpoint": name}, [])

    async def save_files(self, name: str, fd: int) -> int:
        """Save the files of a checkpoint to `fd`; returns bytes. Raises CheckpointFailed,
        SlotConnectionLost."""
        return await self._files.wait(
            name, lambda: self._send({"op": "keep_files", "checkpoint": name}, [os.dup(fd)])
        )

    async def criu(
        self,
        run: str,
        argv: list[str],
        *,
        uid: int,
        cgroup: Mapping[str, Any],
        fds: list[int],
        socket: bool = True,
        stdio: bool = False,
    ) -> CriuRun:
        """Start CRIU. Takes ownership of `fds`. Raises SlotConnectionLost. On cancellation it is
        killed."""
        order = {
            "op": "criu",
            "run": run,
            "argv": argv,
            "uid": uid,
            "cgroup": cgroup,
            "socket": socket,
            "stdio": stdio,
        }
        return await self._start(run, order, fds)

    async def serve_pages(
        self, run: str, *, cgroup: Mapping[str, Any], fds: list[int], record: bool
    ) -> CriuRun:
        """Start a page server. Takes ownership of `fds`. Raises SlotConnectionLost. On cancellation
        it is killed."""
        order = {"op": "pages", "run": run, "cgroup": cgroup, "record": record}
        return await self._start(run, order, fds)

    async def _start(self, run: str, order: Mapping[str, Any], fds: list[int]) -> CriuRun:
        if run in self._exits:
            seqpacket.close_all(fds)
            raise SlotConnectionLost(f"CRIU run {run} already exists")
        self._exits[run] = asyncio.get_running_loop().create_future()
        try:
            return await self._criu_processes.wait(run, lambda: self._send(order, fds))
        except BaseException:
            self._exits.pop(run, None)
            self._kill(run)
            raise

    def _kill(self, run: str) -> None:
        with contextlib.suppress(SlotConnectionLost):
            self._send({"op": "criu_kill", "run": run}, [])

    async def prepare_restore(self, order: Mapping[str, Any], kdat: int, files: int) -> None:
        """Make the tree for a restore. Raises BootFailed, SlotConnectionLost."""
        await self._moves.wait(
            "furnish", lambda: self._send({**order, "op": "furnish"}, [os.dup(kdat), os.dup(files)])
        )

    async def resume(self, pid: int, point: Mapping[str, Any] | None, deadline_s: float) -> int:
        """Attach to the restored worker; without a point it boots the slot's function. Returns its
        host pid. Raises BootFailed, SlotConnectionLost, TimeoutError."""
        order = {"op": "revive", "pid": pid, "point": point or {}, "boots": point is None}
        answer = await self._moves.wait("revive", lambda: self._send(order, []), deadline_s)
        return int(answer["host_pid"])

    async def check_examples(
        self, deadline_s: float, answers: Mapping[str, Any], *, records: bool
    ) -> ExampleCheckResult:
        """Run the worker's examples. Raises BootFailed, SlotConnectionLost, TimeoutError."""
        order = {"op": "prove", "answers": dict(answers), "records": records}
        return await self._proofs.wait("prove", lambda: self._send(order, []), deadline_s)

    # -- messages of the shim

    def on_message(self, message: Mapping[str, Any], fds: list[int]) -> bool:
        """Handle one event; False if it is of another kind. Descriptors taken over are removed from
        `fds`."""
        handler = {
            "quiesced": self._on_quiesced,
            "checkpoint_failed": lambda m, _: self._checkpoints.fail(
                m["checkpoint"], CheckpointFailed(m["message"])
            ),
            "checkpoint_gone": lambda *_: None,
            "files_kept": lambda m, _: self._files.answer(m["checkpoint"], m["bytes"]),
            "files_failed": lambda m, _: self._files.fail(
                m["checkpoint"], CheckpointFailed(m["message"])
            ),
            "criu": self._on_criu,
            "criu_exited": lambda m, _: self._on_criu_exited(m),
            "furnished": lambda m, _: self._moves.answer("furnish", m),
            "revived": lambda _, fds: self._moves.answer(
                "revive", {"host_pid": proc.host_pid(fds[0])}
            ),
            "revive_failed": lambda m, _: self._moves.fail("revive", BootFailed(m["message"])),
            "proved": self._on_proved,
        }.get(message["event"])
        if handler is None:
            return False
        handler(message, fds)
        return True

    def boot_failed(self, message: str) -> None:
        """The tree could not be made."""
        self._moves.fail("furnish", BootFailed(message))

    def on_worker_exit(self, status: int | None) -> None:
        """Fail requests that the exited worker cannot answer."""
        self._proofs.fail(
            "prove", BootFailed("the restored worker exited during validation", status=status)
        )

    def lost(self, slot: str) -> None:
        """Fail all requests: the shim has exited."""
        error = SlotConnectionLost(f"slot {slot} was lost")
        for pending in (
            self._checkpoints,
            self._files,
            self._criu_processes,
            self._proofs,
            self._moves,
        ):
            pending.fail_all(error)
        for exited in self._exits.values():
            if not exited.done():
                exited.set_result(None)

    def _on_quiesced(self, m: Mapping[str, Any], fds: list[int]) -> None:
        found = messages.quiesced_of(m)
        quiesced = QuiesceResult(
            pid=m["pid"],
            host_pid=proc.host_pid(fds[0]),
            obstacles=tuple(found["obstacles"]),
            phases_ms=found["phases_ms"],
            stdio=m["stdio"],
            listens=tuple(found["listens"]),
            connections_inside=found["connections_inside"],
        )
        self._checkpoints.answer(m["checkpoint"], quiesced)

    def _on_criu(self, m: Mapping[str, Any], fds: list[int]) -> None:
        name = m["run"]
        exited = self._exits.get(name)
        if exited is None:
            return
        *connection, pidfd = fds
        fds.clear()
        rpc = sockets.socket(fileno=connection[0]) if connection else None
        run = CriuRun(
            socket=rpc,
            pidfd=pidfd,
            stdio_fds=tuple(m["stdio"]),
            exited=exited,
            end=lambda: self._kill(name),
        )
        if not self._criu_processes.answer(name, run):
            run.close()

    def _on_criu_exited(self, m: Mapping[str, Any]) -> None:
        self._criu_processes.fail(
            m["run"],
            SlotConnectionLost(
                f"CRIU could not be started: {m.get('message', 'it exited immediately')}"
            ),
        )
        exited = self._exits.pop(m["run"], None)
        if exited is not None and not exited.done():
            exited.set_result(m["status"])

    def _on_proved(self, m: Mapping[str, Any], _: Sequence[int]) -> None:
        result = messages.proved_of(m)
        self._proofs.answer(
            "prove", ExampleCheckResult(**{**result, "notes": tuple(result["notes"])})
        )
