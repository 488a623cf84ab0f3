"""Calls of functions with a response cache, through real HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import httpx
import pytest

from activator.billing.errors import JournalFull
from activator.calls.call import Call
from activator.gateway.shadow_traffic import ShadowTraffic
from activator.worker_client.connection import WHOLE_BODY_BYTES
from pilotlight.errors import InvalidInput
from pilotlight.protocol import CONTENT_PICKLE
from pilotlight.spec.features.schema import Feature, FeatureSchema
from pilotlight.spec.features.sources import FeaturesSpec, RedisFeatures
from pilotlight.spec.function import Clocks, FunctionKind, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import Fallback, ResponseCacheSpec
from pilotlight.spec.traffic import Shadow
from tests.activator.calls.test_fallback import broken
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import problem_of, until
from tests.activator.test_modules_of_a_call import modules_passed
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest
from tests.fakes.routes import SCHEMA, TENANT, route_of, spec_of, split_route

CACHE = ResponseCacheSpec(ttl_s=60)
V1, V2 = "v1-aaaaaa", "v2-bbbbbb"
NO_CACHE, NO_STORE = {"cache-control": "no-cache"}, {"cache-control": "no-store"}


class Counting:
    """Answers with the number of the call, once `gate` is open."""

    def __init__(self) -> None:
        self.calls = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing = 0

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.calls += 1
        number = self.calls
        await self.gate.wait()
        if self.failing:
            self.failing -= 1
            return WorkerAnswer(status=500, body=b'{"type":"function-raised"}', outcome="raised")
        return WorkerAnswer(body=b"%d" % number)


@pytest.fixture(name="runs")
def _runs(script: Script) -> Counting:
    script.now = counting = Counting()
    return counting


def cached(name: str = "hello", **more: Any) -> Any:
    more.setdefault("scaling", Scaling(max_inputs=16))
    return spec_of(name, cache=CACHE, **more)


def told(answer: httpx.Response) -> tuple[int, str, str | None]:
    return answer.status_code, answer.text, answer.headers.get("pilotlight-cache")


async def test_an_equal_call_is_answered_from_memory(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    first = await edge.call(content=b'{"x": 1, "y": 2}')
    edge.later_s = 7.4
    second = await edge.call(content=b'{"y":2,"x":1}')
    other = await edge.call(json={"x": 2})

    assert (told(first), told(second), told(other)) == (
        (200, "1", "miss"),
        (200, "1", "hit"),
        (200, "2", "miss"),
    )
    assert "age" not in first.headers
    assert second.headers["age"] == "7"
    assert second.headers["pilotlight-start"] == "CACHED"
    assert second.headers["content-type"] == "application/json"
    assert second.headers["pilotlight-cost"] == "0.000000000000"
    assert 'cache;desc="hit"' in second.headers["server-timing"]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]


async def test_an_answer_is_served_until_its_time_is_over(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    await edge.call(json={"x": 1})
    edge.later_s = 59.0
    assert told(await edge.call(json={"x": 1})) == (200, "1", "hit")
    edge.later_s = 61.0
    assert told(await edge.call(json={"x": 1})) == (200, "2", "miss")
    assert told(await edge.call(json={"x": 1})) == (200, "2", "hit")


async def test_a_hit_is_a_record_of_its_own_price(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    await edge.call(json={"x": 1})
    await edge.call(json={"x": 1})
    ran, hit = sorted((await edge.settle()).values(), key=lambda one: one.started_at)
    assert (hit.kind, hit.start_kind, hit.outcome, hit.status) == ("CALL", "CACHED", "ok", 200)
    assert (hit.exec_ms, hit.billed_ns, hit.instance, hit.cpu) == (0, 0, "", 0)
    assert (hit.bytes_in, hit.bytes_out) == (len(b'{"x":1}'), 1)
    assert (hit.key, hit.function, hit.revision) == (ran.key, ran.function, ran.revision)
    assert Decimal(hit.cost) == 0 < Decimal(ran.cost)


# -- whose answers -----------------------------------------------------------------------------------
async def test_an_answer_never_reaches_another_tenant(edge: Edge, runs: Counting) -> None:
    edge.add_tenant("acme")
    edge.add_tenant("others", tenant="t-2")
    edge.add(route_of(cached(access=("*",))))
    edge.add_key("neighbour", tenant="t-2")
    edge.add_key("second", tenant="t-2")
    edge.add_key("colleague")
    url = f"{edge.url}/t/acme/v1/functions/shop/hello:invoke"
    found = []
    for key in (KEY, "colleague", "neighbour", "second", "", ""):
        headers = {"authorization": f"Bearer {key}"} if key else {}
        found.append(told(await edge.client.post(url, json={"x": 1}, headers=headers)))
    assert found == [
        (200, "1", "miss"),
        (200, "1", "hit"),
        (200, "2", "miss"),
        (200, "2", "hit"),
        (200, "3", "miss"),
        (200, "3", "hit"),
    ]


async def test_the_same_function_of_two_tenants_has_two_caches(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    edge.add(replace(route_of(cached(), tenant="t-2"), id="f-of-another"))
    edge.add_key("neighbour", tenant="t-2")
    assert told(await edge.call(json={"x": 1})) == (200, "1", "miss")
    assert told(await edge.call(json={"x": 1}, key="neighbour")) == (200, "2", "miss")


async def test_a_hit_needs_the_same_rights(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    edge.add_key("poor", quotas={"requests_per_s": 0.001, "burst": 2})
    edge.add_key("revoked")
    for key in ("revoked", "poor", "poor"):
        assert (await edge.call(json={"x": 1}, key=key)).status_code == 200
    assert (await edge.call(json={"x": 1}, key="poor")).status_code == 429
    edge.tell("key", "k-revoked", None)
    assert (await edge.call(json={"x": 1}, key="revoked")).status_code == 401
    assert (await edge.call(json={"x": "no"})).status_code == 400
    edge.add_tenant("acme", suspended=True)
    assert (await edge.call(json={"x": 1})).status_code == 403
    assert runs.calls == 1


# -- what is stored ----------------------------------------------------------------------------------
async def test_callers_opt_out_for_a_call(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    body = {"x": 1}
    assert told(await edge.call(json=body, headers=NO_STORE)) == (200, "1", "bypass")
    assert told(await edge.call(json=body)) == (200, "2", "miss")
    assert told(await edge.call(json=body, headers=NO_CACHE)) == (200, "3", "bypass")
    assert told(await edge.call(json=body)) == (200, "3", "hit"), "no-cache stored a newer answer"
    assert told(await edge.call(json=body, headers=NO_STORE)) == (200, "4", "bypass")
    assert told(await edge.call(json=body)) == (200, "3", "hit")


async def test_failures_are_not_stored(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    runs.failing = 1
    assert (await edge.call(json={"x": 1})).status_code == 500
    assert told(await edge.call(json={"x": 1})) == (200, "2", "miss")
    assert told(await edge.call(json={"x": 1})) == (200, "2", "hit")


@pytest.mark.parametrize("how", ["large", "chunks", "no-store", "degraded"])
async def test_answers_that_cannot_be_kept_are_not(edge: Edge, script: Script, how: str) -> None:
    ran = 0

    async def answers(request: WorkerRequest) -> WorkerAnswer:
        nonlocal ran
        ran += 1

        async def chunks() -> Any:
            yield b"1"

        if how == "large":
            return WorkerAnswer(body=b"1" * (WHOLE_BODY_BYTES + 1))
        if how == "chunks":
            return WorkerAnswer(chunks=chunks())
        return WorkerAnswer(body=b"1", headers=("cache-control: private, no-store",))

    script.now = answers
    fallback = (Fallback(kind="static", body=1),)
    edge.add(route_of(cached(fallback=fallback)))
    if how == "degraded":
        broken(edge, "hello")
    found = [await edge.call(json={"x": 1}) for _ in range(2)]
    assert {one.headers["pilotlight-cache"] for one in found} == {"miss"}
    assert (ran, edge.answers.size_bytes) == (0 if how == "degraded" else 2, 0)


async def test_streams_bypass_the_cache(edge: Edge, runs: Counting) -> None:
    methods = (
        MethodSpec(name="items", is_generator=True),
        MethodSpec(name="one", schema=SCHEMA, parameters=("x", "y")),
    )
    edge.add(route_of(cached(kind=FunctionKind.CLASS, methods=methods)))
    for expected in ("bypass", "bypass"):
        answer = await edge.call("shop/hello.items:invoke", json={})
        assert answer.headers["pilotlight-cache"] == expected
    assert told(await edge.call("shop/hello.one:invoke", json={"x": 1}))[2] == "miss"
    assert told(await edge.call("shop/hello.one:invoke", json={"x": 1}))[2] == "hit"


async def test_pickles_go_by_their_bytes(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    headers = {"content-type": CONTENT_PICKLE}
    first = [await edge.call(content=b"\x80\x04N.", headers=headers) for _ in range(2)]
    assert [told(one)[2] for one in first] == ["miss", "hit"]
    assert told(await edge.call(content=b"\x80\x04K\x01.", headers=headers))[2] == "miss"


async def test_submitted_calls_run(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    await edge.call(json={"x": 1})
    assert (await edge.call("shop/hello:submit", json={"x": 1})).status_code == 202
    await until(lambda: runs.calls == 2)


async def test_a_rollout_and_a_rollback_begin_with_an_empty_cache(
    edge: Edge, runs: Counting
) -> None:
    def serve(revision: str, generation: int) -> None:
        edge.add(split_route(cached(), {revision: 100}, generation=generation))

    serve(V1, 1)
    assert told(await edge.call(json={"x": 1})) == (200, "1", "miss")
    assert told(await edge.call(json={"x": 1})) == (200, "1", "hit")
    serve(V2, 2)
    edge.table.handed_over(f"{TENANT}/main/shop/hello")
    answer = await edge.call(json={"x": 1})
    assert (told(answer), answer.headers["pilotlight-revision"]) == ((200, "2", "miss"), V2)
    serve(V1, 3)
    edge.table.handed_over(f"{TENANT}/main/shop/hello")
    answer = await edge.call(json={"x": 1})
    assert (told(answer), answer.headers["pilotlight-revision"]) == ((200, "3", "miss"), V1)


class Copies(ShadowTraffic):
    """Notes which calls are copied, and copies none."""

    def __init__(self, edge: Edge) -> None:
        super().__init__(
            throttler_of=edge.scaler.throttler_of,
            observer=edge.metrics.observer,
            is_crowded=lambda: False,
        )
        self.copied: list[bytes] = []

    def copy(self, call: Call, *, status: int, body: bytes, exec_ms: float) -> None:
        self.copied.append(body)


async def test_a_hit_is_not_copied(edge: Edge, runs: Counting) -> None:
    edge.copy_calls(copies := Copies(edge))
    edge.add(split_route(cached(), {V1: 100}, named=(V2,), shadow=Shadow(revision=V2)))
    assert [told(await edge.call(json={"x": 1}))[2] for _ in range(3)] == ["miss", "hit", "hit"]
    assert copies.copied == [b"1"]


# -- single flight -----------------------------------------------------------------------------------
async def together(edge: Edge, runs: Counting, count: int) -> list[asyncio.Task[httpx.Response]]:
    """`count` equal calls, of which one runs and the others wait for it."""
    runs.gate.clear()
    tasks = [asyncio.create_task(edge.call(json={"x": 1})) for _ in range(count)]
    await until(lambda: edge.flights.waiting == count - 1 and runs.calls == 1)
    return tasks


async def test_equal_calls_run_once(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    tasks = await together(edge, runs, 6)
    assert edge.queue.waiting == 5, "they count in the bounds of the queue"
    runs.gate.set()
    found = sorted([told(await task)[2] or "" for task in tasks])
    assert found == ["hit"] * 5 + ["miss"]
    assert (runs.calls, edge.flights.waiting, edge.queue.waiting) == (1, 0, 0)
    records = (await edge.settle()).values()
    assert sorted(one.start_kind == "CACHED" for one in records) == [False] + [True] * 5


async def test_a_failure_lets_one_other_run(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    runs.failing = 1
    tasks = await together(edge, runs, 4)
    runs.gate.set()
    found = sorted([told(await task) for task in tasks])
    assert found == [
        (200, "2", "hit"),
        (200, "2", "hit"),
        (200, "2", "miss"),
        (500, '{"type":"function-raised"}', "miss"),
    ]


async def test_a_caller_that_leaves_does_not_fail_the_others(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    runs.gate.clear()
    first = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: runs.calls == 1)
    others = [asyncio.create_task(edge.call(json={"x": 1})) for _ in range(3)]
    await until(lambda: edge.flights.waiting == 3)
    others[0].cancel()
    await until(lambda: edge.flights.waiting == 2)
    first.cancel()
    await until(lambda: runs.calls == 2 and edge.flights.waiting == 1)
    runs.gate.set()
    found = sorted([told(await task) for task in others[1:]])
    assert found == [(200, "2", "hit"), (200, "2", "miss")]
    assert repr(edge.flights) == "<SingleFlight 0 calls, 0 wait for them>"


async def test_an_answer_that_is_not_stored_lets_all_run(edge: Edge, script: Script) -> None:
    gate, ran = asyncio.Event(), 0

    async def large(request: WorkerRequest) -> WorkerAnswer:
        nonlocal ran
        ran += 1
        await gate.wait()
        return WorkerAnswer(body=b"1" * (WHOLE_BODY_BYTES + 1))

    script.now = large
    edge.add(route_of(cached()))
    tasks = [asyncio.create_task(edge.call(json={"x": 1})) for _ in range(4)]
    await until(lambda: edge.flights.waiting == 3)
    gate.set()
    assert {told(await task)[2] for task in tasks} == {"miss"}
    assert ran == 4


async def test_waiting_has_the_bounds_of_the_queue(edge: Edge, runs: Counting) -> None:
    edge.add(
        route_of(cached(scaling=Scaling(max_inputs=16, max_queued=1), clocks=Clocks(queue_s=1)))
    )
    runs.gate.clear()
    first = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: runs.calls == 1)
    second = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: edge.flights.waiting == 1)
    third = await edge.call(json={"x": 1})
    assert (third.status_code, str(problem_of(third)["type"]).rpartition("/")[2]) == (
        429,
        "too-many-requests",
    )
    late = await second
    assert (late.status_code, problem_of(late)["clock"]) == (504, "queue")
    runs.gate.set()
    assert told(await first) == (200, "1", "miss")


# -- faults ------------------------------------------------------------------------------------------
async def test_a_full_journal_refuses_a_hit_too(
    edge: Edge, runs: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.add(route_of(cached()))
    await edge.call(json={"x": 1})

    def full(record: bytes, *, at_ns: int) -> None:
        raise JournalFull("no space left", retry_after_s=5)

    monkeypatch.setattr(edge.books.journal, "append_call", full)
    assert (await edge.call(json={"x": 1})).status_code == 503
    assert len(await edge.settle()) == 1, "what is not written is not answered"
    monkeypatch.undo()
    assert told(await edge.call(json={"x": 1})) == (200, "1", "hit")


async def test_hits_are_answered_without_an_instance(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    await edge.call(json={"x": 1})
    broken(edge, "hello")
    await edge.fleet.aclose()
    assert told(await edge.call(json={"x": 1})) == (200, "1", "hit")


# -- what others see ---------------------------------------------------------------------------------
async def test_metrics_count_calls_bytes_and_dropped_answers(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    for headers in ({}, {}, NO_STORE):
        await edge.call(json={"x": 1}, headers=headers)
    labels = {"tenant": TENANT, "app": "shop", "function": "hello"}

    def value(name: str, **more: str) -> float | None:
        return edge.metrics.registry.get_sample_value(
            f"pilotlight_response_cache_{name}", {**labels, **more}
        )

    assert [value("calls_total", result=one) for one in ("hit", "miss", "bypass")] == [1, 1, 1]
    assert value("bytes") == edge.answers.size_bytes > 0
    assert value("dropped_total") == 0
    assert (
        edge.metrics.registry.get_sample_value(
            "pilotlight_requests_total", {**labels, "status": "200"}
        )
        == 3
    )
    assert (
        edge.metrics.registry.get_sample_value("pilotlight_execution_seconds_count", labels) == 2
    ), "a hit has no execution time"


async def test_a_trace_says_that_the_cache_answered(edge: Edge, runs: Counting) -> None:
    edge.add(route_of(cached()))
    await edge.call(json={"x": 1})
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await edge.call(json={"x": 1}, headers={"traceparent": parent})
    trace = edge.traces[-1]
    root = trace["spans"][0]["attributes"]
    assert (trace["start_kind"], root["pilotlight.cache"]) == ("CACHED", "hit")
    assert not [span for span in trace["spans"] if span["name"] == "exec"]


async def test_a_function_without_a_cache_passes_no_module_of_it(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    for _ in range(2):
        await edge.call(json={"x": 1})
    with modules_passed() as passed:
        answer = await edge.call(json={"x": 1})
    assert answer.is_success
    assert "pilotlight-cache" not in answer.headers
    assert not [module for module in passed if "response_cache" in module]
    assert "calls/response_store.py" not in passed


@pytest.mark.parametrize(
    "why, more",
    [
        ("requests to a web server are not compared", {"kind": FunctionKind.ASGI}),
        ("streams are not kept", {"methods": (MethodSpec(is_generator=True),)}),
    ],
)
def test_functions_whose_answers_do_not_repeat_are_refused(
    why: str, more: Mapping[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match=why):
        cached(**more)


def test_online_features_are_refused() -> None:
    schema = FeatureSchema({"age": Feature(int, default=0)})
    features = FeaturesSpec(online=(RedisFeatures(key="user:{x}", schema=schema),))
    methods = (MethodSpec(schema=SCHEMA, parameters=("x", "y"), takes_features=True),)
    with pytest.raises(InvalidInput, match="online features change"):
        cached(features=features, methods=methods)
