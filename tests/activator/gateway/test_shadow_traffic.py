"""Copies of calls: made when the caller has its answer, within their share, free of charge, left
out first, compared."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import repeat
from typing import Any

import pytest

from activator.billing.errors import JournalFull
from activator.gateway.shadow_traffic import WINDOW_S, ShadowBudget, ShadowTraffic, is_same
from activator.routing.call_target import CallTarget
from activator.tracing.tracer import Tracer
from pilotlight.protocol import UsageRecord
from pilotlight.spec.observations import SHADOW_ARM
from pilotlight.spec.traffic import Shadow
from tests.activator.conftest import Edge
from tests.activator.gateway.test_fast_path import in_flight
from tests.activator.test_gateway import until
from tests.fakes.fake_worker import Script, WorkerAnswer, WorkerRequest
from tests.fakes.reference_prices import price_usage
from tests.fakes.routes import spec_of, split_route

V1, V2 = "v1-aaaaaa", "v2-bbbbbb"


class Seen:
    """What became of copies (`ShadowObserver`)."""

    def __init__(self) -> None:
        self.matched: list[bool | None] = []
        self.statuses: list[int] = []
        self.left_out = 0

    def shadowed(
        self, target: CallTarget, *, status: int, exec_ms: float, matched: bool | None
    ) -> None:
        assert target.revision == V2
        assert exec_ms > 0
        self.statuses.append(status)
        self.matched.append(matched)

    def skipped(self, target: CallTarget) -> None:
        assert target.revision == V2
        self.left_out += 1


class World:
    """An edge with a function, its shadow with an instance of its own, and ways to play both."""

    def __init__(self, edge: Edge, script: Script, *, tracer: Tracer | None = None) -> None:
        self.edge = edge
        self.script = script
        self.seen = Seen()
        self.is_crowded = False
        self.draws: Iterator[float] = repeat(0.0)
        self.budget: type[ShadowBudget] = ShadowBudget
        self.budgets: list[ShadowBudget] = []
        self.shadows = ShadowTraffic(
            throttler_of=edge.scaler.throttler_of,
            observer=self.seen,
            is_crowded=lambda: self.is_crowded,
            draw=lambda: next(self.draws),
            tracer=tracer,
            make_budget=self.make_budget,
        )
        edge.copy_calls(self.shadows)

    def make_budget(self) -> ShadowBudget:
        self.budgets.append(self.budget())
        return self.budgets[-1]

    def deploy(self, **shadow: Any) -> None:
        members = {"percent": 100.0, "max_compute": 1.0, **shadow}
        self.edge.add(
            split_route(spec_of(), {V1: 100}, named=(V2,), shadow=Shadow(revision=V2, **members))
        )

    @property
    def copies(self) -> list[WorkerRequest]:
        """What the shadow was asked."""
        return [
            r
            for worker in self.edge.fleet.workers.values()
            for r in worker.requests
            if r.headers.get("pilotlight-arm") == SHADOW_ARM
        ]

    async def call(self, **more: Any) -> str:
        answer = await self.edge.call(json={"x": 1}, **more)
        assert (answer.status_code, answer.headers["pilotlight-revision"]) == (200, V1), answer.text
        return answer.text

    async def ready(self) -> None:
        """The shadow has its instance, nothing runs, and the function has run for so long that its
        copies have room."""
        shadow = next(t for t in self.edge.table.targets_of(NAME) if t.revision == V2)
        await until(lambda: bool(self.edge.scaler.throttler_of(shadow).instances))
        await self.quiet()
        for budget in self.budgets:
            budget.add(time.monotonic(), own=60_000.0)

    async def quiet(self) -> None:
        await until(
            lambda: (
                repr(self.shadows) == "<ShadowTraffic 0 copies running>"
                and in_flight(self.edge) == 0
            )
        )


NAME = "t-000000000001/main/shop/hello"


@pytest.fixture(name="world")
async def _world(edge: Edge, script: Script) -> AsyncIterator[World]:
    world = World(edge, script)
    yield world
    await world.shadows.aclose()


async def test_the_first_copies_bring_an_instance_up_and_later_ones_use_it(world: World) -> None:
    world.deploy()
    await world.call()
    await world.ready()
    assert (world.copies, world.seen.left_out) == ([], 1)
    await world.call()
    await world.quiet()
    (copy,) = world.copies
    assert copy.body == b'{"x":1}'
    assert copy.headers["pilotlight-call"].endswith("-shadow")
    assert (world.seen.matched, world.seen.statuses) == ([True], [200])
    assert len(world.edge.fleet.started) == 2


async def test_a_caller_has_its_whole_answer_before_the_copy_begins_and_whatever_becomes_of_it(
    world: World,
) -> None:
    """Order of events, not time: the shadow never answers, and every caller is answered all the
    same."""
    world.deploy()
    await world.call()
    await world.ready()
    events: list[str] = []
    held = asyncio.Event()

    async def play(request: WorkerRequest) -> WorkerAnswer:
        is_copy = request.headers.get("pilotlight-arm") == SHADOW_ARM
        events.append("copy" if is_copy else "call")
        if is_copy:
            await held.wait()
        return WorkerAnswer(body=request.body)

    world.script.now = play
    for _ in range(3):
        await world.call()
        events.append("answered")
    assert [event for event in events if event != "copy"] == ["call", "answered"] * 3
    await until(lambda: "copy" in events)
    assert events.index("copy") > events.index("call")
    assert world.seen.matched == []
    held.set()
    await world.quiet()
    # one slot: those that found it taken were left out, none waited
    assert world.seen.left_out == 1 + 2


async def test_an_ordinary_request_is_copied_as_a_warm_one_is(world: World) -> None:
    world.deploy()
    await world.call()
    await world.ready()
    await world.call(headers={"pilotlight-timeout": "9"})
    await world.quiet()
    assert len(world.copies) == 1


async def test_copies_cost_nothing_and_pass_no_quota(world: World) -> None:
    world.edge.add_tenant("owner", requests_per_s=0.001, burst=3)
    world.deploy()
    for _ in range(3):
        await world.call()
        await world.ready()
    answer = await world.edge.call(json={"x": 1})
    assert answer.status_code == 429  # three calls, and not one more for their copies
    records = list((await world.edge.settle()).values())
    copies = [record for record in records if record.kind == "SHADOW"]
    assert len(copies) == len(world.copies) == 2
    assert {(r.cost, r.rate_per_s, r.revision, r.arm, r.key) for r in copies} == {
        ("0.000000000000", copies[0].rate_per_s, V2, SHADOW_ARM, "")
    }
    assert all(
        price_usage(UsageRecord.from_json(r.to_json()), world.edge.table.rates_of(r.tenant)) == 0
        for r in copies
    )
    assert len([record for record in records if record.kind == "CALL"]) == 3
    # its start is the platform's
    assert {record.revision for record in world.edge.starts()} == {V1}


async def test_an_instance_of_a_shadow_is_billed_from_the_first_call_that_asks_for_it(
    world: World,
) -> None:
    world.deploy()
    await world.call()
    await world.ready()
    (shadow,) = (t for t in world.edge.table.targets_of(NAME) if t.revision == V2)
    (instance,) = world.edge.scaler.throttler_of(shadow).instances.values()
    hour_ns = 3600 * 10**9
    in_an_hour = time.monotonic_ns() + hour_ns
    assert instance.account.settle_idle(now_ns=in_an_hour, at_ns=10**18) == 0
    tagged = await world.edge.call(f"shop/hello@{V2}:invoke", json={"x": 1})
    assert tagged.headers["pilotlight-revision"] == V2
    assert tagged.headers["pilotlight-cost"] != ""
    await world.quiet()
    assert instance.account.settle_idle(now_ns=in_an_hour + hour_ns, at_ns=10**18) == 1
    assert (
        len(
            [
                r
                for r in (await world.edge.settle()).values()
                if r.kind == "CALL" and r.revision == V2
            ]
        )
        == 1
    )


async def test_copies_are_left_out_first_when_anybody_waits_for_room(world: World) -> None:
    world.deploy()
    world.is_crowded = True
    await world.call()
    await world.quiet()
    assert (len(world.edge.fleet.started), world.seen.left_out) == (1, 1)
    world.is_crowded = False
    await world.call()
    await world.ready()
    world.is_crowded = True
    await world.call()
    await world.quiet()
    assert world.copies == []


class Even(ShadowBudget):
    """Each call and each copy takes 10 ms, whatever the machine does meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.expected = 10.0

    def add(self, now: float, *, own: float = 0.0, copied: float = 0.0) -> None:
        super().add(now, own=10.0 if own else 0.0, copied=10.0 if copied else 0.0)

    def ran(self, took: float) -> None:
        super().ran(10.0)


