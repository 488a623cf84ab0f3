"""An activator's real gateway behind a real listener, and a client that speaks bytes: one input,
one connection."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import re
import termios
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx

from activator.balancing.throttler_stats import calls_per_instance
from activator.http.server import ClientConnection
from activator.quotas.process_store import ProcessQuotas
from activator.settings import ActivatorSettings
from pilotlight.spec.function import FunctionKind
from tests.activator.conftest import KEY, Edge, served
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.plain_http import NO_TLS
from tests.fakes.routes import route_of, spec_of

PAUSE = b"%%PAUSE%%"
"""In an input: what follows is written after the server has read what comes before."""
PATIENCE_S = 20.0
"""Until another client must be answered, and until what an input held is free."""
STILL_S = 0.02
"""A request that is in flight and says nothing for so long waits for more of its body, and gets
none."""
DOCUMENTED = frozenset({502, 503, 504})
"""Of the platform's answers of 5xx: there is no controller here, and workers may refuse."""
_HEAD = re.compile(
    rb"HTTP/1\.1 ([1-5][0-9]{2}) "
    rb"[\x20-\x7e]*\r\n((?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n\0]*\r\n)*)\r\n"
)
_CHUNK = re.compile(rb"([0-9a-fA-F]+)\r\n")


class Answers:
    """What a connection sent, taken apart. Raises AssertionError for what is no HTTP/1.1."""

    def __init__(self, data: bytes, *, is_closed: bool) -> None:
        self.statuses: list[int] = []
        at = 0
        while at < len(data) and 101 not in self.statuses:
            head = _HEAD.match(data, at)
            assert head is not None, f"no HTTP answer at byte {at}: {data[at : at + 200]!r}"
            status = int(head[1])
            self.statuses.append(status)
            at = (
                head.end()
                if status < 200 or status in (204, 304)
                else _after_body(data, head, is_closed=is_closed)
            )


def _after_body(data: bytes, head: re.Match[bytes], *, is_closed: bool) -> int:
    lines = [line.partition(b":") for line in head[2].split(b"\r\n")[:-1]]
    fields = [(name.lower(), value.strip()) for name, _, value in lines]
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value for name, value in fields if name == b"transfer-encoding"]
    assert len(lengths) + len(codings) <= 1, f"an answer whose end is told twice: {head[0]!r}"
    at = head.end()
    if data.startswith(b"HTTP/1.1 ", at) or (at == len(data) and (lengths or codings)):
        return at  # of HEAD
    if codings:
        while (chunk := _CHUNK.match(data, at)) is not None:
            at = chunk.end() + int(chunk[1], 16) + 2
            assert data[at - 2 : at] == b"\r\n" or at > len(data)
            if int(chunk[1], 16) == 0:
                return at
        assert at >= len(data), f"no chunk at byte {at}: {data[at : at + 50]!r}"
        return len(data)
    if lengths:
        return min(len(data), at + int(lengths[0]))
    assert is_closed, f"an answer without an end: {head[0]!r}"
    return len(data)


