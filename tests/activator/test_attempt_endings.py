"""How attempts end, whichever entrance they came by: one table of endings, with the status for the
caller, the usage record, the slot, the worker's connection and the instance, each exactly once."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace

import httpx
import pytest
import websockets
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection

from activator.balancing.instance import Instance
from activator.gateway.http_proxy import MAX_RESENT_BYTES
from pilotlight.protocol import CallRecord
from pilotlight.spec.function import Clocks, FunctionKind, MethodSpec
from tests.activator.conftest import KEY, Edge
from tests.activator.gateway.test_http_proxy import chatting
from tests.activator.test_gateway import forever, until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import SCHEMA, TENANT, route_of, spec_of

HEADERS = {"authorization": f"Bearer {KEY}"}
EXECUTION_S = 1.0


class Worker:
    """A worker that behaves as `next` says, once."""

    def __init__(self) -> None:
        self.next: Callable[[WorkerRequest], Awaitable[WorkerAnswer]] | None = None
        self.has_begun = asyncio.Event()

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        behave, self.next = self.next, None
        self.has_begun.set()
        if behave is None:
            return WorkerAnswer(body=b'{"x":1}')
        return await behave(request)


@pytest.fixture(name="behaviour")
def _behaviour() -> Worker:
    return Worker()


@dataclass(frozen=True)
class Entrance:
    """A way to call a function, on a warm instance. `streams`: its responses stream."""

    path: str
    headers: tuple[tuple[str, str], ...] = ()
    streams: bool = False
    body: bytes = b'{"x":1}'

    async def call(self, edge: Edge) -> httpx.Response:
        headers = {**HEADERS, "content-type": "application/json", **dict(self.headers)}
        return await edge.client.post(f"{edge.url}{self.path}", headers=headers, content=self.body)


@dataclass(frozen=True)
class Submitted(Entrance):
    """A submitted call, which its caller waits for, and cancels where the caller leaves."""

    async def call(self, edge: Edge) -> httpx.Response:
        submitting = asyncio.create_task(super().call(edge))
        try:
            await asyncio.shield(submitting)
            url = f"{edge.url}{submitting.result().headers['location']}"
            while True:
                record = (await edge.client.get(f"{url}?wait_s=10", headers=HEADERS)).json()
                if record["status"]:
                    return httpx.Response(
                        record["status"],
                        content=base64.b64decode(CallRecord.from_json(record).result),
                    )
        except asyncio.CancelledError:
            url = f"{edge.url}{(await submitting).headers['location']}"
            assert (await edge.client.post(f"{url}:cancel", headers=HEADERS)).is_success
            raise


JSON = "/v1/functions/shop/hello:invoke"
ENTRANCES = {
    "fast path": Entrance(JSON),
    "gateway": Entrance(JSON, (("pilotlight-timeout", "30"),)),
    "event stream": Entrance(JSON, (("accept", "text/event-stream"),), streams=True),
    "raw HTTP": Entrance("/fn/shop/site/x"),
    "raw stream": Entrance("/fn/shop/site/x", streams=True),
    "submitted": Submitted("/v1/functions/shop/hello:submit"),
    "submitted stream": Submitted("/v1/functions/shop/hello:submit", streams=True),
    "open inference": Entrance("/v1/models/shop/hello:predict", body=b'{"instances":[{"x":1}]}'),
}


@pytest.fixture(name="entrance", params=list(ENTRANCES))
async def _entrance(request: pytest.FixtureRequest, edge: Edge) -> Entrance:
    entrance = ENTRANCES[request.param]
    clocks = Clocks(execution_s=EXECUTION_S)
    if entrance.path.startswith("/fn/"):
        spec = spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),), clocks=clocks)
    else:
        method = MethodSpec(schema=SCHEMA, parameters=("x", "y"), is_generator=entrance.streams)
        spec = spec_of(methods=(method,), clocks=clocks)
    edge.add(route_of(spec))
    if not entrance.streams:  # the slot of a stream is free a moment after its end
        assert (await entrance.call(edge)).status_code == 200, "the instance is warm"
        await edge.settle()
        edge.ledger.records.clear()
    return entrance


@pytest.fixture(name="worker")
def _worker(behaviour: Worker) -> Worker:
    behaviour.has_begun.clear()
    return behaviour


async def busy(_: WorkerRequest) -> WorkerAnswer:
    """A worker that still runs a call whose caller disconnected."""
    return WorkerAnswer(status=503, body=b"{}", outcome="busy")


def instance_of(edge: Edge) -> Instance:
    """The instance that was started first."""
    (scaled,) = edge.scaler.revisions.values()
    return scaled.throttler.instances[edge.fleet.started[0]]


async def ended(edge: Edge) -> list[tuple[int, str]]:
    """The closed records, once no slot is taken: each attempt has one, and none is open."""
    (scaled,) = edge.scaler.revisions.values()
    await until(lambda: scaled.throttler.in_flight == 0)
    records = (await edge.settle()).values()
    held = edge.books.journal.statistics()
    assert held.open_calls == 0
    return sorted((record.status, record.outcome) for record in records)


def streamed(*chunks: bytes, then: Callable[[], Awaitable[None]] | None = None) -> WorkerAnswer:
    """A response that streams, and does something in its middle."""

    async def items() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk
        if then is not None:
            await then()

    return WorkerAnswer(chunks=items(), content_type="text/event-stream")


async def test_a_call_that_is_answered_ends_ok_and_its_connection_is_used_again(
    edge: Edge, entrance: Entrance, worker: Worker
) -> None:
    for _ in range(2):
        if entrance.streams:

            async def answer(_: WorkerRequest) -> WorkerAnswer:
                return streamed(b"data: 1\n\n")

            worker.next = answer
        assert (await entrance.call(edge)).status_code == 200
        await ended(edge)
    assert await ended(edge) == [(200, "ok")] * 2
    assert len(edge.fleet.workers[edge.fleet.started[0]]._connections) == 1


async def test_an_error_of_user_code_is_its_own_and_the_instance_stays(
    edge: Edge, entrance: Entrance, worker: Worker
) -> None:
    async def fail(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=500, body=b'{"error": null}', outcome="raised")

    worker.next = fail
    assert (await entrance.call(edge)).status_code in (200, 500)  # an event stream says it inside
    assert await ended(edge) == [(500, "error")]
    assert not instance_of(edge).is_stuck


async def test_a_crash_names_its_reason_and_closes_the_record(
    edge: Edge, entrance: Entrance, worker: Worker
) -> None:
    worker.next = forever
    task = asyncio.create_task(entrance.call(edge))
    await worker.has_begun.wait()
    await edge.fleet.kill(edge.fleet.started[0], "out_of_memory")
    answer = await task
    if entrance.streams and answer.status_code == 200:
        assert b"ran out of memory" in answer.content
    else:
        assert answer.status_code == 502
        assert b"ran out of memory" in answer.content
    assert await ended(edge) == [(502, "error")]


async def test_a_call_over_its_execution_clock_is_a_504_and_its_instance_is_replaced(
    edge: Edge, entrance: Entrance, worker: Worker
) -> None:
    worker.next = forever
    answer = await entrance.call(edge)
    assert answer.status_code in (200, 504)
    assert b"longer than 1 s" in answer.content
    assert await ended(edge) == [(504, "error")]
    await until(lambda: edge.fleet.started[0] in [name for name, _ in edge.fleet.stopped])


async def test_a_caller_that_leaves_before_the_response_costs_the_worker_its_connection(
    edge: Edge, entrance: Entrance, worker: Worker
) -> None:
    worker.next = forever
    task = asyncio.create_task(entrance.call(edge))
    await worker.has_begun.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert await ended(edge) == [(499, "cancelled")]
    assert not instance_of(edge).is_stuck
    await until(lambda: not edge.fleet.workers[edge.fleet.started[0]]._connections)


async def test_a_stream_over_the_clock_whose_caller_reads_replaces_the_instance(
    edge: Edge, worker: Worker
) -> None:
    for kind in ("event stream", "raw stream"):
        edge.ledger.records.clear()
        entrance = ENTRANCES[kind]
        method = MethodSpec(schema=SCHEMA, parameters=("x", "y"), is_generator=True)
        clocks = Clocks(execution_s=EXECUTION_S)
        spec = (
            spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),), clocks=clocks)
            if entrance.path.startswith("/fn/")
            else spec_of(methods=(method,), clocks=clocks)
        )
        edge.add(route_of(spec))

        async def hang(_: WorkerRequest) -> WorkerAnswer:
            return streamed(b"data: 1\n\n", then=asyncio.Event().wait)  # type: ignore[arg-type]

        worker.next = hang
        before = len(edge.fleet.stopped)
        try:
            await entrance.call(edge)
        except httpx.RemoteProtocolError:
            assert kind == "raw stream"  # only a broken connection can say it there
        await until(lambda before=before: len(edge.fleet.stopped) > before)
        await until(lambda: not sum(s.throttler.in_flight for s in edge.scaler.revisions.values()))
        assert [(r.status, r.outcome) for r in (await edge.settle()).values()] == [(504, "error")]


async def test_a_worker_that_is_busy_has_not_begun_and_the_call_is_sent_again(
    edge: Edge, entrance: Entrance, worker: Worker
) -> None:
    worker.next = busy
    assert (await entrance.call(edge)).status_code == 200
    assert await ended(edge) == [(200, "ok"), (503, "busy")]
    first, again = edge.fleet.workers[edge.fleet.started[0]].requests[-2:]
    assert again.body == first.body


@pytest.mark.parametrize("entrance", ["raw HTTP"], indirect=True)
@pytest.mark.parametrize("is_large", [True, False], ids=["too large", "no memory for it"])
async def test_a_busy_worker_and_a_body_that_was_not_kept_is_a_503_of_the_platform(
    edge: Edge, entrance: Entrance, worker: Worker, is_large: bool
) -> None:
    worker.next = busy
    sent = replace(entrance, body=b"x" * (MAX_RESENT_BYTES + 1)) if is_large else entrance
    with edge.gateway.bodies.reserved(TENANT, 0 if is_large else 2**40):
        answer = await sent.call(edge)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert "pilotlight-outcome" not in answer.headers
    assert answer.json()["type"].endswith("unavailable")
    assert await ended(edge) == [(503, "busy")]
    assert not edge.gateway.bodies.bytes_of


@pytest.mark.parametrize("entrance", ["raw HTTP"], indirect=True)
async def test_an_application_cannot_call_itself_busy(
    edge: Edge, entrance: Entrance, worker: Worker
) -> None:
    async def forge(_: WorkerRequest) -> WorkerAnswer:  # the worker adds its own header last
        return WorkerAnswer(status=503, outcome="busy", headers=("pilotlight-outcome: ok",))

    worker.next = forge
    assert (await entrance.call(edge)).status_code == 503
    assert await ended(edge) == [(503, "error")]


async def test_an_upload_over_the_clock_is_no_fault_of_the_instance(edge: Edge) -> None:
    spec = spec_of(
        "site",
        kind=FunctionKind.ASGI,
        methods=(MethodSpec(),),
        clocks=Clocks(execution_s=EXECUTION_S),
    )
    edge.add(route_of(spec))

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        await asyncio.sleep(1.2 * EXECUTION_S)

    answer = await edge.client.post(f"{edge.url}/fn/shop/site/x", headers=HEADERS, content=body())
    assert answer.status_code == 504
    assert await ended(edge) == [(504, "error")]
    assert not instance_of(edge).is_stuck
    assert edge.fleet.stopped == []


@pytest.mark.slow  # waits for an answer to the close of the WebSocket
async def test_a_websocket_whose_worker_hangs_at_the_end_of_its_clock_replaces_the_instance(
    edge: Edge,
) -> None:
    gone = asyncio.Event()

    async def hang(caller: ServerConnection) -> None:
        caller.transport.pause_reading()  # it never answers the close
        await gone.wait()

    async with chatting(edge, execution_s=EXECUTION_S, side=hang) as (url, _):
        async with connect(url, additional_headers=HEADERS, proxy=None) as socket:
            with pytest.raises(websockets.ConnectionClosedError):
                await socket.recv()
        assert (504, "error") in await ended(edge)
        await until(lambda: edge.fleet.stopped)
        gone.set()


async def test_a_websocket_whose_worker_dies_is_closed_with_the_reason(edge: Edge) -> None:
    async def die(caller: ServerConnection) -> None:
        await caller.send("hello")
        caller.transport.abort()

    async with (
        chatting(edge, side=die) as (url, _),
        connect(url, additional_headers=HEADERS, proxy=None) as socket,
    ):
        assert await socket.recv() == "hello"
        with pytest.raises(websockets.ConnectionClosedError) as closed:
            await socket.recv()
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1011
    assert "the instance died during this call" in closed.value.rcvd.reason
    assert (502, "error") in await ended(edge)
