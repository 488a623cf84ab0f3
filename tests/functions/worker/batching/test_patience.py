"""Waiting is learnt: where calls come it goes on, where none come it ends, and it never costs more
than it can save."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pilotlight.worker.batching.adaptive_wait import AdaptiveWait

FIXED_S = 0.02


def test_a_first_silence_is_half_as_long_as_it_is_worth() -> None:
    assert AdaptiveWait().seconds(1, FIXED_S) == FIXED_S / 2
    assert AdaptiveWait().seconds(4, FIXED_S) == FIXED_S / 8, "four wait"


def test_it_waits_where_calls_came() -> None:
    patience = AdaptiveWait()
    for _ in range(5):
        patience.note(3, 0.001, came=True)

    assert patience.seconds(3, FIXED_S) == FIXED_S / 3


def test_it_stops_waiting_where_none_came() -> None:
    patience = AdaptiveWait()
    for _ in range(3):
        patience.note(8, patience.seconds(8, FIXED_S), came=False)

    assert patience.seconds(8, FIXED_S) < FIXED_S / 8 * 0.05


def test_calls_that_stop_coming_are_not_waited_for_much_longer() -> None:
    patience = AdaptiveWait()
    for _ in range(1000):
        patience.note(1, 0.0005, came=True)
    waits = 0
    while patience.seconds(1, FIXED_S) > FIXED_S / 10:
        patience.note(1, patience.seconds(1, FIXED_S), came=False)
        waits += 1

    assert waits <= 12


def test_each_size_has_an_experience_of_its_own() -> None:
    patience = AdaptiveWait()
    for _ in range(20):  # eight callers that each wait for their answer
        for size in range(1, 8):
            patience.note(size, 0.0005, came=True)
        patience.note(8, patience.seconds(8, FIXED_S), came=False)

    assert patience.seconds(7, FIXED_S) == FIXED_S / 7
    assert patience.seconds(8, FIXED_S) < FIXED_S / 8 * 0.1


def test_what_was_given_up_is_tried_again_after_a_while() -> None:
    patience = AdaptiveWait()
    patience.note(1, FIXED_S, came=False)
    assert patience.seconds(1, FIXED_S) == 0
    tries = 0
    while patience.seconds(1, FIXED_S) < 0.2 * FIXED_S:
        patience.note(1, 0.0, came=False)
        tries += 1

    assert 10 < tries < 200


def test_calls_that_come_farther_apart_than_the_fixed_cost_are_not_waited_for() -> None:
    patience, gap_s = AdaptiveWait(), 1.5 * FIXED_S
    for _ in range(200):
        patience.note(1, min(gap_s, patience.seconds(1, FIXED_S)), came=False)

    assert patience.seconds(1, FIXED_S) < 0.25 * FIXED_S


@given(
    st.lists(st.tuples(st.integers(1, 100), st.floats(0, 1), st.booleans()), max_size=60),
    st.floats(0, 10),
    st.integers(1, 200),
)
def test_no_silence_ever_costs_more_than_one_more_call_saves(
    seen: list[tuple[int, float, bool]], fixed_s: float, size: int
) -> None:
    patience = AdaptiveWait()
    for n, waited_s, came in seen:
        patience.note(n, waited_s, came=came)

    assert 0 <= patience.seconds(size, fixed_s) * size <= fixed_s * 1.000001


@given(st.lists(st.floats(0.0001, 0.1), min_size=1, max_size=300), st.floats(0.001, 0.05))
def test_fruitless_waiting_stays_a_small_part_of_the_time(
    gaps: list[float], fixed_s: float
) -> None:
    """Whatever comes when: what waiting lost is bounded by what it saved, plus a little for trying
    again."""
    patience, lost_s, saved_s = AdaptiveWait(), 0.0, 0.0
    for gap_s in gaps:
        limit_s = patience.seconds(1, fixed_s)
        came = gap_s <= limit_s
        waited_s = min(gap_s, limit_s)
        patience.note(1, waited_s, came=came)
        lost_s += waited_s
        saved_s += fixed_s if came else 0.0

    assert lost_s <= saved_s + fixed_s * (1 + len(gaps) * 0.05)
