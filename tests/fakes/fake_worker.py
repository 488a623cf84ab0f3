"""A worker for the activator's tests: HTTP/1.1 on a Unix socket, in the test's own event loop, with
behaviour given by a function."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httptools


@dataclass(kw_only=True)
class WorkerRequest:
    """What the activator sent."""

    method: str = ""
    path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, kw_only=True)
class WorkerAnswer:
    """What the worker says: `body` whole, or `chunks` streamed, as fast as they are read, and
    header lines behind them."""

    status: int = 200
    body: bytes = b"null"
    chunks: AsyncIterator[bytes] | None = None
    content_type: str = "application/json"
    outcome: str = "ok"
    headers: tuple[str, ...] = ()
    trailers: tuple[str, ...] = ()


Behaviour = Callable[[WorkerRequest], Awaitable[WorkerAnswer]]


async def echo(request: WorkerRequest) -> WorkerAnswer:
    """Answer with the body that came."""
    return WorkerAnswer(body=request.body or b"null")


class FakeWorker:
    """Serves `behaviour` at `path` until closed. `requests` is what arrived; `cancelled` counts
    callers who left."""

    def __init__(self, path: Path, behaviour: Behaviour = echo) -> None:
        self.path = path
        self.behaviour = behaviour
        self.requests: list[WorkerRequest] = []
        self.cancelled = 0
        self.is_dead = False
        self._server: asyncio.Server | None = None
        self.connections: set[_Connection] = set()

    async def start(self) -> FakeWorker:
        """Listen."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Connection(self), str(self.path))
        return self

    async def die(self) -> None:
        """As after kill -9: the socket stays behind, every connection breaks."""
        self.is_dead = True
        for connection in list(self.connections):
            connection.abort()
        if self._server is not None:
            for listener in self._server.sockets:
                asyncio.get_running_loop().remove_reader(listener.fileno())
            self._close_soon(4)
        await asyncio.sleep(0)

    async def aclose(self) -> None:
        """`die`, and wait until nothing of it is left."""
        await self.die()
        for _ in range(6):
            await asyncio.sleep(0)

    def _close_soon(self, rounds: int) -> None:
        """What was accepted in this moment is made first, and broken: asyncio would leave it
        open."""
        if rounds:
            asyncio.get_running_loop().call_soon(self._close_soon, rounds - 1)
        elif self._server is not None:
            self._server.close()


class _Connection(asyncio.Protocol):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._parser = httptools.HttpRequestParser(self)
        self.request = WorkerRequest()
        self._transport: asyncio.Transport | None = None
        self._task: asyncio.Task[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._worker.is_dead:  # it was accepted in the moment of its death
            transport.abort()
        self._worker.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections.discard(self)
        if self._task is not None and not self._task.done():
            self._worker.cancelled += 1
            self._task.cancel()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.abort()  # of a WebSocket: this worker has none

    def on_message_begin(self) -> None:
        self.request = WorkerRequest()

    def on_url(self, url: bytes) -> None:
        self.request.path += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.request.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.request.body += body

    def on_message_complete(self) -> None:
        self.request.method = self._parser.get_method().decode()
        self._worker.requests.append(self.request)
        self._task = asyncio.ensure_future(self._answer(self.request))

    async def _answer(self, request: WorkerRequest) -> None:
        answer = await self._worker.behaviour(request)
        transport = self._transport
        assert transport is not None
        head = (
            f"HTTP/1.1 {answer.status} X\r\ncontent-type: "
            f"{answer.content_type}\r\npilotlight-outcome: {answer.outcome}\r\n"
        )
        head += "".join(f"{line}\r\n" for line in answer.headers)
        if answer.chunks is None:
            transport.write(
                head.encode() + b"content-length: %d\r\n\r\n" % len(answer.body) + answer.body
            )
            return
        transport.write(head.encode() + b"transfer-encoding: chunked\r\n\r\n")
        async for chunk in answer.chunks:
            await self._writable.wait()
            transport.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
        transport.write(
            b"0\r\n%s\r\n" % "".join(f"{line}\r\n" for line in answer.trailers).encode()
        )


@contextlib.asynccontextmanager
async def serving(path: Path, behaviour: Behaviour = echo) -> AsyncIterator[FakeWorker]:
    """A FakeWorker for the length of a block."""
    worker = await FakeWorker(path, behaviour).start()
    try:
        yield worker
    finally:
        await worker.aclose()


class Script:
    """A behaviour that can be changed between calls."""

    def __init__(self) -> None:
        self.now: Behaviour = echo

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        return await self.now(request)


class Flaky:
    """Raises in its first `failures` calls."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.attempts: list[str] = []

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.attempts.append(request.headers.get("pilotlight-attempt", "1"))
        if len(self.attempts) <= self.failures:
            return WorkerAnswer(status=500, body=b'{"type":"function-raised"}', outcome="raised")
        return await echo(request)
