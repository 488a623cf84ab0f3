"""When schedules are due, also where a clock is changed."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.errors import InvalidInput
from pilotlight.schedules.cron import check_schedule, next_after, occurrences
from pilotlight.spec.policies import Schedule

BERLIN = ZoneInfo("Europe/Berlin")
SPRING = dt.datetime(2026, 3, 29, tzinfo=BERLIN)  # 02:00 to 03:00 does not exist
AUTUMN = dt.datetime(2026, 10, 25, tzinfo=BERLIN)  # 02:00 to 03:00 exists twice


def due(cron: str, after: dt.datetime, count: int) -> list[str]:
    """The next times, as a clock on a wall in Berlin shows them, with its offset."""
    schedule = Schedule(cron=cron, timezone="Europe/Berlin")
    first = next_after(schedule, after.timestamp())
    found = occurrences(schedule, first, until=float("inf"), limit=count)
    return [dt.datetime.fromtimestamp(at, BERLIN).strftime("%d %H:%M %z") for at in found]


def test_fields_are_read_in_the_time_zone_of_the_schedule() -> None:
    assert due("0 6 * * 1", dt.datetime(2026, 11, 21, tzinfo=BERLIN), 2) == [
        "23 06:00 +0100",
        "30 06:00 +0100",
    ]
    assert next_after(Schedule(cron="0 6 * * *"), 0.0) == 6 * 3600


def test_a_time_that_does_not_exist_is_due_as_much_later_as_the_clock_jumped_and_once() -> None:
    assert due("30 2 * * *", SPRING, 2) == ["29 03:30 +0200", "30 02:30 +0200"]
    assert due("30 2,3 * * *", SPRING, 3) == ["29 03:30 +0200", "30 02:30 +0200", "30 03:30 +0200"]


def test_a_time_that_exists_twice_is_due_the_first_time_only() -> None:
    assert due("30 2 * * *", AUTUMN, 2) == ["25 02:30 +0200", "26 02:30 +0100"]


def test_what_counts_hours_counts_on_when_the_clock_is_changed() -> None:
    assert due("0 * * * *", AUTUMN, 5) == [
        "25 01:00 +0200",
        "25 02:00 +0200",
        "25 02:00 +0100",
        "25 03:00 +0100",
        "25 04:00 +0100",
    ]
    assert due("0 * * * *", SPRING, 3) == ["29 01:00 +0100", "29 03:00 +0200", "29 04:00 +0200"]
    assert due("*/30 2 * * *", SPRING, 2) == ["30 02:00 +0200", "30 02:30 +0200"]


def test_a_period_counts_on_from_the_time_before_whenever_it_is_asked() -> None:
    every = Schedule(period_s=90)
    assert next_after(every, 1000.0) == 1090.0
    assert next_after(every, 1095.0, previous=1090.0) == 1180.0
    assert next_after(every, 1180.0, previous=1090.0) == 1270.0
    # a clock that was set back brings no time twice
    assert next_after(every, 1000.0, previous=1090.0) == 1180.0


@given(
    after=st.floats(min_value=1_700_000_000, max_value=1_900_000_000),
    cron=st.sampled_from(
        [
            "*/15 * * * *",
            "0 3 * * *",
            "30 2 * * 0",
            "0 0 1 * *",
            "5,35 1-3 * * *",
            "0 */6 * * mon-fri",
        ]
    ),
    zone=st.sampled_from(
        ["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kolkata"]
    ),
)
def test_the_next_time_is_later_and_none_is_between(after: float, cron: str, zone: str) -> None:
    schedule = Schedule(cron=cron, timezone=zone)
    found = next_after(schedule, after)
    assert found > after
    assert next_after(schedule, (after + found) / 2) == found
    assert next_after(schedule, found) > found


@pytest.mark.parametrize("cron", ["61 * * * *", "x * * * *", "H * * * *", "R * * * *", "* * * * 9"])
def test_what_is_no_expression_is_refused(cron: str) -> None:
    with pytest.raises(InvalidInput, match="minute hour"):
        check_schedule(Schedule(cron=cron))


def test_what_never_comes_is_refused() -> None:
    with pytest.raises(InvalidInput, match="never matches"):
        check_schedule(Schedule(cron="0 0 30 2 *"))


@pytest.mark.parametrize("zone", ["Mars/Olympus", "../etc/passwd", "", "Europe"])
def test_a_time_zone_that_there_is_not_is_refused(zone: str) -> None:
    with pytest.raises(InvalidInput, match="time zone"):
        check_schedule(Schedule(cron="0 6 * * *", timezone=zone))


def test_good_expressions_pass() -> None:
    for cron in (
        "0 6 * * 1",
        "*/5 * * * *",
        "0 9 * jan-mar mon-fri",
        "0 0 L * *",
        "15,45 8-18/2 1,15 * *",
    ):
        check_schedule(Schedule(cron=cron, timezone="America/New_York"))
