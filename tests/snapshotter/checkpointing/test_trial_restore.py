"""What a proof measures."""

from __future__ import annotations

import pytest

from snapshotter.checkpointing.trial_restore import RestoreTiming


@pytest.mark.parametrize(
    "waited_ms, is_starved, restore_ms, answer_ms",
    [(0.0, False, 100.0, 200.0), (50.0, False, 75.0, 150.0), (100.0, True, 50.0, 100.0)],
)
def test_waiting_for_a_processor_is_no_part_of_what_a_restore_takes(
    waited_ms: float, is_starved: bool, restore_ms: float, answer_ms: float
) -> None:
    timing = RestoreTiming(restore_ms=100.0, answer_ms=200.0, waited_ms=waited_ms)
    assert timing.is_starved is is_starved
    assert timing.without_waiting() == RestoreTiming(restore_ms=restore_ms, answer_ms=answer_ms)


def test_a_measurement_that_waited_all_the_time_is_not_zero() -> None:
    timing = RestoreTiming(restore_ms=100.0, answer_ms=200.0, waited_ms=500.0).without_waiting()
    assert timing.answer_ms == pytest.approx(20.0)
