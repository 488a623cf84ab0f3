"""Schedule of retries of webhook deliveries: when to try again and when to give up."""

from __future__ import annotations

GIVE_UP_AFTER_S = 3 * 86_400.0
"""A weekend and a working day. After it the undelivered messages are listed for the receiver's
owner."""
FIRST_DELAY_S, GROWTH, LONGEST_DELAY_S = 5.0, 4.0, 6 * 3600.0
JITTER = 0.2
"""Spreads retries, so that a receiver that failed for many messages does not get them all at
once."""
CLAIM_S = 60.0
"""For how long a delivery worker owns a message: longer than an attempt can take."""


def retry_in_s(
    *, attempts: int, begun_at: float, now: float, chance: float, asked_s: float = 0.0
) -> float | None:
    """Return how long to wait after attempt number `attempts` failed; None: give up,
    GIVE_UP_AFTER_S after `begun_at`.

    Args:
        chance: uniform in [0, 1), for the jitter.
        asked_s: the receiver's Retry-After.
    """
    # Bounded before it becomes an exponent: three days of attempts stay far below, but the count of
    # a corrupt row may not.
    plain_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * GROWTH ** min(attempts - 1, 20))
    delay_s = max(plain_s * (1 - JITTER + 2 * JITTER * chance), min(asked_s, LONGEST_DELAY_S))
    return delay_s if now + delay_s <= begun_at + GIVE_UP_AFTER_S else None
