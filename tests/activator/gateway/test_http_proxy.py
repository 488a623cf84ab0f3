"""Raw HTTP and WebSocket to functions that are web applications."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import ClientConnection, connect
from websockets.asyncio.server import ServerConnection, unix_serve

from activator.settings import ActivatorSettings
from pilotlight.protocol import WORKER_ASGI, WORKER_END
from pilotlight.spec.function import Clocks, FunctionKind, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, route_of, spec_of

Opened = Callable[..., Awaitable[asyncio.StreamReader]]
HEADERS = {"authorization": f"Bearer {KEY}"}
MIB = 1024 * 1024


async def tell(request: WorkerRequest) -> WorkerAnswer:
    """What the worker sees, line by line."""
    lines = [
        f"{request.method} {request.path}",
        *(f"{name}: {value}" for name, value in request.headers.items()),
    ]
    return WorkerAnswer(body="\n".join(lines).encode())


@pytest.fixture(name="behaviour")
def _behaviour() -> object:
    return tell


@pytest.fixture(name="site")
def _site(edge: Edge) -> str:
    edge.add(route_of(spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))))
    return f"{edge.url}/fn/shop/site"


async def test_a_worker_never_sees_the_key_nor_what_a_caller_says_in_our_name(
    edge: Edge, site: str
) -> None:
    sent = {
        **HEADERS,
        "pilotlight-root-path": "/elsewhere",
        "Pilotlight-Deadline-S": "9",
        "pilotlight-call": "theirs",
        "x-own": "1",
    }
    seen = (await edge.client.get(f"{site}/a", headers=sent)).text

    assert KEY not in seen
    assert "pilotlight-root-path: /fn/shop/site" in seen
    assert "x-own: 1" in seen
    assert "theirs" not in seen
    assert "pilotlight-deadline-s: 300.000" in seen


async def test_a_caller_writes_no_header_of_the_platform_in_another_spelling(
    edge: Edge, site: str
) -> None:
    """WSGI applications take `_` for `-` (PEP 3333)."""
    sent = {
        **HEADERS,
        "pilotlight_call": "forged-1",
        "Content_Length": "forged-2",
        "x-forwarded-for": "forged-3",
        "X_Forwarded_For": "forged-4",
        "forwarded": "for=forged-5",
        "x-real-ip": "forged-6",
        "proxy-authorization": "Basic forged-7",
        "cookie": "a=1; pilotlight_session=forged-8; b=2",
        "x_own": "1",
    }
    seen = (await edge.client.get(f"{site}/a", headers=sent)).text

    assert "forged" not in seen
    assert "x-forwarded-for: 127.0.0.1" in seen
    assert {"cookie: a=1; b=2", "x_own: 1"} <= set(seen.splitlines())


async def test_an_application_gets_the_request_id_of_its_caller_and_no_other(
    edge: Edge, site: str
) -> None:
    plain = await edge.client.get(f"{site}/a", headers=HEADERS)
    assert "x-request-id" not in plain.text
    assert f"pilotlight-call: {plain.headers['x-request-id']}" in plain.text

    own = "0b0d7b3e-34ef-4bb0-a2d4-3e1f6f2f8a3e"
    named = await edge.client.get(f"{site}/a", headers={**HEADERS, "x-request-id": own})
    assert f"x-request-id: {own}" in named.text
    assert named.headers["x-request-id"] != own


async def in_pieces() -> AsyncIterator[bytes]:
    yield b"he"
    yield b"llo"


@pytest.mark.parametrize(
    "content, framing, absent",
    [
        (b"hello", "content-length: 5", "transfer-encoding"),
        (b"", "content-length: 0", "transfer-encoding"),
        (in_pieces(), "transfer-encoding: chunked", "content-length"),
    ],
    ids=["declared", "empty", "in pieces"],
)
async def test_a_worker_sees_the_length_that_the_caller_declared(
    edge: Edge, site: str, content: object, framing: str, absent: str
) -> None:
    seen = (await edge.client.post(site, headers=HEADERS, content=content)).text  # type: ignore[arg-type]

    assert framing in seen.splitlines()
    assert absent not in seen


@pytest.mark.parametrize(
    "path", ["/v1/%2e%2e/internal/feed", "/v1/..%2finternal/feed", "/dashboard/%2e/x", "/v1/x/.."]
)
async def test_a_path_that_would_be_another_one_behind_the_edge_is_not_passed_on(
    edge: Edge, path: str
) -> None:
    answer = await edge.client.get(f"{edge.url}{path}", headers=HEADERS)

    assert answer.status_code == 404


@pytest.mark.parametrize("path", [WORKER_END, f"/..{WORKER_END}", f"//{WORKER_END}"])
async def test_callers_do_not_reach_what_a_worker_serves_to_the_platform(
    edge: Edge, site: str, path: str
) -> None:
    host, port = edge.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))  # httpx resolves dots
    head = f"POST /fn/shop/site{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}content-length: 0\r\nconnection: close\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    assert f"POST {WORKER_ASGI}/" in answer or answer.startswith("HTTP/1.1 404 "), answer


class Chat:
    """A worker's WebSocket side: echoes frames until either side closes.

    `closed` holds the codes that its callers closed with, `extensions` what they offered.
    """

    def __init__(self) -> None:
        self.closed: list[int | None] = []
        self.extensions: list[str | None] = []

    async def __call__(self, caller: ServerConnection) -> None:
        assert caller.request is not None
        self.extensions.append(caller.request.headers.get("sec-websocket-extensions"))
        with contextlib.suppress(websockets.ConnectionClosedError):
            async for frame in caller:
                await caller.send(frame)
        self.closed.append(caller.close_code)


@contextlib.asynccontextmanager
async def chatting(
    edge: Edge,
    *,
    execution_s: float = 60.0,
    access: tuple[str, ...] = (),
    side: Callable[[ServerConnection], Awaitable[None]] | None = None,
    **options: Any,
) -> AsyncIterator[tuple[str, Chat]]:
    """An instance of a web application that speaks WebSocket, as `side` or a Chat does; its
    address. `options`: of its server."""
    spec = spec_of(
        "site",
        kind=FunctionKind.ASGI,
        methods=(MethodSpec(),),
        clocks=Clocks(execution_s=execution_s),
        access=access,
    )
    edge.add(route_of(spec))
    await edge.client.get(f"{edge.url}/fn/shop/site/", headers=HEADERS)  # brings the instance up
    path = Path(edge.fleet.infos[edge.fleet.started[0]].socket)
    path.unlink()
    chat = Chat()
    async with unix_serve(side or chat, str(path), max_size=None, compression=None, **options):
        yield f"{edge.url.replace('http', 'ws', 1)}/fn/shop/site/chat", chat


async def talk_for_ever(socket: ClientConnection) -> None:
    while True:
        await socket.send("still here")
        await socket.recv()


def waiting(edge: Edge) -> int:
    return sum(scaled.throttler.waiting for scaled in edge.scaler.revisions.values())


def in_flight(edge: Edge) -> int:
    return sum(scaled.throttler.in_flight for scaled in edge.scaler.revisions.values())


async def test_a_websocket_is_one_call_from_its_first_frame_to_its_close(edge: Edge) -> None:
    async with chatting(edge) as (url, chat):
        async with connect(url, additional_headers=HEADERS, proxy=None) as socket:
            await socket.send("hello")
            assert await socket.recv() == "hello"
            assert in_flight(edge) == 1
        await until(lambda: in_flight(edge) == 0)

        assert chat.closed == [1000]
        assert sorted((r.status, r.outcome) for r in (await edge.settle()).values()) == [
            (101, "ok"),
            (200, "ok"),
        ]


async def test_a_websocket_counts_among_the_connections_of_its_address_until_it_ends(
    edge: Edge,
) -> None:
    async with chatting(edge) as (url, _):
        before = edge.limits.by_address["127.0.0.1"]
        async with connect(url, additional_headers=HEADERS, proxy=None):
            assert edge.limits.by_address["127.0.0.1"] == before + 1
        await until(lambda: edge.limits.by_address["127.0.0.1"] == before)


async def test_a_public_websocket_needs_no_key_and_is_held_until_it_closes(edge: Edge) -> None:
    edge.add_tenant("acme", concurrent=1)
    async with chatting(edge, access=("*",)) as (url, _):
        async with connect(url.replace("/fn/", "/t/acme/fn/"), proxy=None) as socket:
            await socket.send("hello")
            assert await socket.recv() == "hello"
            assert edge.quotas.held(f"tenant:{TENANT}") == 1
            assert socket.response is not None
            assert socket.response.headers["ratelimit"].startswith('"address";r=')
        await until(lambda: edge.quotas.held(f"tenant:{TENANT}") == 0)


async def test_the_execution_clock_bounds_the_life_of_a_websocket(edge: Edge) -> None:
    async with chatting(edge, execution_s=1.0) as (url, chat):  # the handshake is part of it
        async with connect(url, additional_headers=HEADERS, proxy=None) as socket:
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await talk_for_ever(socket)
        await until(lambda: in_flight(edge) == 0 and chat.closed != [])

        assert closed.value.rcvd is not None
        assert (closed.value.rcvd.code, chat.closed) == (1011, [1011])
        assert "longer than 1 s" in closed.value.rcvd.reason
        assert sorted(r.status for r in (await edge.settle()).values()) == [200, 504]


@pytest.mark.usefixtures("site")
async def test_a_websocket_whose_caller_leaves_while_it_waits_for_a_start_leaves_the_queue_at_once(
    edge: Edge,
) -> None:
    edge.fleet.gate.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", int(edge.url.rpartition(":")[2]))
    head = (
        "GET /fn/shop/site/chat HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: "
        "websocket\r\nsec-websocket-version: 13\r\n"
    )
    writer.write(
        f"{head}sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nauthorization: Bearer "
        f"{KEY}\r\n\r\n".encode()
    )
    await until(lambda: waiting(edge) == 1)

    writer.close()
    await until(lambda: waiting(edge) == 0)

    edge.fleet.gate.set()
    await until(lambda: edge.fleet.infos)
    assert (in_flight(edge), await edge.settle()) == (0, {})


class Unread:
    """A caller of the application, as a server would speak for it, that reads nothing once it is
    accepted."""

    def __init__(self) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.gone = asyncio.Event()
        self._is_connected = False

    async def receive(self) -> MutableMapping[str, Any]:
        """What it says: that it connects, and at last that it left."""
        if not self._is_connected:
            self._is_connected = True
            return {"type": "websocket.connect"}
        await self.gone.wait()
        return {"type": "websocket.disconnect", "code": 1001}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """What it is sent; messages of the function wait until it leaves."""
        self.sent.append(message)
        if message["type"] == "websocket.send":
            await self.gone.wait()

    async def connect(self, edge: Edge) -> None:
        """Its whole life."""
        scope = {
            "type": "websocket",
            "path": "/fn/shop/site/chat",
            "raw_path": b"/fn/shop/site/chat",
            "query_string": b"",
            "root_path": "",
            "headers": [(b"authorization", f"Bearer {KEY}".encode())],
            "client": ("127.0.0.1", 1),
            "subprotocols": [],
        }
        await edge.gateway(scope, self.receive, self.send)


class Pouring:
    """A worker's WebSocket side that sends messages without end. `count`: those that were taken
    from it."""

    def __init__(self, size: int) -> None:
        self.message = b"x" * size
        self.count = 0

    async def __call__(self, caller: ServerConnection) -> None:
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await caller.send(self.message)
                self.count += 1


async def test_a_worker_whose_caller_does_not_read_is_read_a_few_messages_ahead(edge: Edge) -> None:
    pouring, caller = Pouring(MIB), Unread()
    async with chatting(edge, side=pouring):
        life = asyncio.create_task(caller.connect(edge))
        await until(lambda: len(caller.sent) == 2)
        before = -1
        while before != pouring.count:  # until it is stopped
            before = pouring.count
            for _ in range(50):
                await asyncio.sleep(0)

        assert pouring.count <= 6
        assert edge.gateway.bodies.bytes_of[TENANT] == MIB
        caller.gone.set()
        await life
        assert not edge.gateway.bodies.bytes_of


async def test_a_websocket_whose_messages_have_no_room_is_closed_and_told_so(edge: Edge) -> None:
    async with chatting(edge, side=lambda worker: worker.send(b"x" * 1000)):
        edge.gateway.bodies.acquire(TENANT, ActivatorSettings().tenant_waiting_bytes)
        caller = Unread()
        await caller.connect(edge)

    assert [message["type"] for message in caller.sent] == ["websocket.accept", "websocket.close"]
    assert caller.sent[1]["code"] == 1013
    assert "bodies of this tenant's calls" in caller.sent[1]["reason"]


async def test_a_websocket_is_closed_when_a_message_of_its_caller_has_no_room(edge: Edge) -> None:
    async with (
        chatting(edge, side=lambda worker: worker.wait_closed()) as (url, _),
        connect(url, additional_headers=HEADERS, proxy=None) as socket,
    ):
        edge.gateway.bodies.acquire(TENANT, ActivatorSettings().tenant_waiting_bytes)
        await socket.send("more")
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            async with asyncio.timeout(PATIENCE_S):
                await socket.recv()

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1013
    assert "bodies of this tenant's calls" in closed.value.rcvd.reason


async def test_a_message_of_a_function_over_the_bound_closes_its_websocket_with_1009(
    edge: Edge,
) -> None:
    async with (
        chatting(edge, side=Pouring(MIB + 1)) as (url, _),
        connect(url, additional_headers=HEADERS, proxy=None, max_size=None) as socket,
    ):
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await socket.recv()

    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, str(MIB) in closed.value.rcvd.reason) == (1009, True)


async def test_a_message_of_a_caller_over_the_bound_closes_its_websocket_with_1009(
    edge: Edge,
) -> None:
    async with chatting(edge) as (url, chat):
        async with connect(url, additional_headers=HEADERS, proxy=None, max_size=None) as socket:
            assert "sec-websocket-extensions" not in socket.response.headers  # type: ignore[union-attr]
            await socket.send(b"x" * MIB)
            assert await socket.recv() == b"x" * MIB
            await socket.send(b"x" * (MIB + 1))
            with pytest.raises(websockets.ConnectionClosedError) as closed:
                await socket.recv()
        await until(lambda: chat.closed != [])

    assert closed.value.rcvd is not None
    assert (closed.value.rcvd.code, str(MIB) in closed.value.rcvd.reason) == (1009, True)
    assert (chat.closed, chat.extensions) == ([1009], [None])


async def test_a_function_that_refuses_a_websocket_is_a_403(edge: Edge, site: str) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        await connect(
            f"{site.replace('http', 'ws', 1)}/chat", additional_headers=HEADERS, proxy=None
        )

    assert refused.value.response.status_code == 403
    assert [record.status for record in (await edge.settle()).values()] == [403]


class TestSlowBodies:
    """At a public web application of four slots."""

    @pytest.fixture(name="body_clock_s")
    def _body_clock_s(self) -> float:
        return 0.5

    @pytest.fixture(name="settings")
    def _settings(self, body_clock_s: float) -> ActivatorSettings:
        return ActivatorSettings(body_timeout_s=body_clock_s)

    @pytest.fixture(name="place")
    def _place(self, edge: Edge) -> str:
        edge.add_tenant("acme")
        edge.add(
            route_of(
                spec_of(
                    "page",
                    kind=FunctionKind.ASGI,
                    access=("*",),
                    scaling=Scaling(max_instances=1, max_inputs=4),
                )
            )
        )
        return "/t/acme/fn/shop/page/x"

    @pytest.fixture(name="opened")
    async def _opened(self, edge: Edge) -> AsyncIterator[Opened]:
        writers: list[asyncio.StreamWriter] = []

        async def opened(place: str, *parts: bytes) -> asyncio.StreamReader:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(edge.url.rpartition(":")[2])
            )
            writers.append(writer)
            writer.write(
                f"POST {place} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n".encode()
            )
            for part in parts:
                writer.write(part)
                await asyncio.sleep(0.2)
            return reader

        yield opened
        for writer in writers:
            writer.close()

    async def test_bodies_that_do_not_go_on_hold_no_slot_for_long(
        self, edge: Edge, place: str, opened: Opened
    ) -> None:
        readers = [await opened(place, b"a") for _ in range(4)]

        assert (
            await asyncio.wait_for(edge.client.get(edge.url + place), PATIENCE_S)
        ).status_code == 200
        assert [await reader.readline() for reader in readers] == [
            b"HTTP/1.1 400 Bad Request\r\n"
        ] * 4

    async def test_a_trickle_is_given_up_too(self, place: str, opened: Opened) -> None:
        reader = await opened(place, *[b"a"] * 5)

        assert await reader.readline() == b"HTTP/1.1 400 Bad Request\r\n"

    async def test_a_body_of_which_nothing_came_takes_no_slot(
        self, edge: Edge, place: str, opened: Opened
    ) -> None:
        readers = [await opened(place) for _ in range(4)]
        await asyncio.sleep(0.1)

        assert edge.fleet.started == []
        assert [await reader.readline() for reader in readers] == [
            b"HTTP/1.1 400 Bad Request\r\n"
        ] * 4
        assert edge.fleet.started == []

    @pytest.mark.slow  # takes longer than a pause that no busy machine makes by itself
    @pytest.mark.parametrize("body_clock_s", [2.0])
    async def test_a_large_body_may_take_longer_than_a_pause(self, edge: Edge, place: str) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(11):
                yield b"x" * 20_000
                await asyncio.sleep(0.2)

        assert (await edge.client.post(edge.url + place, content=pieces())).status_code == 200


@pytest.mark.parametrize(
    "location", ["https://elsewhere.test/sign-in", "ws://elsewhere.test/", "/asgi/other", "//["]
)
async def test_a_websocket_follows_no_redirect_of_its_function(
    edge: Edge, location: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    def redirect(connection: ServerConnection, request: Any) -> Any:
        asked.append(request.path)
        response = connection.respond(302, "there")
        response.headers["Location"] = location
        return response

    async with chatting(edge, process_request=redirect) as (url, _):
        with pytest.raises(websockets.InvalidStatus) as refused:
            await connect(url, additional_headers=HEADERS, proxy=None)

    assert refused.value.response.status_code == 403
    assert asked == ["/asgi/chat"]
    assert not [record for record in caplog.records if record.exc_info]
    assert in_flight(edge) == 0


@pytest.mark.parametrize("status", [600, 999])
async def test_a_status_that_is_none_of_http_is_an_error_of_the_worker(
    edge: Edge, site: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=status)

    edge.fleet.behaviour = answer
    assert (await edge.client.get(f"{site}/a", headers=HEADERS)).status_code == 502
    edge.add(route_of(spec_of()))
    for _ in range(2):
        assert (await edge.call(json={"x": 1})).status_code == 502
    assert not [record for record in caplog.records if record.exc_info]
