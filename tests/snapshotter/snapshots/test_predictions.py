"""Expectations follow what was observed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshotter.snapshots.predictions import Predictions
from snapshotter.types import RevisionKey, StartKind

R = RevisionKey("fn@r1")
durations = st.floats(min_value=0, max_value=1e7)


def seen(*durations_ms: float) -> float:
    predictions = Predictions()
    for ms in durations_ms:
        predictions.observe(R, StartKind.COLD, ms)
    expected = predictions.expect_ms(R, StartKind.COLD)
    assert expected is not None
    return expected


def test_nothing_is_expected_of_what_was_never_seen() -> None:
    predictions = Predictions()
    predictions.observe(R, StartKind.COLD, 5.0)
    assert predictions.expect_ms(R, StartKind.RESTORE) is None
    assert predictions.expect_ms(RevisionKey("fn@r2"), StartKind.COLD) is None
    predictions.forget(R)
    assert predictions.expect_ms(R, StartKind.COLD) is None


@given(durations)
def test_one_start_is_believed(ms: float) -> None:
    assert seen(ms) == ms


@given(st.lists(durations, min_size=1))
def test_an_expectation_lies_between_what_was_seen(observed: list[float]) -> None:
    assert min(observed) - 1e-6 <= seen(*observed) <= max(observed) * (1 + 1e-12) + 1e-6


@given(st.lists(durations, max_size=5), durations)
def test_a_new_speed_is_learnt_within_twenty_starts(before: list[float], ms: float) -> None:
    assert seen(*before, *[ms] * 20) == pytest.approx(ms, abs=0.001 * (max([*before, ms]) + 1))


def test_what_was_not_observed_for_longest_is_forgotten() -> None:
    predictions = Predictions(max_keys=2)
    for name in ("a", "b", "a", "c"):
        predictions.observe(RevisionKey(name), StartKind.COLD, 1.0)
    assert predictions.expect_ms(RevisionKey("b"), StartKind.COLD) is None
    assert predictions.expect_ms(RevisionKey("a"), StartKind.COLD) == 1.0
    assert repr(predictions) == "<Predictions of 2 rungs>"


@pytest.mark.parametrize("ms", [-1.0, float("nan"), float("inf")])
def test_impossible_durations_are_refused(ms: float) -> None:
    with pytest.raises(ValueError, match="duration of a start"):
        Predictions().observe(R, StartKind.COLD, ms)


def test_an_impossible_weight_is_refused() -> None:
    with pytest.raises(ValueError, match="weight"):
        Predictions(weight=0.0)
