"""Instances are there in the windows of a function's scaling schedules, and go afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import ScalingSchedule
from tests.activator.autoscaler.test_autoscaler_loop import Rig
from tests.activator.test_gateway import until
from tests.fakes.routes import TENANT, change, route_of, spec_of

EIGHT = 8 * 3600.0
"""08:00 UTC on the first day of the epoch."""
MORNING = ScalingSchedule(cron="0 8 * * *", duration_s=3600, min_instances=2)


class Day:
    """A rig whose wall clock goes with its monotonic one, from 07:58."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        began = rig.clock()
        rig.scaler.floors.wall = lambda: EIGHT - 120 + rig.clock() - began

    async def pass_s(self, seconds: int) -> None:
        """As the loop does it, every other second."""
        for _ in range(seconds // 2):
            self.rig.pass_s(2)
            self.rig.scaler.apply_schedules()
            self.rig.decide()
        for throttler in self.rig.scaler.throttlers():
            await until(lambda throttler=throttler: not throttler.starting)


@pytest.fixture(name="day")
async def _day(short_tmp: Path) -> AsyncIterator[Day]:
    async with Rig.running(short_tmp) as rig:
        yield Day(rig)


async def test_instances_come_when_the_window_opens_and_go_when_it_is_over(day: Day) -> None:
    target = day.rig.deploy(Scaling(scaledown_window_s=10, schedules=(MORNING,)))
    await day.pass_s(110)
    assert target.key not in day.rig.scaler.revisions, "nothing is kept before"
    await day.pass_s(20)
    throttler = day.rig.scaler.throttler_of(target)
    assert (len(throttler.instances), throttler.min_instances) == (2, 2)
    await day.pass_s(3400)
    assert len(throttler.instances) == 2
    await day.pass_s(300)
    assert not throttler.instances
    assert target.key not in day.rig.scaler.revisions


async def test_they_are_billed_as_reserved_only_within_the_window(day: Day) -> None:
    schedule = ScalingSchedule(cron="0 8 * * *", duration_s=60, min_instances=1)
    target = day.rig.deploy(Scaling(scaledown_window_s=3600, schedules=(schedule,)))
    throttler = day.rig.scaler.throttler_of(target)
    (await throttler.reserve(5.0)).release()
    (instance,) = throttler.instances.values()
    reserved = []
    for _ in range(3):
        reserved.append("reserved" in repr(instance.account.meter))
        await day.pass_s(130 if not reserved[-1] else 60)
    assert reserved == [False, True, False]


async def test_a_deploy_changes_the_windows_at_once(day: Day) -> None:
    target = day.rig.deploy(Scaling(scaledown_window_s=1, schedules=(MORNING,)))
    await day.pass_s(130)
    throttler = day.rig.scaler.throttler_of(target)
    assert len(throttler.instances) == 2
    day.rig.deploy(Scaling(scaledown_window_s=1))
    await day.pass_s(10)
    assert not throttler.instances


async def test_a_schedule_that_cannot_be_computed_holds_up_no_other(
    day: Day,
) -> None:
    lost = ScalingSchedule(
        cron="0 8 * * *", timezone="Mars/Olympus_Mons", duration_s=3600, min_instances=1
    )
    table = day.rig.table
    table.apply(change(1, route_of(spec_of("first", scaling=Scaling(schedules=(lost,))))))
    table.apply(change(2, route_of(spec_of("second", scaling=Scaling(schedules=(MORNING,))))))
    (there,) = table.targets_of(f"{TENANT}/main/shop/second")
    await day.pass_s(130)
    assert len(day.rig.scaler.throttler_of(there).instances) == 2
