"""What speaks against a revision and its instances: watching begins with a failure, ends when all
is well, and leaves outliers."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest

from activator.balancing.global_queue import GlobalQueue
from activator.balancing.instance_lifecycle import InstanceProvisioner
from activator.balancing.outlier_detection import CHECK_S, MAX_PAST, SLOW_CHECKS, RevisionHealth
from activator.balancing.throttler import Throttler
from activator.billing.service import BillingService
from activator.fairness.start_admission import StartAdmission
from activator.metrics.metrics import Metrics
from activator.resilience.breaker import WINDOW_S, BreakerTerms, Outcome
from activator.resilience.outliers import (
    OutcomeCounts,
    TimedRevision,
    is_outlier,
    may_eject,
    slowest,
)
from activator.routing.call_target import CallTarget
from pilotlight import errors
from pilotlight.spec.instances.scaling import Scaling
from snapshotter import errors as agent_errors
from snapshotter.types import InstanceId, InstanceInfo, StartKind
from tests.activator.scaled_world import books_of
from tests.fakes.fake_fleet import FakeFleet, info_of
from tests.fakes.routes import spec_of, target_of

TERMS = BreakerTerms(error_ratio=0.5, min_calls=4, open_s=5)


class BareFleet(FakeFleet):
    """Instances without a process: nobody calls them here."""

    async def start(
        self, target: CallTarget, instance_id: InstanceId, secret_env: Mapping[str, str]
    ) -> InstanceInfo:
        """See Fleet."""
        self.started.append(instance_id)
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop(0)
        self.infos[instance_id] = info_of(target, instance_id, "/nowhere", StartKind.FORK)
        return self.infos[instance_id]


class World:
    """One revision's throttler, with a manual clock."""

    def __init__(self, directory: Path, books: BillingService) -> None:
        self.now = 1000.0
        self.fleet = BareFleet(directory)
        self.throttler = Throttler(
            target_of(spec_of(scaling=Scaling(max_instances=10))),
            provisioner=InstanceProvisioner(
                self.fleet,
                secret_env=lambda _: {},
                gate=StartAdmission(clock=lambda: self.now),
            ),
            queue=GlobalQueue(100),
            observer=Metrics(),
            account=books.account,
            terms=TERMS,
            clock=lambda: self.now,
        )

    async def grow(self, count: int) -> list[str]:
        """So many instances."""
        self.throttler.start(count)
        while len(self.throttler.instances) < count:
            await asyncio.sleep(0)
        return list(self.throttler.instances)

    def call(self, instance: str, ending: Outcome, *, took_s: float = 0.0) -> None:
        """One call on this very instance."""
        others = [one for one in self.throttler.instances.values() if one.id != instance]
        for one in others:
            one.blocked_until = self.now + 1
        reservation = self.throttler.reserve_nowait()
        assert reservation is not None
        assert reservation.instance.id == instance
        self.now += took_s
        reservation.ending = ending
        reservation.release()
        for one in others:
            one.blocked_until = 0.0

    def live(self) -> set[str]:
        return {instance.id for instance in self.throttler.live()}


@pytest.fixture(name="world")
async def _world() -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory(prefix="pl") as directory:
        books = books_of(Path(directory))
        world = World(Path(directory), books)
        try:
            yield world
        finally:
            await world.throttler.aclose()
            await books.aclose()


async def test_a_revision_that_never_failed_has_no_watch(world: World) -> None:
    (one,) = await world.grow(1)
    for _ in range(50):
        world.call(one, Outcome.ANSWERED)

    assert world.throttler.health is None


async def test_watching_ends_ten_seconds_after_the_last_failure(world: World) -> None:
    (one,) = await world.grow(1)
    world.call(one, Outcome.FAILED)
    assert world.throttler.health is not None
    world.now += WINDOW_S - 1
    world.call(one, Outcome.ANSWERED)
    assert world.throttler.health is not None
    world.now += 1
    world.call(one, Outcome.ANSWERED)
    assert world.throttler.health is None


async def test_a_caller_that_left_speaks_against_nobody(world: World) -> None:
    (one,) = await world.grow(1)
    world.call(one, Outcome.NEITHER)

    assert world.throttler.health is None


async def test_an_open_breaker_refuses_at_once_and_says_when_to_come_again(world: World) -> None:
    (one,) = await world.grow(1)
    for _ in range(4):
        world.call(one, Outcome.FAILED)

    assert world.throttler.reserve_nowait() is None
    with pytest.raises(errors.CircuitOpen) as caught:
        await world.throttler.reserve(60)
    assert caught.value.status == 503
    assert caught.value.retry_after_s is not None
    assert 5 <= caught.value.retry_after_s <= 6
    assert caught.value.detail == {"revision": "v1-abcdef", "error_ratio": 1.0}
    assert "hello failed 100%" in str(caught.value)


async def test_after_the_pause_one_probe_goes_and_its_answer_lets_all_others_go(
    world: World,
) -> None:
    (one,) = await world.grow(1)
    for _ in range(4):
        world.call(one, Outcome.FAILED)
    world.now += 7
    probe = world.throttler.reserve_nowait()
    assert probe is not None
    with pytest.raises(errors.CircuitOpen):
        await world.throttler.reserve(60)
    probe.release()

    assert world.throttler.reserve_nowait() is not None


async def test_a_probe_that_gives_up_waiting_leaves_its_place(world: World) -> None:
    (one,) = await world.grow(1)
    for _ in range(4):
        world.call(one, Outcome.FAILED)
    world.throttler.drain(world.throttler.instances[one])
    world.now += 7
    world.fleet.gate.clear()
    probe = asyncio.create_task(world.throttler.reserve(60))
    await asyncio.sleep(0)
    probe.cancel()
    await asyncio.gather(probe, return_exceptions=True)
    assert world.throttler.health is not None

    assert world.throttler.health.breaker.admits(world.now)


