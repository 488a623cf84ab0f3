"""Lengths and arrivals have the distribution that their name says, and broken ones are named."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from pilotlight.errors import InvalidInput
from pilotlight.loadtest.arrivals import arrivals
from pilotlight.loadtest.distributions import parse_distribution

N = 4000


def drawn(text: str, *, longest: int = 10_000_000) -> list[int]:
    source, lengths = random.Random(1), parse_distribution(text, option="--prompt", longest=longest)
    return [lengths.draw(source) for _ in range(N)]


def test_a_plain_number_is_always_that_number() -> None:
    assert set(drawn("200")) == set(drawn("fixed:200")) == {200}


def test_uniform_lengths_stay_within_their_bounds() -> None:
    found = drawn("uniform:10,40")

    assert (min(found), max(found)) == (10, 40)


def test_lognormal_lengths_have_the_median_that_was_asked_for() -> None:
    assert statistics.median(drawn("lognormal:200,0.8")) == pytest.approx(200, rel=0.08)


def test_the_tail_of_pareto_is_heavy() -> None:
    found = drawn("pareto:50,1.5")

    assert min(found) == 50
    assert max(found) > 20 * statistics.median(found)


def test_exponential_lengths_have_their_mean() -> None:
    assert statistics.mean(drawn("exponential:300")) == pytest.approx(300, rel=0.08)


def test_what_is_too_long_is_cut() -> None:
    assert max(drawn("pareto:50,1.1", longest=99)) == 99


@pytest.mark.parametrize("text", ["lognormal:200,2000", "pareto:1,0.0001"])
def test_lengths_beyond_all_numbers_are_cut_too(text: str) -> None:
    assert max(drawn(text, longest=99)) == 99


@pytest.mark.parametrize(
    "text",
    [
        "",
        "lognormal",
        "lognormal:5",
        "normal:1,2",
        "fixed:0",
        "fixed:-3",
        "uniform:9,3",
        "fixed:nan",
        "fixed:1,2",
    ],
)
def test_broken_distributions_are_named(text: str) -> None:
    with pytest.raises(InvalidInput, match="--prompt"):
        parse_distribution(text, option="--prompt")


@pytest.mark.parametrize("kind", ["poisson", "even", "bursty"])
def test_arrivals_come_at_their_rate_in_order_and_in_time(kind: str) -> None:
    due = list(arrivals(kind, rate_per_s=100, duration_s=60, source=random.Random(3)))

    assert len(due) == pytest.approx(6000, rel=0.1)
    assert due == sorted(due)
    assert due[0] >= 0
    assert due[-1] < 60


def test_bursts_are_burstier_than_strangers_and_a_clock_is_even() -> None:
    def variation(kind: str) -> float:
        due = list(arrivals(kind, rate_per_s=100, duration_s=60, source=random.Random(3)))
        gaps = [b - a for a, b in itertools.pairwise(due)]
        return statistics.stdev(gaps) / statistics.mean(gaps)

    assert variation("even") < 0.01
    assert variation("poisson") == pytest.approx(1, rel=0.1)
    assert variation("bursty") == pytest.approx(2, rel=0.15)


def test_an_unknown_kind_of_arrivals_is_named() -> None:
    with pytest.raises(InvalidInput, match="must be one of poisson, even, bursty"):
        list(arrivals("random", rate_per_s=1, duration_s=1, source=random.Random(0)))
