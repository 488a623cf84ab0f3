"""Instances that sleep between bursts: woken before anything is started, ended in time, the first
to go where room is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.balancing.preemptible_instances import PreemptibleInstances
from activator.balancing.throttler import Throttler
from activator.worker_client import engine_sleep
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionKind, FunctionSpec, Resources, WeightsSpec
from pilotlight.spec.instances.scaling import Scaling
from snapshotter import errors
from snapshotter.types import InstanceId, StartKind
from tests.activator.autoscaler.test_autoscaler_loop import Rig
from tests.activator.test_gateway import until
from tests.fakes.engine.served import ServedEngine
from tests.fakes.routes import TENANT, change, route_of, spec_of

NAPS = Scaling(scaledown_window_s=10, keep_asleep_s=100, max_instances=2)


@pytest.fixture(name="rig")
async def _rig(short_tmp: Path) -> AsyncIterator[Rig]:
    async with Rig.running(short_tmp) as rig:
        yield rig


async def slept(rig: Rig, scaling: Scaling = NAPS) -> Throttler:
    """A throttler whose only instance sleeps."""
    throttler = rig.scaler.throttler_of(rig.deploy(scaling))
    (await throttler.reserve(5.0)).release()
    rig.pass_s(14)
    await until(lambda: len(rig.fleet.naps) == 1 and throttler.asleep.instances() != [])
    await asyncio.sleep(0)
    return throttler


async def test_an_idle_instance_sleeps_and_the_next_call_wakes_it(rig: Rig) -> None:
    throttler = await slept(rig)
    (name,) = rig.fleet.started
    assert (len(throttler.instances), rig.fleet.stopped) == (0, [])

    reservation = await throttler.reserve(5.0)

    assert rig.fleet.naps == [("ASLEEP", name), ("READY", name)]
    assert rig.fleet.started == [name]
    assert (reservation.instance.id, reservation.start_kind) == (name, StartKind.WAKE)
    reservation.release()


async def test_without_keep_asleep_it_is_stopped(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(Scaling(scaledown_window_s=10)))
    (await throttler.reserve(5.0)).release()

    rig.pass_s(14)

    await until(lambda: len(rig.fleet.stopped) == 1)
    assert rig.fleet.naps == []


async def test_one_that_has_slept_long_enough_ends_and_its_revision_is_forgotten(rig: Rig) -> None:
    throttler = await slept(rig)

    throttler.stop_expired_suspended(rig.clock() + 99 - 14)
    assert len(throttler.asleep) == 1
    throttler.stop_expired_suspended(rig.clock() + 101)
    await until(lambda: len(rig.fleet.stopped) == 1)
    rig.pass_s(40)

    assert repr(rig.scaler) == "<AutoscalerLoop 0 active revisions>"


async def test_it_owes_nothing_while_it_sleeps(rig: Rig) -> None:
    throttler = await slept(rig)
    await asyncio.sleep(0)
    before = len(rig.ledger.records)

    rig.pass_s(60)
    throttler.settle_idle()

    assert len(rig.ledger.records) == before


async def test_one_that_cannot_be_woken_is_ended_and_the_caller_gets_another_in_the_same_request(
    rig: Rig,
) -> None:
    throttler = await slept(rig)
    rig.fleet.nap_failures.append(errors.InstanceUnknown("lost"))

    reservation = await throttler.reserve(5.0)

    assert len(rig.fleet.started) == 2
    assert reservation.instance.id == rig.fleet.started[1]
    await until(lambda: [name for name, _ in rig.fleet.stopped] == rig.fleet.started[:1])
    reservation.release()


async def test_one_that_cannot_be_put_to_sleep_is_stopped(rig: Rig) -> None:
    rig.fleet.nap_failures.append(errors.SnapshotterError("no"))
    throttler = rig.scaler.throttler_of(rig.deploy(NAPS))
    (await throttler.reserve(5.0)).release()

    rig.pass_s(14)

    await until(lambda: len(rig.fleet.stopped) == 1)
    assert len(throttler.asleep) == 0


async def test_a_call_that_comes_while_the_only_instance_falls_asleep_wakes_it(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(
        rig.deploy(Scaling(scaledown_window_s=10, keep_asleep_s=100, max_instances=1))
    )
    (await throttler.reserve(5.0)).release()
    rig.pass_s(14)
    assert (len(throttler.asleep), rig.fleet.naps) == (1, [])  # it is on its way down

    reservation = await throttler.reserve(5.0)

    assert (reservation.start_kind, len(rig.fleet.started)) == (StartKind.WAKE, 1)
    reservation.release()


async def test_one_that_fell_asleep_as_its_revision_lost_its_traffic_is_ended(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(NAPS))
    (await throttler.reserve(5.0)).release()
    rig.pass_s(14)
    rig.deploy(NAPS, revision="v2-abcdef")
    rig.pass_s(2)
    await until(lambda: rig.fleet.naps != [])

    rig.pass_s(2)

    await until(lambda: [name for name, _ in rig.fleet.stopped] == rig.fleet.started)
    assert len(throttler.asleep) == 0


async def test_one_that_dies_in_its_sleep_is_forgotten(rig: Rig) -> None:
    throttler = await slept(rig)
    (name,) = rig.fleet.started

    throttler.instance_exited(name, "killed")

    assert len(throttler.asleep) == 0
    (await throttler.reserve(5.0)).release()
    assert len(rig.fleet.started) == 2


async def test_more_calls_than_sleep_wake_them_and_start_the_rest_within_the_bound(
    rig: Rig,
) -> None:
    throttler = await slept(
        rig, Scaling(scaledown_window_s=10, keep_asleep_s=100, max_instances=2, max_inputs=1)
    )

    first, second = await asyncio.gather(throttler.reserve(5.0), throttler.reserve(5.0))

    assert {first.start_kind, second.start_kind} == {StartKind.WAKE, StartKind.FORK}
    assert len(throttler.instances) == 2
    first.release()
    second.release()


async def test_calls_that_the_waking_one_will_take_start_no_other(rig: Rig) -> None:
    throttler = await slept(
        rig, Scaling(scaledown_window_s=10, keep_asleep_s=100, max_instances=4, max_inputs=8)
    )

    reservations = await asyncio.gather(*(throttler.reserve(5.0) for _ in range(8)))

    assert len(rig.fleet.started) == 1
    for reservation in reservations:
        reservation.release()


async def test_a_revision_that_lost_its_traffic_keeps_nobody_asleep(rig: Rig) -> None:
    throttler = await slept(rig)

    throttler.retire()

    await until(lambda: len(rig.fleet.stopped) == 1)
    assert len(throttler.asleep) == 0


async def test_a_spent_budget_ends_them(rig: Rig) -> None:
    throttler = await slept(rig)

    throttler.drain_idle()

    await until(lambda: len(rig.fleet.stopped) == 1)


async def test_they_are_the_first_to_go_for_room(rig: Rig) -> None:
    throttler = await slept(rig)
    holdings = PreemptibleInstances(lambda: [throttler], clock=rig.clock)

    (tenure,) = holdings.tenures()
    holdings.give_up(tenure.id)

    assert (tenure.idle_s or 0) > 1e6
    assert tenure.is_spare
    await until(lambda: [name for name, _ in rig.fleet.stopped] == [tenure.id])


async def test_an_activator_that_comes_back_finds_them_asleep(rig: Rig) -> None:
    target = rig.deploy(NAPS)
    throttler = rig.scaler.throttler_of(target)
    reservation = await throttler.reserve(5.0)
    name = reservation.instance.info.id
    reservation.release()
    await rig.fleet.sleep(name)
    throttler.instances.clear()

    await rig.reconciler.reconcile()
    await rig.reconciler.reconcile()

    assert [one.id for one in throttler.asleep.instances()] == [name]
    assert rig.scaler.states()[target.tenant, target.app, target.function, "asleep"] == 1


def on_a_gpu(level: int) -> FunctionSpec:
    engine = EngineSpec(model="m", max_model_len=128, max_num_seqs=2, sleep_level=level)
    weights = (WeightsSpec(name="m", manifest="a" * 64),)
    return spec_of(
        kind=FunctionKind.ENGINE,
        engine=engine,
        weights=weights,
        resources=Resources(gpu=("L4",), gpu_count=1),
    )


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_on_a_gpu_gives_its_memory_up_and_takes_it_back_weights_first(
    short_tmp: Path, level: int
) -> None:
    spec, served = on_a_gpu(level), await ServedEngine(short_tmp / "e.sock", model="hello").start()
    try:
        await engine_sleep.suspend(spec, str(served.path))
        await engine_sleep.resume(spec, str(served.path))
    finally:
        await served.die()

    reload = ["/collective_rpc"] if level == 2 else []
    assert served.paths == ["/sleep", "/wake_up", *reload, "/wake_up"]


async def test_an_engine_that_was_left_half_asleep_answers_no_calls(
    rig: Rig, short_tmp: Path
) -> None:
    """An activator that ends between its engine's sleep and its agent's leaves a process that is
    ready, and has no memory of its model."""
    spec = on_a_gpu(2)
    rig.table.apply(change(1, route_of(spec)))
    target = rig.table.targets_of(f"{TENANT}/main/shop/hello")[0]
    half, whole = [
        str((await rig.fleet.start(target, InstanceId(name), {})).id)
        for name in ("i-half", "i-whole")
    ]
    await engine_sleep.suspend(spec, str(rig.fleet.engines[half].path))

    await rig.reconciler.reconcile()

    assert [name for name, _ in rig.fleet.stopped] == [half]
    assert list(rig.scaler.throttler_of(target).instances) == [whole]


async def test_an_engine_that_does_not_answer_says_so_in_time(short_tmp: Path) -> None:
    spec = on_a_gpu(2)
    with pytest.raises(errors.SnapshotterError, match="/sleep"):
        await engine_sleep.suspend(spec, str(short_tmp / "nobody.sock"))
