"""A peer that fails is left alone for longer and longer; one that lies for long; one that is merely
busy for a moment."""

from __future__ import annotations

import pytest

from weight_cache.peers.standing import BUSY_REST_S, Failure, Standing


def failed(standing: Standing, failure: Failure, now: float) -> Standing:
    return standing.failed(failure, now=now, distrust_s=600)


def test_rests_double_and_end_with_a_good_answer() -> None:
    standing, now, rests = Standing(), 100.0, []
    for _ in range(8):
        standing = failed(standing, Failure.SLOW, now)
        rests.append(standing.rests_until - now)
        now = standing.rests_until
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    assert standing.well() == Standing()


def test_many_who_waited_in_vain_count_as_one_failure() -> None:
    once = failed(Standing(), Failure.UNREACHABLE, 100)
    assert failed(failed(once, Failure.UNREACHABLE, 100.1), Failure.SLOW, 100.2) == once


def test_absence_is_an_answer() -> None:
    assert failed(Standing(), Failure.ABSENT, 100) == Standing()


def test_a_busy_peer_is_asked_again_soon() -> None:
    busy = failed(Standing(), Failure.BUSY, 100)
    assert not busy.is_asked(100)
    assert busy.is_asked(100 + BUSY_REST_S)
    assert busy.failures == 0


@pytest.mark.parametrize("later", [Failure.SLOW, Failure.BUSY, Failure.ABSENT])
def test_no_later_answer_brings_trust_back_early(later: Failure) -> None:
    liar = failed(Standing(), Failure.WRONG, 100)
    for standing in (liar.well(), failed(liar, later, 101)):
        assert standing.is_distrusted(699)
        assert not standing.is_asked(699)
    assert liar.is_asked(700)
