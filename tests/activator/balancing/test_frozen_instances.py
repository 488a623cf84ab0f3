"""Idle instances that stand still where the operator says so: thawed for the call that comes,
started again when that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from activator.__main__ import _settings
from activator.autoscaler.autoscaler_loop import AutoscalerLoop
from activator.autoscaler.instance_reconciler import InstanceReconciler
from activator.balancing.throttler import Throttler
from activator.settings import ActivatorSettings
from pilotlight.core.settings import PlatformSettings, SettingsInvalid
from pilotlight.spec.engines import EngineSpec
from pilotlight.spec.function import FunctionKind, WeightsSpec
from pilotlight.spec.instances.scaling import Scaling
from snapshotter import errors
from snapshotter.types import StartKind
from tests.activator.autoscaler.test_autoscaler_loop import Rig
from tests.activator.test_gateway import until
from tests.fakes.routes import TENANT, change, route_of, spec_of

IDLE_S = 5.0
KEPT = Scaling(scaledown_window_s=60, max_instances=2)


@pytest.fixture(name="rig")
async def _rig(short_tmp: Path) -> AsyncIterator[Rig]:
    async with Rig.running(short_tmp) as rig:
        yield rig


async def frozen(rig: Rig, scaling: Scaling = KEPT) -> Throttler:
    """A throttler whose only instance is frozen."""
    throttler = rig.scaler.throttler_of(rig.deploy(scaling))
    (await throttler.reserve(5.0)).release()
    throttler.freeze_idle(rig.clock() + IDLE_S, IDLE_S)
    await until(lambda: len(rig.fleet.naps) == 1)
    return throttler


async def test_an_idle_instance_is_frozen_and_thawed_for_the_next_call(rig: Rig) -> None:
    throttler = await frozen(rig)
    (name,) = rig.fleet.started
    assert throttler.reserve_nowait() is None, "nothing is sent to a process that stands still"
    assert {state: count for (*_, state), count in rig.scaler.states().items() if count} == {
        "frozen": 1
    }

    reservation = await throttler.reserve(5.0)

    assert rig.fleet.naps == [("ASLEEP", name), ("READY", name)]
    assert (reservation.instance.id, reservation.start_kind, rig.fleet.started) == (
        name,
        StartKind.WARM,
        [name],
    )
    reservation.release()
    assert throttler.reserve_nowait() is not None


async def test_only_what_has_been_idle_for_long_enough_is_frozen(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(KEPT))
    reservation = await throttler.reserve(5.0)
    throttler.freeze_idle(rig.clock() + 1000, IDLE_S)
    reservation.release()
    throttler.freeze_idle(rig.clock() + IDLE_S - 0.1, IDLE_S)
    await asyncio.sleep(0)
    assert rig.fleet.naps == []


async def test_a_call_that_comes_while_it_is_being_frozen_is_served_by_it(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(KEPT))
    (await throttler.reserve(5.0)).release()
    throttler.freeze_idle(rig.clock() + IDLE_S, IDLE_S)
    reservation = await throttler.reserve(5.0)
    assert (reservation.instance.id, len(rig.fleet.started)) == (rig.fleet.started[0], 1)
    assert [state for state, _ in rig.fleet.naps] == ["ASLEEP", "READY"]
    reservation.release()


async def test_as_many_are_thawed_as_calls_wait(rig: Rig) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(KEPT))
    both = await asyncio.gather(throttler.reserve(5.0), throttler.reserve(5.0))
    for reservation in both:
        reservation.release()
    throttler.freeze_idle(rig.clock() + IDLE_S, IDLE_S)
    await until(lambda: len(rig.fleet.naps) == 2)

    (await throttler.reserve(5.0)).release()

    assert [state for state, _ in rig.fleet.naps] == ["ASLEEP", "ASLEEP", "READY"]
    assert len(rig.fleet.started) == 2


async def test_one_that_cannot_be_thawed_is_ended_and_the_caller_gets_another_in_the_same_request(
    rig: Rig,
) -> None:
    throttler = await frozen(rig)
    rig.fleet.nap_failures.append(errors.InstanceUnknown("lost"))

    reservation = await throttler.reserve(5.0)

    assert (len(rig.fleet.started), reservation.instance.id) == (2, rig.fleet.started[1])
    reservation.release()


async def test_a_node_agent_that_is_away_for_a_moment_costs_no_instance(rig: Rig) -> None:
    throttler = await frozen(rig)
    rig.fleet.nap_failures += [errors.AgentUnavailable("away"), errors.AgentUnavailable("away")]

    reservation = await throttler.reserve(5.0)

    assert (len(rig.fleet.started), [state for state, _ in rig.fleet.naps]) == (
        1,
        ["ASLEEP", "READY", "READY", "READY"],
    )
    reservation.release()


async def test_one_that_is_frozen_ends_in_its_time(rig: Rig) -> None:
    throttler = await frozen(rig)
    rig.pass_s(70)
    await until(lambda: len(rig.fleet.stopped) == 1)
    assert (len(throttler.instances), len(throttler.frozen)) == (0, 0)


async def test_one_that_was_frozen_when_the_activator_came_is_thawed(rig: Rig) -> None:
    await frozen(rig)
    await rig.scaler.aclose()
    rig.scaler = AutoscalerLoop(
        table=rig.table, fleet=rig.fleet, make_throttler=rig.make_throttler, clock=rig.clock
    )
    rig.reconciler = InstanceReconciler(table=rig.table, fleet=rig.fleet, scaler=rig.scaler)
    await rig.reconciler.reconcile()
    await until(lambda: rig.fleet.naps[-1][0] == "READY")
    throttler = rig.scaler.throttler_of(rig.table.targets_of(f"{TENANT}/main/shop/hello")[0])
    assert throttler.reserve_nowait() is not None
    assert len(rig.fleet.started) == 1


async def test_engines_are_not_frozen(rig: Rig) -> None:
    engine = EngineSpec(model="m", max_model_len=128, max_num_seqs=2)
    weights = (WeightsSpec(name="m", manifest="a" * 64),)
    rig.table.apply(
        change(1, route_of(spec_of(kind=FunctionKind.ENGINE, engine=engine, weights=weights)))
    )
    throttler = rig.scaler.throttler_of(rig.table.targets_of(f"{TENANT}/main/shop/hello")[0])
    (await throttler.reserve(5.0)).release()
    throttler.freeze_idle(rig.clock() + IDLE_S, IDLE_S)
    await asyncio.sleep(0)
    assert rig.fleet.naps == []


@pytest.mark.parametrize("seconds", [0.5, 0, -1, 86_401])
def test_a_bound_that_makes_no_sense_is_refused_by_name(seconds: float) -> None:
    with pytest.raises(ValueError, match=r"freeze_idle_s = .*: must be from 1 to 86400, or null"):
        ActivatorSettings(freeze_idle_s=seconds)


def test_it_is_refused_where_it_has_no_effect(tmp_path: Path) -> None:
    config = tmp_path / "platform.yaml"
    config.write_text("activator: {freeze_idle_s: 5}\n")
    with pytest.raises(
        SettingsInvalid, match=r"activator\.freeze_idle_s = 5: pods cannot be frozen"
    ):
        _settings(PlatformSettings(fleet="knative"), config)
    assert _settings(PlatformSettings(), config).freeze_idle_s == 5
