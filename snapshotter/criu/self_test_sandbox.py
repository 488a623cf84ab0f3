"""A self-test sandbox: a minimal slot with its own namespaces and a PID 1 that runs CRIU and reaps,
without a worker.

Used by the CRIU self test and by tests of CRIU's features. All its processes die with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from snapshotter.criu.errors import CriuUnavailable
from snapshotter.criu.fd_numbers import FIRST_FD
from snapshotter.linux import proc
from snapshotter.shim import seqpacket

_ROOT = str(Path(__file__).resolve().parents[2])
_BOOT = (
    "import sys; sys.path.insert(0, {root!r}); from snapshotter.criu.sandbox_init import "
    "main; main({fd})"
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


S = TypeVar("S", bound="Sandbox")


class FirstProcess(Protocol):
    """The process that started a sandbox, and ends after it: `subprocess.Popen`, for example."""

    pid: int

    def wait(self) -> int:
        """Wait until it has exited. Blocking."""


@dataclass(eq=False, kw_only=True)
class SandboxProcess:
    """A process in a sandbox: a subject, a restored one, or CRIU. `pid` in the sandbox's namespace.
    Owner: the event loop."""

    pid: int
    pidfd: int
    exited: asyncio.Future[int | None]
    socket: socket.socket | None = None
    stdio_fds: Sequence[int] = field(default=())

    def kill(self) -> None:
        """Send SIGKILL; no error if it has exited."""
        proc.send_signal(self.pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Close its descriptors. (CRIU's are closed by its driver.)"""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Sandbox:
    """One sandbox. Owner: the event loop; answers arrive in the order of the requests, so each
    request is queued in `_waiting`.

    Attributes:
        stdio: pipes for stdout and stderr of restored processes; owned by the caller.
        criu_env: environment of CRIU.
    """

    def __init__(self, connection: socket.socket, process: FirstProcess) -> None:
        connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._process = process
        self._waiting: deque[asyncio.Future[SandboxProcess]] = deque()
        self._exits: dict[int, asyncio.Future[int | None]] = {}
        self.stdio: tuple[int, ...] = ()
        self.criu_env: Mapping[str, str] = {"PATH": _PATH}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), self._on_readable)

    def __repr__(self) -> str:
        return f"<Sandbox pid {self._process.pid}, {len(self._waiting)} orders wait>"

    async def spawn(
        self, argv: Sequence[str], *, env: Mapping[str, str] | None = None, fds: Sequence[int] = ()
    ) -> SandboxProcess:
        """Start a program in its own session, with stdio as its only descriptors.

        `fds`: stdout, or stdout and stderr, of which it takes ownership; missing ones are
        /dev/null.
        """
        return await self._order(
            {"op": "spawn", "argv": list(argv), "env": dict(env or {"PATH": _PATH})}, fds
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
    ) -> SandboxProcess:
        """Run CRIU (`snapshotter.criu.processes.CriuSlot`); a sandbox has no cgroups. With `stdio`,
        copies of `stdio` are passed."""
        pipes = [os.dup(fd) for fd in self.stdio] if stdio else []
        process = await self._order(
            {"op": "criu", "argv": argv, "uid": uid, "socket": socket, "env": self.criu_env},
            [*fds, *pipes],
        )
        process.stdio_fds = range(FIRST_FD + len(fds), FIRST_FD + len(fds) + len(pipes))
        return process

    async def serve_pages(
        self, run: str, *, cgroup: Mapping[str, Any], fds: list[int], record: bool
    ) -> SandboxProcess:
        """Start a page server (`snapshotter.criu.processes.CriuSlot`); a sandbox has no cgroups."""
        return await self._order({"op": "pages", "record": record}, fds)

    async def watch(self, pid: int) -> SandboxProcess:
        """The handle of a restored process."""
        return await self._order({"op": "watch", "pid": pid})

    async def keep_kdat(self, source: int) -> None:
        """Provide CRIU's cached kernel features. Takes ownership of `source`."""
        (await self._order({"op": "keep_kdat"}, [source])).close()

    async def kdat(self) -> bytes:
        """CRIU's cached kernel features. Raises CriuUnavailable."""
        answer = await self._order({"op": "kdat"})
        with os.fdopen(answer.pidfd, "rb") as f:
            return f.read()

    async def aclose(self) -> None:
        """Kill all its processes, and wait."""
        self._lose("the sandbox was closed")
        await asyncio.to_thread(self._process.wait)

    async def _order(self, order: Mapping[str, Any], fds: Sequence[int] = ()) -> SandboxProcess:
        answer: asyncio.Future[SandboxProcess] = self._loop.create_future()
        try:
            seqpacket.send(self._connection, seqpacket.encode(order), fds)
        except OSError as e:
            raise CriuUnavailable(f"the sandbox has exited: {e.strerror}") from e
        finally:
            seqpacket.close_all(fds)
        self._waiting.append(answer)
        return await answer

    def _on_readable(self) -> None:
        try:
            while True:
                message, fds = seqpacket.receive(self._connection)
                if message is None:
                    return self._lose("its PID 1 has exited")
                self._on_message(message, fds)
        except BlockingIOError:
            return None
        except OSError as e:
            self._lose(str(e))

    def _on_message(self, message: Mapping[str, Any], fds: list[int]) -> None:
        match message["event"]:
            case "ready":
                self._ready.set_result(None)
            case "failed":
                self._lose(message["message"])
            case "exited":
                self._on_exit(message["pid"], message["status"])
            case "done":
                self._on_answer(message, fds)

    def _on_exit(self, pid: int, status: int) -> None:
        """Remove the future too, because pids are reused (a restored process has its old one)."""
        if exited := self._exits.pop(pid, None):
            exited.set_result(status)

    def _on_answer(self, message: Mapping[str, Any], fds: list[int]) -> None:
        answer = self._waiting.popleft()
        if answer.done():  # the caller was cancelled
            seqpacket.close_all(fds)
        elif error := message.get("error"):
            answer.set_exception(CriuUnavailable(f"the sandbox reports an error: {error}"))
        else:
            exited = (
                self._exits.setdefault(message["pid"], self._loop.create_future())
                if message["pid"]
                else self._loop.create_future()
            )
            connection = socket.socket(fileno=fds.pop(0)) if message.get("socket") else None
            answer.set_result(
                SandboxProcess(
                    pid=message["pid"],
                    pidfd=fds[0] if fds else -1,
                    exited=exited,
                    socket=connection,
                )
            )

    def _lose(self, why: str) -> None:
        if self._connection.fileno() < 0:
            return
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        if not self._ready.done():
            self._ready.set_exception(CriuUnavailable(f"cannot start a sandbox: {why}"))
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(CriuUnavailable(f"the sandbox has exited: {why}"))
        for exited in self._exits.values():
            if not exited.done():
                exited.set_result(None)

    async def wait_ready(self) -> None:
        """Wait until it accepts orders. Raises CriuUnavailable if namespaces cannot be created."""
        await self._ready


@contextlib.asynccontextmanager
async def cell() -> AsyncIterator[Sandbox]:
    """A fresh sandbox for the duration of the block. Raises CriuUnavailable."""
    async with started(Sandbox, _boot) as (found, _):
        await found.wait_ready()
        yield found


async def _boot(control: socket.socket) -> FirstProcess:
    code = _BOOT.format(root=_ROOT, fd=control.fileno())
    return await asyncio.to_thread(
        subprocess.Popen,
        [sys.executable, "-I", "-S", "-B", "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=[control.fileno()],
    )


@contextlib.asynccontextmanager
async def started(
    kind: type[S], boot: Callable[[socket.socket], Awaitable[FirstProcess]]
) -> AsyncIterator[tuple[S, socket.socket]]:
    """A sandbox whose PID 1 serves the socket that `boot` gets, and our end of the connection. It
    may not be ready yet."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            process = await boot(theirs)
        found = kind(ours, process)
        try:
            yield found, ours
        finally:
            await found.aclose()
