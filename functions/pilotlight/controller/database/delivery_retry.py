"""When a delivery to a webhook is tried again, and when it is given up."""

from __future__ import annotations

GIVE_UP_AFTER_S = 3 * 86_400.0
"""A weekend and a working day: whoever has not repaired the receiver by then reads the list of what
was not delivered."""
FIRST_DELAY_S, GROWTH, LONGEST_DELAY_S = 5.0, 4.0, 6 * 3600.0
JITTER = 0.2
"""Receivers that fail for many messages at once are not asked for all of them at once again."""
CLAIM_S = 60.0
"""For how long a deliverer has a message to itself: longer than an attempt can take."""


def retry_in_s(
    *, attempts: int, begun_at: float, now: float, chance: float, asked_s: float = 0.0
) -> float | None:
    """How long to wait after attempt number `attempts` failed; None: it is given up,
    GIVE_UP_AFTER_S after `begun_at`.

    Args:
        chance: uniform in [0, 1), for the jitter.
        asked_s: what the receiver asked for (Retry-After).
    """
    # Bounded before it is raised to a power: what is tried for three days stays far below, a broken
    # row may not.
    plain_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * GROWTH ** min(attempts - 1, 20))
    delay_s = max(plain_s * (1 - JITTER + 2 * JITTER * chance), min(asked_s, LONGEST_DELAY_S))
    return delay_s if now + delay_s <= begun_at + GIVE_UP_AFTER_S else None
