"""Tests that may be looked at whenever one likes: they reject what is wrong, and seldom what is
right, however often they are asked."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotlight.controller.rollouts.baseline import subtract
from pilotlight.controller.statistics import sequential_tests
from pilotlight.spec.observations import Observation, latency_bucket
from tests.functions.controller.rollouts.seen import observed


@pytest.mark.parametrize(
    "x,a,b",
    [(0.3, 2, 3), (0.5, 1, 1), (0.05, 15, 12), (0.01, 3, 300), (0.01, 30, 2000), (0.2, 3, 300)],
)
def test_the_tail_of_a_beta_variable_is_that_of_a_binomial_one(x: float, a: int, b: int) -> None:
    n = a + b - 1
    below = sum(math.comb(n, hits) * x**hits * (1 - x) ** (n - hits) for hits in range(a))
    assert sequential_tests.beta_tail(x, a, b) == pytest.approx(below, rel=1e-6)


def test_nothing_is_above_all_and_everything_above_nothing() -> None:
    assert (sequential_tests.beta_tail(0.0, 2, 2), sequential_tests.beta_tail(1.0, 2, 2)) == (1, 0)


@given(st.floats(0.001, 0.999), st.integers(1, 500), st.integers(1, 5000))
def test_the_two_tails_of_a_beta_variable_add_up(x: float, a: int, b: int) -> None:
    assert sequential_tests.beta_tail(x, a, b) + sequential_tests.beta_tail(
        1 - x, b, a
    ) == pytest.approx(1, abs=1e-9)


def test_the_e_value_is_a_fair_bet_under_its_hypothesis() -> None:
    share, n = 0.2, 30
    expected = sum(
        math.comb(n, hits)
        * share**hits
        * (1 - share) ** (n - hits)
        * math.exp(sequential_tests.log_e_share(hits, n, share))
        for hits in range(n + 1)
    )
    assert expected == pytest.approx(1, abs=1e-6)


def test_looking_after_every_call_rejects_the_truth_no_more_often_than_it_says() -> None:
    rng, alpha, rejected = random.Random(7), 0.1, 0
    for _ in range(200):
        hits = 0
        for n in range(1, 201):
            hits += rng.random() < 0.1
            if sequential_tests.log_e_share(hits, n, 0.1) >= math.log(1 / alpha):
                rejected += 1
                break
    assert rejected / 200 <= alpha


def test_errors_are_compared_by_how_much_traffic_each_had() -> None:
    same = sequential_tests.log_e_ratio((5, 95), (5_000, 95_000), 1.0)
    worse = sequential_tests.log_e_ratio((50, 95), (5_000, 95_000), 1.0)
    assert same < 0 < math.log(1000) < worse
    assert sequential_tests.log_e_ratio((5, 0), (0, 10), 1.0) == -math.inf


def test_a_boundary_allows_for_every_look_and_for_the_false_alarms_asked_for() -> None:
    one_look = 3.29  # two-sided, one in a thousand
    widths = [
        sequential_tests.boundary(n, 200, 0.001) for n in (50, 200, 2_000, 2_000_000, 2_000_000_000)
    ]
    assert min(widths) > one_look
    assert widths[0] > widths[1] > widths[2] < widths[3] < widths[4]
    assert sequential_tests.boundary(200, 200, 0.01) < sequential_tests.boundary(200, 200, 0.001)


def test_percentiles_have_bounds_that_close_with_samples() -> None:
    few, many = ({latency_bucket(10 + n): count for n in range(100)} for count in (1, 1000))
    for buckets in (few, many):
        lower, upper = (
            sequential_tests.lower_quantile(buckets, 0.5),
            sequential_tests.upper_quantile(buckets, 0.5),
        )
        assert lower is not None
        assert upper is not None
        assert lower < upper or buckets is many
    assert sequential_tests.upper_quantile({}, 0.5) is None
    assert (sequential_tests.upper_quantile(few, 0.5) or 0) > (
        sequential_tests.upper_quantile(many, 0.5) or 0
    )


def test_the_spread_of_what_is_always_the_same_is_what_a_bucket_hides() -> None:
    assert sequential_tests.spread({10: 1000}) == 0.1
    assert sequential_tests.spread({}) == 1.0
    assert sequential_tests.spread({0: 99, 70: 1}) > 5


def test_what_was_seen_before_is_taken_off_and_never_below_nothing() -> None:
    seen, before = observed(100, failed=3, slow=5), observed(40, failed=1, slow=1)
    left = subtract(seen, before)
    assert (left.answered, left.failed, sum(left.latency["warm"].values())) == (58, 2, 58)
    assert subtract(seen, None) is seen
    gone = subtract(before, seen)
    assert (gone.answered, gone.latency) == (0, {"warm": {}, "exec": {}})
    assert isinstance(gone, Observation)
