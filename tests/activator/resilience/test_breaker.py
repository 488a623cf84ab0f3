"""The circuit breaker, by a manual clock."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from activator.resilience.breaker import (
    JITTER,
    MAX_DOUBLINGS,
    WINDOW_S,
    Breaker,
    BreakerTerms,
    Outcome,
    State,
    Window,
)

TERMS = BreakerTerms(error_ratio=0.5, min_calls=4, open_s=5)


def make_breaker(seed: int = 1) -> Breaker:
    return Breaker(TERMS, rng=random.Random(seed))


def end(breaker: Breaker, text: str, now: float) -> None:
    """`.` is an answer, `x` a failure, `r` a raise, `-` nothing."""
    kinds = {".": Outcome.ANSWERED, "x": Outcome.FAILED, "r": Outcome.RAISED, "-": Outcome.NEITHER}
    for letter in text:
        breaker.record_outcome(kinds[letter], now)


def open_at(now: float) -> Breaker:
    breaker = make_breaker()
    end(breaker, "xxxx", now)
    assert breaker.state is State.OPEN
    return breaker


def test_it_stays_closed_below_its_volume() -> None:
    breaker = make_breaker()
    end(breaker, "xxx", 100)
    assert breaker.state is State.CLOSED
    assert breaker.admits(100)


def test_it_opens_when_half_of_enough_calls_failed_and_says_how_many_did() -> None:
    breaker = make_breaker()
    end(breaker, "..xx", 100)
    assert breaker.state is State.OPEN
    assert breaker.error_ratio == 0.5
    assert not breaker.admits(100)


def test_it_stays_closed_while_most_calls_are_answered() -> None:
    breaker = make_breaker()
    for second in range(100):
        end(breaker, "..x", 100 + second)
    assert breaker.state is State.CLOSED


def test_what_user_code_raised_is_no_failure_of_the_revision() -> None:
    breaker = make_breaker()
    end(breaker, "r" * 50, 100)
    assert breaker.state is State.CLOSED


def test_failures_of_more_than_ten_seconds_ago_say_nothing() -> None:
    breaker = make_breaker()
    end(breaker, "xxx", 100)
    end(breaker, "x", 100 + WINDOW_S)
    assert breaker.state is State.CLOSED


def test_after_its_pause_one_probe_goes_and_no_second() -> None:
    breaker = open_at(100)
    assert not breaker.admits(104.9)
    after = 100 + 5 * (1 + JITTER)
    assert breaker.admits(after)
    breaker.record_start(after)
    assert breaker.state is State.HALF_OPEN
    assert not breaker.admits(after)


def test_an_answered_probe_closes_it() -> None:
    breaker = open_at(100)
    breaker.record_start(110)
    end(breaker, ".", 111)
    assert breaker.state is State.CLOSED
    assert breaker.admits(111)
    end(breaker, "xxx", 111)
    assert breaker.state is State.CLOSED, "the old failures were forgotten"


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breaker, now = open_at(100), 100.0
    for failures in range(1, 9):
        now += 1000
        breaker.record_start(now)
        end(breaker, "x", now)
        pause_s = 5 * 2 ** min(failures, MAX_DOUBLINGS)
        assert pause_s <= breaker.retry_after_s(now) <= pause_s * (1 + JITTER)


def test_a_probe_whose_caller_left_leaves_its_place_to_another() -> None:
    breaker = open_at(100)
    breaker.record_start(110)
    end(breaker, "-", 110)
    assert breaker.state is State.HALF_OPEN
    assert breaker.admits(110)


def test_calls_that_began_before_it_opened_change_nothing_while_it_is_open() -> None:
    breaker = open_at(100)
    end(breaker, "....x", 101)
    assert breaker.state is State.OPEN
    assert breaker.retry_after_s(101) <= 5 * (1 + JITTER) - 1


def test_its_pauses_differ_so_that_several_do_not_probe_in_step() -> None:
    pauses = {first_pause_s(seed) for seed in range(8)}
    assert len(pauses) == 8


def first_pause_s(seed: int) -> float:
    breaker = make_breaker(seed)
    end(breaker, "xxxx", 0)
    return breaker.retry_after_s(0)


def test_a_clock_that_jumps_back_forgets_nothing_and_breaks_nothing() -> None:
    window = Window()
    window.add(100, failed=True)
    window.add(50, failed=True)
    assert window.counts(100) == (2, 2)


@pytest.mark.parametrize("gap_s", [1, 9, 10, 11, 1000])
def test_a_window_counts_exactly_the_last_ten_seconds(gap_s: int) -> None:
    window = Window()
    window.add(100, failed=True)
    window.add(100 + gap_s, failed=False)
    assert window.counts(100 + gap_s) == ((2, 1) if gap_s < WINDOW_S else (1, 0))


@example([(1, "failed")] * 25)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2 * WINDOW_S),
            st.sampled_from(["answered", "failed", "clear"]),
        ),
        max_size=30,
    )
)
def test_a_window_counts_what_a_list_of_all_calls_counts(steps: list[tuple[int, str]]) -> None:
    window, now = Window(), 0
    calls: list[tuple[int, bool]] = []
    for pause_s, step in steps:
        now += pause_s
        if step == "clear":
            window.clear()
            calls.clear()
        else:
            window.add(now, failed=step == "failed")
            calls.append((now, step == "failed"))
        recent = [failed for second, failed in calls if second > now - WINDOW_S]
        assert window.counts(now) == (len(recent), sum(recent))


def test_a_probe_is_admitted_when_the_pause_ends_and_not_before() -> None:
    breaker = open_at(0)
    until = breaker.retry_after_s(0)
    breaker.record_start(until - 0.001)
    assert (breaker.state, breaker.admits(until - 0.001)) == (State.OPEN, False)
    assert breaker.admits(until)
    breaker.record_start(until)
    assert breaker.state is State.HALF_OPEN


def test_a_call_leaves_a_closed_breaker_closed() -> None:
    breaker = make_breaker()
    breaker.record_start(100)
    assert (breaker.state, breaker.admits(100)) == (State.CLOSED, True)


def test_after_it_closed_its_next_pause_is_the_first_one_again() -> None:
    breaker = open_at(0)
    breaker.record_start(100)
    end(breaker, "x", 100)
    breaker.record_start(200)
    end(breaker, ".", 200)
    end(breaker, "xxxx", 200)
    assert 5 <= breaker.retry_after_s(200) <= 5 * (1 + JITTER)


def test_a_caller_is_asked_to_wait_a_second_once_the_pause_has_ended() -> None:
    assert open_at(0).retry_after_s(1000) == 1.0
    assert make_breaker().retry_after_s(0) == 1.0


def test_breakers_that_share_no_seed_pause_differently() -> None:
    pauses = set()
    for _ in range(8):
        breaker = Breaker(TERMS)
        end(breaker, "xxxx", 0)
        pauses.add(breaker.retry_after_s(0))
    assert len(pauses) > 1


def test_its_repr_is_a_status_line() -> None:
    assert repr(open_at(100)) == "<Breaker open <Window 4 of 4 failed>>"
    new = make_breaker()
    assert (repr(new), new.error_ratio) == ("<Breaker closed <Window 0 of 0 failed>>", 0.0)
