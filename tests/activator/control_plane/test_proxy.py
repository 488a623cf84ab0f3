"""Who may hold the connections to the controller: strangers a small share, and nobody with a body
that does not come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from activator.control_plane.proxy import (
    MAX_CONNECTIONS,
    MAX_OF_TENANT,
    MAX_STRANGER_BODY_BYTES,
)
from activator.settings import ActivatorSettings
from pilotlight.core.dashboard import visitor_cookie
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import FakeWorker, WorkerAnswer, WorkerRequest
from tests.fakes.plain_http import NO_TLS
from tests.fakes.routes import TEST_KEY

SHARE = 8
FOREVER = 1e12
OWN = {"authorization": f"Bearer {KEY}"}


@pytest.fixture(name="pause_s")
def _pause_s() -> float:
    """Longest pause in a body; short only where a test shows a longer one."""
    return PATIENCE_S


@pytest.fixture(name="settings")
def _settings(pause_s: float) -> ActivatorSettings:
    return ActivatorSettings(
        body_timeout_s=pause_s, unauthenticated_per_s=1000.0, stranger_connections=SHARE
    )


@pytest.fixture(name="held")
async def _held(short_tmp: Path) -> AsyncIterator[FakeWorker]:
    """A controller that answers no request for the dashboard."""

    async def answer(request: WorkerRequest) -> WorkerAnswer:
        if request.path.startswith("/dashboard"):
            await asyncio.Event().wait()
        return WorkerAnswer(body=b"%d" % len(request.body))

    controller = FakeWorker(short_tmp / "controller.sock", answer)
    await controller.start()
    yield controller
    await controller.aclose()


class _Senders:
    """Connections that send the same beginning of a request, and wait."""

    def __init__(self, url: str) -> None:
        self._place = urlsplit(url)
        self._open: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def send(self, count: int, data: bytes) -> None:
        for _ in range(count):
            reader, writer = await asyncio.open_connection(self._place.hostname, self._place.port)
            writer.write(data)
            await writer.drain()
            self._open.append((reader, writer))

    async def first_line(self) -> bytes:
        """Of the answer on the newest connection."""
        return await asyncio.wait_for(self._open[-1][0].readline(), PATIENCE_S)

    async def aclose(self) -> None:
        for _, writer in self._open:
            writer.close()
            await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.fixture(name="senders")
async def _senders(edge: Edge) -> AsyncIterator[_Senders]:
    senders = _Senders(edge.url)
    yield senders
    await senders.aclose()


async def test_strangers_with_unfinished_bodies_hold_no_connection(
    edge: Edge, held: FakeWorker, senders: _Senders
) -> None:
    head = b"POST /v1/apps HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n%b\r\nhalf a body"
    for authorization in (b"", b"authorization: Bearer pl_guess\r\n"):
        await senders.send(MAX_CONNECTIONS // 2 + 10, head % authorization)

    answer = await edge.client.get(f"{edge.url}/v1/apps", headers=OWN)

    assert answer.status_code == 200
    assert [request.path for request in held.requests] == ["/v1/apps"]


async def test_strangers_hold_no_more_than_their_share(
    edge: Edge, held: FakeWorker, senders: _Senders
) -> None:
    await senders.send(SHARE // 2, b"GET /dashboard HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: len(held.requests) == SHARE // 2)
    await senders.send(1, b"GET /dashboard HTTP/1.1\r\nhost: x\r\n\r\n")

    assert await senders.first_line() == b"HTTP/1.1 429 Too Many Requests\r\n"
    assert (await edge.client.get(f"{edge.url}/v1/apps", headers=OWN)).status_code == 200
    assert len(held.requests) == SHARE // 2 + 1


def signed_in(key: str = KEY, *, until: float = FOREVER) -> bytes:
    """The head of a request for a page, from a browser that signed in with `key`."""
    cookie = visitor_cookie.join_cookie(
        "k1.of-the-controller", TEST_KEY.visitors, key=f"k-{key}", until=until
    )
    return (
        b'GET /dashboard HTTP/1.1\r\nhost: x\r\ncookie: theme=dark; pilotlight_session="%b"\r\n\r\n'
        % cookie.encode()
    )


async def test_browsers_that_are_signed_in_count_as_their_tenant(
    edge: Edge, held: FakeWorker, senders: _Senders
) -> None:
    await senders.send(SHARE // 2, b"GET /dashboard HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: edge.control.held == SHARE // 2)

    await senders.send(MAX_OF_TENANT, signed_in())
    await until(lambda: edge.control.held == SHARE // 2 + MAX_OF_TENANT)
    await senders.send(1, signed_in())

    assert await senders.first_line() == b"HTTP/1.1 429 Too Many Requests\r\n"


@pytest.mark.parametrize(
    "cookie",
    [
        "of a session that is over",
        "of a key that was revoked",
        "of somebody else's making",
        "of no key",
    ],
)
async def test_a_cookie_that_says_nothing_valid_is_a_strangers(
    edge: Edge, held: FakeWorker, senders: _Senders, cookie: str
) -> None:
    head = {
        "of a session that is over": signed_in(until=1.0),
        "of a key that was revoked": signed_in("pl_revoked"),
        "of somebody else's making": signed_in().replace(b"~k1.", b"~k1.x"),
        "of no key": b"GET /dashboard HTTP/1.1\r\nhost: x\r\ncookie: "
        b"pilotlight_session=k1.s\r\n\r\n",
    }[cookie]
    await senders.send(SHARE // 2, head)
    await until(lambda: edge.control.held == SHARE // 2)
    await senders.send(1, head)

    assert await senders.first_line() == b"HTTP/1.1 429 Too Many Requests\r\n"


async def test_one_tenant_holds_no_more_than_half_of_the_connections(
    edge: Edge, held: FakeWorker, senders: _Senders
) -> None:
    edge.add_tenant("other")
    edge.add_key("pl_other", tenant="other")
    head = b"GET /dashboard HTTP/1.1\r\nhost: x\r\nauthorization: Bearer %b\r\n\r\n"
    await senders.send(MAX_OF_TENANT, head % KEY.encode())
    await until(lambda: edge.control.held == MAX_OF_TENANT)
    await senders.send(1, head % KEY.encode())

    assert await senders.first_line() == b"HTTP/1.1 429 Too Many Requests\r\n"
    answer = await edge.client.get(
        f"{edge.url}/v1/apps", headers={"authorization": "Bearer pl_other"}
    )
    assert answer.status_code == 200


async def test_one_address_holds_no_more_connections_than_it_may(
    edge: Edge, senders: _Senders
) -> None:
    edge.limits.max_per_address = 3
    await senders.send(3, b"")
    await until(lambda: len(edge.limits.connections) == 3)
    await senders.send(1, b"")

    assert await senders.first_line() == b"HTTP/1.1 503 Service Unavailable\r\n"
    assert edge.limits.refused == 1


async def test_changes_are_answered_once_activators_have_them_and_values_at_once(
    edge: Edge, held: FakeWorker
) -> None:
    asked: list[str] = []

    async def catch_up() -> None:
        asked.append("one")

    edge.control.catch_up = catch_up
    paths = ("/v1/keys", "/v1/dicts/d", "/v1/queues/q", "/v1/dictionary", "/v1/environments")
    counts = []
    for path in paths:
        assert (await edge.client.post(edge.url + path, headers=OWN)).status_code == 200
        counts.append(len(asked))
    assert counts == [1, 1, 1, 2, 3]


async def test_a_share_is_given_back(edge: Edge, held: FakeWorker, senders: _Senders) -> None:
    leaving = _Senders(edge.url)
    await leaving.send(SHARE // 2, b"GET /dashboard HTTP/1.1\r\nhost: x\r\n\r\n")
    await until(lambda: edge.control.held == SHARE // 2)
    await leaving.aclose()
    await until(lambda: edge.control.held == 0)

    assert (await edge.client.get(f"{edge.url}/v1/apps")).status_code == 200
    assert edge.control.held == 0


@pytest.mark.parametrize("headers,status", [({}, 413), (OWN, 200)])
async def test_only_callers_with_a_key_send_large_bodies(
    edge: Edge, held: FakeWorker, headers: dict[str, str], status: int
) -> None:
    body = b"x" * (MAX_STRANGER_BODY_BYTES + 1)

    answer = await edge.client.post(f"{edge.url}/v1/apps", headers=headers, content=body)

    assert answer.status_code == status
    assert len(held.requests) == (status == 200)


async def test_a_form_without_a_key_is_passed_on(edge: Edge, held: FakeWorker) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield b"key=pl_"
        yield b"secret"

    whole = await edge.client.post(f"{edge.url}/v1/form", content=b"key=pl_secret")
    chunked = await edge.client.post(f"{edge.url}/v1/form", content=chunks())

    assert (whole.text, chunked.text) == ("13", "13")


@pytest.mark.parametrize("pause_s", [0.5])
async def test_a_body_that_pauses_is_ended(edge: Edge, held: FakeWorker, senders: _Senders) -> None:
    head = (
        f"PUT /v1/blobs/x HTTP/1.1\r\nhost: x\r\nauthorization: Bearer "
        f"{KEY}\r\ncontent-length: 1000\r\n\r\nhalf"
    )
    await senders.send(1, head.encode())

    assert await senders.first_line() == b"HTTP/1.1 400 Bad Request\r\n"
    await until(lambda: edge.control.held == 0)


LARGE = 256 * 1024
UNREAD_S = 0.3


class _LargeOrLong:
    """A page that no caller's buffers hold, or a stream that says little. The page comes once it
    may."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        if request.path == "/dashboard/stream":
            return WorkerAnswer(chunks=_now_and_then())
        await self.may_answer.wait()
        return WorkerAnswer(body=b"x" * LARGE)


