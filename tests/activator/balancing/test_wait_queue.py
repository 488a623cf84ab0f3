"""Calls that wait: in a fair order, and each answered exactly once, whatever happens to it and to
the others."""

from __future__ import annotations

import asyncio
import math
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance import Reservation
from activator.balancing.instance_lifecycle import InstanceProvisioner
from activator.balancing.throttler import Throttler
from activator.fairness.queue_priority import QueueBound, QueuePriority
from activator.metrics.metrics import Metrics
from activator.routing.route_table import CallTarget
from pilotlight import errors
from pilotlight.spec.identifiers import Priority
from pilotlight.spec.instances.scaling import Scaling
from snapshotter.types import InstanceId, InstanceInfo, StartKind
from tests.activator.scaled_world import books_of
from tests.activator.test_gateway import until
from tests.fakes.fake_fleet import FakeFleet, info_of
from tests.fakes.routes import spec_of, target_of
from tests.hypothesis_profiles import examples


class BareFleet(FakeFleet):
    """Instances without a process: nobody calls them here. `phases_ms`: of those that start from
    now on."""

    phases_ms: Mapping[str, float] | None = None

    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """See Fleet."""
        self.started.append(instance_id)
        await self.gate.wait()
        info = info_of(target, instance_id, "/nowhere", StartKind.FORK)
        self.infos[instance_id] = replace(
            info, phases_ms=info.phases_ms if self.phases_ms is None else self.phases_ms
        )
        return self.infos[instance_id]


