"""Answers whose online features were defaults: what the caller, the ledger, the metrics and the
prediction log get of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from activator.prediction_log.queue import PredictionQueue
from activator.prediction_log.writer import make_row
from pilotlight.spec.features.schema import Feature, FeatureSchema
from pilotlight.spec.features.sources import FeaturesSpec, RedisFeatures
from pilotlight.spec.function import MethodSpec
from pilotlight.spec.prediction_log import PredictionLogSpec
from tests.activator.conftest import Edge
from tests.activator.test_modules_of_a_call import modules_passed
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest
from tests.fakes.routes import SCHEMA, TENANT, route_of, spec_of

DEGRADED = "pilotlight-degraded"
USER = FeatureSchema({"trips": Feature(int, default=0)})
ONLINE = FeaturesSpec(online=(RedisFeatures(key="user:{x}", schema=USER),))
TAKES = (MethodSpec(schema=SCHEMA, parameters=("x", "y"), takes_features=True),)


def ranker(**more: Any) -> Any:
    methods = more.pop("methods", TAKES)
    return route_of(spec_of("ranker", features=ONLINE, methods=methods, **more))


def says(value: str, **more: Any) -> Any:
    async def answer(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(body=request.body, headers=(f"{DEGRADED}: {value}",), **more)

    return answer


async def call(edge: Edge) -> Any:
    return await edge.call("shop/ranker:invoke", json={"x": 1})


async def test_the_caller_and_the_ledger_are_told_the_reason(edge: Edge, script: Script) -> None:
    edge.add(ranker())
    wanted = []
    for value in ("features=deadline", "features=missing", ""):
        if value:
            script.now = says(value)
        else:
            script.now = Script().now
        for _ in range(2):  # the second one is warm
            answer = await call(edge)
            assert answer.status_code == 200
            assert answer.headers.get(DEGRADED, "") == value
            wanted.append(value)
    records = await edge.settle()
    assert [one.degraded for one in records.values()] == wanted


async def test_they_are_counted_by_reason_and_in_no_clock(edge: Edge, script: Script) -> None:
    edge.add(ranker())
    await call(edge)
    script.now = says("features=unavailable")
    await call(edge)
    script.now = says("features=deadline")
    await call(edge)
    labels = {"tenant": TENANT, "app": "shop", "function": "ranker"}
    registry = edge.metrics.registry
    for reason, count in (("unavailable", 1), ("deadline", 1), ("stale", None)):
        value = registry.get_sample_value(
            "pilotlight_degraded_features_total", {**labels, "reason": reason}
        )
        assert value == count
    (target,) = edge.table.targets_of(f"{TENANT}/main/shop/ranker")
    tally = edge.metrics.observer.bucket(target, "")
    assert (tally.answered, tally.degraded) == (3, 2)
    clocks = {name: sum(tally.clocks.get(name, {}).values()) for name in ("cold", "warm")}
    assert (clocks, sum(tally.warm)) == ({"cold": 1, "warm": 0}, 0)


async def test_a_stream_says_it_too(edge: Edge, script: Script) -> None:
    async def items(request: WorkerRequest) -> WorkerAnswer:
        async def chunks() -> Any:
            yield b"1\n"

        return WorkerAnswer(
            chunks=chunks(),
            content_type="application/x-ndjson",
            headers=(f"{DEGRADED}: features=stale",),
        )

    script.now = items
    methods = (MethodSpec(is_generator=True, takes_features=True),)
    edge.add(ranker(methods=methods))
    answer = await edge.call(
        "shop/ranker:invoke", json={"x": 1}, headers={"accept": "application/x-ndjson"}
    )
    assert (answer.text, answer.headers[DEGRADED]) == ("1\n", "features=stale")
    (record,) = (await edge.settle()).values()
    assert record.degraded == "features=stale"


@pytest.mark.parametrize(
    "lie", ["static", "features=", "features=<script>", "variant=other", "x" * 900]
)
async def test_a_worker_is_believed_the_known_reasons_only(
    edge: Edge, script: Script, lie: str
) -> None:
    script.now = says(lie)
    edge.add(ranker())
    for _ in range(2):
        assert DEGRADED not in (await call(edge)).headers
    assert {one.degraded for one in (await edge.settle()).values()} == {""}


async def test_rows_have_the_schema_and_the_reason(edge: Edge, script: Script) -> None:
    queue = PredictionQueue()
    edge.log_calls(queue)
    edge.add(ranker(log=PredictionLogSpec(sample=1.0)))
    edge.add(route_of(spec_of(log=PredictionLogSpec(sample=1.0))))
    await edge.call(json={"x": 1})
    await call(edge)
    script.now = says("features=deadline")
    await call(edge)
    rows = [json.loads(make_row(one, b"k" * 32)) for one in queue.pop_batch()]
    found = sorted((row["function"], row["feature_schema"], row["degraded"]) for row in rows)
    assert found == [
        ("hello", "", ""),
        ("ranker", USER.hash, ""),
        ("ranker", USER.hash, "features=deadline"),
    ]


async def test_a_function_without_features_passes_no_module_of_them(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    for _ in range(2):
        await edge.call(json={"x": 1})
    with modules_passed() as passed:
        assert (await edge.call(json={"x": 1})).is_success
    assert "calls/degradation.py" not in passed
