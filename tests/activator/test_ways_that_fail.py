"""Warm ways, handovers and slots where a revision, a caller or the disk lets them down."""

from __future__ import annotations

import asyncio
import random
import time
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from activator.balancing.instance_lifecycle import STUCK_GRACE_S
from activator.balancing.outlier_detection import RevisionHealth
from activator.balancing.throttler import Throttler
from activator.billing.errors import JournalFull
from activator.calls.call import Call
from activator.calls.response_store import (
    ResponseStore,
    StoredResponse,
    bare,
    fallback_key,
    owner_of,
)
from activator.resilience.breaker import BreakerTerms, Outcome, State
from activator.routing.traffic_split import MAX_NAME_BYTES, MAX_UNITS, FunctionRouter
from activator.worker_client.connection import WorkerResponse
from pilotlight.protocol import FunctionRoute
from pilotlight.spec.function import Clocks, MethodSpec
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.pricing import Rates
from pilotlight.spec.record_json import to_json
from pilotlight.spec.traffic import Arm, ExperimentTraffic, Segment, Shadow
from tests.activator.balancing.test_cutover import throttler
from tests.activator.conftest import Edge
from tests.activator.gateway.test_fast_path import ClocksByHand
from tests.activator.routing.test_traffic_split import caller
from tests.activator.test_gateway import forever, until
from tests.fakes.calls import call_of
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest, echo
from tests.fakes.routes import SCHEMA, TENANT, route_of, spec_of, split_route, target_of

V1, V2 = "v1-aaaaaa", "v2-bbbbbb"


@pytest.fixture(name="behaviour")
def _behaviour() -> Script:
    return Script()


METHODS = tuple(
    MethodSpec(name=name, schema=SCHEMA, parameters=("x", "y")) for name in ("old", "new")
)


def with_methods(route: FunctionRoute, revision: str, *names: str) -> FunctionRoute:
    spec = spec_of(methods=tuple(method for method in METHODS if method.name in names))
    revisions = {**route.revisions, revision: {**route.revisions[revision], "spec": to_json(spec)}}
    return replace(route, revisions=revisions)


async def test_a_method_that_one_of_two_revisions_lacks_is_not_found_there_also_when_warm(
    edge: Edge,
) -> None:
    route = split_route(spec_of(methods=METHODS), {V1: 50, V2: 50}, sticky="header:x-user")
    edge.add(with_methods(route, V2, "new"))
    statuses: dict[str, set[int]] = {}
    for _ in range(3):
        for n in range(8):
            answer = await edge.call(
                "shop/hello.old:invoke", json={"x": 1}, headers={"x-user": f"u-{n}"}
            )
            statuses.setdefault(f"u-{n}", set()).add(answer.status_code)
    assert {200} in statuses.values()
    assert {404} in statuses.values(), statuses
    assert all(seen in ({200}, {404}) for seen in statuses.values())


async def test_a_key_that_may_not_call_is_told_so_each_time_also_of_two_revisions(
    edge: Edge,
) -> None:
    edge.add_key("pl_reader", scope="read-billing")
    edge.add(split_route(spec_of(), {V1: 50, V2: 50}))
    assert [(await edge.call(json={"x": 1}, key="pl_reader")).status_code for _ in range(4)] == [
        403
    ] * 4


async def test_units_of_an_arm_wait_for_its_revision_rather_than_be_answered_by_another(
    edge: Edge,
) -> None:
    edge.table.handovers = edge.handovers
    edge.add(route_of(spec_of(), revision=V1))
    await edge.call(json={"x": 0})
    edge.fleet.gate.clear()
    arms = (Arm(name="b", revision=V2, share=100),)
    experiment = ExperimentTraffic(id="x-1", salt="s", unit="header:x-user", percent=100, arms=arms)
    edge.add(split_route(spec_of(), {V1: 50, V2: 50}, experiment=experiment))
    waiting = asyncio.create_task(edge.call(json={"x": 1}, headers={"x-user": "ada"}))
    await until(lambda: throttler(edge, V2).waiting == 1)
    edge.fleet.gate.set()
    answer = await waiting
    assert (answer.headers["pilotlight-arm"], answer.headers["pilotlight-revision"]) == ("b", V2)


def test_what_is_remembered_of_units_is_bounded_in_bytes_too() -> None:
    routed = FunctionRouter(
        split_route(spec_of(), {V1: 50, V2: 50}, sticky="header:x-user"), Rates(version="test")
    )
    long = [b"%d" % n + b"u" * MAX_NAME_BYTES for n in range(20)]
    first = [routed.choose(caller(), {b"x-user": name}) for name in long]
    # the same unit, the same choice
    assert [routed.choose(caller(), {b"x-user": name}) for name in long] == first
    assert repr(routed).endswith(", 0 units cached>")
    assert MAX_UNITS * MAX_NAME_BYTES <= 1024**2


