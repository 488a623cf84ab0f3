"""A peer that fails is left alone for longer and longer; one that lies for long; one that is merely
busy for a moment."""

from __future__ import annotations

import pytest

from weight_cache.peers.peer_health import BUSY_BACKOFF_S, PeerFailure, PeerHealth


def failed(standing: PeerHealth, failure: PeerFailure, now: float) -> PeerHealth:
    return standing.failed(failure, now=now, distrust_s=600)


def test_rests_double_and_end_with_a_good_answer() -> None:
    standing, now, rests = PeerHealth(), 100.0, []
    for _ in range(8):
        standing = failed(standing, PeerFailure.SLOW, now)
        rests.append(standing.backoff_until - now)
        now = standing.backoff_until
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    assert standing.well() == PeerHealth()


def test_many_who_waited_in_vain_count_as_one_failure() -> None:
    once = failed(PeerHealth(), PeerFailure.UNREACHABLE, 100)
    assert failed(failed(once, PeerFailure.UNREACHABLE, 100.1), PeerFailure.SLOW, 100.2) == once


def test_absence_is_an_answer() -> None:
    assert failed(PeerHealth(), PeerFailure.ABSENT, 100) == PeerHealth()


def test_a_busy_peer_is_asked_again_soon() -> None:
    busy = failed(PeerHealth(), PeerFailure.BUSY, 100)
    assert not busy.is_asked(100)
    assert busy.is_asked(100 + BUSY_BACKOFF_S)
    assert busy.failures == 0


@pytest.mark.parametrize("later", [PeerFailure.SLOW, PeerFailure.BUSY, PeerFailure.ABSENT])
def test_no_later_answer_brings_trust_back_early(later: PeerFailure) -> None:
    liar = failed(PeerHealth(), PeerFailure.WRONG, 100)
    for standing in (liar.well(), failed(liar, later, 101)):
        assert standing.is_distrusted(699)
        assert not standing.is_asked(699)
    assert liar.is_asked(700)
