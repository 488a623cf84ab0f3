"""Sequential tests: valid at every look, so the false alarm rate `alpha` holds however often they
are evaluated.

A controller evaluates a canary each second. A test made for one look at the end would sooner or
later raise a false alarm, so these are *anytime valid*: under the hypothesis, the probability that
they *ever* reject is at most alpha. Counts use an e-value, the likelihood ratio averaged over the
alternatives, which is a martingale under the hypothesis and so seldom grows large (Ville 1939;
Robbins 1970, "Statistical methods related to the law of the iterated logarithm"). Means use
Robbins' normal mixture boundary, which holds for large samples."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pilotlight.spec.observations import GROWTH

_TINY = 1e-300
_ROUNDS = 5000
"""Terms of the continued fraction. It needs about the square root of the greater parameter; the
remainder is below 1e-9."""
_QUANTILE_Z = 3.0
"""Stable's percentile is an estimate too, so its upper bound at three standard errors of an order
statistic is used instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """n values with their mean and variance; `se` is the standard error of the mean."""

    n: int
    mean: float
    variance: float

    @property
    def se(self) -> float:
        """Standard error of the mean; infinite without values."""
        return math.sqrt(self.variance / self.n) if self.n else math.inf


def log_e_share(hits: int, trials: int, share: float) -> float:
    """Log of the e-value against "each trial is a hit with a probability of at most `share`",
    averaged over all greater ones.

    Rejecting once it has reached log(1 / alpha) is wrong with a probability of at most alpha, over
    all looks."""
    if not 0 < share < 1 or not trials:
        return -math.inf
    misses = trials - hits
    tail = beta_tail(share, hits + 1, misses + 1)
    if tail <= 0:
        return -math.inf
    log_mixed = (
        math.lgamma(hits + 1)
        + math.lgamma(misses + 1)
        - math.lgamma(trials + 2)
        + math.log(tail)
        - math.log1p(-share)
    )
    return log_mixed - hits * math.log(share) - misses * math.log1p(-share)


def log_e_ratio(hits: tuple[int, int], trials: tuple[int, int], ratio: float) -> float:
    """Log of the e-value against "the first's share of hits is at most `ratio` times the second's".

    Given the total number of hits, each was the first's with a probability that depends only on
    `ratio` and on the trials (the conditional test of two Poisson rates: Przyborowski and Wilenski
    1940). Hits that are not rare vary less than that, so the test errs on the side of holding."""
    if not trials[0] or not trials[1]:
        return -math.inf
    odds = ratio * trials[0] / trials[1]
    return log_e_share(hits[0], hits[0] + hits[1], odds / (1 + odds))


def boundary(n: int, tuned_for: int, alpha: float) -> float:
    """Number of standard errors that a mean of `n` values may be beyond its hypothesis, at any
    look; narrowest from `tuned_for` on.

    Two-sided although only one side is tested: it errs on the side of holding.
    """
    u = max(n, 1) / max(tuned_for, 1)
    return math.sqrt((1 + 1 / u) * math.log((1 + u) / (alpha * alpha)))


def beta_tail(x: float, a: float, b: float) -> float:
    """The probability that a Beta(a, b) variable is above x."""
    if x <= 0 or x >= 1:
        return float(x <= 0)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    if x < (a + 1) / (a + b + 2):
        return 1 - front * _fraction(x, a, b) / a
    return front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """The continued fraction of the incomplete beta function (DLMF 8.17.22), by Lentz's method."""
    c, d = 1.0, 1 / _away_from_zero(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _ROUNDS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away_from_zero(1 + term * d)
            c = _away_from_zero(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < 1e-12:
            break
    return value


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY


def upper_quantile(buckets: Mapping[int, int], share: float) -> float | None:
    """Upper bound in milliseconds of the true percentile, at three standard errors of its estimate;
    None without values."""
    return _quantile(buckets, share, _QUANTILE_Z)


def lower_quantile(buckets: Mapping[int, int], share: float) -> float | None:
    """The lower bound, at three standard errors; None without values."""
    return _quantile(buckets, share, -_QUANTILE_Z)


def _quantile(buckets: Mapping[int, int], share: float, z: float) -> float | None:
    total = sum(buckets.values())
    if not total:
        return None
    rank = share * total + z * math.sqrt(share * (1 - share) * total)
    for bucket in sorted(buckets):
        rank -= buckets[bucket]
        if rank <= 1e-9:
            return float(GROWTH**bucket)
    return float(GROWTH ** max(buckets))


def spread(buckets: Mapping[int, int]) -> float:
    """Coefficient of variation (standard deviation over mean) of a histogram, at least a tenth (the
    width of a bucket); 1 without values."""
    total = sum(buckets.values())
    if not total:
        return 1.0
    mean = sum(GROWTH**bucket * count for bucket, count in buckets.items()) / total
    square = sum(GROWTH ** (2 * bucket) * count for bucket, count in buckets.items()) / total
    return max(0.1, math.sqrt(max(0.0, square - mean * mean)) / mean)
