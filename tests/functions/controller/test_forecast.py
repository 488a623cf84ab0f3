"""What a period will have cost."""

from __future__ import annotations

import datetime as dt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.controller.billing.budget_periods import DAY_S, day_of, period_of
from pilotlight.controller.billing.forecast import Forecast, forecast

NOON = dt.datetime(2026, 11, 21, 12, tzinfo=dt.UTC).timestamp()
TODAY = day_of(NOON)
NOVEMBER = period_of("month", TODAY)


def seen(
    days: dict[int, int], *, spent: int | None = None, amount: int | None = None, now: float = NOON
) -> Forecast | None:
    inside = sum(picos for day, picos in days.items() if NOVEMBER.first_day <= day)
    return forecast(
        now=now, period=NOVEMBER, spent=inside if spent is None else spent, days=days, amount=amount
    )


def band(days: dict[int, int]) -> tuple[int, int]:
    found = seen(days, spent=100)
    assert found is not None
    assert found.low is not None
    assert found.high is not None
    return found.low, found.high


def test_an_even_pace_goes_on() -> None:
    days = {TODAY - n: 100 for n in range(1, 8)} | {TODAY: 50}
    found = seen(days, spent=2050)
    # 9 1/2 days are left
    assert found == Forecast(expected=2050 + 950, low=3000, high=3000, per_day=100, basis_days=7)


def test_only_the_last_seven_full_days_count_and_today_does_not() -> None:
    days = (
        {TODAY - n: 700 for n in range(8, 15)}
        | {TODAY - n: 10 for n in range(1, 8)}
        | {TODAY: 100_000}
    )
    found = seen(days)
    assert found is not None
    assert (found.per_day, found.basis_days) == (10, 7)


def test_a_day_without_records_after_the_first_one_costs_nothing() -> None:
    found = seen({TODAY - 4: 40, TODAY: 1})
    assert found is not None
    assert (found.per_day, found.basis_days) == (10, 4)


def test_days_before_the_first_one_do_not_count() -> None:
    found = seen({TODAY - 2: 40, TODAY - 1: 60})
    assert found is not None
    assert (found.per_day, found.basis_days) == (50, 2)


def test_the_band_is_wide_after_two_days_and_narrow_after_seven() -> None:
    two, seven = (
        band({TODAY - 2: 40, TODAY - 1: 60}),
        band({TODAY - n: 40 + 20 * (n % 2) for n in range(1, 8)}),
    )
    assert two[1] - two[0] > 2 * (seven[1] - seven[0]) > 0
    assert two[0] >= 100


def test_one_full_day_gives_no_band() -> None:
    found = seen({TODAY - 1: 60, TODAY: 5})
    assert found is not None
    assert (found.low, found.high, found.basis_days) == (None, None, 1)


def test_the_first_day_stands_for_itself_after_an_hour() -> None:
    found = seen({TODAY: 50})
    assert found is not None
    assert (found.per_day, found.expected, found.basis_days) == (100, 50 + 950, 0)
    midnight = float(TODAY * DAY_S)
    assert seen({TODAY: 50}, now=midnight + 3599) is None
    assert seen({TODAY: 50}, now=midnight + 3600) is not None


def test_nothing_is_known_of_who_used_nothing() -> None:
    assert seen({}) is None


@pytest.mark.parametrize("amount, days_ahead", [(2050, 0), (2150, 1), (2999, 9.49), (3100, None)])
def test_when_the_amount_will_have_been_spent(amount: int, days_ahead: float | None) -> None:
    days = {TODAY - n: 100 for n in range(1, 8)}
    found = seen(days, spent=2050, amount=amount)
    assert found is not None
    assert found.reached_at == (
        None if days_ahead is None else pytest.approx(NOON + days_ahead * DAY_S)
    )


def test_credits_do_not_bring_the_end_below_what_is_spent() -> None:
    found = seen({TODAY - 1: -500, TODAY - 2: 100}, spent=700, amount=1000)
    assert found is not None
    assert (found.expected, found.per_day, found.reached_at) == (700, 0, None)


@given(
    st.dictionaries(st.integers(TODAY - 40, TODAY), st.integers(0, 10**21)),
    st.floats(0, DAY_S - 1),
    st.integers(0, 10**21),
    st.integers(1, 10**21),
)
def test_it_holds_together_whatever_was_spent(
    days: dict[int, int], second: float, spent: int, amount: int
) -> None:
    now = TODAY * DAY_S + second
    found = forecast(now=now, period=NOVEMBER, spent=spent, days=days, amount=amount)
    if found is None:
        return
    assert found.expected >= spent
    assert found.low is None or spent <= found.low <= found.expected <= (found.high or 0)
    assert found.reached_at is None or now <= found.reached_at < NOVEMBER.ends_at
