"""Streams of events through the whole activator, over real sockets: nothing is held back, silence is filled, and every end is told.

Items are released by what the caller has read, never by time: a byte that is held back anywhere would make a test wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from activator.__main__ import listen
from activator.request import Request
from activator.settings import ActivatorSettings
from activator.streaming import HOLD_BYTES, EventCutter, EventStream, data_lines, early_head
from pilotlight.spec import Clocks, MethodSpec, Scaling
from snapshotter import errors as agent_errors
from tests.activator.conftest import KEY, PATIENCE_S, Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import Behaviour, WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

GENERATOR = (MethodSpec(is_generator=True),)
EVENTS = {"authorization": f"Bearer {KEY}", "accept": "text/event-stream"}
OFTEN_S = 0.02
RAISED = WorkerAnswer(status=500, body=b'{"status": 500}', content_type="application/problem+json", outcome="raised")


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

        content_type = "text/event-stream" if "event-stream" in request.headers.get("accept", "") else "application/x-ndjson"
        return WorkerAnswer(chunks=chunks(), content_type=self.content_type or content_type, trailers=self.trailers)


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
    edge: Edge, path: str = "shop/hello:invoke", body: bytes = b"{}", accept: str = "text/event-stream"
) -> AsyncIterator[Reader]:
    """A call over a connection of its own, with as little between the test and the socket as there can be."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(edge.url.rpartition(":")[2]), limit=2**20)
    head = f"POST /v1/functions/{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\naccept: {accept}\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    try:
        yield Reader(reader, writer)
    finally:
        writer.close()
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


@pytest.fixture(name="every_s")
def _every_s() -> float:
    return PATIENCE_S


@pytest.fixture(name="settings")
def _settings(every_s: float) -> ActivatorSettings:
    return ActivatorSettings(max_body_bytes=100_000, heartbeat_s=every_s)


@pytest.fixture(name="worker")
def _worker() -> Released:
    return Released()


@pytest.fixture(name="behaviour")
def _behaviour(worker: Released) -> Behaviour:
    return worker


@pytest.fixture(name="generator")
def _generator(edge: Edge) -> Edge:
    edge.add(route_of(spec_of(methods=GENERATOR)))
    return edge


often = pytest.mark.parametrize("every_s", [OFTEN_S])


# -- nothing is held back ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("accept, item", [("text/event-stream", b"data: %d\n\n"), ("application/x-ndjson", b"%d\n")])
async def test_each_item_arrives_before_the_next_one_is_made(generator: Edge, worker: Released, accept: str, item: bytes) -> None:
    async with reading(generator, accept=accept) as caller:
        for n in range(50):
            worker.put(item % n)
            await caller.until((item % n).decode())
        worker.put(None)
        await caller.until("\r\n0\r\n\r\n")


async def test_several_items_at_once_arrive_with_the_part_of_the_next_one_held_until_it_is_whole(generator: Edge, worker: Released) -> None:
    async with reading(generator) as caller:
        worker.put(b"data: 0\n\ndata: 1\n\ndat")
        await caller.until("data: 1\n\n")
        assert caller.events() == ["data: 0", "data: 1"]
        worker.put(b"a: 2\n", b"\ndata: 3\n\n")
        await caller.until("data: 3\n\n")
        worker.put(None)
        assert (await caller.rest())[:4] == ["data: 0", "data: 1", "data: 2", "data: 3"]


def test_sockets_do_not_wait_for_more_to_send() -> None:
    with listen(ActivatorSettings(listen="127.0.0.1:0")) as listener:
        listener.listen()
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_proxies_are_asked_to_hold_nothing_back(generator: Edge, worker: Released) -> None:
    worker.put(b"data: 0\n\n", None)
    answer = await generator.call(json={}, headers={"accept": "text/event-stream"})

    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == ("no-cache", "no")