async def test_copies_keep_to_their_share_of_the_execution_time(world: World) -> None:
    world.budget = Even
    world.deploy(max_compute=0.15)
    for _ in range(40):
        await world.call()
        await world.quiet()
    assert 0 < len(world.copies) <= 0.15 * 40
    (compute,) = world.budgets
    assert compute.reserved == pytest.approx(0)


async def test_only_the_percent_that_was_asked_for_is_copied(world: World) -> None:
    world.draws = iter([0.0, 0.5, 0.1, 0.9])
    world.deploy(percent=20)
    await world.call()  # brings the instance up
    await world.ready()
    for _ in range(3):
        await world.call()
        await world.quiet()
    assert (len(world.copies), world.seen.left_out) == (1, 1)


@pytest.mark.parametrize(
    "answer, status, matched",
    [
        pytest.param(
            WorkerAnswer(body=b'{ "x": 1.0000000001 }'),
            200,
            True,
            id="the same but for the last digits",
        ),
        pytest.param(WorkerAnswer(body=b'{"x":2}'), 200, False, id="another value"),
        pytest.param(WorkerAnswer(body=b"not json"), 200, False, id="no JSON"),
        pytest.param(
            WorkerAnswer(status=500, body=b'{"x":1}', outcome="raised"), 500, False, id="an error"
        ),
    ],
)
async def test_answers_are_compared_and_thrown_away(
    world: World, answer: WorkerAnswer, status: int, matched: bool
) -> None:
    world.deploy()
    await world.call()
    await world.ready()

    async def play(request: WorkerRequest) -> WorkerAnswer:
        return (
            answer
            if request.headers.get("pilotlight-arm") == SHADOW_ARM
            else WorkerAnswer(body=request.body)
        )

    world.script.now = play
    assert await world.call() == '{"x":1}'
    await world.quiet()
    assert (world.seen.statuses, world.seen.matched) == ([status], [matched])
    assert await world.call() == '{"x":1}'  # its connection is as good as before
    await world.quiet()
    assert world.seen.statuses == [status, status]


