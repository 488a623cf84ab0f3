"""The pooled client towards workers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.worker_client.connection import (
    JOINED_BYTES,
    MAX_HEAD_BYTES,
    MAX_IDLE_S,
    WHOLE_BODY_BYTES,
    ConnectionPool,
    WorkerConnectionLost,
)
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest, serving

GET = b"GET /x HTTP/1.1\r\nhost: worker\r\n\r\n"


def post(body: bytes) -> bytes:
    return b"POST /x HTTP/1.1\r\nhost: worker\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


async def test_a_small_answer_arrives_whole_and_its_connection_is_used_again(
    short_tmp: Path,
) -> None:
    async with serving(short_tmp / "w.sock") as worker:
        pool = ConnectionPool(str(worker.path))
        loop = asyncio.get_running_loop()
        connection = await pool.open(loop)

        answer = await connection.request(post(b"one"), loop=loop)
        pool.release(connection, now=1.0)
        again = pool.acquire_nowait(2.0)

        assert (answer.status, answer.body, answer.header(b"pilotlight-outcome")) == (
            200,
            b"one",
            b"ok",
        )
        assert again is connection
        assert (await again.request(post(b"two"), loop=loop)).body == b"two"


@pytest.mark.parametrize(
    "head",
    [b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"content-length: 9999999\r\n"],
)
async def test_the_answer_to_head_ends_with_its_head(short_tmp: Path, head: bytes) -> None:
    def worker() -> asyncio.Protocol:
        return _Bodiless(b"HTTP/1.1 200 OK\r\n" + head + b"\r\n")

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(worker, str(short_tmp / "w.sock"))
    async with server:
        pool = ConnectionPool(str(short_tmp / "w.sock"))
        connection = await pool.open(loop)

        answer = await connection.request(
            b"HEAD /x HTTP/1.1\r\nhost: worker\r\n\r\n", loop=loop, is_head=True
        )
        pool.release(connection, now=1.0)

        assert (answer.status, answer.body) == (200, b"")
        assert pool.acquire_nowait(1.0) is None


@pytest.mark.parametrize(
    "head, said, sent",
    [
        (b"x-content-type-options: nosniff", b"dial tcp 127.0.0.1:8080: refused\n", False),
        (b"x-content-type-options: nosniff", b"EOF\n", True),
        (b"x-content-type-options: nosniff\r\npilotlight-outcome: raised", b"EOF\n", None),
        (b"content-type: text/plain", b"EOF\n", None),
    ],
)
async def test_a_pod_whose_queue_proxy_has_no_worker_is_a_lost_worker(
    short_tmp: Path, head: bytes, said: bytes, sent: bool | None
) -> None:
    whole = b"HTTP/1.1 502 Bad Gateway\r\n%s\r\ncontent-length: %d\r\n\r\n%s"
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(
        lambda: _Bodiless(whole % (head, len(said), said)), str(short_tmp / "w.sock")
    )
    async with server:
        connection = await ConnectionPool(str(short_tmp / "w.sock")).open(loop)
        if sent is None:  # the function's own answer
            assert (await connection.request(GET, loop=loop)).body == said
        else:
            with pytest.raises(WorkerConnectionLost) as lost:
                await connection.request(GET, loop=loop)
            assert lost.value.sent is sent
        connection.close()


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
        return _Bodiless(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body + b"0\r\n\r\n"
        )

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
        pool.release(connection, now=0.0)

        assert pool.acquire_nowait(MAX_IDLE_S + 1) is None


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


async def test_events_stream_even_when_they_are_short_and_sent_at_once(short_tmp: Path) -> None:
    events = b"data: 1\n\ndata: 2\n\n"
    head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: Text/Event-Stream; x=y\r\n\r\n"
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(
        lambda: _Bodiless(head % len(events) + events), str(short_tmp / "w.sock")
    )
    async with server:
        connection = await ConnectionPool(str(short_tmp / "w.sock")).open(loop)
        for _ in range(2):  # the second head is known
            answer = await connection.request(GET, loop=loop)
            assert answer.body is None
            assert b"".join([piece async for piece in answer.chunks()]) == events
        connection.close()


async def test_reading_pauses_while_the_caller_does_not_read(short_tmp: Path) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(64):
            sent += 1
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

        assert 0 < sent < 64
        assert sum([len(chunk) async for chunk in answer.chunks()]) == 64 * 65536


async def test_a_worker_that_dies_before_it_answers_is_told_apart_from_one_that_never_listened(
    short_tmp: Path,
) -> None:
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

        with pytest.raises(WorkerConnectionLost) as died:
            await future
        with pytest.raises(WorkerConnectionLost) as refused:
            await pool.open(loop)

    assert died.value.sent
    assert not refused.value.sent


async def test_a_worker_that_dies_in_the_middle_of_a_stream_breaks_the_stream(
    short_tmp: Path,
) -> None:
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

        with pytest.raises(WorkerConnectionLost):
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
        with pytest.raises(WorkerConnectionLost):
            await future


async def test_a_head_without_an_end_is_cut_off(short_tmp: Path) -> None:
    """A worker runs user code: it must not fill the memory of the activator, which is
    everybody's."""
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
    with pytest.raises(WorkerConnectionLost, match="head"):
        await connection.request(b"POST / HTTP/1.1\r\ncontent-length: 0\r\n\r\n", loop=loop)
    assert sent < 30
    connection.close()
    server.close()
    await server.wait_closed()


