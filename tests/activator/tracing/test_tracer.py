"""A flood of one kind is a handful of traces, and takes nothing from other kinds and other
tenants."""

from __future__ import annotations

from activator.calls.trace_context import ASKED, ERROR
from activator.tracing.tracer import BURST_S, RATES, Sampling

NOW = 1000.0


def test_a_flood_keeps_a_burst_and_then_the_rate() -> None:
    sampling = Sampling()
    kept_at_once = sum(sampling.try_acquire("t", ASKED, NOW) for _ in range(10_000))
    kept_in_ten_s = sum(sampling.try_acquire("t", ASKED, NOW + n / 1000) for n in range(1, 10_001))
    assert kept_at_once == RATES[ASKED] * BURST_S
    assert kept_in_ten_s == 10 * RATES[ASKED]


def test_one_tenants_flood_and_one_kind_take_nothing_from_others() -> None:
    sampling = Sampling()
    while sampling.try_acquire("loud", ASKED, NOW):
        pass
    assert sampling.try_acquire("quiet", ASKED, NOW)
    assert sampling.try_acquire("loud", ERROR, NOW)


def test_what_was_not_used_is_there_later_up_to_the_burst() -> None:
    sampling = Sampling()
    while sampling.try_acquire("t", ERROR, NOW):
        pass
    assert (
        sum(sampling.try_acquire("t", ERROR, NOW + 3600) for _ in range(1000))
        == RATES[ERROR] * BURST_S
    )