async def test_a_revision_that_cannot_start_is_left_alone_after_a_while(world: World) -> None:
    for _ in range(4):
        world.fleet.failures = [agent_errors.StartFailed("no module named torch")]
        with pytest.raises(errors.StartFailed):
            await world.throttler.reserve(60)
    with pytest.raises(errors.CircuitOpen):
        await world.throttler.reserve(60)

    assert len(world.fleet.started) == 4


async def test_want_of_room_does_not_speak_against_a_revision(world: World) -> None:
    for _ in range(6):
        world.fleet.gate.clear()
        waiting = asyncio.create_task(world.throttler.reserve(60))
        await asyncio.sleep(0)
        world.throttler.start_refused(errors.Unavailable("no room"))
        with pytest.raises(errors.Unavailable):
            await waiting

    assert world.throttler.health is None


async def test_the_one_instance_on_which_user_code_raises_is_replaced(world: World) -> None:
    good, other, bad = await world.grow(3)
    for _ in range(5):
        world.call(good, Outcome.ANSWERED)
        world.call(other, Outcome.ANSWERED)
        world.call(bad, Outcome.RAISED)
    await asyncio.sleep(0)

    assert bad not in world.live()
    assert {good, other} <= world.live()
    assert len(world.fleet.started) == 4, "another comes in its place"


async def test_where_all_instances_raise_none_is_ejected(world: World) -> None:
    instances = await world.grow(3)
    for _ in range(10):
        for instance in instances:
            world.call(instance, Outcome.RAISED)

    assert world.live() == set(instances)
    assert world.throttler.reserve_nowait() is not None, "what user code raises opens no breaker"


async def test_at_most_half_of_the_instances_are_ejected(world: World) -> None:
    instances = await world.grow(4)
    for _ in range(20):
        world.call(instances[0], Outcome.ANSWERED)
    for bad in instances[1:]:
        for _ in range(8):
            if bad in world.live():
                world.call(bad, Outcome.RAISED)

    assert len(world.live() & set(instances)) >= 2


async def test_a_lone_instance_is_never_ejected(world: World) -> None:
    (one,) = await world.grow(1)
    for _ in range(30):
        world.call(one, Outcome.RAISED)

    assert world.live() == {one}


async def test_an_instance_that_stays_much_slower_than_the_others_is_replaced(world: World) -> None:
    quick, other, slow = await world.grow(3)
    for _ in range(SLOW_CHECKS):
        for _ in range(20):
            world.call(quick, Outcome.ANSWERED, took_s=0.01)
            world.call(other, Outcome.ANSWERED, took_s=0.012)
            world.call(slow, Outcome.ANSWERED, took_s=0.5)
        world.now += CHECK_S
        assert slow in world.live()
        world.throttler.eject_slow_instance(world.now)

    assert slow not in world.live()
    assert {quick, other} <= world.live()


async def test_one_slow_while_is_no_reason(world: World) -> None:
    quick, slow = await world.grow(2)
    for took_s in (0.5, 0.01, 0.5, 0.01):
        for _ in range(20):
            world.call(quick, Outcome.ANSWERED, took_s=0.01)
            world.call(slow, Outcome.ANSWERED, took_s=took_s)
        world.now += CHECK_S
        world.throttler.eject_slow_instance(world.now)

    assert world.live() == {quick, slow}


def test_a_revision_that_crashes_for_days_is_not_remembered_by_instance() -> None:
    health = RevisionHealth(TERMS)
    for n in range(10_000):
        health.record_outcome(f"i-{n}", Outcome.FAILED, float(n))
        health.should_eject(f"i-{n}", [f"i-{n}"], float(n))

    tracked = re.search(r"(\d+) instances", repr(health))
    assert tracked is not None
    assert int(tracked[1]) <= MAX_PAST + 2


@pytest.mark.parametrize(
    "mine, others, expected",
    [
        (OutcomeCounts(5, 5), OutcomeCounts(50, 0), True),
        (OutcomeCounts(4, 4), OutcomeCounts(50, 0), False),
        (OutcomeCounts(10, 4), OutcomeCounts(50, 0), False),
        (OutcomeCounts(10, 10), OutcomeCounts(50, 25), False),
        (OutcomeCounts(10, 10), OutcomeCounts(50, 12), True),
        (OutcomeCounts(10, 10), OutcomeCounts(4, 0), False),
    ],
)
def test_an_outlier_fails_where_its_siblings_do_not(
    mine: OutcomeCounts, others: OutcomeCounts, expected: bool
) -> None:
    assert is_outlier(mine, others) is expected


@pytest.mark.parametrize(
    "live, ejected, expected",
    [(1, 0, False), (2, 0, True), (1, 1, False), (3, 1, True), (2, 2, False)],
)
def test_no_more_than_half_are_ejected(live: int, ejected: int, expected: bool) -> None:
    assert may_eject(live=live, ejected=ejected) is expected


def test_slowness_is_a_factor_and_a_difference_and_needs_calls() -> None:
    assert slowest([TimedRevision("a", 20, 0.2), TimedRevision("b", 20, 10)]) == "b"
    assert slowest([TimedRevision("a", 20, 0.002), TimedRevision("b", 20, 0.2)]) is None, (
        "a hundred times slower, and still 10 ms"
    )
    assert slowest([TimedRevision("a", 20, 0.2), TimedRevision("b", 19, 10)]) is None
    assert slowest([TimedRevision("a", 20, 20), TimedRevision("b", 20, 60)]) is None
