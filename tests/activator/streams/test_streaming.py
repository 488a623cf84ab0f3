"""Streams of events through the whole activator, over real sockets: nothing is held back, silence
is filled, and every end is told.

Items are released by what the caller has read, never by time: a byte that is held back anywhere
would make a test wait for ever."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from activator.__main__ import listen
from activator.settings import ActivatorSettings
from pilotlight.spec.instances.scaling import Scaling
from snapshotter import errors as agent_errors
from tests.activator.conftest import Edge
from tests.activator.streams.world import EVENTS, GENERATOR, OFTEN_S, Released, reading, told
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

often = pytest.mark.parametrize("every_s", [OFTEN_S])


# -- nothing is held back --------------------------------------------------------------------------
@pytest.mark.parametrize(
    "accept, item", [("text/event-stream", b"data: %d\n\n"), ("application/x-ndjson", b"%d\n")]
)
async def test_each_item_arrives_before_the_next_one_is_made(
    generator: Edge, worker: Released, accept: str, item: bytes
) -> None:
    async with reading(generator, accept=accept) as caller:
        for n in range(50):
            worker.put(item % n)
            await caller.until((item % n).decode())
        worker.put(None)
        await caller.until("\r\n0\r\n\r\n")


async def test_several_items_at_once_arrive_with_the_part_of_the_next_one_held_until_it_is_whole(
    generator: Edge, worker: Released
) -> None:
    async with reading(generator) as caller:
        worker.put(b"data: 0\n\ndata: 1\n\ndat")
        await caller.until("data: 1\n\n")
        assert caller.events() == ["data: 0", "data: 1"]
        worker.put(b"a: 2\n", b"\ndata: 3\n\n")
        await caller.until("data: 3\n\n")
        worker.put(None)
        assert (await caller.rest())[:4] == ["data: 0", "data: 1", "data: 2", "data: 3"]


def test_sockets_do_not_wait_for_more_to_send() -> None:
    for listener in listen(ActivatorSettings(listen="127.0.0.1:0")):
        with listener:
            listener.listen()
            listener.setblocking(True)
            with (
                socket.create_connection(listener.getsockname()[:2]),
                listener.accept()[0] as accepted,
            ):
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


async def test_proxies_are_asked_to_hold_nothing_back(generator: Edge, worker: Released) -> None:
    worker.put(b"data: 0\n\n", None)
    answer = await generator.call(json={}, headers={"accept": "text/event-stream"})

    assert (answer.headers["cache-control"], answer.headers["x-accel-buffering"]) == (
        "no-cache",
        "no",
    )


# -- heartbeats ------------------------------------------------------------------------------------
@often
async def test_a_cold_start_is_waited_for_with_heartbeats(
    generator: Edge, worker: Released
) -> None:
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
async def test_a_long_prefill_and_a_pause_between_items_are_waited_for_with_heartbeats(
    generator: Edge, worker: Released
) -> None:
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
async def test_a_caller_who_asked_for_lines_gets_no_heartbeats(
    generator: Edge, worker: Released
) -> None:
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


# -- cancellation ----------------------------------------------------------------------------------
@pytest.mark.parametrize("items", [0, 1], ids=["before the first item", "between items"])
async def test_a_caller_who_leaves_ends_the_call_at_its_worker_and_gives_its_slot_back(
    edge: Edge, worker: Released, items: int
) -> None:
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

    assert (left.status, left.outcome, left.finish) == (
        499,
        "cancelled",
        "cancelled" if items else "",
    )
    assert stayed.finish == "stop"


@often
async def test_a_caller_who_leaves_between_heartbeats_of_a_start_waits_no_more(
    generator: Edge,
) -> None:
    generator.fleet.gate.clear()
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n")
        assert generator.queue.waiting == 1
    await until(lambda: generator.queue.waiting == 0)


# -- back-pressure ---------------------------------------------------------------------------------
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
        return WorkerAnswer(
            chunks=self._chunks(request.body.decode()), content_type="text/event-stream"
        )


async def test_slow_readers_pause_their_own_workers_and_nobody_elses(edge: Edge) -> None:
    # 16 MB for each: far more than all buffers on the way
    flood = edge.fleet.behaviour = Flood(2000)
    edge.add(route_of(spec_of(methods=GENERATOR, scaling=Scaling(max_inputs=20, max_instances=1))))
    names = [f'{{"x": {n}}}' for n in range(16)]
    slow = [reading(edge, body=name.encode()) for name in names]
    readers = [await one.__aenter__() for one in slow]
    for reader in readers:  # they begin to read, and then do not
        reader.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await until(lambda: len(flood.made) == 16)

    async with reading(edge, body=b'{"x": 99}') as fast:
        size, last = 0, b""
        while b"event: end" not in last:
            data = await fast.reader.read(2**20)
            assert data
            size += len(data)
            last = last[-20:] + data
    paused = [flood.made[name] for name in names]
    for one in slow:
        await one.__aexit__(None, None, None)

    assert size > 2000 * 8000
    # the kernel's buffers, our window and uvicorn's: a few MB each at most
    assert max(paused) < 2000
    await until(lambda: sum(w.cancelled for w in edge.fleet.workers.values()) == 16)


# -- other ways in ---------------------------------------------------------------------------------
async def test_a_stream_under_an_idempotency_key_is_given_again_with_its_end(
    generator: Edge, worker: Released
) -> None:
    worker.put(b"data: 0\n\n", None)
    headers = {"accept": "text/event-stream", "idempotency-key": "order-7"}
    first = await generator.call(json={}, headers=headers)
    again = await generator.call(json={}, headers=headers)

    assert (again.text, again.headers["idempotency-replayed"], worker.requests) == (
        first.text,
        "true",
        1,
    )
    assert told(first.text.strip().split("\n\n")[-1])[0] == "end"


async def test_a_generators_caller_can_leave_through_httpx(
    generator: Edge, worker: Released
) -> None:
    worker.put(b"data: 0\n\n")
    url = f"{generator.url}/v1/functions/shop/hello:invoke"
    async with generator.client.stream("POST", url, json={}, headers=EVENTS) as response:
        async for line in response.aiter_lines():
            assert line == "data: 0"
            break
    await until(lambda: sum(w.cancelled for w in generator.fleet.workers.values()) == 1)


@often
@pytest.mark.parametrize("body", [b"[" * 100_000, b"{torn"], ids=["deep", "torn"])
async def test_an_error_that_says_it_is_json_and_is_not_is_an_event_of_its_text(
    generator: Edge, body: bytes
) -> None:
    async def lies(_: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=500, body=body, content_type="application/problem+json")

    generator.fleet.behaviour = lies
    generator.fleet.gate.clear()
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n")  # the head is out
        generator.fleet.gate.set()
        error, _ = await caller.rest()
    assert error == f"event: error\ndata: {body.decode()}"
