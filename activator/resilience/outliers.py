"""Outlier detection among the instances of a revision. Pure functions.

Failures that all instances share are caused by the revision or the function: ejecting an instance
would not help. So an instance is compared with the others in the same seconds, and at most half of
them are ejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_CALLS = 5
"""Calls of the instance, and of the others together, below which it is no outlier."""
BAD_RATIO = 0.5
"""Failed share below which an instance is not ejected."""
TIMES_WORSE = 4.0
"""Factor by which an outlier fails more often than the others."""
TIMES_SLOWER = 5.0
"""Factor of the mean call time of an outlier over the median of the others; it must also be slower
by SLOWER_BY_S, because a factor of a tiny time means little."""
SLOWER_BY_S = 0.1
MIN_TIMED_CALLS = 20


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Calls of an instance, and those that failed or in which user code raised."""

    calls: int
    failed: int


@dataclass(frozen=True, slots=True)
class TimedRevision:
    """An instance's calls since the last check, and their total seconds."""

    instance: str
    calls: int
    seconds: float


def is_outlier(mine: OutcomeCounts, others: OutcomeCounts) -> bool:
    """Return whether an instance fails far more often than the others."""
    if mine.calls < MIN_CALLS or others.calls < MIN_CALLS:
        return False
    ratio = mine.failed / mine.calls
    return ratio >= BAD_RATIO and ratio >= TIMES_WORSE * others.failed / others.calls


def may_eject(*, live: int, ejected: int) -> bool:
    """Return whether one more instance may be ejected: at most half of all."""
    return 2 * (ejected + 1) <= live + ejected


def slowest(timed: Sequence[TimedRevision]) -> str | None:
    """Return the instance that is much slower than the others; None when there is none."""
    means = {one.instance: one.seconds / one.calls for one in timed if one.calls >= MIN_TIMED_CALLS}
    if len(means) < 2:
        return None
    worst = max(means, key=means.__getitem__)
    others = sorted(mean for instance, mean in means.items() if instance != worst)
    usual = others[len(others) // 2]
    return worst if means[worst] > max(TIMES_SLOWER * usual, usual + SLOWER_BY_S) else None
