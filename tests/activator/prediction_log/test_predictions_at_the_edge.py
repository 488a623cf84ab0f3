"""Calls through real HTTP: which are logged, with what, and what the others pay."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from activator.prediction_log.frames import MAX_BODY_BYTES, LoggedCall
from activator.prediction_log.queue import MAX_BYTES, ROW_BYTES, PredictionQueue
from activator.settings import ActivatorSettings
from pilotlight.errors import InvalidInput
from pilotlight.spec.function import FunctionKind, MethodSpec, WeightsSpec
from pilotlight.spec.policies import Fallback
from pilotlight.spec.prediction_log import Content, PredictionLogSpec
from tests.activator.calls.test_fallback import broken
from tests.activator.conftest import Edge
from tests.activator.test_gateway import until
from tests.activator.test_modules_of_a_call import modules_passed
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest
from tests.fakes.routes import TENANT, route_of, spec_of

ALL = PredictionLogSpec(sample=1.0)


@pytest.fixture(name="settings")
def _settings() -> ActivatorSettings:
    return ActivatorSettings(max_body_bytes=2 * MAX_BODY_BYTES)


@pytest.fixture(name="queue")
def _queue(edge: Edge) -> PredictionQueue:
    queue = PredictionQueue()
    edge.log_calls(queue)
    return queue


def rows(queue: PredictionQueue) -> list[LoggedCall]:
    found: list[LoggedCall] = []
    while len(queue):
        found += queue.pop_batch()
    return found


async def test_a_call_from_zero_and_a_warm_one_are_logged_once_each(
    edge: Edge, queue: PredictionQueue
) -> None:
    weights = (WeightsSpec(name="resnet", manifest="c" * 64),)
    edge.add(route_of(spec_of(log=ALL, weights=weights)))
    answers = [await edge.call(json={"x": number}) for number in range(3)]
    found = rows(queue)
    assert [row.facts["request_id"] for row in found] == [
        answer.headers["x-request-id"] for answer in answers
    ]
    assert [row.facts["start_kind"] for row in found] != ["WARM"] * 3
    warm = found[-1]
    assert (warm.input, warm.output) == (b'{"x":2}', b'{"x":2}')
    told = {
        name: warm.facts[name]
        for name in ("tenant", "app", "function", "version", "status", "start_kind")
    }
    assert told == {
        "tenant": TENANT,
        "app": "shop",
        "function": "hello",
        "version": "v1-abcdef",
        "status": 200,
        "start_kind": "WARM",
    }
    assert warm.facts["model_id"] == "resnet@cccccccccccc"
    assert warm.facts["latency_ms"] >= warm.facts["exec_ms"] > 0
    assert warm.facts["picos"] > 0
    assert (warm.facts["input_is_json"], warm.facts["output_is_json"]) == (True, True)
    assert warm.facts["parameters"] == ("x", "y")


async def test_a_function_without_a_log_passes_no_module_of_it(
    edge: Edge, queue: PredictionQueue
) -> None:
    edge.add(route_of(spec_of()))
    for _ in range(2):
        await edge.call(json={"x": 1})
    with modules_passed() as passed:
        assert (await edge.call(json={"x": 1})).is_success
    assert not [module for module in passed if module.startswith("prediction_log")]
    assert len(queue) == 0


async def test_a_share_of_the_calls_is_logged(edge: Edge) -> None:
    drawn = iter([0.1, 0.3, 0.29, 0.9])
    queue = PredictionQueue(draw=lambda: next(drawn))
    edge.log_calls(queue)
    edge.add(route_of(spec_of(log=PredictionLogSpec(sample=0.3))))
    for number in range(4):
        await edge.call(json={"x": number})
    assert [row.input for row in rows(queue)] == [b'{"x":0}', b'{"x":2}']


async def test_a_submitted_call_is_logged_with_its_arguments(
    edge: Edge, queue: PredictionQueue
) -> None:
    edge.add(route_of(spec_of(log=ALL)))
    answer = await edge.call("shop/hello:submit", json={"x": 7})
    assert answer.status_code == 202, answer.text
    await until(lambda: len(queue) == 1)
    (row,) = rows(queue)
    assert (row.input, row.output) == (b'{"x":7}', b'{"x":7}')
    assert row.facts["request_id"] == answer.json()["id"]


async def test_a_stream_is_logged_without_its_items(
    edge: Edge, queue: PredictionQueue, script: Script
) -> None:
    async def items(request: WorkerRequest) -> WorkerAnswer:
        async def chunks() -> Any:
            yield b"1\n"
            await asyncio.sleep(0)
            yield b"2\n"

        return WorkerAnswer(chunks=chunks(), content_type="application/x-ndjson")

    script.now = items
    edge.add(route_of(spec_of(log=ALL, methods=(MethodSpec(is_generator=True),))))
    assert (await edge.call(json={}, headers={"accept": "application/x-ndjson"})).text == "1\n2\n"
    (row,) = rows(queue)
    assert (row.output, row.facts["output_bytes"], row.facts["output_is_json"]) == (b"", 4, False)


async def test_what_no_instance_answered_is_not_logged(edge: Edge, queue: PredictionQueue) -> None:
    fallback = (Fallback(kind="static", status=203, body={"a": 1}),)
    edge.add(route_of(spec_of(log=ALL, fallback=fallback)))
    broken(edge, "hello")
    assert (await edge.call(json={"x": 1})).status_code == 203
    assert (await edge.call(json={"x": "not a number"})).status_code == 400
    assert len(queue) == 0


async def test_a_failed_call_is_logged_with_its_status(
    edge: Edge, queue: PredictionQueue, script: Script
) -> None:
    async def fails(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(status=500, body=b'{"error":"x"}', outcome="raised")

    script.now = fails
    edge.add(route_of(spec_of(log=ALL)))
    assert (await edge.call(json={"x": 1})).status_code == 500
    assert [row.facts["status"] for row in rows(queue)] == [500]


async def test_large_bodies_are_logged_by_their_size(edge: Edge, queue: PredictionQueue) -> None:
    edge.add(route_of(spec_of(log=ALL, methods=(MethodSpec(),))))
    body = b'{"x":"%b"}' % (b"x" * MAX_BODY_BYTES)
    assert (await edge.call(content=body)).status_code == 200
    (row,) = rows(queue)
    assert (row.input, row.output) == (b"", b"")
    assert row.facts["input_bytes"] == row.facts["output_bytes"] == len(body)


async def test_results_that_are_not_logged_do_not_leave_the_activator(
    edge: Edge, queue: PredictionQueue
) -> None:
    edge.add(route_of(spec_of(log=PredictionLogSpec(sample=1.0, outputs=Content.NONE))))
    await edge.call(json={"x": 1})
    assert [row.output for row in rows(queue)] == [b""]


async def test_a_full_queue_drops_rows_and_answers_calls(edge: Edge) -> None:
    queue = PredictionQueue(max_bytes=4 * (ROW_BYTES + 100))
    edge.log_calls(queue)
    edge.add(route_of(spec_of(log=ALL)))
    for number in range(5):
        assert (await edge.call(json={"x": number})).status_code == 200
    assert (len(queue), queue.dropped) == (2, 3), "one tenant has half of the queue"
    edge.add_key("other", tenant="t-2")
    edge.add(route_of(spec_of(log=ALL), tenant="t-2"))
    assert (await edge.call(key="other", json={"x": 1})).status_code == 200
    assert len(queue) == 3
    rows(queue)
    assert (await edge.call(json={"x": 1})).status_code == 200
    assert len(queue) == 1
    assert MAX_BYTES < 2**25


@pytest.mark.parametrize("kind", [FunctionKind.ASGI])
def test_only_calls_with_arguments_and_a_result_can_be_logged(kind: FunctionKind) -> None:
    with pytest.raises(InvalidInput, match="only functions and classes"):
        spec_of(kind=kind, log=ALL)