async def test_a_shadow_whose_worker_dies_is_replaced_and_its_record_closed(world: World) -> None:
    world.deploy()
    await world.call()
    await world.ready()

    async def play(request: WorkerRequest) -> WorkerAnswer:
        if request.headers.get("pilotlight-arm") == SHADOW_ARM:
            await next(w for w in world.edge.fleet.workers.values() if request in w.requests).die()
        return WorkerAnswer(body=request.body)

    world.script.now = play
    await world.call()
    await world.quiet()
    assert (world.seen.statuses, world.seen.matched) == ([502], [False])
    (record,) = (r for r in (await world.edge.settle()).values() if r.kind == "SHADOW")
    assert (record.status, record.outcome) == (502, "error")
    (shadow,) = (t for t in world.edge.table.targets_of(NAME) if t.revision == V2)
    assert not list(world.edge.scaler.throttler_of(shadow).live())


def test_compute_forgets_what_is_older_than_its_window() -> None:
    compute = ShadowBudget()
    compute.add(0.0, own=1000.0)
    assert compute.may_run(150.0, 0.15)
    assert not compute.may_run(151.0, 0.15)
    compute.add(30.0, copied=100.0)
    assert not compute.may_run(51.0, 0.15)
    compute.add(WINDOW_S + 1.0, own=200.0)
    # the copies of half a minute ago still count, the calls before do not
    assert not compute.may_run(1.0, 0.15)
    compute.add(WINDOW_S + 31.0, own=200.0)
    assert compute.may_run(60.0, 0.15)