# -- heartbeats ----------------------------------------------------------------------------------------------------------
@often
async def test_a_cold_start_is_waited_for_with_heartbeats(generator: Edge, worker: Released) -> None:
    generator.fleet.gate.clear()
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n", times=2)
        assert "content-type: text/event-stream\r\n" in caller.text
        assert "x-accel-buffering: no\r\n" in caller.text
        generator.fleet.gate.set()
        worker.put(b"data: 0\n\n", None)
        item, end = await caller.rest()

    assert item == "data: 0"
    assert (told(end)[1]["finish_reason"], told(end)[1]["start"]) == ("stop", "COLD")


@often
async def test_a_long_prefill_and_a_pause_between_items_are_waited_for_with_heartbeats(generator: Edge, worker: Released) -> None:
    async with reading(generator) as caller:
        await until(lambda: worker.requests == 1)
        await caller.until(": waiting\n\n")
        worker.put(b"data: 0\n\n")
        await caller.until("data: 0\n\n")
        await caller.until(": waiting\n\n", times=caller.text.count("waiting") + 1)
        worker.put(None)
        assert (await caller.rest())[0] == "data: 0"


@often
async def test_a_warm_call_is_waited_for_too(generator: Edge, worker: Released) -> None:
    worker.put(b"data: 0\n\n", None)
    await generator.call(json={}, headers={"accept": "text/event-stream"})
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n")
        worker.put(b"data: 0\n\n", None)
        assert told((await caller.rest())[1])[1]["start"] == "WARM"


@often
async def test_a_caller_who_asked_for_lines_gets_no_heartbeats(generator: Edge, worker: Released) -> None:
    generator.fleet.gate.clear()
    async with reading(generator, accept="application/x-ndjson") as caller:
        await until(lambda: bool(generator.fleet.started))
        await asyncio.sleep(5 * OFTEN_S)
        generator.fleet.gate.set()
        worker.put(b"0\n", None)
        await caller.until("\r\n0\r\n\r\n")

    assert "waiting" not in caller.text


