"""Bytes between a caller and the engine: at once, in both directions, with back-pressure, and with
every kind of end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from pilotlight.worker.engine import tcp_proxy
from pilotlight.worker.engine.one_request import MAX_REQUEST_HEAD_BYTES, OneRequest
from pilotlight.worker.engine.tcp_proxy import HIGH_WATER_BYTES, STATUS_QUESTION, ProxyPair

PATIENCE_S = 20.0


@dataclass
class Raw:
    """An engine that is nothing but a socket: tests play its side."""

    path: str
    accepted: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = field(
        default_factory=asyncio.Queue
    )

    async def side(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """The engine's side of the next connection."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.accepted.get()


@dataclass
class World:
    """A splice in front of an engine."""

    engine: Raw
    front: str
    pairs: set[ProxyPair]
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def call(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A caller's connection."""
        reader, writer = await asyncio.open_unix_connection(self.front)
        self.writers.append(writer)
        return reader, writer


@pytest.fixture
async def world(short_tmp: Path) -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()
    raw = Raw(str(short_tmp / "engine"))
    made = World(engine=raw, front=str(short_tmp / "front"), pairs=set())

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.writers.append(writer)
        raw.accepted.put_nowait((reader, writer))

    engine = await asyncio.start_unix_server(accept, raw.path)

    def on_gone(pair: ProxyPair) -> None:
        made.pairs.discard(pair)
        made.gone.set()

    front = await loop.create_unix_server(
        _accepting(raw.path, loop, made.pairs, on_gone), made.front
    )
    yield made
    for server in (front, engine):
        server.close()
    for writer in made.writers:
        writer.transport.abort()
    while made.pairs:
        await asyncio.sleep(0)
    for writer in made.writers:
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def _accepting(
    path: str,
    loop: asyncio.AbstractEventLoop,
    pairs: set[ProxyPair],
    on_gone: Callable[[ProxyPair], None],
) -> Callable[[], asyncio.Protocol]:
    def accept() -> asyncio.Protocol:
        pair = ProxyPair(path, loop, on_gone, {STATUS_QUESTION: lambda: b'{"instance":"i-1"}'})
        pairs.add(pair)
        return pair.caller

    return accept


async def fill(writer: asyncio.StreamWriter) -> int:
    """Write until nothing more is taken for a while; how much that was."""
    sent = 0
    try:
        async with asyncio.timeout(0.5):
            while sent < 64 * HIGH_WATER_BYTES:
                writer.write(bytes(65536))
                sent += 65536
                await writer.drain()
    except TimeoutError:
        return sent
    raise AssertionError("nobody held it back")


async def test_what_is_sent_before_the_engines_side_is_there_arrives_in_order(world: World) -> None:
    _, writer = await world.call()
    writer.write(b"one ")
    writer.write(b"two")
    reader, _ = await world.engine.side()

    assert await reader.readexactly(7) == b"one two"


@pytest.mark.parametrize("pieces", [1, 7])
async def test_whoever_asks_for_the_instance_is_answered_by_the_splice(
    world: World, pieces: int
) -> None:
    reader, writer = await world.call()
    question = b"GET /pilotlight/health HTTP/1.1\r\nHost: worker\r\n\r\n"
    for start in range(0, len(question), -(-len(question) // pieces)):
        writer.write(question[start : start + -(-len(question) // pieces)])
        await writer.drain()
        await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE_S):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        await world.gone.wait()
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"content-length: 18" in head
    assert body == b'{"instance":"i-1"}'
    assert not world.pairs


@pytest.mark.parametrize(
    "question",
    [
        b"GET /pilotlight/healthy HTTP/1.1\r\n\r\n",
        b"GET /pi",
        b"G",
        b"POST /pilotlight/health HTTP/1.1\r\n\r\n",
    ],
)
async def test_what_only_begins_like_that_question_is_the_engines(
    world: World, question: bytes
) -> None:
    _, writer = await world.call()
    for at in range(len(question)):
        writer.write(question[at : at + 1])
    writer.write_eof()
    asked, engine = await world.engine.side()

    async with asyncio.timeout(PATIENCE_S):
        assert await asked.read() == question
    engine.close()


async def test_a_question_with_endless_headers_is_cut_off(world: World) -> None:
    reader, writer = await world.call()
    writer.write(b"GET /pilotlight/health HTTP/1.1\r\n" + b"x" * 9000)

    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""


async def test_each_piece_of_the_engine_goes_out_at_once(world: World) -> None:
    reader, writer = await world.call()
    writer.write(b"?")
    _, engine = await world.engine.side()

    for piece in (b"data: 1\n\n", b"data: 2\n\n"):
        engine.write(piece)
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.readexactly(len(piece)) == piece


async def test_a_caller_that_ends_its_direction_still_gets_its_answer(world: World) -> None:
    reader, writer = await world.call()
    writer.write(b"question")
    writer.write_eof()
    asked, engine = await world.engine.side()

    assert await asked.read() == b"question"
    engine.write(b"answer")
    engine.close()
    assert await reader.read() == b"answer"


async def test_an_engine_sees_that_its_caller_left(world: World) -> None:
    _, writer = await world.call()
    writer.write(b"question")
    asked, engine = await world.engine.side()
    assert await asked.readexactly(8) == b"question"

    writer.transport.abort()

    async with asyncio.timeout(PATIENCE_S):
        assert await asked.read() == b""
    engine.close()


async def test_a_caller_gets_what_the_engine_sent_before_it_died(world: World) -> None:
    reader, writer = await world.call()
    writer.write(b"?")
    _, engine = await world.engine.side()
    engine.write(b"half of an ans")
    await engine.drain()
    engine.close()

    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b"half of an ans"
        writer.write_eof()
        await world.gone.wait()
    assert not world.pairs


async def test_a_caller_that_still_sends_gets_the_answer_of_an_engine_that_has_closed(
    world: World,
) -> None:
    reader, writer = await world.call()
    writer.write(b"head")
    asked, engine = await world.engine.side()
    await asked.readexactly(4)
    (pair,) = world.pairs
    engine.write(b"answer")
    engine.close()

    async with asyncio.timeout(PATIENCE_S):
        while not pair.engine_is_lost:
            await asyncio.sleep(0.001)
        for _ in range(3):
            writer.write(bytes(2 * HIGH_WATER_BYTES))
            await writer.drain()
        assert await reader.read() == b"answer"
        assert not world.gone.is_set(), "it may still send"
        writer.write_eof()
        await world.gone.wait()


async def test_a_caller_that_sends_without_end_is_cut_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp_proxy, "LINGER_S", 0.1)
    reader, writer = await world.call()
    writer.write(b"head")
    _, engine = await world.engine.side()
    engine.close()

    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
        await world.gone.wait()
    assert not world.pairs


async def test_a_caller_that_reads_slowly_holds_the_engine_back(world: World) -> None:
    reader, writer = await world.call()
    writer.write(b"?")
    _, engine = await world.engine.side()
    sent = await fill(engine)

    assert sent < 16 * HIGH_WATER_BYTES
    async with asyncio.timeout(PATIENCE_S):
        assert len(await reader.readexactly(sent)) == sent


async def test_an_engine_that_reads_slowly_holds_the_caller_back(world: World) -> None:
    _, writer = await world.call()
    sent = await fill(writer)
    asked, engine = await world.engine.side()

    async with asyncio.timeout(PATIENCE_S):
        assert len(await asked.readexactly(sent)) == sent
    engine.close()


async def test_the_side_that_spoke_last_tells_who_owes_an_answer(world: World) -> None:
    reader, writer = await world.call()
    writer.write(b"?")
    asked, engine = await world.engine.side()
    await asked.readexactly(1)
    (pair,) = world.pairs
    assert pair.is_asking()

    engine.write(b"!")
    await reader.readexactly(1)

    assert not pair.is_asking()
    assert repr(pair) == "<ProxyPair open=2 last=engine>"


async def test_without_an_engine_the_caller_is_sent_away(short_tmp: Path) -> None:
    loop, pairs, gone = asyncio.get_running_loop(), set[ProxyPair](), asyncio.Event()
    accept = _accepting(str(short_tmp / "nobody"), loop, pairs, lambda _: gone.set())
    server = await loop.create_unix_server(accept, str(short_tmp / "front"))
    reader, writer = await asyncio.open_unix_connection(str(short_tmp / "front"))

    async with asyncio.timeout(PATIENCE_S):
        assert await reader.read() == b""
        await gone.wait()
    writer.close()
    await writer.wait_closed()
    server.close()


async def test_a_head_without_end_is_refused_and_reaches_no_server(short_tmp: Path) -> None:
    """Forwarded as it is, it would keep its connection, on which requests of other callers follow
    that are not edited."""
    loop = asyncio.get_running_loop()
    accepted: list[asyncio.StreamWriter] = []
    seen: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.append(writer)
        while data := await reader.read(65536):
            seen.append(data)

    server = await asyncio.start_unix_server(accept, str(short_tmp / "server"))
    gone = asyncio.Event()

    def front() -> asyncio.Protocol:
        pair = ProxyPair(str(short_tmp / "server"), loop, lambda _: gone.set(), edits=OneRequest())
        return pair.caller

    async with await loop.create_unix_server(front, str(short_tmp / "front")):
        reader, writer = await asyncio.open_unix_connection(str(short_tmp / "front"))
        writer.write(b"GET /asgi/x HTTP/1.1\r\nx-long: ")
        with contextlib.suppress(OSError):
            for _ in range(MAX_REQUEST_HEAD_BYTES // 65536 + 1):
                writer.write(b"a" * 65536)
                await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n")
            writer.close()
            await gone.wait()
    assert head == b"HTTP/1.1 413 Too large\r\n"
    assert seen == []
    for writer in accepted:
        writer.transport.abort()
    server.close()
