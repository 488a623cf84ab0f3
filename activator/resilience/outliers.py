"""Which instance of a revision is worse than its siblings. Pure.

A failure that all instances share is the revision's, or the function's own: leaving one of them
would not help. So an instance is judged by what the others did in the same seconds, and never more
than half of them are left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_CALLS = 5
"""Calls of the instance, and of the others together, below which nothing is concluded."""
BAD_RATIO = 0.5
"""An instance that fails less than this is not left."""
TIMES_WORSE = 4.0
"""And it fails so many times as often as the others."""
TIMES_SLOWER = 5.0
"""The mean time of an outlier's calls, against the median of the others'; and SLOWER_BY_S more at
least: a factor of nothing is nothing."""
SLOWER_BY_S = 0.1
MIN_TIMED_CALLS = 20


@dataclass(frozen=True, slots=True)
class Tally:
    """Calls of an instance, and those of them that failed or that user code raised in."""

    calls: int
    failed: int


@dataclass(frozen=True, slots=True)
class Timed:
    """An instance's calls of the last while, and the seconds that they took together."""

    instance: str
    calls: int
    seconds: float


def is_outlier(mine: Tally, others: Tally) -> bool:
    """Whether an instance fails where its siblings do not."""
    if mine.calls < MIN_CALLS or others.calls < MIN_CALLS:
        return False
    ratio = mine.failed / mine.calls
    return ratio >= BAD_RATIO and ratio >= TIMES_WORSE * others.failed / others.calls


def may_eject(*, live: int, ejected: int) -> bool:
    """Whether one more may be left: at most half of those that there were."""
    return 2 * (ejected + 1) <= live + ejected


def slowest(timed: Sequence[Timed]) -> str | None:
    """The instance that is much slower than the others; None when none is."""
    means = {one.instance: one.seconds / one.calls for one in timed if one.calls >= MIN_TIMED_CALLS}
    if len(means) < 2:
        return None
    worst = max(means, key=means.__getitem__)
    others = sorted(mean for instance, mean in means.items() if instance != worst)
    usual = others[len(others) // 2]
    return worst if means[worst] > max(TIMES_SLOWER * usual, usual + SLOWER_BY_S) else None
