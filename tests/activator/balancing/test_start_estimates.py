"""How long the next start is expected to take."""

from __future__ import annotations

from typing import Any

import pytest

from activator.balancing.start_estimates import StartTimeEstimator, is_start_needed
from snapshotter.types import StartKind


def test_nothing_known_is_not_zero() -> None:
    assert StartTimeEstimator().expected_s() is None
    assert repr(StartTimeEstimator()) == "<StartTimeEstimator next COLD: nothing known>"


def test_the_rung_that_will_be_used_is_what_counts() -> None:
    times = StartTimeEstimator()
    times.observe(StartKind.COLD, 5.0, ("boot", "fork"))
    assert times.next_rung() is StartKind.FORK, "a start that was forked left a Template behind"
    assert times.expected_s() == 5.0, "no fork was measured yet: the next slower rung that was"
    times.observe(StartKind.FORK, 0.02, ("fork",))
    assert times.expected_s() == 0.02
    times.set_template(is_resident=False)
    assert (times.next_rung(), times.expected_s()) == (StartKind.COLD, 5.0)


def test_without_a_template_a_known_snapshot_is_restored() -> None:
    times = StartTimeEstimator()
    times.observe(StartKind.COLD, 5.0, ("boot",))
    times.snapshot_proven(0.12)
    assert (times.next_rung(), times.expected_s()) == (StartKind.RESTORE, 0.12)
    times.observe(StartKind.RESTORE, 0.22, ("restore", "serve"))
    assert times.expected_s() == pytest.approx(0.15)
    times.observe(StartKind.COLD, 5.0, ("boot",))
    assert times.next_rung() is StartKind.COLD, "it fell to COLD: the snapshot is gone, or failed"


def test_averages_follow_what_is_new() -> None:
    times = StartTimeEstimator()
    for seconds in (1.0, 2.0, 2.0, 2.0, 2.0, 2.0):
        times.observe(StartKind.COLD, seconds, ("boot",))
    assert 1.8 < (times.expected_s() or 0) < 2.0
    assert repr(times).startswith("<StartTimeEstimator next COLD: COLD 18")


def test_a_faster_rung_says_nothing_about_a_slower_one() -> None:
    times = StartTimeEstimator()
    times.observe(StartKind.FORK, 0.02, ("fork",))
    times.set_template(is_resident=False)
    assert times.expected_s() is None


ONE_RUNS: dict[str, Any] = {
    "waiting": 1,
    "starting_slots": 0,
    "running_slots": 1,
    "oldest_wait_s": 5.0,
    "start_s": 60.0,
    "call_s": 2.0,
}
"""Its instance serves 30 calls while another one starts."""


@pytest.mark.parametrize(
    "changed, is_needed",
    [
        pytest.param({"running_slots": 0}, True, id="nothing runs"),
        pytest.param({"running_slots": 0, "waiting": 0}, False, id="nothing waits"),
        pytest.param({"running_slots": 0, "starting_slots": 1}, False, id="another start suffices"),
        pytest.param({"waiting": 30}, False, id="all are served before it is ready"),
        pytest.param({"waiting": 31}, True, id="one is not"),
        pytest.param({"waiting": 31, "starting_slots": 1}, False, id="and has another start"),
        pytest.param({"oldest_wait_s": 60.0}, True, id="one has waited for a whole start"),
        pytest.param({"objective_s": 4.0}, True, id="beyond the latency objective"),
        pytest.param({"objective_s": 5.0}, False, id="within the latency objective"),
        pytest.param({"start_s": None}, True, id="unknown duration of a start"),
        pytest.param({"call_s": None}, True, id="unknown duration of a call"),
    ],
)
def test_a_start_that_waited_for_room_is_needed_for_calls_that_nothing_else_serves_sooner(
    changed: dict[str, Any], is_needed: bool
) -> None:
    assert is_start_needed(**{**ONE_RUNS, **changed}) is is_needed
