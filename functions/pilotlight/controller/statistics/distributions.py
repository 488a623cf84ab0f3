"""Differences of two distributions that are counted in sketches.

The population stability index (PSI) compares shares of bins: the tenths of the reference, or the
categories. It is symmetrised Kullback-Leibler divergence; by convention 0.1 is a moderate and 0.25
a large change (Siddiqi, "Credit Risk Scorecards", 2006). The Kolmogorov-Smirnov distance (KS) is
the greatest difference of two cumulative distributions. Both grow with chance alone when there are
few rows, so each has a p-value: PSI times nm/(n+m) is asymptotically chi-square, with one degree
less than there are bins (Yurdakul, "Statistical properties of the population stability index",
2018). `holm` corrects for the number of tests.

Those are for one look. `ks_radius` is the distance between a sample and its distribution at any
time (Howard and Ramdas, "Sequential estimation of quantiles", Bernoulli 28(3), 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Final

from pilotlight.controller.statistics.estimates import chi_square, chi_square_tail
from pilotlight.spec.sketches import OTHER, Sketch, cell_bounds, common_cells

PSI_MODERATE: Final = 0.1
BINS: Final = 10
_SMOOTHING: Final = 0.5
"""Added to each bin (Jeffreys): an empty one has no logarithm."""
_TERMS: Final = 100

Counts = tuple[Sequence[int], Sequence[int]]
"""Counts of the same bins in the reference and in the current rows."""


def psi_bins(reference: Sketch, current: Sketch) -> Counts:
    """Return the counts of tenths of the reference's numbers, as far as its cells separate them,
    and of its categories; categories that it lacks are one more."""
    ours, theirs = [], []
    numbers = common_cells(reference, current)
    size = sum(mine for mine, _ in numbers.values()) / BINS
    mine = other = 0
    for of_reference, of_current in numbers.values():
        if mine and mine + of_reference / 2 >= size:
            ours.append(mine)
            theirs.append(other)
            mine = other = 0
        mine += of_reference
        other += of_current
    if numbers:
        ours.append(mine)
        theirs.append(other)
    known = [name for name in reference.categories if name != OTHER]
    unknown = current.categories.total() - sum(current.categories[name] for name in known)
    ours += [reference.categories[name] for name in known]
    theirs += [current.categories[name] for name in known]
    if reference.categories[OTHER] or unknown:
        ours.append(reference.categories[OTHER])
        theirs.append(unknown)
    return ours, theirs


def psi(counts: Counts) -> float:
    """Population stability index of counts; 0 without rows on one side."""
    reference, current = counts
    n, m, bins = sum(reference), sum(current), len(reference)
    if not n or not m:
        return 0.0
    total = 0.0
    for one, other in zip(reference, current, strict=True):
        expected = (one + _SMOOTHING) / (n + _SMOOTHING * bins)
        actual = (other + _SMOOTHING) / (m + _SMOOTHING * bins)
        total += (actual - expected) * math.log(actual / expected)
    return total


def psi_p(counts: Counts) -> float:
    """The probability of so large an index by chance."""
    n, m, bins = sum(counts[0]), sum(counts[1]), len(counts[0])
    if bins < 2 or not n or not m:
        return 1.0
    return chi_square_tail(psi(counts) * n * m / (n + m), bins - 1)


def ks(one: Sketch, other: Sketch) -> float:
    """Kolmogorov-Smirnov distance, at the bounds of the cells, so at most the true one. Categories
    follow the numbers, in the order of their names. 0 without values on one side."""
    counts = list(common_cells(one, other).values())
    names = {*one.categories} | {*other.categories}
    if one.categories[OTHER] or other.categories[OTHER]:  # either may have joined any of them
        names = {*one.categories} & {*other.categories} - {OTHER}
        rest = [
            each.categories.total() - sum(each.categories[k] for k in names)
            for each in (one, other)
        ]
        counts.append((rest[0], rest[1]))
    counts += [(one.categories[name], other.categories[name]) for name in sorted(names)]
    n, m = one.present, other.present
    if not n or not m:
        return 0.0
    ours, theirs = accumulate(a for a, _ in counts), accumulate(b for _, b in counts)
    return max(abs(a / n - b / m) for a, b in zip(ours, theirs, strict=True))


def ks_p(distance: float, n: int, m: int) -> float:
    """The probability of so large a distance by chance (Kolmogorov's limit, for large samples; it
    errs on the side of chance where values are equal)."""
    x = distance * math.sqrt(n * m / (n + m)) if n and m else 0.0
    if x < 0.2:  # the series needs many terms there, and its sum is 1
        return 1.0
    terms = (math.exp(-2 * k * k * x * x) * (1 if k % 2 else -1) for k in range(1, _TERMS))
    return max(0.0, min(1.0, 2 * sum(terms)))


def share_p(hits: tuple[int, int], trials: tuple[int, int]) -> float:
    """The probability of so large a difference of two shares by chance (chi-square of the 2x2
    table)."""
    total, both = sum(trials), sum(hits)
    if not all(trials) or both in (0, total):
        return 1.0
    shares = [one / total * (both / total) for one in trials]
    shares += [one / total * (1 - both / total) for one in trials]
    observed = [*hits, trials[0] - hits[0], trials[1] - hits[1]]
    statistic, _ = chi_square(observed, shares)
    return chi_square_tail(statistic, 1)


def outside(reference: Sketch, current: Sketch) -> int:
    """Count the current values outside those of the reference: numbers below its smallest or above
    its greatest, as far as cells separate them, and categories that it lacks."""
    count = 0
    if reference.low is not None and reference.high is not None:
        for cell, found in current.cells.items():
            first, last = cell_bounds(cell)
            if last < reference.low or first > reference.high:
                count += found
    if reference.categories and not reference.categories[OTHER]:
        unknown = current.categories.keys() - reference.categories.keys()
        count += sum(current.categories[name] for name in unknown)
    return count


def holm(values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number (Holm 1979): rejecting those below alpha is wrong for any of
    them with a probability of at most alpha."""
    adjusted, highest = list(values), 0.0
    for rank, at in enumerate(sorted(range(len(values)), key=lambda at: values[at])):
        highest = max(highest, min(1.0, (len(values) - rank) * values[at]))
        adjusted[at] = highest
    return adjusted


def ks_radius(n: int, alpha: float) -> float:
    """Greatest KS distance between the first n values and their distribution at any n, except with
    probability `alpha`."""
    if not n:
        return math.inf
    return 0.85 * math.sqrt((math.log(math.log(math.e * n)) + 0.8 * math.log(1612 / alpha)) / n)
