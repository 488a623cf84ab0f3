"""PSI and KS of sketches, against scipy; rates of false and of true alarms."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import special, stats

from pilotlight.controller.statistics import distributions
from pilotlight.spec.sketches import MAX_CELLS, Sketch


def normal(random_: random.Random, n: int, mean: float = 0.0) -> list[float]:
    return [random_.gauss(mean, 1.0) for _ in range(n)]


@pytest.mark.parametrize("shift", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("scale, offset", [(1e-9, 0.0), (1.0, 0.0), (1e3, 1.7e9)])
def test_ks_of_sketches_is_that_of_scipy_within_a_hundredth(
    shift: float, scale: float, offset: float
) -> None:
    rng = random.Random(1)
    one = [offset + scale * x for x in normal(rng, 4_000)]
    other = [offset + scale * x for x in normal(rng, 3_000, shift)]
    exact = float(stats.ks_2samp(one, other).statistic)
    found = distributions.ks(Sketch.of(one), Sketch.of(other))
    assert exact - 0.01 <= found <= exact + 1e-12


def test_ks_of_few_values_is_exact() -> None:
    rng = random.Random(2)
    one, other = normal(rng, 60), normal(rng, 60, 0.4)
    found = distributions.ks(Sketch.of(one), Sketch.of(other))
    assert found == pytest.approx(float(stats.ks_2samp(one, other).statistic))


@pytest.mark.parametrize("distance", [0.001, 0.02, 0.05, 0.1, 0.9])
def test_the_p_value_of_ks_is_kolmogorovs_distribution(distance: float) -> None:
    n, m = 1_000, 2_000
    expected = float(special.kolmogorov(math.sqrt(n * m / (n + m)) * distance))
    assert distributions.ks_p(distance, n, m) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "counts",
    [([100, 200, 300], [110, 190, 310]), ([500] * 10, [400, 600] * 5), ([10, 990], [60, 940])],
)
def test_psi_is_symmetrised_relative_entropy(counts: tuple[Sequence[int], Sequence[int]]) -> None:
    one, other = (np.asarray(each) + 0.5 for each in counts)
    expected = float(stats.entropy(one, other) + stats.entropy(other, one))
    assert distributions.psi(counts) == pytest.approx(expected)


def test_the_p_value_of_psi_is_that_of_chi_square() -> None:
    counts = ([500] * 10, [450, 550] * 5)
    statistic = distributions.psi(counts) * 5_000 * 5_000 / 10_000
    assert distributions.psi_p(counts) == pytest.approx(float(stats.chi2.sf(statistic, 9)))


def test_bins_are_tenths_of_the_reference_and_its_categories() -> None:
    rng = random.Random(3)
    reference, current = Sketch.of(normal(rng, 10_000)), Sketch.of(normal(rng, 5_000, 0.2))
    ours, theirs = distributions.psi_bins(reference, current)
    assert len(ours) in (9, 10, 11)
    assert max(ours) < 2_000
    assert (sum(ours), sum(theirs)) == (10_000, 5_000)
    ours, theirs = distributions.psi_bins(Sketch.of("aab"), Sketch.of("abcd"))
    assert (ours, theirs) == ([2, 1, 0], [1, 1, 2])


@pytest.mark.parametrize("hits", [((30, 10), (500, 500)), ((5, 50), (300, 4_000))])
def test_shares_are_compared_as_scipy_compares_them(
    hits: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    (a, b), (n, m) = hits
    found = stats.chi2_contingency([[a, n - a], [b, m - b]], correction=False)
    assert distributions.share_p((a, b), (n, m)) == pytest.approx(float(found.pvalue))


def test_holm_is_that_of_the_paper() -> None:
    # Holm (1979): multiplied by 4, 3, 2 and 1, and never falling
    assert distributions.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert distributions.holm([]) == []


def test_values_outside_are_those_beyond_the_reference() -> None:
    reference = Sketch.of([1.0, 2.0, 3.0])
    assert distributions.outside(reference, Sketch.of([0.5, 1.5, 3.0, 9.0])) == 2
    assert distributions.outside(Sketch.of(["a"]), Sketch.of(["a", "b", "b"])) == 2


def test_a_sketch_without_values_says_nothing() -> None:
    empty, some = Sketch(), Sketch.of([1.0, 2.0])
    assert distributions.ks(empty, some) == 0
    assert distributions.psi(distributions.psi_bins(empty, some)) == 0
    assert distributions.psi_p(distributions.psi_bins(some, empty)) == 1
    assert distributions.share_p((0, 0), (0, 5)) == 1


def test_the_bound_at_any_time_holds_at_every_look() -> None:
    rng, alpha = random.Random(4), 0.2
    wrong = 0
    for _ in range(40):
        values = [rng.random() for _ in range(400)]
        for n in range(5, 400, 5):
            seen = np.sort(values[:n])
            at = np.arange(1, n + 1) / n
            distance = max(float(np.abs(at - seen).max()), float(np.abs(at - 1 / n - seen).max()))
            if distance > distributions.ks_radius(n, alpha):
                wrong += 1
                break
    assert wrong <= 40 * alpha
    assert distributions.ks_radius(0, alpha) == math.inf
    assert distributions.ks_radius(100_000, alpha) < 0.01


def test_sketches_of_parts_count_what_the_whole_counts() -> None:
    rng = random.Random(5)
    values = normal(rng, 6_000)
    parts = Sketch()
    for begin in range(0, 6_000, 100):
        parts = parts.merged(Sketch.of(values[begin : begin + 100]))
    whole = Sketch.of(values)
    assert parts.present == whole.present == 6_000
    assert (parts.low, parts.high) == (min(values), max(values))
    assert len(parts.cells) <= MAX_CELLS
    assert distributions.ks(parts, whole) < 0.005