class World:
    """One function's throttler."""

    def __init__(
        self,
        directory: Path,
        *,
        limit: int,
        scaling: Scaling,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = BareFleet(directory)
        self.queue = GlobalQueue(limit)
        self.books = books_of(directory)
        self.throttler = Throttler(
            target_of(spec_of(scaling=scaling)),
            provisioner=InstanceProvisioner(self.fleet, secret_env=lambda _: {}),
            queue=self.queue,
            observer=Metrics(),
            account=self.books.account,
            clock=clock,
        )

    def call(self, rank: QueuePriority, *, timeout_s: float = 60.0) -> asyncio.Task[Reservation]:
        return asyncio.create_task(self.throttler.reserve(timeout_s, rank))


@asynccontextmanager
async def world_of(
    *,
    limit: int = 100,
    scaling: Scaling | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="pl") as directory:
        scaling = scaling or Scaling(max_instances=1)
        world = World(Path(directory), limit=limit, scaling=scaling, clock=clock)
        try:
            yield world
        finally:
            await world.throttler.aclose()
            await world.books.aclose()


def rank_of(
    tenant: str, priority: Priority = Priority.STANDARD, weight: int = 1, *bounds: QueueBound
) -> QueuePriority:
    return QueuePriority(priority=priority, tenant=tenant, weight=weight, queued=bounds)


async def served(calls: Mapping[asyncio.Task[Reservation], str]) -> list[str]:
    """The names of calls in the order in which they got the one slot there is."""
    names: list[str] = []
    while len(names) < len(calls):
        await until(lambda: any(call.done() and name not in names for call, name in calls.items()))
        for call, name in calls.items():
            if call.done() and name not in names:
                names.append(name)
                call.result().release()
                break
    return names


@pytest.mark.parametrize("ms", [-5000.0, math.nan, math.inf, -math.inf])
async def test_phases_that_are_no_durations_neither_fail_a_start_nor_make_it_free(
    tmp_path: Path, ms: float
) -> None:
    world = World(tmp_path, limit=100, scaling=Scaling(max_instances=1))
    world.fleet.phases_ms = {"fork": ms, "queue": ms, "weights": ms}
    (await world.throttler.reserve(5)).release()
    await world.throttler.aclose()
    await world.books.aclose()
    assert sum(path.read_text().count("/START/") for path in tmp_path.rglob("journal-*")) == 1


def test_phases_that_are_no_durations_stay_out_of_the_platforms_sums(tmp_path: Path) -> None:
    metrics, target = Metrics(), target_of(spec_of())
    for ms in (-5000.0, math.nan, math.inf, 3000.0):
        info = info_of(target, "i-1", "/nowhere", StartKind.FORK)
        metrics.instance_ready(target, replace(info, phases_ms={"wake": ms}), 2.0)
    labels = {"start_kind": "FORK", "phase": "wake"}
    # no more than the start took
    assert metrics.registry.get_sample_value("pilotlight_start_phase_seconds_total", labels) == 4.0


async def test_slots_go_by_priority_then_in_turns_between_tenants() -> None:
    async with world_of() as world:
        busy = await world.throttler.reserve(5)
        calls = {world.call(rank_of("flood")): f"flood {n}" for n in range(3)}
        calls |= {
            world.call(rank_of("small")): "small",
            world.call(rank_of("flood", Priority.REALTIME)): "urgent",
        }
        calls |= {world.call(rank_of("small", Priority.BATCH)): "batch"}
        await until(lambda: world.throttler.waiting == 6)
        busy.release()

        assert await served(calls) == ["urgent", "flood 0", "small", "flood 1", "flood 2", "batch"]


async def test_a_heavy_tenants_calls_get_a_longer_turn() -> None:
    async with world_of() as world:
        busy = await world.throttler.reserve(5)
        calls = {world.call(rank_of("heavy", weight=3)): f"h{n}" for n in range(6)}
        calls |= {world.call(rank_of("light")): f"l{n}" for n in range(2)}
        await until(lambda: world.throttler.waiting == 8)
        busy.release()

        assert [name[0] for name in await served(calls)] == list("hhhlhhhl")


async def test_the_one_that_waits_longest_is_told_to_the_autoscaler_whoever_is_next() -> None:
    async with world_of() as world:
        busy = await world.throttler.reserve(5)
        batch = world.call(rank_of("a", Priority.BATCH))
        await until(lambda: world.throttler.waiting == 1)
        await asyncio.sleep(0.01)
        urgent = world.call(rank_of("a", Priority.REALTIME))
        await until(lambda: world.throttler.waiting == 2)
        oldest = world.throttler.oldest_wait_s(time.monotonic())
        assert oldest is not None
        assert oldest >= 0.01
        busy.release()
        (await urgent).release()
        (await batch).release()


async def test_a_full_queue_sheds_in_order_and_refuses_the_rest() -> None:
    """Batch goes first, then who is over its share; a realtime call of a tenant within its share is
    never turned away for them."""
    async with world_of(limit=4) as world:
        busy = await world.throttler.reserve(5)
        batch = world.call(rank_of("a", Priority.BATCH))
        flood = [world.call(rank_of("flood")) for _ in range(3)]
        await until(lambda: world.queue.waiting == 4)

        first = world.call(rank_of("b", Priority.REALTIME))
        with pytest.raises(errors.Shed) as e:
            await batch
        assert (e.value.detail, e.value.status) == ({"priority": "batch", "tenant": "a"}, 429)
        assert e.value.retry_after_s is not None
        second = world.call(rank_of("b", Priority.REALTIME))
        with pytest.raises(errors.Shed):
            await flood[2]
        with pytest.raises(errors.Shed, match="max_queued"):
            await world.throttler.reserve(5, rank_of("flood"))

        assert world.queue.waiting == 4
        busy.release()
        for call in (first, second, *flood[:2]):
            (await call).release()


async def test_the_place_in_the_queue_lasts_as_long_as_the_callers_deadline() -> None:
    async with world_of(limit=1) as world:
        busy = await world.throttler.reserve(5)
        with pytest.raises(errors.DeadlineExceeded) as e:
            await world.throttler.reserve(0.02, rank_of("a"))
        assert (e.value.detail["clock"], world.queue.waiting, world.throttler.waiting) == (
            "queue",
            0,
            0,
        )
        later = world.call(rank_of("b"))
        await until(lambda: world.queue.waiting == 1)
        busy.release()
        (await later).release()


async def test_a_functions_max_queued_and_a_tenants_quota_give_places_to_who_ranks_higher() -> None:
    async with world_of(scaling=Scaling(max_instances=1, max_queued=2)) as world:
        busy = await world.throttler.reserve(5)
        bound = QueueBound("tenant", "a", 1)
        low = world.call(rank_of("a", Priority.BATCH, 1, bound))
        await until(lambda: world.queue.waiting == 1)
        with pytest.raises(errors.OverQuota, match=r"quota \(queued\)"):
            await world.throttler.reserve(5, rank_of("a", Priority.BATCH, 1, bound))
        high = world.call(rank_of("a", Priority.STANDARD, 1, bound))
        with pytest.raises(errors.Shed):
            await low
        other = world.call(rank_of("b"))
        await until(lambda: world.throttler.waiting == 2)
        with pytest.raises(errors.TooManyRequests, match=r"limit \(max_queued\)"):
            await world.throttler.reserve(5, rank_of("b"))
        busy.release()
        (await high).release()
        (await other).release()


_ranks = st.builds(
    rank_of, st.sampled_from("abc"), st.sampled_from(list(Priority)), st.integers(1, 4)
)
_steps = st.one_of(
    st.tuples(st.just("call"), st.integers(0, 99), _ranks),
    st.tuples(
        st.sampled_from(
            ["release", "cancel", "expire", "kill", "pause", "hold_starts", "let_starts_go"]
        ),
        st.integers(0, 99),
        _ranks,
    ),
)


class Story:
    """What happens to calls, step by step, and how each was answered."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.calls: list[asyncio.Task[Reservation]] = []
        self.held: list[Reservation] = []
        self.answered: set[int] = set()

    def call(self, _n: int, rank: QueuePriority) -> None:
        self.calls.append(self.world.call(rank))

    def release(self, n: int, _rank: QueuePriority) -> None:
        if self.held:
            self.held.pop(n % len(self.held)).release()

    def cancel(self, n: int, _rank: QueuePriority) -> None:
        waiting = [call for call in self.calls if not call.done()]
        if waiting:
            waiting[n % len(waiting)].cancel()

    def expire(self, _n: int, rank: QueuePriority) -> None:
        """A call whose time ends while it waits."""
        self.calls.append(self.world.call(rank, timeout_s=0.0))

    def kill(self, _n: int, _rank: QueuePriority) -> None:
        for instance in list(self.world.throttler.instances)[:1]:
            self.world.throttler.instance_exited(instance, "crashed")

    def hold_starts(self, _n: int, _rank: QueuePriority) -> None:
        self.world.fleet.gate.clear()

    def let_starts_go(self, _n: int, _rank: QueuePriority) -> None:
        self.world.fleet.gate.set()

    def pause(self, _n: int, _rank: QueuePriority) -> None:
        """Only the loop runs."""

    def collect(self) -> None:
        """Take the slots that came; each call is answered once, or this finds one twice."""
        for n, call in enumerate(self.calls):
            if call.done() and n not in self.answered:
                self.answered.add(n)
                if not call.cancelled() and call.exception() is None:
                    self.held.append(call.result())

    async def end(self) -> None:
        """Let go of everything until all are answered."""
        self.world.fleet.gate.set()
        async with asyncio.timeout(20):
            while len(self.answered) < len(self.calls) or self.held:
                await asyncio.sleep(0)
                self.collect()
                while self.held:
                    self.held.pop().release()


@settings(deadline=None, max_examples=examples(60))
@given(st.lists(_steps, max_size=60))
def test_every_call_is_answered_exactly_once_and_nothing_is_left(
    steps: list[tuple[str, int, QueuePriority]],
) -> None:
    asyncio.run(_live_through(steps))


async def _live_through(steps: list[tuple[str, int, QueuePriority]]) -> None:
    async with world_of(limit=4, scaling=Scaling(max_instances=2, max_queued=6)) as world:
        story = Story(world)
        for name, n, rank in steps:
            getattr(story, name)(n, rank)
            for _ in range(n % 4 if name == "pause" else 0):
                await asyncio.sleep(0)
            story.collect()
        await story.end()

        for call in story.calls:
            if not call.cancelled() and (error := call.exception()) is not None:
                assert isinstance(error, errors.TooManyRequests | errors.DeadlineExceeded)
        assert (world.queue.waiting, world.throttler.waiting, world.throttler.in_flight) == (
            0,
            0,
            0,
        )
        assert world.throttler.load.consume_average(0.0, 0.0) == 0


async def test_a_pause_that_ends_while_a_call_joins_the_queue_leaves_it_not_waiting() -> None:
    skew_s = 0.0

    def clock() -> float:  # of a process that gets no processor between two looks at it
        nonlocal skew_s
        skew_s += 0.005
        return time.monotonic() + skew_s

    async with world_of(clock=clock) as world:
        rank = rank_of("t-1")
        world.fleet.gate.set()
        first = await world.call(rank)
        first.release()
        first.instance.blocked_until = time.monotonic() + skew_s + 0.0055
        second = await asyncio.wait_for(world.call(rank), 10)
        second.release_unused()
