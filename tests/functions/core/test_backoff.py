"""Pauses between retries: their growth, their limit and their randomness."""

from __future__ import annotations

import pytest

from pilotlight.core.backoff import JITTER, Backoff, delay_s


@pytest.mark.parametrize(
    "failures, expected_s", [(0, 0.1), (1, 0.2), (3, 0.8), (4, 1.0), (5000, 1.0)]
)
def test_pauses_double_up_to_the_limit(failures: int, expected_s: float) -> None:
    assert delay_s(failures, first_s=0.1, max_s=1.0, jitter=0) == pytest.approx(expected_s)


def test_a_factor_too_large_for_a_float_gives_the_limit() -> None:
    assert delay_s(1023, first_s=1.0, max_s=60.0, factor=10.0, jitter=0) == 60.0


@pytest.mark.parametrize(
    "jitter, drawn, expected_s", [(1.0, 0.75, 0.25), (0.5, 1.0, 0.5), (0.2, 0.0, 1.0)]
)
def test_jitter_only_shortens_a_pause(jitter: float, drawn: float, expected_s: float) -> None:
    assert delay_s(0, first_s=1.0, max_s=1.0, jitter=jitter, draw=lambda: drawn) == expected_s


def test_a_success_starts_again_with_the_first_pause() -> None:
    backoff = Backoff(first_s=1.0, max_s=60.0)
    waits = [backoff.next_s() for _ in range(4)]
    assert backoff.failures == 4
    for failures, wait_s in enumerate(waits):
        assert 2**failures * (1 - JITTER) <= wait_s <= 2**failures
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_s() <= 1.0
