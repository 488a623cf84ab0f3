"""An instance's counter of CPU time through its life: its start, its sleep, its end, and starts
that fail."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pilotlight.errors import StartFailed
from pilotlight.spec.instances.scaling import Scaling
from snapshotter import errors
from tests.activator.autoscaler.test_autoscaler_loop import Rig
from tests.activator.billing_world import SECOND, records_on_disk
from tests.activator.test_gateway import until

MINE = Scaling(scaledown_window_s=10, keep_asleep_s=100, max_instances=1)


class Counted(Rig):
    """A rig whose instances have a counter that the test writes."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._directory = directory
        self._file = directory / "cpuacct.usage"
        self.fleet.cpu_file = str(self._file)
        self.count(0)

    def count(self, seconds: float) -> int:
        """Where the counter stands."""
        value = round(seconds * SECOND)
        self._file.write_text(f"{value}\n")
        return value

    def charged(self) -> list[int]:
        """Nanoseconds of the CPU records in the journal."""
        return [
            record["billed_ns"]
            for record in records_on_disk(self._directory / "j")
            if record["kind"] == "CPU"
        ]

    def open_descriptors(self) -> int:
        """How often the counter is held open."""
        held = 0
        for descriptor in os.listdir("/proc/self/fd"):
            try:
                held += os.readlink(f"/proc/self/fd/{descriptor}") == str(self._file)
            except FileNotFoundError:
                continue
        return held


@pytest.fixture(name="rig")
async def _rig(short_tmp: Path) -> AsyncIterator[Counted]:
    rig = Counted(short_tmp)
    await rig.reconciler.reconcile()
    yield rig
    await rig.scaler.aclose()
    await rig.fleet.aclose()
    await rig.books.aclose()


async def test_a_start_and_a_pause_are_charged_when_idle_time_is(rig: Counted) -> None:
    rig.fleet.cpu_from_ns = -2 * SECOND
    rig.count(1)
    throttler = rig.scaler.throttler_of(rig.deploy(MINE))
    (await throttler.reserve(5.0)).release()
    rig.count(1.5)
    throttler.settle_idle()
    assert rig.charged() == [3_500_000_000]


async def test_the_agents_last_word_is_charged_and_the_counter_let_go(rig: Counted) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(MINE))
    reservation = await throttler.reserve(5.0)
    reservation.release()
    assert rig.open_descriptors() == 1
    throttler.instance_exited(reservation.instance.id, "exited", 4 * SECOND)
    assert (rig.charged(), rig.open_descriptors()) == ([4 * SECOND], 0)


async def test_exit_hooks_are_charged_after_the_stop(rig: Counted) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(Scaling(scaledown_window_s=10, max_instances=1)))
    reservation = await throttler.reserve(5.0)
    reservation.release()
    rig.count(1)
    rig.pass_s(14)
    await until(lambda: len(rig.fleet.stopped) == 1)
    throttler.instance_exited(reservation.instance.id, "stopped", 3 * SECOND)
    assert (rig.charged(), rig.open_descriptors()) == ([SECOND, 2 * SECOND], 0)


async def test_who_sleeps_and_wakes_is_counted_on_and_holds_one_counter(rig: Counted) -> None:
    throttler = rig.scaler.throttler_of(rig.deploy(MINE))
    (await throttler.reserve(5.0)).release()
    rig.count(1)
    rig.pass_s(14)
    await until(lambda: len(rig.fleet.naps) == 1 and throttler.asleep.instances() != [])
    await asyncio.sleep(0)
    rig.fleet.cpu_from_ns = rig.count(1.25)
    (await throttler.reserve(5.0)).release()
    rig.count(2)
    throttler.settle_idle()
    assert (sum(rig.charged()), rig.open_descriptors()) == (2 * SECOND, 1)


async def test_a_start_that_fails_is_charged_and_its_caller_learns_nothing_of_it(
    rig: Counted,
) -> None:
    rig.fleet.failures.append(
        errors.StartFailed("it raised", {"log_tail": [], "cpu_ns": 5 * SECOND})
    )
    with pytest.raises(StartFailed) as failed:
        await rig.scaler.throttler_of(rig.deploy(MINE)).reserve(5.0)
    assert "cpu_ns" not in failed.value.detail
    assert rig.charged() == [5 * SECOND]


async def test_an_instance_elsewhere_is_named_as_not_metered_once(
    rig: Counted, caplog: pytest.LogCaptureFixture
) -> None:
    rig.fleet.cpu_file = ""
    throttler = rig.scaler.throttler_of(rig.deploy(Scaling(max_inputs=1, max_instances=2)))
    first, second = await throttler.reserve(5.0), await throttler.reserve(5.0)
    said = [record for record in caplog.records if "not metered" in record.getMessage()]
    assert len(said) == 1
    for reservation in (first, second):
        reservation.release()
    throttler.settle_idle()
    assert rig.charged() == []
