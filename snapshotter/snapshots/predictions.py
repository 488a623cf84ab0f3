"""Predictions of start durations: an exponentially weighted moving average per revision and start
kind."""

from __future__ import annotations

from collections import OrderedDict

from snapshotter.types import RevisionKey, StartKind

_WEIGHT = 0.3
"""Weight of the newest start: two starts bring the average halfway to a new speed, and one outlier
fades after a dozen."""
_MAX_KEYS = 20_000


class Predictions:
    """Start durations, in memory only. Owner: the event loop. Evicts the least recently updated."""

    def __init__(self, *, weight: float = _WEIGHT, max_keys: int = _MAX_KEYS) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight = {weight}: must be above 0 and at most 1")
        self._weight = weight
        self._max_keys = max_keys
        self._expected_ms: OrderedDict[tuple[RevisionKey, StartKind], float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Predictions of {len(self._expected_ms)} rungs>"

    def expect_ms(self, revision: RevisionKey, kind: StartKind) -> float | None:
        """The expected duration of a start of `kind`; None if none was observed."""
        return self._expected_ms.get((revision, kind))

    def observe(self, revision: RevisionKey, kind: StartKind, ms: float) -> None:
        """Record a start that took `ms`. Raises ValueError if that is negative or not a number."""
        if not 0 <= ms < float("inf"):
            raise ValueError(f"the duration of a start cannot be {ms} ms")
        key = (revision, kind)
        before = self._expected_ms.get(key)
        self._expected_ms[key] = ms if before is None else before + self._weight * (ms - before)
        self._expected_ms.move_to_end(key)
        if len(self._expected_ms) > self._max_keys:
            self._expected_ms.popitem(last=False)

    def forget(self, revision: RevisionKey) -> None:
        """Forget a deleted revision."""
        for kind in StartKind:
            self._expected_ms.pop((revision, kind), None)
