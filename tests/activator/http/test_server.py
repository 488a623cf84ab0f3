"""What the edge keeps and reads of bodies that go on: trailers, extensions of chunks, and bodies
whose request was answered."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator

import pytest

from activator.http.server import MAX_BARE_BYTES, MAX_UNREAD_BYTES, PIECE_BYTES
from tests.activator.conftest import KEY, Edge
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

PATH = "/v1/functions/shop/hello:invoke"
STRANGER = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode()
CALLER = STRANGER.replace(b"host: x\r\n", f"host: x\r\nauthorization: Bearer {KEY}\r\n".encode())
TRAILERS = b"a: b\r\n" * (MAX_BARE_BYTES // 5)


class Client:
    """A client that speaks bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def status(self) -> int:
        """Of the next answer, which is read to its end."""
        head = await self.reader.readuntil(b"\r\n\r\n")
        await self.reader.readexactly(
            int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        )
        return int(head.split()[1])

    async def flood(self, block: bytes, *, most: int) -> int:
        """Write until the connection is closed, or `most` bytes; how many were written."""
        sent = 0
        with contextlib.suppress(OSError):
            while sent < most and not self.reader.at_eof():
                self.writer.write(block)
                await self.writer.drain()
                sent += len(block)
                await asyncio.sleep(0)
        return sent

    async def rest(self) -> bytes:
        """What came until the connection was closed."""
        with contextlib.suppress(ConnectionError):
            return await self.reader.read()
        return b""


@pytest.fixture(name="client")
async def _client(edge: Edge) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(edge.url.rpartition(":")[2]))
    yield Client(reader, writer)
    writer.close()


@pytest.mark.parametrize(
    "line", [b"a: b\r\n" * 1000, b"y" * 6000], ids=["many", "one without an end"]
)
async def test_a_stranger_keeps_no_memory_with_trailers(
    edge: Edge, client: Client, line: bytes
) -> None:
    client.writer.write(STRANGER + b"0\r\n")
    assert await client.status() == 401

    (connection,) = edge.limits.connections
    sent = await client.flood(b"a:" * (line[:1] == b"y") + line, most=8 << 20)

    assert sent < 8 << 20
    assert len(connection.headers) == 2
    assert await client.rest() == b""


async def test_trailers_of_a_request_that_waits_for_its_body_are_refused_beyond_their_bound(
    edge: Edge, client: Client
) -> None:
    edge.add(route_of(spec_of()))
    for part in (CALLER + b"1\r\n{\r\n", b"0\r\n" + TRAILERS, b"c: d\r\n"):
        client.writer.write(part)
        await asyncio.sleep(0.05)

    assert await client.status() == 431
    assert await client.rest() == b""
    assert edge.fleet.started == []


async def test_a_chunk_whose_extension_does_not_end_is_refused(client: Client) -> None:
    client.writer.write(STRANGER + b"1;")
    assert await client.status() == 401

    assert await client.flood(b"x" * 4000, most=4 << 20) < 4 << 20