class _Flooding(asyncio.Protocol):
    """Answers whatever comes with `head` and then with `block` over and over, until `most` bytes or
    the end of the connection."""

    def __init__(self, head: bytes, block: bytes, most: int) -> None:
        self._head, self._block, self._most = head, block, most
        self.sent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(self._head)  # type: ignore[attr-defined]
        self._go_on()

    def _go_on(self) -> None:
        if self.sent < self._most and not self._transport.is_closing():
            self._transport.write(self._block)  # type: ignore[attr-defined]
            self.sent += len(self._block)
            asyncio.get_running_loop().call_soon(self._go_on)


@pytest.mark.parametrize(
    "behind,block",
    [(b"0\r\n", b"a: b\r\n" * 2000), (b"0\r\na: ", b"y" * 12_000), (b"1;", b"z" * 12_000)],
    ids=["many trailers", "a trailer without an end", "a chunk's extension"],
)
async def test_what_follows_a_streamed_answer_is_cut_off_and_not_kept(
    short_tmp: Path, behind: bytes, block: bytes
) -> None:
    flooding = _Flooding(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n" + behind, block, 4 << 20
    )
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: flooding, str(short_tmp / "w.sock"))
    async with server:
        connection = await ConnectionPool(str(short_tmp / "w.sock")).open(loop)
        answer = await connection.request(GET, loop=loop)
        assert await anext(answer.chunks()) == b"x"
        with pytest.raises(WorkerConnectionLost):
            await anext(answer.chunks())
        assert flooding.sent < 4 << 20
        assert len(answer.headers) == 1
        assert not connection.is_usable


def _held_bytes(thing: object) -> int:
    """The bytes that it and its containers refer to."""
    if isinstance(thing, bytes):
        return len(thing)
    return sum(
        _held_bytes(part)
        for part in gc.get_referents(thing)
        if isinstance(part, bytes | list | tuple | deque)
    )


async def test_a_connection_in_the_pool_keeps_no_headers(short_tmp: Path) -> None:
    trailers = b"a: b\r\n" * (MAX_HEAD_BYTES // 8)

    def worker() -> asyncio.Protocol:
        return _Bodiless(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: "
            b"chunked\r\n\r\n1\r\nx\r\n0\r\nPilotlight-Finish: error\r\n" + trailers + b"\r\n"
        )

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(worker, str(short_tmp / "w.sock"))
    async with server:
        pool = ConnectionPool(str(short_tmp / "w.sock"))
        connection = await pool.open(loop)
        for _ in range(2):
            answer = await connection.request(GET, loop=loop)
            assert [chunk async for chunk in answer.chunks()] == [b"x"]
            assert answer.headers == [
                (b"transfer-encoding", b"chunked"),
                (b"pilotlight-finish", b"error"),
            ]
            assert _held_bytes(connection) < MAX_HEAD_BYTES // 8
            pool.release(connection, now=1.0)
            assert pool.acquire_nowait(1.0) is connection
        connection.close()


async def test_a_head_in_one_read_has_its_bound_as_well(short_tmp: Path) -> None:
    line = b"x: " + b"y" * 1000 + b"\r\n"

    def worker() -> asyncio.Protocol:
        return _Bodiless(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n" + line * 100 + b"\r\n")

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(worker, str(short_tmp / "w.sock"))
    async with server:
        connection = await ConnectionPool(str(short_tmp / "w.sock")).open(loop)
        with pytest.raises(WorkerConnectionLost, match="head"):
            await connection.request(GET, loop=loop)
        assert not connection.is_usable


async def test_what_a_worker_says_unasked_closes_its_connection(short_tmp: Path) -> None:
    """It would be taken for the answer to the next request."""
    workers: list[_Bodiless] = []

    def worker() -> asyncio.Protocol:
        workers.append(_Bodiless(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"))
        return workers[-1]

    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(worker, str(short_tmp / "w.sock"))
    async with server:
        pool = ConnectionPool(str(short_tmp / "w.sock"))
        connection = await pool.open(loop)
        assert (await connection.request(GET, loop=loop)).body == b"x"
        pool.release(connection, now=1.0)
        workers[0].data_received(b"")
        await asyncio.sleep(0.05)

        assert pool.acquire_nowait(1.0) is None


class _InPieces(asyncio.Protocol):
    """Answers each request with the next pieces, one write each."""

    def __init__(self, answers: list[list[bytes]]) -> None:
        self._answers = iter(answers)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._write(list(next(self._answers)))

    def _write(self, pieces: list[bytes]) -> None:
        self._transport.write(pieces.pop(0))  # type: ignore[attr-defined]
        if pieces:
            asyncio.get_running_loop().call_later(0.01, self._write, pieces)


async def test_answers_with_a_head_that_came_before_have_their_own_bodies(short_tmp: Path) -> None:
    head = b"HTTP/1.1 200 OK\r\npilotlight-outcome: ok\r\ncontent-length: 3\r\n\r\n"
    informed = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    pieces = [
        [head + b"one"],
        [head + b"two"],
        [head + b"th", b"r"],
        [head, b"fou"],
        [informed + head + b"fiv"],
        [head + b"six"],
    ]
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _InPieces(pieces), str(short_tmp / "w.sock"))
    async with server:
        pool = ConnectionPool(str(short_tmp / "w.sock"))
        connection = await pool.open(loop)
        answers = []
        for _ in pieces:
            answers.append(await connection.request(GET, loop=loop))
            pool.release(connection, now=1.0)
            assert pool.acquire_nowait(1.0) is connection

        assert [answer.body for answer in answers] == [
            b"one",
            b"two",
            b"thr",
            b"fou",
            b"fiv",
            b"six",
        ]
        assert {answer.header(b"pilotlight-outcome") for answer in answers} == {b"ok"}
        connection.close()
        await asyncio.sleep(0)  # its transport is closed