class Listener:
    """The activator, one client at a time, and what it logged. Owner: one event loop."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self.received: list[WorkerRequest] = []
        self.faults: list[str] = []

    async def exchange(self, data: bytes, *, still_s: float = STILL_S) -> Answers:
        """One connection that sends this input. Raises AssertionError for whatever an activator
        must not do.

        still_s: how long it may say nothing after the last part before the caller leaves.
        """
        self.received.clear()
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", int(self.edge.url.rpartition(":")[2])
        )
        port = writer.get_extra_info("sockname")[1]
        await self._accepted(port)
        read = asyncio.create_task(_all(reader))
        try:
            with contextlib.suppress(ConnectionError):
                *parts, last = data.split(PAUSE)
                for part, within_s in (*((part, STILL_S) for part in parts), (last, still_s)):
                    writer.write(part)
                    await writer.drain()
                    await self._settled(port, writer, read, within_s)
            is_closed = read.done()
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError, TimeoutError):
                await asyncio.wait_for(writer.wait_closed(), PATIENCE_S)
        received = [*self.received]
        answers = Answers(await asyncio.wait_for(read, PATIENCE_S), is_closed=is_closed)
        assert all(status < 500 or status in DOCUMENTED for status in answers.statuses), (
            answers.statuses
        )
        await self._is_well()
        self.received[:] = received
        return answers

    async def _accepted(self, port: int) -> None:
        """Return once the server knows the connection."""
        ends_at = time.monotonic() + PATIENCE_S
        while self._connection(port) is None:
            assert time.monotonic() < ends_at, "it is not accepted"
            await asyncio.sleep(0)

    async def _settled(
        self, port: int, writer: asyncio.StreamWriter, read: asyncio.Task[bytes], still_s: float
    ) -> None:
        """Return once the server has read all and answered all that it can, and its answers are
        read here."""
        still_since, before = time.monotonic(), -1
        while not read.done() and not (_is_empty(writer) and self._is_idle(port)):
            now = len(self.received)
            if now != before:
                still_since, before = time.monotonic(), now
            if time.monotonic() - still_since > still_s:
                return
            await asyncio.sleep(0.0005)
        await asyncio.sleep(0)

    def _connection(self, port: int) -> ClientConnection | None:
        return next(
            (c for c in self.edge.limits.connections if c.client and c.client[1] == port), None
        )

    def _is_idle(self, port: int) -> bool:
        connection = self._connection(port)
        return connection is not None and _waits(connection) and _is_empty(connection.transport)

    async def _is_well(self) -> None:
        """Another client is answered, and nothing of this one is left."""
        async with httpx.AsyncClient(timeout=PATIENCE_S, verify=NO_TLS) as client:
            answer = await client.post(
                f"{self.edge.url}/v1/functions/shop/hello:invoke",
                json={"x": 1},
                headers={"authorization": f"Bearer {KEY}"},
            )
        assert (answer.status_code, answer.text) == (200, '{"x":1}')
        ends_at = time.monotonic() + PATIENCE_S
        while self.edge.limits.connections or sum(
            calls_per_instance(self.edge.scaler.throttlers()).values()
        ):
            assert time.monotonic() < ends_at, (
                f"{self.edge.limits}, {calls_per_instance(self.edge.scaler.throttlers())}"
            )
            await asyncio.sleep(0.001)
        faults, self.faults[:] = [*self.faults], []
        assert not faults, faults


def _is_empty(end: asyncio.StreamWriter | asyncio.Transport) -> bool:
    """Whether the kernel holds nothing for this end of a connection: neither unread (FIONREAD) nor
    on its way (TIOCOUTQ, tcp(7))."""
    descriptor = end.get_extra_info("socket").fileno()
    return descriptor < 0 or not any(
        any(fcntl.ioctl(descriptor, which, bytes(4)))
        for which in (termios.FIONREAD, termios.TIOCOUTQ)
    )


def _waits(connection: ClientConnection) -> bool:
    cycle: Any = connection.cycle
    is_parsed = (
        connection._warm is None and not connection.pipeline and not connection.flow.unparsed
    )
    return is_parsed and (cycle is None or cycle.response_complete)


async def _all(reader: asyncio.StreamReader) -> bytes:
    parts = []
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65_536):
            parts.append(part)
    return b"".join(parts)


@contextlib.asynccontextmanager
async def listening(directory: Path) -> AsyncIterator[Listener]:
    """An activator with a function, a web application and a public one; every worker keeps what it
    received."""
    settings = ActivatorSettings(
        max_body_bytes=10_000,
        max_header_bytes=8_000,
        body_timeout_s=PATIENCE_S,
        header_timeout_s=PATIENCE_S,
        unauthenticated_per_s=1e6,
    )
    listener: Listener | None = None

    async def answer(request: WorkerRequest) -> WorkerAnswer:
        assert listener is not None
        listener.received.append(request)
        return WorkerAnswer(body=request.body or b"null")

    async with served(Edge(directory, settings, answer, ProcessQuotas())) as edge:
        listener = Listener(edge)
        edge.add_tenant("acme")
        edge.add(route_of(spec_of(access=("*",))))
        edge.add(route_of(spec_of("page", kind=FunctionKind.ASGI, access=("*",))))
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: listener.faults.append(repr(context))
        )
        with _logged(listener.faults):
            yield listener


@contextlib.contextmanager
def _logged(faults: list[str]) -> Iterator[None]:
    """Keep what is logged as an error."""

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            faults.append(self.format(record))

    handler = Keep(logging.ERROR)
    logging.getLogger().addHandler(handler)
    logging.getLogger("uvicorn.error").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger("uvicorn.error").removeHandler(handler)
