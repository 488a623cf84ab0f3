"""A worker whose stream is the test's to make, and a caller who reads each byte as its socket gives
it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from pilotlight.spec.function import MethodSpec
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest

GENERATOR = (MethodSpec(is_generator=True),)
EVENTS = {"authorization": f"Bearer {KEY}", "accept": "text/event-stream"}
OFTEN_S = 0.02


class Released:
    """A worker whose stream is what the test puts into it: each piece when it is put."""

    def __init__(self) -> None:
        self.pieces: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.trailers: tuple[str, ...] = ()
        self.content_type = ""
        self.requests = 0

    def put(self, *pieces: bytes | None) -> None:
        """None ends the stream."""
        for piece in pieces:
            self.pieces.put_nowait(piece)

    async def _chunks(self) -> AsyncIterator[bytes]:
        while (piece := await self.pieces.get()) is not None:
            yield piece

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.requests += 1
        first = await self.pieces.get()

        async def chunks() -> AsyncIterator[bytes]:
            if first is not None:
                yield first
                async for piece in self._chunks():
                    yield piece

        content_type = (
            "text/event-stream"
            if "event-stream" in request.headers.get("accept", "")
            else "application/x-ndjson"
        )
        return WorkerAnswer(
            chunks=chunks(), content_type=self.content_type or content_type, trailers=self.trailers
        )


class Reader:
    """One caller's connection: what has arrived, as text."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.text = ""
        self.at_end = False

    async def read(self) -> None:
        """One more piece, as the socket gives it."""
        async with asyncio.timeout(PATIENCE_S):
            data = await self.reader.read(65536)
        self.at_end = not data
        self.text += data.decode()

    async def until(self, text: str, times: int = 1) -> None:
        """Read until it has arrived so often."""
        while self.text.count(text) < times:
            assert not self.at_end, self.text
            await self.read()

    async def rest(self) -> list[str]:
        """Read to the end; the events of the whole stream, without comments."""
        while not self.text.endswith("\r\n0\r\n\r\n"):
            assert not self.at_end, self.text
            await self.read()
        return events_of(self.text)

    def events(self) -> list[str]:
        """What has arrived as whole events."""
        return events_of(self.text)


def events_of(raw: str) -> list[str]:
    """The events in an HTTP/1.1 answer in chunks."""
    _, _, rest = raw.partition("\r\n\r\n")
    body = ""
    while rest and (size := int(rest.partition("\r\n")[0], 16)):
        _, _, rest = rest.partition("\r\n")
        body, rest = body + rest[:size], rest[size + 2 :]
    return [part for part in body.split("\n\n") if part and not part.startswith(":")]


def told(event: str) -> tuple[str, Any]:
    """An event's name and what it says."""
    name, _, data = event.partition("\n")
    assert (name[:7], data[:6]) == ("event: ", "data: "), event
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


@contextlib.asynccontextmanager
async def reading(
    edge: Edge,
    path: str = "shop/hello:invoke",
    body: bytes = b"{}",
    accept: str = "text/event-stream",
    key: str = KEY,
) -> AsyncIterator[Reader]:
    """A call over a connection of its own, with as little between the test and the socket as there
    can be."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", int(edge.url.rpartition(":")[2]), limit=2**20
    )
    head = (
        f"POST /v1/functions/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        f"{key}\r\naccept: {accept}\r\n"
    )
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    try:
        yield Reader(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)
