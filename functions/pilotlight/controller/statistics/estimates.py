"""Estimates and confidence intervals of metrics of arms. Pure.

Units are independent of each other, calls of one unit are not. So every metric is a ratio of two
sums over units (errors per call, milliseconds per warm call, ...), and its variance is computed
from the differences between units (the delta method). Intervals are confidence sequences: the true
value is inside *at all times* with probability 1 - alpha, so a report may be read as often as
desired, and an arm may be stopped at the first look that shows a breach. Such an interval is about
1.5 times as wide as one that is valid for one look only.

Sources: delta method for ratios of clustered data: Deng, Knoblich, Lu, "Applying the Delta Method
in Metric Analytics" (KDD 2018). Normal mixture: Robbins (1970); asymptotic form for estimated
variances: Waudby-Smith, Arbour, Sinha, Kennedy, Ramdas, "Time-uniform central limit theory and
asymptotic confidence sequences" (2021). Sample ratio at any time: Lindon, Malek, "Anytime-valid
inference for multinomial count data" (2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALPHA = 0.05
SRM_ALPHA = 0.001
"""A sample ratio mismatch invalidates the whole experiment, so it is reported only when it is
almost certain."""
TUNED_FOR = 5_000.0
"""Number of calls at which the intervals are narrowest. They are valid at every number, and some
tenths wider at a tenth or ten times of it."""
MIN_UNITS = 20
"""Minimum per arm: with fewer, a variance over units is not reliable."""
_CONCENTRATIONS = (10.0, 1000.0)
"""Concentrations of the alternatives in the sample ratio test: arms off by some ten percent, and by
some one percent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Sums over units of x (the denominator), y (the numerator), and their products."""

    n: int = 0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    yy: float = 0.0
    xy: float = 0.0

    @classmethod
    def of(cls, pairs: Sequence[tuple[float, float]]) -> Moments:
        """Sums of units given as (x, y)."""
        return cls(
            n=len(pairs),
            x=sum(x for x, _ in pairs),
            y=sum(y for _, y in pairs),
            xx=sum(x * x for x, _ in pairs),
            yy=sum(y * y for _, y in pairs),
            xy=sum(x * y for x, y in pairs),
        )

    def smoothed(self) -> Moments:
        """Add two units of average size, one of which is all y and one has none. For shares, which
        are never exactly 0 or 1.

        Otherwise an arm without errors so far would have a variance of 0 (Agresti and Coull, 1998,
        do the same for single counts)."""
        if not self.n:
            return self
        size = self.x / self.n
        square = size * size
        return Moments(
            n=self.n + 2,
            x=self.x + 2 * size,
            y=self.y + size,
            xx=self.xx + 2 * square,
            yy=self.yy + square,
            xy=self.xy + square,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A metric of an arm: its value, the variance of that value, and the number of calls that it is
    based on."""

    value: float
    variance: float
    calls: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate with the bounds of the true value."""

    value: float
    low: float
    high: float


def ratio(moments: Moments, *, is_share: bool = False) -> Estimate | None:
    """Σy/Σx with its variance over units; None with too few units, or if Σx is 0."""
    if moments.n < MIN_UNITS or moments.x <= 0:
        return None
    value = moments.y / moments.x
    used = moments.smoothed() if is_share else moments
    around = used.y / used.x
    squares = max(0.0, used.yy - 2 * around * used.xy + around * around * used.xx)
    mean_x = used.x / used.n
    return Estimate(
        value=value, variance=squares / (used.n - 1) / used.n / (mean_x * mean_x), calls=moments.x
    )


def radius(variance: float, calls: float, *, alpha: float = ALPHA) -> float:
    """Greatest distance between an estimate and the true value at any time, except with probability
    `alpha`. `variance`: of the estimate."""
    tuned = (-2 * math.log(alpha) + math.log(-2 * math.log(alpha)) + 1) / TUNED_FOR
    grown = calls * tuned
    return math.sqrt(variance * (grown + 1) / grown * 2 * math.log(math.sqrt(grown + 1) / alpha))


def interval(estimate: Estimate, *, alpha: float = ALPHA) -> Interval:
    """The estimate with its bounds."""
    reach = radius(estimate.variance, estimate.calls, alpha=alpha)
    return Interval(value=estimate.value, low=estimate.value - reach, high=estimate.value + reach)


def contrast(
    arm: Estimate, first: Estimate, *, factor: float = 1.0, alpha: float = ALPHA
) -> Interval:
    """The difference arm - factor · first."""
    reach = radius(
        arm.variance + factor * factor * first.variance, arm.calls + first.calls, alpha=alpha
    )
    value = arm.value - factor * first.value
    return Interval(value=value, low=value - reach, high=value + reach)


def contrast_of(arm: Interval, first: Interval, *, factor: float = 1.0) -> Interval:
    """arm - factor · first of two intervals that may be asymmetric (Zou and Donner, 2008); for
    percentiles."""
    value = arm.value - factor * first.value
    low = math.hypot(arm.value - arm.low, factor * (first.high - first.value))
    high = math.hypot(arm.high - arm.value, factor * (first.value - first.low))
    return Interval(value=value, low=value - low, high=value + high)


def chi_square(observed: Sequence[int], shares: Sequence[float]) -> tuple[float, float]:
    """Pearson's statistic of counts against shares (which add up to 1), and its p-value for a
    single look."""
    total = sum(observed)
    if not total:
        return 0.0, 1.0
    statistic = sum(
        (count - total * share) ** 2 / (total * share)
        for count, share in zip(observed, shares, strict=True)
    )
    return statistic, chi_square_tail(statistic, len(observed) - 1)


def ratio_p(observed: Sequence[int], shares: Sequence[float]) -> float:
    """An anytime-valid p-value of counts against shares: the probability that it is ever below p is
    at most p.

    The inverse of a mean of two Bayes factors: Dirichlet-multinomial alternatives around the
    shares, against the shares themselves."""
    logs = [_log_bayes_factor(observed, shares, concentration) for concentration in _CONCENTRATIONS]
    top = max(logs)
    mean = top + math.log(sum(math.exp(log - top) for log in logs) / len(logs))
    return min(1.0, math.exp(-mean)) if mean > 0 else 1.0


def _log_bayes_factor(
    observed: Sequence[int], shares: Sequence[float], concentration: float
) -> float:
    total = sum(observed)
    log = math.lgamma(concentration) - math.lgamma(concentration + total)
    for count, share in zip(observed, shares, strict=True):
        prior = concentration * share
        log += math.lgamma(prior + count) - math.lgamma(prior) - count * math.log(share)
    return log


def chi_square_tail(statistic: float, freedom: int) -> float:
    """P(chi-square with `freedom` degrees of freedom > statistic): Q(freedom/2, statistic/2), by
    its recurrence."""
    half = statistic / 2
    if half == 0:
        return 1.0
    at = 0.5 if freedom % 2 else 1.0
    tail = math.erfc(math.sqrt(half)) if freedom % 2 else math.exp(-half)
    while at < freedom / 2:  # Q(a + 1, x) = Q(a, x) + x^a e^-x / Γ(a + 1)
        tail += math.exp(at * math.log(half) - half - math.lgamma(at + 1))
        at += 1
    return min(1.0, tail)
