"""Every end of a stream is told: in it, and on its record."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from activator.http.sse import HOLD_BYTES
from pilotlight.spec.function import Clocks
from snapshotter import errors as agent_errors
from tests.activator.conftest import Edge
from tests.activator.streams.world import GENERATOR, OFTEN_S, Released, reading, told
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

RAISED = WorkerAnswer(
    status=500, body=b'{"status": 500}', content_type="application/problem+json", outcome="raised"
)

often = pytest.mark.parametrize("every_s", [OFTEN_S])


async def only_record(edge: Edge) -> tuple[int, str, str]:
    (record,) = (await edge.settle()).values()
    return record.status, record.outcome, record.finish


def streams_of(edge: Edge) -> tuple[int, int]:
    (one,) = edge.metrics.observer.drain(7)
    return one.streams, one.streams_completed


async def test_a_stream_that_ends_by_itself_says_stop_and_what_it_cost(
    generator: Edge, worker: Released
) -> None:
    worker.trailers = ("pilotlight-finish: stop",)
    worker.put(b"data: 0\n\n", None)
    async with reading(generator) as caller:
        item, end = await caller.rest()
    (record,) = (await generator.settle()).values()
    name, body = told(end)

    assert (item, name, body["finish_reason"], body["cost"], body["start"]) == (
        "data: 0",
        "end",
        "stop",
        record.cost,
        "COLD",
    )
    assert (record.status, record.outcome, record.finish, record.bytes_out) == (
        200,
        "ok",
        "stop",
        9,
    )
    assert streams_of(generator) == (1, 1)


async def test_a_generator_that_raised_in_the_middle_is_a_failure_on_its_record(
    generator: Edge, worker: Released
) -> None:
    worker.trailers = ("pilotlight-finish: error",)
    worker.put(b"data: 0\n\n", b'event: error\ndata: {"status": 500}\n\n', None)
    async with reading(generator) as caller:
        _, error, end = await caller.rest()

    assert (told(error)[0], told(end)[1]["finish_reason"]) == ("error", "error")
    assert await only_record(generator) == (500, "error", "error")
    assert streams_of(generator) == (1, 0)


async def test_one_that_raised_is_a_failure_for_who_asked_for_lines_too(
    generator: Edge, worker: Released
) -> None:
    worker.trailers = ("pilotlight-finish: error",)
    worker.put(b"0\n", b'{"status": 500}\n', None)
    async with reading(generator, accept="application/x-ndjson") as caller:
        await caller.until("\r\n0\r\n\r\n")

    assert await only_record(generator) == (500, "error", "error")


@pytest.mark.parametrize(
    "part", [b"", b'data: {"half'], ids=["between events", "inside an event that is held back"]
)
async def test_a_worker_that_dies_in_the_middle_is_told_of_in_the_stream(
    generator: Edge, worker: Released, part: bytes
) -> None:
    async with reading(generator) as caller:
        worker.put(b"data: 0\n\n" + part)
        await caller.until("data: 0\n\n")
        await generator.fleet.kill(generator.fleet.started[0], "out_of_memory")
        item, error, end = await caller.rest()
    name, problem = told(error)

    assert (item, name, problem["status"], problem["reason"]) == (
        "data: 0",
        "error",
        502,
        "out_of_memory",
    )
    assert problem["type"].endswith("/worker-crashed")
    assert told(end)[1]["finish_reason"] == "error"
    assert await only_record(generator) == (502, "error", "error")
    assert streams_of(generator) == (1, 0)


async def test_a_break_in_an_event_too_long_to_hold_back_breaks_the_connection(
    generator: Edge, worker: Released
) -> None:
    async with reading(generator) as caller:
        worker.put(b"data: " + b"x" * (HOLD_BYTES + 10))
        await caller.until("x" * HOLD_BYTES)
        await generator.fleet.kill(generator.fleet.started[0], "killed")
        with contextlib.suppress(ConnectionError):
            while not caller.at_end:
                await caller.read()

    assert not caller.text.endswith("0\r\n\r\n")
    assert await only_record(generator) == (502, "error", "error")


async def test_a_stream_that_outlives_its_clock_is_cut_off_and_told_so(
    edge: Edge, worker: Released
) -> None:
    # its start and its first item are part of it
    edge.add(route_of(spec_of(methods=GENERATOR, clocks=Clocks(execution_s=1.0))))
    async with reading(edge) as caller:
        worker.put(b"data: 0\n\n")
        item, error, end = await caller.rest()

    assert item == "data: 0"
    assert (told(error)[1]["status"], told(error)[1]["clock"], told(end)[1]["finish_reason"]) == (
        504,
        "execution",
        "error",
    )
    (record,) = (await edge.settle()).values()
    assert (record.status, record.outcome, record.finish, record.bytes_out) == (
        504,
        "error",
        "error",
        9,
    )


@pytest.mark.slow  # waits for the clock of a call and of its connection
async def test_a_caller_who_does_not_read_costs_a_function_no_instance(
    edge: Edge, worker: Released
) -> None:
    """The clock ends its call, and soon its connection, so that it holds nothing; the instance has
    done its part, and is kept."""
    edge.add(route_of(spec_of(methods=GENERATOR, clocks=Clocks(execution_s=1.0))))
    edge.add_key("idler", quotas={"concurrent": 3})
    async with reading(edge, key="idler"):
        worker.put(*[b"data: %b\n\n" % (b"x" * 250_000)] * 64)
        await until(lambda: worker.requests == 1)
        (throttler,) = edge.scaler.throttlers()
        await until(lambda: throttler.in_flight == 0)

        (record,) = (await edge.settle()).values()
        assert (record.status, record.outcome, record.finish) == (504, "error", "error")
        assert (edge.fleet.stopped, len(list(throttler.live())), throttler.health) == ([], 1, None)
        await until(lambda: edge.quotas.held("key:k-idler") == 0)


@often
async def test_a_start_that_fails_behind_heartbeats_is_told_in_the_stream(generator: Edge) -> None:
    generator.fleet.gate.clear()
    generator.fleet.failures.append(agent_errors.StartFailed("it cannot be imported"))
    async with reading(generator) as caller:
        await caller.until(": waiting\n\n")
        generator.fleet.gate.set()
        error, end = await caller.rest()

    assert (told(error)[0], told(error)[1]["status"]) == ("error", 502)
    assert told(end) == (
        "end",
        {"finish_reason": "error", "cost": "0", "exec_ms": 0.0, "start": ""},
    )
    assert await generator.settle() == {}


@often
@pytest.mark.parametrize(
    "answer, expected, finish",
    [
        (RAISED, 'event: error\ndata: {"status": 500}', "error"),
        (WorkerAnswer(body=b'{"a":\n1}'), 'data: {"a":\ndata: 1}', "stop"),
    ],
    ids=["a failure", "a value"],
)
async def test_a_whole_answer_behind_heartbeats_is_an_event(
    generator: Edge, answer: WorkerAnswer, expected: str, finish: str
) -> None:
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
    assert (await only_record(generator))[:2] == (
        answer.status,
        "ok" if answer.status < 400 else "error",
    )
