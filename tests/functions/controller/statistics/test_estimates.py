"""Intervals and checks against values worked out by hand, and against simulated experiments that
are looked at all the time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from pilotlight.controller.statistics import estimates
from pilotlight.controller.statistics.estimates import Estimate, Interval, Moments

RUNS = 120
LOOKS = 60


def test_a_ratio_and_its_variance_are_those_of_the_delta_method() -> None:
    # 20 units: ten with 2 calls and 1 error, ten with 4 calls and 1 error: 20/60 = 1/3. Residuals y
    # - x/3: 1/3 and -1/3, ten each: their squares add up to 20/9; s² = 20/9/19; mean x = 3;
    # variance = s² / 20 / 9.
    found = estimates.ratio(Moments.of([(2, 1)] * 10 + [(4, 1)] * 10))
    assert found is not None
    assert found.value == pytest.approx(1 / 3)
    assert found.calls == 60
    assert found.variance == pytest.approx(20 / 9 / 19 / 20 / 9)


def test_with_one_call_per_unit_it_is_the_variance_of_a_mean() -> None:
    values = [float(n) for n in range(1, 31)]  # mean 15.5; variance of 1..n is n(n+1)/12 = 77.5
    found = estimates.ratio(Moments.of([(1, value) for value in values]))
    assert found is not None
    assert (found.value, found.calls) == (15.5, 30)
    assert found.variance == pytest.approx(77.5 / 30)


def test_calls_of_one_unit_are_not_taken_for_independent() -> None:
    # The same 400 calls, a tenth of them errors: spread over 400 units, or all errors with 2 of 20
    # units.
    apart = estimates.ratio(Moments.of([(1, 1)] * 40 + [(1, 0)] * 360), is_share=True)
    together = estimates.ratio(Moments.of([(20, 20)] * 2 + [(20, 0)] * 18), is_share=True)
    assert apart is not None
    assert together is not None
    assert apart.value == together.value == 0.1
    assert together.variance > 15 * apart.variance


def test_too_few_units_are_no_estimate_and_no_errors_are_no_certainty() -> None:
    assert estimates.ratio(Moments.of([(5, 1)] * (estimates.MIN_UNITS - 1))) is None
    assert estimates.ratio(Moments()) is None
    none = estimates.ratio(Moments.of([(5, 0)] * 100), is_share=True)
    assert none is not None
    assert none.value == 0.0
    assert 0.005 < math.sqrt(none.variance) < 0.03, "of the order of the rule of three: 3/100"


def test_the_radius_is_that_of_the_normal_mixture() -> None:
    # alpha 0.05: 1/a = 20; -2 ln a = 5.9915; ln 5.9915 = 1.7904; rho² = 8.7819/5000. At 5000 calls:
    # 9.7819/8.7819·2·ln(20·sqrt(9.7819)).
    assert estimates.radius(1.0, 5000) == pytest.approx(
        math.sqrt(9.7819 / 8.7819 * 2 * math.log(20 * math.sqrt(9.7819))), rel=1e-4
    )
    assert 1.5 < estimates.radius(1.0, 5000) / 1.96 < 1.6, "the price of looking at any time"
    assert estimates.radius(4.0, 5000) == pytest.approx(2 * estimates.radius(1.0, 5000))


def test_differences_add_variances_and_percentiles_keep_their_skew() -> None:
    arm, first = (
        Estimate(value=3.0, variance=0.03, calls=2000),
        Estimate(value=2.0, variance=0.01, calls=3000),
    )
    found = estimates.contrast(arm, first)
    assert found.value == 1.0
    assert found.high - found.value == pytest.approx(estimates.radius(0.04, 5000))
    assert estimates.contrast(arm, first, factor=1.5).value == 0.0
    skewed = estimates.contrast_of(
        Interval(value=10, low=7, high=30), Interval(value=5, low=4, high=9)
    )
    assert (skewed.low, skewed.high) == pytest.approx((0.0, 5 + math.hypot(20, 1)))


@pytest.mark.parametrize(
    "observed, shares, statistic, p",
    [
        ([50, 50], [0.5, 0.5], 0.0, 1.0),
        # tables of the chi-square distribution, 1 to 4 degrees of freedom
        ([60, 40], [0.5, 0.5], 4.0, 0.0455),
        ([40, 30, 30], [1 / 3] * 3, 2.0, math.exp(-1)),
        ([40, 20, 20, 20], [0.25] * 4, 12.0, 0.00738),
        ([30, 20, 20, 20, 10], [0.2] * 5, 10.0, 0.0404),
    ],
)
def test_chi_square(observed: list[int], shares: list[float], statistic: float, p: float) -> None:
    assert estimates.chi_square(observed, shares) == pytest.approx((statistic, p), rel=2e-3)


def test_a_sample_ratio_that_is_off_is_found_and_one_that_is_not_is_left() -> None:
    assert estimates.ratio_p([5000, 5000], [0.5, 0.5]) == 1.0
    assert estimates.ratio_p([5100, 4900], [0.5, 0.5]) > 0.1
    assert estimates.ratio_p([5300, 4700], [0.5, 0.5]) < estimates.SRM_ALPHA
    assert estimates.ratio_p([0, 30], [0.5, 0.5]) < estimates.SRM_ALPHA, "an arm that nobody meets"
    assert estimates.ratio_p([0, 0], [0.5, 0.5]) == 1.0


def test_a_fair_split_that_is_checked_after_every_unit_is_hardly_ever_called_unfair() -> None:
    rng, wrong, wrong_by_one_look = random.Random(3), 0, 0
    for _ in range(RUNS):
        observed, ever, ever_by_one_look = [0, 0, 0], False, False
        for number in range(1500):
            observed[rng.choices((0, 1, 2), (50, 30, 20))[0]] += 1
            if number % 10 == 9:
                ever |= estimates.ratio_p(observed, [0.5, 0.3, 0.2]) < 0.05
                ever_by_one_look |= estimates.chi_square(observed, [0.5, 0.3, 0.2])[1] < 0.05
        wrong += ever
        wrong_by_one_look += ever_by_one_look
    assert wrong <= 0.05 * RUNS
    assert wrong_by_one_look > 0.15 * RUNS, (
        "the simulation shows what peeking does to a test made for one look"
    )


@dataclass(slots=True)
class Side:
    """One arm of a simulated experiment: units that come back, and their sums."""

    units: list[list[float]] = field(default_factory=list)
    x: float = 0
    y: float = 0
    xx: float = 0
    yy: float = 0
    xy: float = 0

    def call(self, unit: list[float], outcome: float) -> None:
        _, x, y = unit
        self.x, self.y = self.x + 1, self.y + outcome
        self.xx += 2 * x + 1
        self.yy += 2 * y * outcome + outcome * outcome
        self.xy += x * outcome + y + outcome
        unit[1:] = x + 1, y + outcome

    def moments(self) -> Moments:
        return Moments(n=len(self.units), x=self.x, y=self.y, xx=self.xx, yy=self.yy, xy=self.xy)


def experiment(
    rng: random.Random,
    trait: Callable[[], float],
    outcome: Callable[[float], float],
    *,
    is_share: bool,
) -> tuple[bool, bool]:
    """Two arms that are the same, looked at after every 50 calls: whether a difference was ever
    shown, and whether 1.96 sigma ever were."""
    shown = shown_by_one_look = False
    sides = (Side(), Side())
    for _ in range(LOOKS):
        for side in sides:
            for _ in range(25):
                if len(side.units) < 20 or rng.random() < 0.3:
                    side.units.append([trait(), 0.0, 0.0])
                    unit = side.units[-1]
                else:
                    unit = side.units[int(rng.random() * len(side.units))]
                side.call(unit, outcome(unit[0]))
        one, other = (estimates.ratio(side.moments(), is_share=is_share) for side in sides)
        if one is not None and other is not None:
            found = estimates.contrast(other, one)
            shown |= found.low > 0 or found.high < 0
            shown_by_one_look |= abs(found.value) > 1.96 * math.sqrt(one.variance + other.variance)
    return shown, shown_by_one_look


@pytest.mark.parametrize("kind", ["errors", "rare errors", "milliseconds"])
@pytest.mark.slow  # simulates thousands of experiments
def test_looking_after_every_fifty_calls_shows_a_difference_that_is_not_there_in_one_of_twenty_at_most(
    kind: str,
) -> None:
    rng = random.Random(kind)
    ratio = 0.002 if kind == "rare errors" else 0.05

    def error(chance: float) -> float:
        return float(rng.random() < chance)

    def took_ms(usual: float) -> float:
        return usual * math.exp(rng.gauss(0, 0.7))

    shown = shown_by_one_look = 0
    for _ in range(RUNS):
        if kind == "milliseconds":
            found = experiment(rng, lambda: math.exp(rng.gauss(3, 0.5)), took_ms, is_share=False)
        else:
            found = experiment(rng, lambda: rng.betavariate(2, 2 / ratio - 2), error, is_share=True)
        shown += found[0]
        shown_by_one_look += found[1]
    assert shown <= 0.05 * RUNS
    if kind != "rare errors":
        assert shown_by_one_look > 0.1 * RUNS, (
            "an interval for one look would have been wrong far more often"
        )


def test_a_difference_that_is_there_is_shown() -> None:
    rng = random.Random(5)
    bad, good = (
        [(20.0, float(sum(rng.random() < p for _ in range(20)))) for _ in range(250)]
        for p in (0.06, 0.02)
    )
    one, other = (estimates.ratio(Moments.of(side), is_share=True) for side in (bad, good))
    assert one is not None
    assert other is not None
    assert estimates.contrast(one, other).low > 0