async def test_trailers_within_their_bound_are_dropped(edge: Edge, client: Client) -> None:
    """They are no headers: neither of their own request nor of the next one on the connection."""
    seen: list[dict[str, str]] = []

    async def looks(request: WorkerRequest) -> WorkerAnswer:
        seen.append(dict(request.headers))
        return WorkerAnswer(body=b"1")

    edge.fleet.behaviour = looks
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 0})
    seen.clear()
    trailers = b"accept: x/y\r\npilotlight-priority: none\r\nexpect: 100-continue\r\n"
    for end in (trailers, b"x: " + b"y" * (MAX_BARE_BYTES // 2) + b"\r\n", b""):
        for pause in (0.0, 0.02):
            client.writer.write(CALLER + b'7\r\n{"x":1}\r\n')
            await asyncio.sleep(pause)
            client.writer.write(b"0\r\n" + end[:20])
            await asyncio.sleep(pause)
            client.writer.write(end[20:] + b"\r\n")
            assert await client.status() == 200

    assert len(seen) == 6
    assert all("x/y" not in headers.values() and "expect" not in headers for headers in seen)


async def test_a_body_in_many_small_chunks_is_read(edge: Edge, client: Client) -> None:
    edge.add(route_of(spec_of()))
    client.writer.write(CALLER)
    for byte in b'{"x":1}' + b" " * 900:
        client.writer.write(b"1;ext=" + b"e" * 100 + b"\r\n%c\r\n" % byte)
        if byte == b"}"[0]:
            await asyncio.sleep(0.02)
    client.writer.write(b"0\r\n\r\n")

    assert await client.status() == 200


@pytest.mark.parametrize("length", [b"content-length: 99999999", b"transfer-encoding: chunked"])
async def test_a_body_goes_on_after_its_answer_up_to_a_bound(client: Client, length: bytes) -> None:
    client.writer.write(STRANGER.replace(b"transfer-encoding: chunked", length))
    assert await client.status() == 401

    block = b"%x\r\n%b\r\n" % (250_000, b"x" * 250_000)
    sent = await client.flood(block, most=2 * MAX_UNREAD_BYTES)

    assert MAX_UNREAD_BYTES <= sent < 2 * MAX_UNREAD_BYTES
    assert await client.rest() == b""


async def test_a_body_that_ends_after_its_answer_leaves_its_connection_in_use(
    client: Client,
) -> None:
    for _ in range(3):
        client.writer.write(STRANGER)
        assert await client.status() == 401
        for _ in range(30):
            client.writer.write(b"%x\r\n%b\r\n" % (250_000, b"x" * 250_000))
            await client.writer.drain()
        client.writer.write(b"0\r\nx: y\r\n\r\n")


HEALTH = b"GET /healthz HTTP/1.1\r\nhost:\r\n\r\n"
MOST_WAITING = PIECE_BYTES // len(HEALTH) + 2


async def test_a_stranger_queues_few_requests_by_pipelining(edge: Edge, client: Client) -> None:
    """A request that waits costs a hundred times its bytes: few of a read are parsed, and the rest
    when those are answered."""
    client.writer.write(HEALTH * 1000)
    waiting = []
    for _ in range(1000):
        assert await client.status() == 200
        (connection,) = edge.limits.connections
        waiting.append(len(connection.pipeline))

    assert 1 < max(waiting) <= MOST_WAITING
    assert not connection.flow.read_paused


async def test_more_requests_than_may_wait_are_answered_in_order(
    edge: Edge, client: Client
) -> None:
    edge.add(route_of(spec_of()))
    bodies = [
        b'{"x":%d}' % number + b" " * (97 * number % 900 if number % 5 == 0 else 0)
        for number in range(120)
    ]
    framings = [
        lambda body: b"content-length: %d\r\n\r\n%b" % (len(body), body),
        lambda body: b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body),
    ]
    head = CALLER.partition(b"transfer-encoding")[0]
    client.writer.write(
        b"".join(head + framings[number % 7 == 0](body) for number, body in enumerate(bodies))
    )

    for body in bodies:
        answer = await client.reader.readuntil(b"\r\n\r\n")
        length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        assert await client.reader.readexactly(length) == body


async def test_nothing_is_read_while_requests_wait_whoever_asks_for_it(
    edge: Edge, client: Client
) -> None:
    """An application that waits for its caller to leave asks for more to be read."""
    is_asked, may_answer = asyncio.Event(), asyncio.Event()

    async def waits(request: WorkerRequest) -> WorkerAnswer:
        is_asked.set()
        await may_answer.wait()
        return WorkerAnswer(body=request.body)

    edge.fleet.behaviour = waits
    edge.add(route_of(spec_of()))
    call = CALLER.partition(b"transfer-encoding")[0] + b'content-length: 7\r\n\r\n{"x":1}'
    client.writer.write(call + HEALTH * 300)
    await is_asked.wait()
    (connection,) = edge.limits.connections
    unparsed = len(connection.flow.unparsed)
    connection.flow.resume_reading()

    assert connection.flow.read_paused
    assert unparsed > 200 * len(HEALTH)
    may_answer.set()
    assert [await client.status() for _ in range(301)] == [200] * 301
    assert not connection.flow.read_paused


async def test_the_rest_of_a_read_is_dropped_with_its_connection(
    edge: Edge, client: Client
) -> None:
    client.writer.write(HEALTH * 100 + b"bad\r\n\r\n" + HEALTH * 300)
    statuses = [await client.status() for _ in range(100)]

    assert statuses == [200] * 100
    assert await client.rest() == b""


AT_UNIX = """
import contextlib, os, socket, sys
os.setresgid(int(sys.argv[2]), int(sys.argv[2]), int(sys.argv[2]))
os.setresuid(int(sys.argv[2]), int(sys.argv[2]), int(sys.argv[2]))
held = []
for _ in range(int(sys.argv[3])):
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect(sys.argv[1])
    with contextlib.suppress(BrokenPipeError):  # one too many may be answered, and closed, before it asks
        held[-1].sendall(b"GET /healthz HTTP/1.1\\r\\nhost: x\\r\\n\\r\\n")
print(*(connection.recv(100).split()[1].decode() for connection in held), flush=True)
sys.stdin.read()
"""


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
async def test_at_the_socket_of_functions_connections_are_bounded_for_each_tenant(
    edge: Edge,
) -> None:
    """What one tenant's functions hold takes nothing from another's, and nothing from addresses."""
    edge.limits.max_per_address = 2
    async with contextlib.AsyncExitStack() as stack:
        answers = [
            await at_unix(stack, edge, uid, count) for uid, count in ((20001, 3), (20002, 2))
        ]
        assert answers == ["200 200 503", "200 200"]
        assert edge.limits.by_address == {"uid-20001": 2, "uid-20002": 2}


async def at_unix(stack: contextlib.AsyncExitStack, edge: Edge, uid: int, count: int) -> str:
    """The statuses that so many connections of a user get, which stay open."""
    path, pipe = str(edge.directory / "http.sock"), asyncio.subprocess.PIPE
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AT_UNIX, path, str(uid), str(count), stdin=pipe, stdout=pipe
    )
    stack.push_async_callback(caller.communicate, b"")
    assert caller.stdout is not None
    return (await caller.stdout.readline()).decode().strip()