async def _now_and_then() -> AsyncIterator[bytes]:
    for _ in range(4):
        yield b"event\n"
        await asyncio.sleep(UNREAD_S / 2)


@pytest.fixture(name="generous")
async def _generous(edge: Edge, short_tmp: Path) -> AsyncIterator[_LargeOrLong]:
    generous = _LargeOrLong()
    controller = FakeWorker(short_tmp / "controller.sock", generous)
    await controller.start()
    yield generous
    await controller.aclose()


async def _deaf(edge: Edge, head: bytes, *, buffer_bytes: int = 4096) -> socket.socket:
    """A connection with many requests whose answers are not read."""
    place = urlsplit(edge.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (place.hostname, place.port))
    await loop.sock_sendall(connection, head * 40)
    return connection


@pytest.mark.parametrize("unread_s", [UNREAD_S])
@pytest.mark.parametrize("authorization", [b"", f"authorization: Bearer {KEY}\r\n".encode()])
async def test_who_does_not_read_answers_holds_no_connection(
    edge: Edge, generous: _LargeOrLong, authorization: bytes
) -> None:
    generous.may_answer.clear()
    deaf = [
        await _deaf(edge, b"GET /dashboard HTTP/1.1\r\nhost: x\r\n%b\r\n" % authorization)
        for _ in range(SHARE // 2)
    ]
    try:
        await until(lambda: edge.control.held == SHARE // 2)
        generous.may_answer.set()
        await until(lambda: edge.control.held == 0)

        assert (await edge.client.get(f"{edge.url}/dashboard/login")).status_code == 200
        await until(lambda: len(edge.limits.connections) == 1)
    finally:
        for connection in deaf:
            connection.close()


@pytest.mark.parametrize("unread_s", [UNREAD_S])
async def test_a_stream_to_somebody_who_reads_goes_on(edge: Edge, generous: _LargeOrLong) -> None:
    answer = await edge.client.get(f"{edge.url}/dashboard/stream")

    assert answer.text == 4 * "event\n"


@pytest.mark.slow  # reads slowly
@pytest.mark.usefixtures("generous")
# also where the machine pauses meanwhile
@pytest.mark.parametrize("unread_s", [5 * UNREAD_S])
async def test_somebody_who_reads_slowly_gets_all_of_it(edge: Edge, unread_s: float) -> None:
    deaf = await _deaf(edge, b"GET /dashboard HTTP/1.1\r\nhost: x\r\n\r\n", buffer_bytes=2**17)
    loop, size = asyncio.get_running_loop(), 0
    try:
        await until(lambda: any(connection.is_congested for connection in edge.limits.connections))
        while size < 40 * LARGE:
            size += len(await asyncio.wait_for(loop.sock_recv(deaf, 2**18), PATIENCE_S))
            await asyncio.sleep(unread_s / 60)
    finally:
        deaf.close()


async def test_questions_about_calls_count_in_the_share_of_their_tenant(
    edge: Edge, short_tmp: Path
) -> None:
    async def never(request: WorkerRequest) -> WorkerAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    controller = await FakeWorker(short_tmp / "controller.sock", never).start()
    url = f"{edge.url}/v1/calls/unknown"
    many = httpx.AsyncClient(verify=NO_TLS, limits=httpx.Limits(), timeout=PATIENCE_S)
    asking = [asyncio.create_task(many.get(url, headers=OWN)) for _ in range(MAX_OF_TENANT)]
    try:
        await until(lambda: edge.control.held == MAX_OF_TENANT)
        assert (await edge.client.get(url, headers=OWN)).status_code == 429
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await many.aclose()
        await controller.aclose()