def test_a_point_at_the_end_of_the_range_is_somebodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that were computed elsewhere may end a hair before 100."""
    route = split_route(spec_of(), {V1: 50, V2: 50})
    segments = (
        Segment(revision=V1, begin=0.0, end=50.0),
        Segment(revision=V2, begin=50.0, end=99.9999999),
    )
    document = {
        **route.document,
        "segments": [{"revision": s.revision, "begin": s.begin, "end": s.end} for s in segments],
    }
    routed = FunctionRouter(replace(route, document=document), Rates(version="test"))
    monkeypatch.setattr(random, "random", lambda: 0.9999999999)
    assert routed.any().revision == V2


# -- slots that no call used -----------------------------------------------------------------------


def half_open(one: Throttler) -> RevisionHealth:
    """Its next call is the probe."""
    one.health = health = RevisionHealth(BreakerTerms(min_calls=1, open_s=0.0))
    health.breaker.record_outcome(Outcome.FAILED, 0.0)
    assert health.breaker.state is State.OPEN
    return health


async def test_a_slot_that_was_given_back_unused_does_not_close_a_breaker(edge: Edge) -> None:
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 0})
    (target,) = edge.table.targets_of("t-000000000001/main/shop/hello")
    one = edge.scaler.throttler_of(target)
    health = half_open(one)
    reservation = one.reserve_nowait()
    assert reservation is not None
    reservation.release_unused()
    assert health.breaker.state is not State.CLOSED
    assert health.breaker.admits(time.monotonic())  # the next one is the probe


async def test_a_call_that_could_not_be_written_down_is_no_probe(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 0})
    (target,) = edge.table.targets_of("t-000000000001/main/shop/hello")
    one = edge.scaler.throttler_of(target)

    def full(*_: Any, **__: Any) -> None:
        raise JournalFull("no room")

    monkeypatch.setattr(edge.books.journal, "open_call", full)
    health = half_open(one)
    answer = await edge.call(json={"x": 1})
    assert answer.status_code == JournalFull.status
    assert health.breaker.state is not State.CLOSED
    assert one.in_flight == 0


async def test_an_unexpected_error_of_a_warm_call_keeps_no_slot_and_no_quota(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    edge.add(route_of(spec_of()))
    edge.tell("quota", f"{TENANT}/main/shop/hello", {"concurrent": 1})
    await edge.call(json={"x": 0})
    (target,) = edge.table.targets_of(f"{TENANT}/main/shop/hello")

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patched:
        patched.setattr(edge.books.journal, "open_call", broken)
        await edge.call(json={"x": 1})
    assert edge.scaler.throttler_of(target).in_flight == 0
    assert (await edge.call(json={"x": 1})).status_code == 200


async def test_a_warm_call_without_a_connection_is_no_probe(edge: Edge) -> None:
    """It goes on as an ordinary call; were that one refused, nobody had probed."""
    edge.add(route_of(spec_of()))
    await edge.call(json={"x": 0})
    await edge.call(json={"x": 0})
    (target,) = edge.table.targets_of("t-000000000001/main/shop/hello")
    one = edge.scaler.throttler_of(target)
    (instance,) = one.instances.values()
    health = half_open(one)
    instance.connections.close()
    seen: list[State] = []
    worker = next(iter(edge.fleet.workers.values()))
    before = worker.behaviour

    async def looks(request: Any) -> Any:
        seen.append(health.breaker.state)
        return await before(request)

    worker.behaviour = looks
    assert (await edge.call(json={"x": 1})).status_code == 200
    assert seen == [State.HALF_OPEN]


async def test_a_call_that_waits_does_not_get_the_slot_of_one_that_ran_out_of_its_clock(
    edge: Edge, behaviour: Script
) -> None:
    clocks = edge.gateway.warm.clocks = ClocksByHand()
    edge.add(route_of(spec_of(scaling=Scaling(max_instances=1))))
    await edge.call(json={"x": 0})
    (stuck,) = edge.fleet.workers.values()
    behaviour.now = forever
    first = asyncio.create_task(edge.call(json={"x": 1}))
    await until(lambda: len(stuck.requests) == 2)
    behaviour.now = echo
    second = asyncio.create_task(edge.call(json={"x": 2}))
    await until(
        lambda: (
            edge.scaler.throttler_of(
                edge.table.targets_of("t-000000000001/main/shop/hello")[0]
            ).waiting
            == 1
        )
    )
    clocks.run_out()
    assert ((await first).status_code, (await second).json()) == (504, {"x": 2})
    assert len(stuck.requests) == 2
    assert [grace_s for _, grace_s in edge.fleet.stopped] == [STUCK_GRACE_S]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_callers_own_deadline_ends_no_instance(
    edge: Edge, behaviour: Script, is_stream: bool
) -> None:
    """Else anybody who may call could have a function's instances replaced, as fast as they come
    up."""
    edge.add(route_of(spec_of(clocks=Clocks(execution_s=60))))
    await edge.call(json={"x": 0})

    async def drips(request: WorkerRequest) -> WorkerAnswer:
        return WorkerAnswer(chunks=_one_and_wait())

    behaviour.now = drips if is_stream else forever
    for _ in range(3):
        try:
            status = (
                await edge.call(json={"x": 1}, headers={"pilotlight-timeout": "0.02"})
            ).status_code
        except httpx.RemoteProtocolError:
            status = 504
        assert status == 504
    behaviour.now = echo
    assert (await edge.call(json={"x": 2})).json() == {"x": 2}
    assert (len(edge.fleet.started), edge.fleet.stopped) == (1, [])
    assert sorted(record.status for record in (await edge.settle()).values()) == [
        200,
        200,
        504,
        504,
        504,
    ]


async def _one_and_wait() -> AsyncIterator[bytes]:
    yield b"1\n"
    await asyncio.Event().wait()


def remember(answers: ResponseStore, call: Call, answer: WorkerResponse) -> None:
    answers.store(fallback_key(call), owner_of(call), StoredResponse(bare(answer), 0.0))


def remembered(answers: ResponseStore, call: Call) -> WorkerResponse | None:
    found = answers.find(fallback_key(call), max_age_s=1.0, now=0.0)
    return found.answer if found is not None else None


async def test_a_kept_answer_holds_no_more_than_it_is_counted_for() -> None:
    answers, spans = ResponseStore(max_bytes=10_000), b"s" * 8000
    call = call_of()
    remember(
        answers,
        call,
        WorkerResponse(
            None, 200, [(b"content-type", b"application/json"), (b"pilotlight-spans", spans)], b"1"
        ),
    )
    kept = remembered(answers, call)
    assert kept is not None
    assert kept.headers == [(b"content-type", b"application/json")], (
        "what its worker said of itself is of that call"
    )


@pytest.mark.parametrize(
    "values", [(), (5000,), (1,) * 40], ids=["no headers", "a long header", "many short headers"]
)
async def test_kept_answers_take_no_more_memory_than_they_are_counted_for(
    values: tuple[int, ...],
) -> None:
    answers, target = ResponseStore(), target_of(spec_of())
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for n in range(60):
        headers = [
            (bytearray(b"cache-control"), bytearray(b"%04d" % n * (size // 4 + 1)))
            for size in values
        ]
        call = call_of(target, b"%d" % n, accept=b"%04d" % n * 250)
        remember(
            answers,
            call,
            WorkerResponse(
                None, 200, [(bytes(name), bytes(value)) for name, value in headers], b"1"
            ),
        )
    del headers, call
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert after - before <= answers.size_bytes


async def test_a_cached_answer_is_for_those_who_ask_in_the_same_way() -> None:
    def called(accept: bytes, body: bytes = b"{}") -> Call:
        return call_of(target_of(spec_of()), body, accept=accept)

    answers = ResponseStore()
    remember(answers, called(b"text/plain"), WorkerResponse(None, 200, [], b"1"))
    assert remembered(answers, called(b"text/plain")) is not None
    assert remembered(answers, called(b"")) is None
    assert remembered(answers, called(b"text/plai", b"n{}")) is None


async def test_a_cached_answer_is_shared_within_one_tenant_and_among_callers_without_a_key_only() -> (
    None
):
    def called(*, key_id: str, caller: str = "") -> Call:
        return call_of(key_id=key_id, tenant=caller)

    answers = ResponseStore()
    remember(answers, called(key_id="k"), WorkerResponse(None, 200, [], b"the owner's"))
    assert remembered(answers, called(key_id="another-key")) is not None
    assert remembered(answers, called(key_id="")) is None
    assert remembered(answers, called(key_id="k2", caller="another-tenant")) is None
    remember(answers, called(key_id=""), WorkerResponse(None, 200, [], b"public"))
    found = remembered(answers, called(key_id=""))
    assert found is not None
    assert found.body == b"public"


async def test_copies_are_no_load_that_the_way_back_must_keep_room_for(edge: Edge) -> None:
    edge.add(
        split_route(
            spec_of(scaling=Scaling(max_inputs=8)),
            {V1: 100},
            named=(V2,),
            stable=V1,
            shadow=Shadow(revision=V2),
        )
    )
    targets = {t.revision: t for t in edge.table.targets_of(f"{TENANT}/main/shop/hello")}
    for target in targets.values():
        edge.scaler.throttler_of(target)
    scaled = {s.throttler.target.revision: s for s in edge.scaler.revisions.values()}
    now = time.monotonic()
    for one in scaled.values():
        one.recorded_at = now - 10
        one.throttler.load.add(now - 10)
    edge.scaler.record(now)
    assert scaled[V1].stable.average(now) == pytest.approx(scaled[V2].stable.average(now))
