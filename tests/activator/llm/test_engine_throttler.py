"""Calls of a language model: how many an instance takes, which one takes them, and what the
autoscaler is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.balancing.start_estimates import StartTimeEstimator
from activator.balancing.throttler import Throttler
from activator.llm.engine_state import MAX_MISSED
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import Objectives
from snapshotter.types import StartKind
from tests.activator.llm.samples import histogram, reading
from tests.activator.llm.worlds import World, started
from tests.activator.test_gateway import until
from tests.fakes.routes import spec_of

MANY = Scaling(max_instances=8, scaledown_window_s=10)


@pytest.fixture(name="world")
async def _world(short_tmp: Path) -> AsyncIterator[World]:
    async with World.running(short_tmp) as world:
        yield world


def take(throttler: Throttler, keys: list[int | None]) -> list[str]:
    """Where calls with these keys go, all of them at once."""
    found = [throttler.reserve_nowait(key) for key in keys]
    return [reservation.instance.id if reservation is not None else "" for reservation in found]


# -- how many --------------------------------------------------------------------------------------
async def test_an_instance_takes_as_many_calls_as_its_engine_has_sequences(world: World) -> None:
    throttler = world.engine(max_num_seqs=3, scaling=Scaling(max_inputs=1, max_instances=1))
    await started(throttler, 1)

    assert [bool(where) for where in take(throttler, [None] * 4)] == [True, True, True, False]


async def test_an_instance_takes_what_its_memory_allows_and_more_once_that_grows(
    world: World,
) -> None:
    throttler = world.engine(scaling=Scaling(max_instances=1))
    (instance,) = await started(throttler, 1)
    throttler.record_metrics(instance, reading(running=2, kv_use=0.6))
    calls = [asyncio.create_task(throttler.reserve(30.0)) for _ in range(5)]
    await asyncio.sleep(0)

    assert (throttler.in_flight, throttler.waiting) == (3, 2), (
        "0.9 of the memory holds three such calls"
    )

    for _ in range(5):
        throttler.record_metrics(instance, reading(running=3, kv_use=0.1))
    await asyncio.gather(*calls)
    assert (throttler.in_flight, throttler.waiting) == (5, 0), (
        "more memory is free: those who waited need no other call to end"
    )


async def test_memory_that_shrinks_takes_no_running_call_away(world: World) -> None:
    throttler = world.engine(scaling=Scaling(max_instances=1))
    (instance,) = await started(throttler, 1)
    held = [throttler.reserve_nowait() for _ in range(6)]
    throttler.record_metrics(instance, reading(running=6, kv_use=1.0))

    assert instance.capacity == 5
    assert throttler.free_slots == 0
    assert throttler.reserve_nowait() is None
    for reservation in held[:2]:
        assert reservation is not None
        reservation.release()
    assert throttler.reserve_nowait() is not None


async def test_an_engine_that_says_nothing_bounds_nothing(world: World) -> None:
    throttler = world.engine(scaling=Scaling(max_instances=1))
    (instance,) = await started(throttler, 1)
    throttler.record_metrics(instance, reading(running=2, kv_use=0.9))
    assert instance.capacity == 2

    for _ in range(MAX_MISSED):
        throttler.record_metrics(instance, None)

    assert instance.capacity == 8
    assert throttler.engine_load(world.clock()) is None
    assert throttler.views() == {}


async def test_a_new_instance_is_taken_to_hold_what_its_siblings_do(world: World) -> None:
    throttler = world.engine(scaling=MANY)
    (first,) = await started(throttler, 1)
    throttler.record_metrics(first, reading(running=2, kv_use=0.6))

    instances = await started(throttler, 2)

    assert [instance.capacity for instance in instances] == [3, 3]


async def test_what_was_known_of_an_instance_goes_with_it(world: World) -> None:
    throttler = world.engine(scaling=MANY)
    first, second = await started(throttler, 2)
    throttler.record_metrics(first, reading(running=1))
    throttler.record_metrics(second, reading(running=1))

    throttler.instance_exited(first.id, "crashed")

    assert list(throttler.views()) == [second.id]


# -- which one -------------------------------------------------------------------------------------
async def test_calls_that_begin_alike_meet_while_the_load_is_even(world: World) -> None:
    throttler = world.engine(scaling=MANY)
    await started(throttler, 3)

    for key in range(20):
        places = set()
        for _ in range(4):
            reservation = throttler.reserve_nowait(key)
            assert reservation is not None
            places.add(reservation.instance.id)
            reservation.release()
        assert len(places) == 1


async def test_a_beginning_that_everybody_shares_is_spread_before_anybody_waits(
    world: World,
) -> None:
    throttler = world.engine(max_num_seqs=8, scaling=MANY)
    await started(throttler, 3)

    take(throttler, [5] * 12)

    loads = sorted(instance.in_flight for instance in throttler.live())
    assert loads[-1] <= 5, "a quarter above the average of four"
    assert "" not in take(throttler, [5] * 12)
    assert take(throttler, [5]) == [""], "24 slots are 24 calls"


async def test_who_waits_gets_the_instance_of_its_beginning_where_two_are_free(
    world: World,
) -> None:
    throttler = world.engine(max_num_seqs=1, scaling=Scaling(max_instances=2))
    instances = await started(throttler, 2)
    places = {}
    for key in range(8):
        (where,) = take(throttler, [key])
        places[key] = where
        throttler.release(throttler.instances[where])
    assert len(set(places.values())) == 2

    for instance in instances:
        throttler.record_metrics(instance, reading(running=1, kv_use=0.9))
        instance.capacity = 0  # nothing is free
    other = next(key for key in places if places[key] != places[0])
    calls = {
        key: asyncio.create_task(throttler.reserve(30.0, affinity=key, tokens=100))
        for key in (0, other)
    }
    await asyncio.sleep(0)
    load = throttler.engine_load(world.clock())
    assert load is not None
    assert load.queued_tokens == 200
    for instance in instances:
        instance.capacity = 1
    throttler.retry_slots()

    for key, call in calls.items():
        assert (await call).instance.id == places[key]


async def test_calls_keep_to_those_that_the_autoscaler_wants_so_that_the_others_grow_idle(
    world: World,
) -> None:
    throttler = world.engine(max_num_seqs=2, scaling=MANY)
    first, *_ = await started(throttler, 3)
    throttler.set_desired_instances(1)

    places = []
    for key in range(20):
        (where,) = take(throttler, [key])
        places.append(where)
        throttler.release(throttler.instances[where])

    assert set(places) == {first.id}
    assert len(set(take(throttler, [1, 2, 3]))) == 2, (
        "but nobody waits for it while others are free"
    )


async def test_keys_that_belong_everywhere_do_not_keep_instances_that_nobody_needs(
    world: World,
) -> None:
    throttler = world.engine(max_num_seqs=2, scaling=MANY)
    await started(throttler, 3)

    for key in range(60):
        reservation = throttler.reserve_nowait(key)
        assert reservation is not None
        world.pass_s(2)
        reservation.release()

    assert len(throttler.instances) == 1


async def test_other_functions_go_by_load_alone(world: World) -> None:
    throttler = world.deploy(spec_of(scaling=Scaling(max_inputs=4, max_instances=2)))
    await started(throttler, 2)

    take(throttler, [7] * 6)

    assert sorted(instance.in_flight for instance in throttler.live()) == [3, 3]
    assert throttler.engine_load(world.clock()) is None


def starts_take(throttler: Throttler, seconds: float) -> None:
    """As measured so far."""
    throttler.start_times = StartTimeEstimator()
    throttler.start_times.observe(StartKind.COLD, seconds, ())


# -- what the autoscaler is told -------------------------------------------------------------------
async def test_a_burst_that_is_over_before_another_instance_came_starts_none(world: World) -> None:
    throttler = world.engine(max_num_seqs=2, scaling=MANY)
    await started(throttler, 1)
    starts_take(throttler, 20.0)
    for _ in range(4):
        reservation = throttler.reserve_nowait()
        assert reservation is not None
        world.clock.advance(1.0)
        reservation.release()

    calls = [asyncio.create_task(throttler.reserve(30.0)) for _ in range(30)]
    await asyncio.sleep(0)
    assert throttler.starting == 0, "two slots work forty such calls off in twenty seconds"

    calls += [asyncio.create_task(throttler.reserve(30.0)) for _ in range(30)]
    await until(lambda: throttler.starting + len(throttler.instances) > 1)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_late_first_tokens_are_those_since_the_newest_instance_came(world: World) -> None:
    throttler = world.engine(scaling=MANY, objectives=Objectives(first_token_s=0.5))
    (first,) = await started(throttler, 1)
    throttler.record_metrics(first, reading(first_token_s=histogram()))
    world.clock.advance(2.0)
    throttler.record_metrics(first, reading(first_token_s=histogram(2.0, 2.0, 0.05, 0.05)))

    load = throttler.engine_load(world.clock())
    assert load is not None
    assert (load.first_tokens, load.late) == (4, 0.5)

    world.clock.advance(1.0)
    await started(throttler, 2)
    load = throttler.engine_load(world.clock())
    assert load is not None
    assert (load.first_tokens, load.late) == (0, None)


async def test_memory_that_binds_starts_instances_and_says_so(world: World) -> None:
    throttler = world.engine(max_num_seqs=8, scaling=MANY)
    (instance,) = await started(throttler, 1)
    starts_take(throttler, 1000.0)
    # calls of one second: a queue would be gone long before another instance came
    for _ in range(3):
        reservation = throttler.reserve_nowait()
        assert reservation is not None
        world.clock.advance(1.0)
        reservation.release()
    throttler.record_metrics(instance, reading(running=2, kv_use=0.9))
    calls = [asyncio.create_task(throttler.reserve(300.0)) for _ in range(6)]
    await asyncio.sleep(0)

    world.pass_s(12)

    decision = world.scaler.revisions[throttler.target.key].decision
    assert decision is not None
    assert decision.signal == "kv_memory", str(decision)
    assert decision.desired == 3
    assert throttler.starting == 2
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
