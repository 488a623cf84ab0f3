"""Calls under an idempotency key, through the whole edge: run once, answered as often as they are
repeated."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from activator.idempotency import middleware
from activator.idempotency.process_store import ProcessIdempotency
from activator.idempotency.store_protocol import Claim, Known
from pilotlight.protocol import HEADER_REPLAYED
from tests.activator.conftest import KEY, Edge
from tests.activator.test_gateway import forever, problem_of, until
from tests.fakes.fake_worker import WorkerAnswer, WorkerRequest
from tests.fakes.routes import route_of, spec_of

ONCE = {"idempotency-key": "order-1"}


class Counting:
    """Answers how often it was called; fails while `fails`; waits while `gate` is shut."""

    def __init__(self, *, fails: int = 0) -> None:
        self.calls = 0
        self.fails = fails
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, request: WorkerRequest) -> WorkerAnswer:
        self.calls += 1
        await self.gate.wait()
        if self.calls <= self.fails:
            return WorkerAnswer(status=500, body=b'{"type":"function-raised"}', outcome="raised")
        return WorkerAnswer(body=b"%d" % self.calls)


@pytest.fixture(name="function")
def _function(edge: Edge) -> Counting:
    counting = Counting()
    edge.fleet.behaviour = counting
    edge.add(route_of(spec_of()))
    return counting


async def call(edge: Edge, x: int = 1, key: str = KEY, **headers: str) -> httpx.Response:
    return await edge.call(key=key, json={"x": x}, headers={**ONCE, **headers})


async def test_a_repeat_gets_the_first_ones_answer_marked_and_under_its_id(
    edge: Edge, function: Counting
) -> None:
    await edge.call(json={"x": 0})  # it is warm: its next calls could go without a task
    first, again = await call(edge), await call(edge)

    assert (first.json(), again.json(), function.calls) == (2, 2, 2)
    assert (first.headers.get(HEADER_REPLAYED), again.headers[HEADER_REPLAYED]) == (None, "true")
    for name in ("x-request-id", "pilotlight-cost", "pilotlight-revision", "content-type"):
        assert again.headers[name] == first.headers[name]
    assert len(await edge.settle()) == 2  # a repeat costs nothing


async def test_another_request_under_the_same_key_is_a_conflict(
    edge: Edge, function: Counting
) -> None:
    await call(edge)
    assert (await call(edge, 2)).status_code == 409
    assert (await call(edge, accept="application/x-ndjson")).status_code == 409
    assert function.calls == 1


async def test_keys_of_two_callers_are_two(edge: Edge, function: Counting) -> None:
    edge.add_key("pl_second")
    await call(edge)
    assert (await call(edge, 2, key="pl_second")).json() == 2


async def test_a_repeat_while_the_first_runs_is_told_to_come_again(
    edge: Edge, function: Counting
) -> None:
    function.gate.clear()
    first = asyncio.create_task(call(edge))
    await until(lambda: function.calls)
    meanwhile = await call(edge)
    function.gate.set()

    assert (meanwhile.status_code, meanwhile.headers["retry-after"]) == (409, "1")
    assert "still running" in str(problem_of(meanwhile)["detail"])
    assert ((await first).json(), (await call(edge)).json()) == (1, 1)


async def test_what_failed_may_be_asked_for_again(edge: Edge, function: Counting) -> None:
    function.fails = 1
    failed, good, again = await call(edge), await call(edge), await call(edge)
    assert [answer.status_code for answer in (failed, good, again)] == [500, 200, 200]
    assert (good.json(), again.json()) == (2, 2)


async def test_a_caller_that_leaves_does_not_end_its_call_and_finds_its_answer(
    edge: Edge, function: Counting
) -> None:
    function.gate.clear()
    leaving = asyncio.create_task(call(edge))
    await until(lambda: function.calls)
    (connection,) = edge.limits.connections
    leaving.cancel()
    await until(lambda: connection not in edge.limits.connections)
    function.gate.set()
    await until(lambda: not edge.idempotency.running)

    again = await call(edge)
    assert (again.json(), again.headers[HEADER_REPLAYED], function.calls) == (1, "true", 1)


async def test_a_stream_is_kept_whole(edge: Edge) -> None:
    async def items(request: WorkerRequest) -> WorkerAnswer:
        async def lines() -> object:
            for number in range(3):
                yield b"%d\n" % number

        return WorkerAnswer(chunks=lines(), content_type="application/x-ndjson")  # type: ignore[arg-type]

    edge.fleet.behaviour = items
    edge.add(route_of(spec_of()))
    first, again = await call(edge), await call(edge)
    assert first.content == again.content == b"0\n1\n2\n"
    assert again.headers[HEADER_REPLAYED] == "true"


async def test_an_answer_that_is_too_long_is_not_kept(
    edge: Edge, function: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "MAX_ANSWER_BYTES", 0)
    assert ((await call(edge)).json(), (await call(edge)).json()) == (1, 2)


async def test_a_warm_up_under_a_key_is_one(edge: Edge, function: Counting) -> None:
    answers = [await edge.call("shop/hello:warmup?snapshot=false", headers=ONCE) for _ in range(2)]
    assert [a.status_code for a in answers] == [200, 200]
    assert answers[1].headers[HEADER_REPLAYED] == "true"


async def test_what_is_no_key_and_who_has_none_are_refused(edge: Edge, function: Counting) -> None:
    assert (
        await edge.call(json={"x": 1}, headers={"idempotency-key": "x" * 300})
    ).status_code == 400
    assert (await edge.call(key="pl_wrong", json={"x": 1}, headers=ONCE)).status_code == 401
    assert (await edge.call(json={"x": "one"}, headers=ONCE)).status_code == 400
    assert (await call(edge)).status_code == 200  # the one before was refused, and kept nothing


async def test_web_applications_get_the_header_themselves(edge: Edge, function: Counting) -> None:
    from pilotlight.spec.function import FunctionKind

    edge.add(route_of(spec_of("web", kind=FunctionKind.ASGI)))
    for _ in range(2):
        await edge.client.post(
            f"{edge.url}/fn/shop/web/pay", headers={"authorization": f"Bearer {KEY}", **ONCE}
        )
    asked = [r for w in edge.fleet.workers.values() for r in w.requests]
    assert [r.headers["idempotency-key"] for r in asked] == ["order-1", "order-1"]


async def test_the_end_of_the_process_ends_what_runs_for_callers_who_left(edge: Edge) -> None:
    edge.fleet.behaviour = forever
    edge.add(route_of(spec_of()))
    task = asyncio.create_task(call(edge))
    await until(lambda: any(w.requests for w in edge.fleet.workers.values()))
    await edge.idempotency.aclose()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not edge.idempotency.running


async def test_requests_that_run_are_never_forgotten_for_want_of_room() -> None:
    store = ProcessIdempotency(max_bytes=3000)
    assert await store.claim("running", "f") is None
    for n in range(20):
        assert await store.claim(f"n-{n}", "f") is None
        await store.store(Claim(name=f"n-{n}", tenant="t", fingerprint="f"), b"x" * 500, ttl_s=60)

    assert await store.claim("running", "f") == Known(fingerprint="f", answer=None)
    assert (await store.claim("n-19", "f")) == Known(fingerprint="f", answer=b"x" * 500)
    assert await store.claim("n-0", "f") is None
    size_bytes = int(repr(store).split()[-2])
    assert size_bytes <= 3000 + 256
