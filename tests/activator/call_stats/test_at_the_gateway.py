"""What callers saw is what was observed: each request that reached a function once, under the right
name."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from pilotlight.spec.function import FunctionKind, MethodSpec
from pilotlight.spec.observations import Observation, sum_observations
from pilotlight.spec.policies import Fallback
from snapshotter.errors import StartFailed
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

PARTITION = ("answered", "failed", "refused", "cancelled")
_BY_STATUS = {2: "answered", 4: "refused", 5: "failed"}


async def behave(request: WorkerRequest) -> WorkerAnswer:
    """As the body's `x` or the path says."""
    if b'"x": 500' in request.body or b'"x":500' in request.body:
        return WorkerAnswer(status=500, body=b"{}", outcome="raised")
    if b'"x":1000' in request.body:
        await asyncio.sleep(3600)
    if b'"x":2000' in request.body:
        return WorkerAnswer(chunks=_three())
    if request.path.endswith("/maintenance"):
        return WorkerAnswer(status=503)
    return WorkerAnswer(body=b"1")


async def _three() -> AsyncIterator[bytes]:
    for part in (b"1\n", b"2\n", b"3\n"):
        yield part


@pytest.fixture(name="behaviour")
def _behaviour() -> object:
    return behave


def observed(edge: Edge, function: str = "hello") -> Observation:
    total = sum_observations(
        one for one in edge.metrics.observer.drain(7) if one.function_id == f"f-shop-{function}"
    )
    assert total is not None
    return total


def _asked(edge: Edge, body: bytes) -> int:
    return sum(
        request.body == body
        for worker in edge.fleet.workers.values()
        for request in worker.requests
    )


def counts(one: Observation) -> dict[str, int]:
    return {name: getattr(one, name) for name in PARTITION if getattr(one, name)}


async def test_every_answer_is_observed_once(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    seen: Counter[str] = Counter()
    bodies = (
        [{"x": 1}] * 5
        + [{"x": 500}] * 3
        + [{"x": "wrong"}] * 2
        + [{"x": 2000}] * 2
        + [{"x": 1}] * 2
    )
    for body in bodies:
        seen[_BY_STATUS[(await edge.call(json=body)).status_code // 100]] += 1
    one = observed(edge)
    assert counts(one) == seen == {"answered": 9, "failed": 3, "refused": 2}
    assert (one.raised, one.cold, one.streams, one.streams_completed, one.starts) == (3, 1, 2, 2, 1)
    assert {
        clock: sum(one.latency[clock].values()) for clock in ("warm", "cold", "first_byte", "exec")
    } == {
        "warm": 6,
        "cold": 1,
        "first_byte": 2,
        "exec": 9,
    }
    assert one.calls_billed == 12


async def test_a_call_over_its_quota_is_refused_on_either_path(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.tell(
        "quota",
        f"{route_of(spec_of()).tenant}/main/shop/hello",
        {"requests_per_s": 0.001, "burst": 2},
    )
    statuses = [(await edge.call(json={"x": 1})).status_code for _ in range(6)]
    assert Counter(statuses) == {200: 2, 429: 4}
    assert counts(observed(edge)) == {"answered": 2, "refused": 4}


async def test_a_caller_that_leaves_is_observed_as_one(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 1})  # cold, so that the next is warm
    await edge.call(json={"x": 1})
    for number in (1, 2):
        call = asyncio.create_task(edge.call(json={"x": 1000}))
        await until(lambda number=number: _asked(edge, b'{"x":1000}') == number)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
    cancelled = 0
    answered = 0

    def both() -> bool:
        nonlocal cancelled, answered
        for one in edge.metrics.observer.drain(7):
            cancelled += one.cancelled
            answered += one.answered
        return cancelled == 2

    await until(both)
    assert answered == 2


async def test_a_clock_that_ran_out_is_a_late_failure(edge: Edge) -> None:
    spec = spec_of()
    edge.add(route_of(replace(spec, clocks=replace(spec.clocks, execution_s=0.2))))
    assert (await edge.call(json={"x": 1000})).status_code == 504
    one = observed(edge)
    assert (counts(one), one.late) == ({"failed": 1}, 1)


async def test_what_does_not_start_is_failed_and_its_start_too(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    edge.fleet.failures.append(StartFailed("no"))
    assert (await edge.call(json={"x": 1})).status_code == 502
    one = observed(edge)
    assert (counts(one), one.starts, one.starts_failed, one.crashed) == ({"failed": 1}, 1, 1, 0)


async def test_a_fallbacks_answer_is_degraded_and_not_failed(edge: Edge) -> None:
    edge.add(route_of(spec_of(fallback=(Fallback(kind="static", body={"a": 1}),))))
    edge.fleet.failures.append(StartFailed("no"))
    answer = await edge.call(json={"x": 1})
    assert (answer.status_code, answer.headers["pilotlight-degraded"]) == (200, "static")
    one = observed(edge)
    assert (counts(one), one.degraded, set(one.latency)) == ({"answered": 1}, 1, set())


async def test_a_warmup_and_an_unknown_function_are_no_calls(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    assert (await edge.call("shop/hello:warmup")).status_code == 200
    assert (await edge.call("shop/nobody:invoke", json={})).status_code == 404
    assert counts(observed(edge)) == {}


async def test_a_web_applications_own_503_is_its_word(edge: Edge) -> None:
    edge.add(route_of(spec_of("site", kind=FunctionKind.ASGI, methods=(MethodSpec(),))))
    statuses = []
    for path in ("a", "maintenance", "b"):
        response = await edge.client.get(
            f"{edge.url}/fn/shop/site/{path}", headers={"authorization": f"Bearer {KEY}"}
        )
        statuses.append(response.status_code)
    one = observed(edge, "site")
    assert (statuses, counts(one)) == ([200, 503, 200], {"answered": 2, "refused": 1})
    assert one.calls_billed == 3


async def test_a_submitted_call_is_observed_and_nobody_waits_for_it(
    edge: Edge, shipping: object
) -> None:
    edge.add(route_of(spec_of()))
    for x in (1, 500):
        receipt = await edge.call("shop/hello:submit", json={"x": x})
        assert receipt.status_code == 202
    found: list[Observation] = []

    def ended() -> bool:
        found.extend(edge.metrics.observer.drain(7))
        total = sum_observations(found)
        return total is not None and total.answered + total.failed == 2

    await until(ended)
    total = sum_observations(found)
    assert total is not None
    assert (counts(total), total.raised, total.latency) == ({"answered": 1, "failed": 1}, 1, {})


async def test_a_submitted_call_that_is_cancelled_is_observed_as_one(
    edge: Edge, shipping: object
) -> None:
    edge.add(route_of(spec_of()))
    receipt = await edge.call("shop/hello:submit", json={"x": 1000})
    await until(lambda: _asked(edge, b'{"x":1000}') == 1)
    headers = {"authorization": f"Bearer {KEY}"}
    assert (
        await edge.client.post(
            f"{edge.url}/v1/calls/{receipt.json()['id']}:cancel", headers=headers
        )
    ).status_code == 200
    assert counts(observed(edge)) == {"cancelled": 1}
