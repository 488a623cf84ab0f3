"""Which calls are made again."""

from __future__ import annotations

import pytest

from pilotlight.kubernetes.errors import (
    AlreadyExists,
    ClusterError,
    ClusterUnreachable,
    Conflict,
    Forbidden,
    Invalid,
    Overloaded,
    WebhookDown,
)
from pilotlight.kubernetes.retry_policy import RetryDelays, is_retryable

CUT = ClusterUnreachable("cut")
REFUSED = ClusterUnreachable("refused", sent=False)
BUSY = Overloaded("busy", status=429)
FAILED = ClusterError("failed", status=500)


@pytest.mark.parametrize(
    "error, verb, again",
    [
        (CUT, "get", True),
        (CUT, "patch", True),
        (CUT, "create", False),
        (REFUSED, "create", True),
        (BUSY, "create", True),
        (Overloaded("starting", status=503, retry_after_s=1), "create", True),
        (Overloaded("starting", status=503), "create", False),
        (FAILED, "create", False),
        (FAILED, "delete", True),
        (WebhookDown("down", status=500), "create", True),
        (Conflict("changed", status=409, reason="Conflict"), "patch", True),
        (Conflict("changed", status=409, reason="Conflict"), "update", False),
        (AlreadyExists("there", status=409, reason="AlreadyExists"), "patch", False),
        (Forbidden("no", status=403), "get", False),
        (Invalid("no such field", status=500), "patch", False),
    ],
)
def test_only_what_can_succeed_and_does_no_harm_is_repeated(
    error: ClusterError, verb: str, *, again: bool
) -> None:
    assert is_retryable(error, verb=verb, is_conditional=False) is again


def test_a_refusal_after_an_absence_is_asked_about_again() -> None:
    error = Forbidden("no", status=403)
    assert is_retryable(error, verb="create", is_conditional=True, was_away=True)


def test_a_conflict_with_a_condition_is_an_answer() -> None:
    assert not is_retryable(Conflict("changed", status=409), verb="patch", is_conditional=True)


def test_pauses_grow_to_their_bound_with_jitter_and_honour_the_server() -> None:
    pauses = RetryDelays(first_s=1.0, most_s=8.0)
    assert [pauses.pause_s(attempt, chance=1.0) for attempt in (1, 2, 3, 4, 5)] == [1, 2, 4, 8, 8]
    assert pauses.pause_s(3, chance=0.0) == 2
    assert pauses.pause_s(1, chance=0.0, retry_after_s=30) == 30
    assert pauses.pause_s(1, chance=1.0, retry_after_s=30) == 37.5
    assert pauses.pause_s(100_000, chance=1.0) == 8
