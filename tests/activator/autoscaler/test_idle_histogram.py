"""How long an idle instance is worth keeping, by the pauses that were seen."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from activator.autoscaler.idle_histogram import (
    BUCKETS,
    EDGES_S,
    LONGEST_S,
    IdleHistogram,
    IdleHistograms,
    KeepAlivePolicy,
    window_s,
)

HOUR_S = 3600.0
TERMS = KeepAlivePolicy(waiting_cost=10.0, longest_s=HOUR_S)


def seen(pauses_s: list[float]) -> tuple[IdleHistogram, float]:
    """A function that needed one instance for a second, then paused, and so on; and when it was
    last needed."""
    gaps, now = IdleHistogram(), 100.0
    gaps.record(now, 1)
    for pause_s in pauses_s:
        now += pause_s
        gaps.record(now, 1)
    return gaps, now


def keeps_for(
    gaps: IdleHistogram,
    now: float,
    *,
    start_s: float,
    is_crowded: bool = False,
    terms: KeepAlivePolicy = TERMS,
) -> float:
    """Seconds until the last instance is not worth keeping any more."""
    at = 0.0
    while gaps.kept(now + at, instances=1, start_s=start_s, terms=terms, is_crowded=is_crowded):
        at += 1.0
    return at


def test_what_is_called_each_minute_is_kept_for_a_minute() -> None:
    gaps, now = seen([60.0] * 50)
    assert 60 <= keeps_for(gaps, now, start_s=20.0) <= 80


def test_a_fast_start_is_not_worth_a_minute() -> None:
    gaps, now = seen([60.0] * 50)
    assert keeps_for(gaps, now, start_s=0.1) <= 3, (
        "a tenth of a second, even weighed by ten, is not worth 60 of idling"
    )


def test_pauses_of_hours_keep_nothing() -> None:
    gaps, now = seen([2 * HOUR_S] * 50)
    assert keeps_for(gaps, now, start_s=20.0) <= 3


def test_the_more_waiting_costs_the_longer_it_is_kept() -> None:
    dice = random.Random(1)
    gaps, now = seen([dice.lognormvariate(4, 1.5) for _ in range(300)])
    windows = [
        keeps_for(
            gaps, now, start_s=5.0, terms=KeepAlivePolicy(waiting_cost=cost, longest_s=HOUR_S)
        )
        for cost in (0.0, 1.0, 10.0, 100.0)
    ]
    assert windows == sorted(windows)
    assert windows[0] < windows[-1]


def test_while_others_wait_for_room_it_is_kept_for_less() -> None:
    gaps, now = seen([60.0] * 50)
    assert keeps_for(gaps, now, start_s=20.0, is_crowded=True) < keeps_for(gaps, now, start_s=20.0)


def test_a_habit_that_changed_is_believed() -> None:
    gaps, now = seen([2 * HOUR_S] * 50 + [30.0] * 40)
    assert keeps_for(gaps, now, start_s=20.0) >= 30


def test_each_instance_has_pauses_of_its_own() -> None:
    gaps, now = IdleHistogram(), 0.0
    for second in range(4000):
        now = float(second)
        # the second one is needed each quarter of an hour, the first always
        gaps.record(now, 2 if second % 1000 == 0 else 1)
    kept = gaps.kept(now, instances=3, start_s=2.0, terms=TERMS, is_crowded=False)
    assert kept == 1


def test_an_instance_that_was_never_needed_is_not_kept() -> None:
    assert IdleHistogram().kept(5.0, instances=4, start_s=2.0, terms=TERMS, is_crowded=False) == 0


def test_before_anything_was_seen_it_is_kept_for_less_than_letting_go_costs() -> None:
    gaps, now = seen([])
    cost_s = 20.0 * 11
    assert 1 <= keeps_for(gaps, now, start_s=20.0) <= cost_s


def test_the_functions_called_last_are_remembered() -> None:
    pauses = IdleHistograms()
    first = pauses.get_or_create("a")
    assert pauses.get_or_create("a") is first
    for n in range(10_001):
        pauses.get_or_create(f"other-{n}")
    assert pauses.get_or_create("a") is not first
    assert repr(pauses) == "<IdleHistograms of 10000 functions>"


@given(st.lists(st.floats(0, 10), min_size=BUCKETS, max_size=BUCKETS), st.floats(0.01, 10_000))
def test_no_other_window_costs_less(weights: list[float], cost_s: float) -> None:
    def expected_s(window: float) -> float:
        middles = [(low * high) ** 0.5 for low, high in itertools.pairwise(EDGES_S)]
        return sum(
            weight * (min(middle, window) if end <= window else window + cost_s)
            for weight, middle, end in zip(weights, middles, EDGES_S[1:], strict=True)
        )

    best = window_s(weights, cost_s=cost_s)
    assert best in (0.0, *EDGES_S)
    assert best <= LONGEST_S * 1.25
    assert expected_s(best) <= min(expected_s(window) for window in (0.0, *EDGES_S[1:])) + 1e-6 * (
        1 + sum(weights) * LONGEST_S
    )