@often
async def test_a_function_that_is_no_generator_keeps_its_status(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.gate.clear()
    edge.fleet.failures.append(agent_errors.StartFailed("it cannot be imported"))
    call = asyncio.create_task(edge.call(json={"x": 1}, headers={"accept": "text/event-stream"}))
    await until(lambda: bool(edge.fleet.started))
    await asyncio.sleep(3 * OFTEN_S)
    edge.fleet.gate.set()

    assert (await call).status_code == 502


class Callers:
    """The far end of an EventStream: keeps what it was sent."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.request = Request({"type": "http", "method": "POST", "path": "/", "headers": []}, self._receive, self._send)

    async def _receive(self) -> dict[str, object]:
        return {}

    async def _send(self, message: Any) -> None:
        self.sent.append(message.get("body", b"head"))

    def stream(self, every_s: float = OFTEN_S) -> EventStream:
        """To it."""
        return EventStream(self.request, every_s=every_s, head=lambda: early_head(self.request))


async def test_no_heartbeat_comes_in_the_middle_of_an_event() -> None:
    caller = Callers()
    async with caller.stream() as stream:
        await stream.begin([])
        await stream.send(b"data: 1", is_inside=True)
        await asyncio.sleep(3 * OFTEN_S)
        await stream.send(b"2\n\n")
        await until(lambda: len(caller.sent) == 4)

    assert caller.sent == [b"head", b"data: 1", b"2\n\n", b": waiting\n\n"]


async def test_a_failure_before_the_first_heartbeat_leaves_the_answer_to_others() -> None:
    caller = Callers()
    async with caller.stream(every_s=PATIENCE_S) as stream:
        with pytest.raises(ZeroDivisionError):
            await stream.during(_fail())

    assert (stream.is_begun, caller.sent) == (False, [])


async def test_a_stream_without_anything_is_a_head_and_an_end() -> None:
    caller = Callers()
    async with caller.stream() as stream:
        await stream.close(b"event: end\ndata: {}\n\n")

    assert caller.sent == [b"head", b"event: end\ndata: {}\n\n"]


async def _fail() -> None:
    raise ZeroDivisionError


# -- every end is told ---------------------------------------------------------------------------------------------------
async def only_record(edge: Edge) -> tuple[int, str, str]:
    (record,) = (await edge.settle()).values()
    return record.status, record.outcome, record.finish


def streams_of(edge: Edge) -> tuple[int, int]:
    (one,) = edge.metrics.observer.take(7)
    return one.streams, one.streams_completed


async def test_a_stream_that_ends_by_itself_says_stop_and_what_it_cost(generator: Edge, worker: Released) -> None:
    worker.trailers = ("pilotlight-finish: stop",)
    worker.put(b"data: 0\n\n", None)
    async with reading(generator) as caller:
        item, end = await caller.rest()
    (record,) = (await generator.settle()).values()
    name, body = told(end)

    assert (item, name, body["finish_reason"], body["cost"], body["start"]) == ("data: 0", "end", "stop", record.cost, "COLD")
    assert (record.status, record.outcome, record.finish, record.bytes_out) == (200, "ok", "stop", 9)
    assert streams_of(generator) == (1, 1)


async def test_a_generator_that_raised_in_the_middle_is_a_failure_on_its_record(generator: Edge, worker: Released) -> None:
    worker.trailers = ("pilotlight-finish: error",)
    worker.put(b"data: 0\n\n", b'event: error\ndata: {"status": 500}\n\n', None)
    async with reading(generator) as caller:
        _, error, end = await caller.rest()

    assert (told(error)[0], told(end)[1]["finish_reason"]) == ("error", "error")
    assert await only_record(generator) == (500, "error", "error")
    assert streams_of(generator) == (1, 0)


async def test_one_that_raised_is_a_failure_for_who_asked_for_lines_too(generator: Edge, worker: Released) -> None:
    worker.trailers = ("pilotlight-finish: error",)
    worker.put(b"0\n", b'{"status": 500}\n', None)
    async with reading(generator, accept="application/x-ndjson") as caller:
        await caller.until("\r\n0\r\n\r\n")

    assert await only_record(generator) == (500, "error", "error")


@pytest.mark.parametrize("part", [b"", b'data: {"half'], ids=["between events", "inside an event that is held back"])
async def test_a_worker_that_dies_in_the_middle_is_told_of_in_the_stream(generator: Edge, worker: Released, part: bytes) -> None:
    async with reading(generator) as caller:
        worker.put(b"data: 0\n\n" + part)
        await caller.until("data: 0\n\n")
        await generator.fleet.kill(generator.fleet.started[0], "out_of_memory")
        item, error, end = await caller.rest()
    name, problem = told(error)

    assert (item, name, problem["status"], problem["reason"]) == ("data: 0", "error", 502, "out_of_memory")
    assert problem["type"].endswith("/worker-crashed")
    assert told(end)[1]["finish_reason"] == "error"
    assert await only_record(generator) == (502, "error", "error")
    assert streams_of(generator) == (1, 0)


async def test_a_break_in_an_event_too_long_to_hold_back_breaks_the_connection(generator: Edge, worker: Released) -> None:
    async with reading(generator) as caller:
        worker.put(b"data: " + b"x" * (HOLD_BYTES + 10))
        await caller.until("x" * HOLD_BYTES)
        await generator.fleet.kill(generator.fleet.started[0], "killed")
        with contextlib.suppress(ConnectionError):
            while not caller.at_end:
                await caller.read()

    assert not caller.text.endswith("0\r\n\r\n")
    assert await only_record(generator) == (502, "error", "error")


async def test_a_stream_that_outlives_its_clock_is_cut_off_and_told_so(edge: Edge, worker: Released) -> None:
    edge.add(route_of(spec_of(methods=GENERATOR, clocks=Clocks(execution_s=0.3))))
    async with reading(edge) as caller:
        worker.put(b"data: 0\n\n")
        item, error, end = await caller.rest()

    assert item == "data: 0"
    assert (told(error)[1]["status"], told(error)[1]["clock"], told(end)[1]["finish_reason"]) == (504, "execution", "error")
    (record,) = (await edge.settle()).values()
    assert (record.status, record.outcome, record.finish, record.bytes_out) == (504, "error", "error", 9)


@often
async def test_a_start_that_fails_behind_heartbeats_is_told_in_the_stream(generator: Edge) -> None:
    generator.fleet.gate.clear()
    generator.fleet.failures.append(agent_errors.StartFailed("it cannot be imported"))
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n")
        generator.fleet.gate.set()
        error, end = await caller.rest()

    assert (told(error)[0], told(error)[1]["status"]) == ("error", 502)
    assert told(end) == ("end", {"finish_reason": "error", "cost": "0", "exec_ms": 0.0, "start": ""})
    assert await generator.settle() == {}


@often
@pytest.mark.parametrize(
    "answer, expected, finish",
    [
        (RAISED, 'event: error\ndata: {"status": 500}', "error"),
        (WorkerAnswer(body=b'{"a":\n1}'), 'data: {"a":\ndata: 1}', "stop"),
    ],
    ids=["a failure", "a value"],
)  # fmt: skip
async def test_a_whole_answer_behind_heartbeats_is_an_event(generator: Edge, answer: WorkerAnswer, expected: str, finish: str) -> None:
    gate = asyncio.Event()

    async def late(request: WorkerRequest) -> WorkerAnswer:
        await gate.wait()
        return answer

    generator.fleet.behaviour = late
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n")
        gate.set()
        event, end = await caller.rest()

    assert (event, told(end)[1]["finish_reason"]) == (expected, finish)
    assert (await only_record(generator))[:2] == (answer.status, "ok" if answer.status < 400 else "error")


# -- cancellation --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("items", [0, 1], ids=["before the first item", "between items"])
async def test_a_caller_who_leaves_ends_the_call_at_its_worker_and_gives_its_slot_back(edge: Edge, worker: Released, items: int) -> None:
    edge.add(route_of(spec_of(methods=GENERATOR, scaling=Scaling(max_inputs=1, max_instances=1))))
    async with reading(edge) as caller:
        await until(lambda: worker.requests == 1)
        for _ in range(items):
            worker.put(b"data: 0\n\n")
            await caller.until("data: 0\n\n")
    await until(lambda: sum(w.cancelled for w in edge.fleet.workers.values()) == 1)
    worker.put(b"data: 1\n\n", None)
    async with reading(edge) as other:
        assert (await other.rest())[0] == "data: 1"
    left, stayed = sorted((await edge.settle()).values(), key=lambda record: record.started_at)

    assert (left.status, left.outcome, left.finish) == (499, "cancelled", "cancelled" if items else "")
    assert stayed.finish == "stop"


@often
async def test_a_caller_who_leaves_between_heartbeats_of_a_start_waits_no_more(generator: Edge) -> None:
    generator.fleet.gate.clear()
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n")
        assert generator.queue.waiting == 1
    await until(lambda: generator.queue.waiting == 0)


# -- back-pressure -------------------------------------------------------------------------------------------------------
class Flood:
    """A worker that makes items of 8 KiB as fast as they are taken."""

    def __init__(self, items: int) -> None:
        self.items = items
        self.made: dict[str, int] = {}

    async def _chunks(self, name: str) -> AsyncIterator[bytes]:
        for n in range(self.items):
            self.made[name] = n + 1
            yield b"data: %08d%s\n\n" % (n, b"x" * 8000)
            await asyncio.sleep(0)

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=self._chunks(request.body.decode()), content_type="text/event-stream")


async def test_slow_readers_pause_their_own_workers_and_nobody_elses(edge: Edge) -> None:
    flood = edge.fleet.behaviour = Flood(2000)  # 16 MB for each: far more than all buffers on the way
    edge.add(route_of(spec_of(methods=GENERATOR, scaling=Scaling(max_inputs=20, max_instances=1))))
    names = [f'{{"x": {n}}}' for n in range(16)]
    slow = [reading(edge, body=name.encode()) for name in names]
    readers = [await one.__aenter__() for one in slow]
    for reader in readers:  # they begin to read, and then do not
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: len(flood.made) == 16)

    async with reading(edge, body=b'{"x": 99}') as fast:
        size = 0
        while b"event: end" not in (data := await fast.reader.read(2**20)):
            size += len(data)
            assert data
    paused = [flood.made[name] for name in names]
    for one in slow:
        await one.__aexit__(None, None, None)

    assert size > 2000 * 8000
    assert max(paused) < 2000  # the kernel's buffers, our window and uvicorn's: a few MB each at most
    await until(lambda: sum(w.cancelled for w in edge.fleet.workers.values()) == 16)


# -- other ways in -------------------------------------------------------------------------------------------------------
async def test_a_stream_under_an_idempotency_key_is_given_again_with_its_end(generator: Edge, worker: Released) -> None:
    worker.put(b"data: 0\n\n", None)
    headers = {"accept": "text/event-stream", "idempotency-key": "order-7"}
    first = await generator.call(json={}, headers=headers)
    again = await generator.call(json={}, headers=headers)

    assert (again.text, again.headers["idempotency-replayed"], worker.requests) == (first.text, "true", 1)
    assert told(first.text.strip().split("\n\n")[-1])[0] == "end"


async def test_a_generators_caller_can_leave_through_httpx(generator: Edge, worker: Released) -> None:
    worker.put(b"data: 0\n\n")
    url = f"{generator.url}/v1/functions/shop/hello:invoke"
    async with generator.client.stream("POST", url, json={}, headers=EVENTS) as response:
        async for line in response.aiter_lines():
            assert line == "data: 0"
            break
    await until(lambda: sum(w.cancelled for w in generator.fleet.workers.values()) == 1)


# -- where events end ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "pieces, passed",
    [
        ([b"data: 1\n\n"], [b"data: 1\n\n"]),
        ([b"data: 1\n", b"\n"], [b"", b"data: 1\n\n"]),
        ([b"a\n\nb\n\nc", b"\n\n"], [b"a\n\nb\n\n", b"c\n\n"]),
        ([b""], [b""]),
    ],
)
def test_events_are_cut_where_they_end(pieces: list[bytes], passed: list[bytes]) -> None:
    cutter = EventCutter()

    assert [cutter.feed(piece) for piece in pieces] == passed
    assert (cutter.rest(), cutter.is_inside) == (b"", False)


def test_a_long_event_is_passed_on_in_parts_and_known_to_be_one() -> None:
    cutter = EventCutter()
    long = b"data: " + b"x" * (HOLD_BYTES + 1)
    first = cutter.feed(long)
    assert (first, cutter.is_inside) == (long[:-1], True)
    assert (cutter.feed(b"\n"), cutter.is_inside) == (b"x", True)
    assert (cutter.feed(b"\ndata: 2\n\nrest"), cutter.is_inside) == (b"\n\ndata: 2\n\n", False)
    assert cutter.rest() == b"rest\n\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_nothing_is_lost_however_a_stream_is_cut(size: int) -> None:
    stream = b"".join(b"data: %d\n\n" % n for n in range(30)) + b"data: " + b"y" * 200_000 + b"\n\ndata: last\n\n"
    cutter = EventCutter()
    step: Callable[[int], bytes] = lambda at: stream[at : at + (size if at < 400 else 4096)]  # noqa: E731
    at, out = 0, b""
    while at < len(stream):
        piece = step(at)
        out += cutter.feed(piece)
        at += len(piece)

    assert out + cutter.rest() == stream


def test_a_text_of_several_lines_is_one_event() -> None:
    assert data_lines(b'{\n"a": 1}') == b'data: {\ndata: "a": 1}\n\n'
    assert data_lines(b"") == b"data: \n\n"
