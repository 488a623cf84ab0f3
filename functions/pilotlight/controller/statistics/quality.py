"""Measures of predictions whose truth is known: accuracy, errors and calibration, with intervals
that hold at any time (`estimates`). Pure.

The calibration error is the expected one (Naeini and others, "Obtaining well calibrated
probabilities using Bayesian binning", AAAI 2015): the mean distance of forecast and frequency over
CALIBRATION_BINS bins of equal width, by their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from pilotlight.controller.statistics import estimates
from pilotlight.controller.statistics.estimates import Estimate, Interval, Moments

CALIBRATION_BINS: Final = 10
SHARES: Final = frozenset({"accuracy"})
"""Measures that are the mean of zeros and ones; higher is better. Of the others, lower is."""
THRESHOLD: Final = 0.5
"""A probability from here on predicts the positive label."""


class Outcome(NamedTuple):
    """A prediction and its truth: two numbers, two labels, or a probability and whether it came
    true."""

    predicted: float | str
    truth: float | str | bool


class CalibrationBin(NamedTuple):
    """Probabilities in one bin: their number and mean, and the share that came true."""

    n: int
    forecast: float
    frequency: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Measures of some predictions.

    Attributes:
        n: predictions with a truth.
        estimates: measure → value and variance; empty with less than `estimates.MIN_UNITS`.
        bins: of probabilities.
    """

    n: int
    estimates: dict[str, Estimate]
    bins: tuple[CalibrationBin, ...] = ()

    @property
    def calibration_error(self) -> float | None:
        """Expected calibration error; None without probabilities."""
        if not self.bins:
            return None
        return sum(one.n * abs(one.forecast - one.frequency) for one in self.bins) / self.n

    def intervals(self) -> dict[str, Interval]:
        """Measure → value and bounds."""
        return {name: estimates.interval(one) for name, one in self.estimates.items()}


def losses(outcome: Outcome) -> dict[str, float]:
    """Measure → this prediction's contribution, whose mean is the measure."""
    predicted, truth = outcome
    if isinstance(predicted, str):
        return {"accuracy": float(predicted == truth)}
    if isinstance(truth, bool):
        return {
            "accuracy": float((predicted >= THRESHOLD) == truth),
            "brier": (predicted - truth) ** 2,
        }
    if isinstance(truth, str):
        return {"accuracy": float(f"{predicted:g}" == truth)}
    return {"absolute_error": abs(predicted - truth), "squared_error": (predicted - truth) ** 2}


def measure(outcomes: Sequence[Outcome]) -> Quality:
    """Measure predictions of one kind."""
    values: dict[str, list[tuple[float, float]]] = {}
    for outcome in outcomes:
        for name, loss in losses(outcome).items():
            values.setdefault(name, []).append((1.0, loss))
    found = {
        name: estimates.ratio(Moments.of(pairs), is_share=name in SHARES)
        for name, pairs in values.items()
    }
    return Quality(
        n=len(outcomes),
        estimates={name: one for name, one in found.items() if one is not None},
        bins=_bins(outcomes),
    )


def _bins(outcomes: Sequence[Outcome]) -> tuple[CalibrationBin, ...]:
    bins: list[list[tuple[float, bool]]] = [[] for _ in range(CALIBRATION_BINS)]
    for predicted, truth in outcomes:
        if isinstance(truth, bool) and not isinstance(predicted, str):
            at = min(CALIBRATION_BINS - 1, max(0, math.floor(predicted * CALIBRATION_BINS)))
            bins[at].append((predicted, truth))
    return tuple(
        CalibrationBin(
            n=len(one),
            forecast=sum(p for p, _ in one) / len(one),
            frequency=sum(y for _, y in one) / len(one),
        )
        for one in bins
        if one
    )
