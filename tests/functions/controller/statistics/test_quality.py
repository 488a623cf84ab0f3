"""Quality and calibration, against scikit-learn."""

from __future__ import annotations

import random

import numpy as np
import pytest
from sklearn import metrics
from sklearn.calibration import calibration_curve

from pilotlight.controller.statistics.estimates import MIN_UNITS
from pilotlight.controller.statistics.quality import CALIBRATION_BINS, Outcome, losses, measure


def forecasts(n: int, *, bias: float = 0.0) -> list[Outcome]:
    rng = random.Random(n)
    found = []
    for _ in range(n):
        p = rng.random()
        found.append(Outcome(p, rng.random() < min(1.0, max(0.0, p + bias))))
    return found


def test_measures_of_probabilities_are_those_of_scikit_learn() -> None:
    outcomes = forecasts(3_000)
    p, y = [float(one.predicted) for one in outcomes], [bool(one.truth) for one in outcomes]
    found = measure(outcomes)
    values = {name: one.value for name, one in found.estimates.items()}
    assert values["brier"] == pytest.approx(metrics.brier_score_loss(y, p))
    assert values["accuracy"] == pytest.approx(metrics.accuracy_score(y, np.asarray(p) >= 0.5))
    frequency, forecast = calibration_curve(y, p, n_bins=CALIBRATION_BINS, strategy="uniform")
    assert [one.frequency for one in found.bins] == pytest.approx(list(frequency))
    assert [one.forecast for one in found.bins] == pytest.approx(list(forecast))


def test_a_biased_forecast_has_a_calibration_error_of_its_bias() -> None:
    good, biased = measure(forecasts(5_000)), measure(forecasts(5_000, bias=0.2))
    assert (good.calibration_error or 0) < 0.03
    assert 0.12 < (biased.calibration_error or 0) < 0.2  # p + 0.2 is at most 1


def test_measures_of_labels_and_numbers_are_those_of_scikit_learn() -> None:
    rng = random.Random(7)
    truth = [rng.choice("abc") for _ in range(500)]
    said = [one if rng.random() < 0.8 else rng.choice("abc") for one in truth]
    found = measure([Outcome(a, b) for a, b in zip(said, truth, strict=True)])
    assert found.estimates["accuracy"].value == pytest.approx(metrics.accuracy_score(truth, said))
    numbers = [rng.gauss(0, 1) for _ in range(500)]
    guesses = [one + rng.gauss(0, 0.5) for one in numbers]
    values = measure([Outcome(a, b) for a, b in zip(guesses, numbers, strict=True)]).estimates
    assert values["absolute_error"].value == pytest.approx(
        metrics.mean_absolute_error(numbers, guesses)
    )
    assert values["squared_error"].value == pytest.approx(
        metrics.mean_squared_error(numbers, guesses)
    )


def test_intervals_contain_the_true_accuracy() -> None:
    inside = 0
    for seed in range(60):
        rng = random.Random(seed)
        outcomes = [Outcome("a", "a" if rng.random() < 0.9 else "b") for _ in range(200)]
        bounds = measure(outcomes).intervals()["accuracy"]
        inside += bounds.low <= 0.9 <= bounds.high
    assert inside >= 57


def test_few_labels_have_no_estimate() -> None:
    found = measure([Outcome("a", "a")] * (MIN_UNITS - 1))
    assert (found.n, found.estimates) == (MIN_UNITS - 1, {})
    assert measure([]).calibration_error is None


def test_a_number_is_compared_with_a_label_as_text() -> None:
    assert losses(Outcome(1.0, "1")) == {"accuracy": 1.0}
    assert losses(Outcome(0.7, True)) == pytest.approx({"accuracy": 1.0, "brier": 0.09})