def test_one_copy_that_took_long_is_paid_off_and_does_not_end_all_copies() -> None:
    """A tenth of a second of calls each second, 15 % of it for copies, and a first copy that takes
    more than a minute's share."""
    compute, ran, own = ShadowBudget(), 0.0, 0.0
    for second in range(1, 3600):
        own += 100.0
        compute.add(float(second), own=100.0)
        if compute.may_run(compute.expected or 100.0, 0.15):
            took = 5000.0 if not ran else 50.0
            ran += took
            compute.add(float(second), copied=took)
            compute.ran(took)
    assert ran > 0.1 * own, "they go on"
    assert ran <= 0.15 * own, "and keep to their share over the hour"


def test_a_copy_that_still_runs_has_taken_what_it_ran_so_far() -> None:
    compute = ShadowBudget()
    compute.add(1.0, own=10_000.0)
    compute.begin("a", 1.0, 100.0)
    assert compute.may_run(100.0, 0.15, now=1.5)
    assert not compute.may_run(100.0, 0.15, now=3.0)
    compute.end("a")
    assert compute.may_run(100.0, 0.15, now=3.0)


async def test_a_copy_that_could_not_be_made_is_no_difference(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy()
    await world.call()
    await world.ready()
    left_out = world.seen.left_out

    async def play(request: WorkerRequest) -> WorkerAnswer:
        if request.headers.get("pilotlight-arm") == SHADOW_ARM:
            return WorkerAnswer(status=503, body=b"{}", outcome="busy")
        return WorkerAnswer(body=request.body)

    world.script.now = play
    await world.call()
    await world.quiet()
    assert (world.seen.statuses, world.seen.left_out) == ([], left_out + 1)


async def test_a_full_journal_leaves_copies_out(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.deploy()
    await world.call()
    await world.ready()
    left_out, open_call = world.seen.left_out, world.edge.books.journal.open_call

    def full(template: Any, **more: Any) -> None:
        if more["call"].endswith("-shadow"):
            raise JournalFull("no room")
        open_call(template, **more)

    monkeypatch.setattr(world.edge.books.journal, "open_call", full)
    await world.call()
    await world.quiet()
    assert (world.seen.statuses, world.seen.left_out) == ([], left_out + 1)


def test_a_clock_that_jumps_back_loses_nothing_of_the_share() -> None:
    compute = ShadowBudget()
    compute.add(100.0, own=1000.0)
    compute.add(40.0, copied=150.0)
    assert not compute.may_run(1.0, 0.15)


@pytest.mark.parametrize(
    "one, other, same",
    [
        (b"1", b"1.0", True),
        (b"1", b"1.00001", False),
        (b"true", b"1", False),
        (b"NaN", b"NaN", True),
        (b"[1, 2]", b"[1,2.0000000001]", True),
        (b"[1, 2]", b"[1]", False),
        (b'{"a": [null, "x"]}', b'{"a":[null,"x"]}', True),
        (b'{"a": 1}', b'{"b": 1}', False),
        (b'"1"', b"1", False),
        (b"null", b"", False),
        (b"1" + b"0" * 400, b"1.5", False),
        (b"[" * 100_000, b"[" * 100_001, False),
    ],
)
def test_what_counts_as_the_same_answer(one: bytes, other: bytes, same: bool) -> None:
    assert is_same(one, other) is same
    assert is_same(other, one) is same
