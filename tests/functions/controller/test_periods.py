"""Days and months of the calendar."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.controller.billing.budget_periods import (
    DAY_S,
    KINDS,
    day_of,
    period_named,
    period_of,
)


def at(text: str) -> float:
    return dt.datetime.fromisoformat(text).replace(tzinfo=dt.UTC).timestamp()


@pytest.mark.parametrize(
    "kind, moment, name, begins, ends",
    [
        ("day", "2026-11-21T00:00:00", "2026-11-21", "2026-11-21", "2026-11-22"),
        ("day", "2026-11-21T23:59:59.999", "2026-11-21", "2026-11-21", "2026-11-22"),
        ("month", "2026-11-30T23:59:59.999", "2026-11", "2026-11-01", "2026-12-01"),
        ("month", "2026-12-31T12:00:00", "2026-12", "2026-12-01", "2027-01-01"),
        ("month", "2028-02-29T12:00:00", "2028-02", "2028-02-01", "2028-03-01"),
    ],
)
def test_a_moment_lies_in_its_day_and_its_month(
    kind: str, moment: str, name: str, begins: str, ends: str
) -> None:
    period = period_of(kind, day_of(at(moment)))
    assert (period.name, period.begins_at, period.ends_at) == (name, at(begins), at(ends))


@given(st.sampled_from(KINDS), st.integers(0, 100_000))
def test_periods_join_without_a_gap_and_are_found_by_their_names(kind: str, day: int) -> None:
    period = period_of(kind, day)
    assert period.first_day <= day < period.end_day
    assert period_of(kind, period.end_day).first_day == period.end_day
    assert period_of(kind, period.end_day - 1) == period == period_named(period.name)
    assert period.ends_at - period.begins_at == (period.end_day - period.first_day) * DAY_S


@pytest.mark.parametrize("name", ["", "2026", "2026-13", "2026-11-31", "week"])
def test_what_is_no_period_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        period_named(name)


def test_there_are_no_other_kinds() -> None:
    with pytest.raises(ValueError, match="day, month"):
        period_of("week", 1)
