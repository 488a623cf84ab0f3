"""What scaling schedules ask for, window by window, also where a clock is changed."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.errors import InvalidInput
from pilotlight.schedules.scaling_schedules import floor_at
from pilotlight.spec.instances.scaling import Scaling
from pilotlight.spec.policies import ScalingSchedule

HOUR_S = 3600.0
VIENNA = ZoneInfo("Europe/Vienna")
OFFICE = ScalingSchedule(
    cron="0 8 * * mon-fri", timezone="Europe/Vienna", duration_s=10 * HOUR_S, min_instances=2
)


def at(day: int, hour: int, minute: int = 0, *, month: int = 11, fold: int = 0) -> float:
    """On a wall clock in Vienna in 2026; 23 November is a Monday."""
    return dt.datetime(2026, month, day, hour, minute, fold=fold, tzinfo=VIENNA).timestamp()


def test_a_window_is_open_from_its_time_for_its_duration_on_its_days() -> None:
    assert floor_at([OFFICE], at(23, 7, 59)).min_instances == 0
    opened = floor_at([OFFICE], at(23, 8))
    assert (opened.min_instances, opened.until) == (2, at(23, 18))
    closed = floor_at([OFFICE], at(23, 18))
    assert (closed.min_instances, closed.until) == (0, at(24, 8))
    weekend = floor_at([OFFICE], at(28, 12))
    assert (weekend.min_instances, weekend.until) == (0, at(30, 8))


def test_of_windows_that_overlap_the_largest_counts_and_they_do_not_add_up() -> None:
    noon = ScalingSchedule(
        cron="0 12 * * *", timezone="Europe/Vienna", duration_s=2 * HOUR_S, min_instances=5
    )
    both = [OFFICE, noon]
    assert [floor_at(both, at(23, hour)).min_instances for hour in (7, 8, 12, 14, 18)] == [
        *(0, 2, 5, 2, 0)
    ]
    assert floor_at(both, at(23, 8)).until == at(23, 12)
    assert floor_at(both, at(28, 12)).min_instances == 5, "on a Saturday"


def test_windows_of_one_schedule_may_overlap_each_other() -> None:
    hourly = ScalingSchedule(cron="0 * * * *", duration_s=2 * HOUR_S, min_instances=1)
    assert {floor_at([hourly], 1_800_000_000 + n * 600).min_instances for n in range(48)} == {1}


def test_a_window_keeps_its_duration_when_the_clock_is_changed_within_it() -> None:
    night = ScalingSchedule(
        cron="0 1 * * *", timezone="Europe/Vienna", duration_s=3 * HOUR_S, min_instances=1
    )
    spring = floor_at([night], at(29, 1, month=3))
    assert (spring.min_instances, spring.until) == (1, at(29, 5, month=3))
    autumn = floor_at([night], at(25, 1, month=10))
    assert (autumn.min_instances, autumn.until) == (1, at(25, 3, month=10))


def test_a_window_that_begins_when_the_clock_is_changed_begins_once() -> None:
    early = ScalingSchedule(
        cron="30 2 * * *", timezone="Europe/Vienna", duration_s=1800, min_instances=1
    )
    # 02:30 does not exist in spring, and exists twice in autumn
    assert floor_at([early], at(29, 3, 29, month=3)).min_instances == 0
    assert floor_at([early], at(29, 3, 30, month=3)).min_instances == 1
    assert floor_at([early], at(25, 2, 30, month=10)).min_instances == 1
    assert floor_at([early], at(25, 2, 30, month=10, fold=1)).min_instances == 0


@given(
    now=st.floats(1_700_000_000, 1_900_000_000),
    hours=st.floats(0.1, 100),
    cron=st.sampled_from(["*/15 * * * *", "0 3 * * *", "30 2 * * 0", "0 */6 * * mon-fri"]),
    zone=st.sampled_from(["UTC", "Europe/Vienna", "America/New_York", "Australia/Lord_Howe"]),
)
def test_nothing_changes_before_it_is_said_to(
    now: float, hours: float, cron: str, zone: str
) -> None:
    given = [
        ScalingSchedule(cron=cron, timezone=zone, duration_s=hours * HOUR_S, min_instances=3),
        ScalingSchedule(cron="15 4 * * *", timezone=zone, duration_s=HOUR_S, min_instances=1),
    ]
    first = floor_at(given, now)
    assert first.since == now < first.until
    assert first.is_valid(now)
    assert not first.is_valid(first.until)
    for share in (0.3, 0.999):
        later = floor_at(given, now + share * (first.until - now))
        assert later.min_instances == first.min_instances


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"cron": "0 8 * *"}, "five fields"),
        ({"cron": ""}, "cron is missing"),
        ({"duration_s": 1}, "duration_s"),
        ({"min_instances": 0}, "min_instances"),
    ],
)
def test_a_window_has_bounds(changes: dict[str, object], message: str) -> None:
    usual: dict[str, object] = {"cron": "0 8 * * *", "duration_s": 600, "min_instances": 1}
    with pytest.raises(InvalidInput, match=message):
        ScalingSchedule(**{**usual, **changes})  # type: ignore[arg-type]


def test_a_floor_is_within_the_ceiling_and_there_are_not_too_many() -> None:
    with pytest.raises(InvalidInput, match="min_instances"):
        Scaling(max_instances=1, schedules=(OFFICE,))
    with pytest.raises(InvalidInput, match="17 entries, at most 16"):
        Scaling(schedules=(OFFICE,) * 17)
