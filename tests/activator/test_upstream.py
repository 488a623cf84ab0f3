"""The pooled client towards workers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.upstream import JOINED_BYTES, MAX_IDLE_S, WHOLE_BODY_BYTES, ConnectionPool, UpstreamGone
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest, serving

GET = b"GET /x HTTP/1.1\r\nhost: worker\r\n\r\n"


def post(body: bytes) -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: worker\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def test_a_small_answer_arrives_whole_and_its_connection_is_used_again(short_tmp: Path) -> None:
    async with serving(short_tmp / "w.sock") as worker:
        pool = ConnectionPool(str(worker.path))
        loop = asyncio.get_running_loop()
        connection = await pool.open(loop)

        answer = await connection.request(post(b"one"), loop=loop)
        pool.give_back(connection, now=1.0)
        again = pool.take_nowait(2.0)

        assert (answer.status, answer.body, answer.header(b"pilotlight-outcome")) == (200, b"one", b"ok")
        assert again is connection
        assert (await again.request(post(b"two"), loop=loop)).body == b"two"


@pytest.mark.parametrize("head", [b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"content-length: 9999999\r\n"])
async def test_the_answer_to_head_ends_with_its_head(short_tmp: Path, head: bytes) -> None:
    def worker() -> asyncio.Protocol:
        return _Bodiless(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(worker, str(short_tmp / "w.sock"))
    async with server:
        pool = ConnectionPool(str(short_tmp / "w.sock"))
        connection = await pool.open(loop)

        answer = await connection.request(b"HEAD /x HTTP/1.1\r\nhost: worker\r\n\r\n", loop=loop, is_head=True)
        pool.give_back(connection, now=1.0)

        assert (answer.status, answer.body) == (200, b"")
        assert pool.take_nowait(1.0) is None


class _Bodiless(asyncio.Protocol):
    """Answers whatever comes with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._answer)  # type: ignore[attr-defined]


async def test_pieces_that_came_together_go_on_together_and_in_bounds(short_tmp: Path) -> None:
    pieces = [b"%d\n" % n for n in range(40_000)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)

    def worker() -> asyncio.Protocol:
        return _Bodiless(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n")

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(worker, str(short_tmp / "w.sock"))
    async with server:
        pool = ConnectionPool(str(short_tmp / "w.sock"))
        connection = await pool.open(loop)
        answer = await connection.request(GET, loop=loop)
        chunks = [chunk async for chunk in answer.chunks()]
        is_idle = connection.is_idle
        connection.close()

    assert b"".join(chunks) == b"".join(pieces)
    assert len(chunks) < len(pieces) / 10
    assert max(map(len, chunks)) <= JOINED_BYTES
    assert is_idle


async def test_an_idle_connection_that_grew_old_is_not_used_again(short_tmp: Path) -> None:
    async with serving(short_tmp / "w.sock") as worker:
        pool = ConnectionPool(str(worker.path))
        loop = asyncio.get_running_loop()
        connection = await pool.open(loop)
        await connection.request(GET, loop=loop)
        pool.give_back(connection, now=0.0)

        assert pool.take_nowait(MAX_IDLE_S + 1) is None


async def test_a_streamed_answer_is_passed_on_piece_by_piece(short_tmp: Path) -> None:
    step = asyncio.Event()

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await step.wait()
        yield b"second"

    async def behaviour(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=pieces())

    async with serving(short_tmp / "w.sock", behaviour) as worker:
        loop = asyncio.get_running_loop()
        connection = await ConnectionPool(str(worker.path)).open(loop)
        answer = await connection.request(GET, loop=loop)
        chunks = answer.chunks()

        assert answer.body is None
        assert await anext(chunks) == b"first"
        assert not connection.is_idle
        step.set()
        assert [chunk async for chunk in chunks] == [b"second"]
        assert connection.is_idle


async def test_a_large_answer_streams_even_when_its_length_is_known(short_tmp: Path) -> None:
    size = WHOLE_BODY_BYTES + 1

    async def behaviour(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=b"x" * size)

    async with serving(short_tmp / "w.sock", behaviour) as worker:
        loop = asyncio.get_running_loop()
        connection = await ConnectionPool(str(worker.path)).open(loop)
        answer = await connection.request(GET, loop=loop)

        assert answer.body is None
        assert sum([len(chunk) async for chunk in answer.chunks()]) == size


async def test_reading_pauses_while_the_caller_does_not_read(short_tmp: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(64):
            yield b"x" * 65536
            await asyncio.sleep(0)

    async def behaviour(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=pieces())

    async with serving(short_tmp / "w.sock", behaviour) as worker:
        loop = asyncio.get_running_loop()
        connection = await ConnectionPool(str(worker.path)).open(loop)
        answer = await connection.request(GET, loop=loop)
        for _ in range(200):
            await asyncio.sleep(0)

        assert connection._buffered < 64 * 65536
        assert connection._paused
        assert sum([len(chunk) async for chunk in answer.chunks()]) == 64 * 65536


async def test_a_worker_that_dies_before_it_answers_is_told_apart_from_one_that_never_listened(short_tmp: Path) -> None:
    async def behaviour(request: WorkerRequest) -> WorkerAnswer:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with serving(short_tmp / "w.sock", behaviour) as worker:
        loop = asyncio.get_running_loop()
        pool = ConnectionPool(str(worker.path))
        connection = await pool.open(loop)
        future = connection.request(GET, loop=loop)
        while not worker.requests:
            await asyncio.sleep(0)
        await worker.die()

        with pytest.raises(UpstreamGone) as died:
            await future
        with pytest.raises(UpstreamGone) as refused:
            await pool.open(loop)

    assert died.value.sent
    assert not refused.value.sent


async def test_a_worker_that_dies_in_the_middle_of_a_stream_breaks_the_stream(short_tmp: Path) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        await asyncio.Event().wait()

    async def behaviour(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=pieces())

    async with serving(short_tmp / "w.sock", behaviour) as worker:
        loop = asyncio.get_running_loop()
        connection = await ConnectionPool(str(worker.path)).open(loop)
        chunks = (await connection.request(GET, loop=loop)).chunks()
        await anext(chunks)
        await worker.die()

        with pytest.raises(UpstreamGone):
            await anext(chunks)


async def test_closing_an_unfinished_exchange_reaches_the_worker(short_tmp: Path) -> None:
    async def behaviour(request: WorkerRequest) -> WorkerAnswer:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async with serving(short_tmp / "w.sock", behaviour) as worker:
        loop = asyncio.get_running_loop()
        connection = await ConnectionPool(str(worker.path)).open(loop)
        future = connection.request(GET, loop=loop)
        while not worker.requests:
            await asyncio.sleep(0)
        connection.close()
        while not worker.cancelled:
            await asyncio.sleep(0)

        assert worker.cancelled == 1
        with pytest.raises(UpstreamGone):
            await future


async def test_a_head_without_an_end_is_cut_off(short_tmp: Path) -> None:
    """A worker runs user code: it must not fill the memory of the activator, which is everybody's."""
    line, sent = b"x: " + b"y" * 60_000, 0

    async def floods(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(OSError):
            while sent < 200:
                writer.write(line if sent % 2 else line + b"\r\n")
                sent += 1
                await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(floods, str(short_tmp / "w.sock"))
    pool = ConnectionPool(str(short_tmp / "w.sock"))
    loop = asyncio.get_running_loop()
    connection = await pool.open(loop)
    with pytest.raises(UpstreamGone, match="head"):
        await connection.request(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", loop=loop)
    assert sent < 30
    connection.close()
    server.close()
    await server.wait_closed()
