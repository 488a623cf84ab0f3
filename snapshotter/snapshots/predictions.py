"""How long the next start will take, from those before it: an exponentially weighted moving average
per revision and rung."""

from __future__ import annotations

from collections import OrderedDict

from snapshotter.types import RevisionKey, StartKind

_WEIGHT = 0.3
"""Of the newest start: a change of speed is half believed after two starts, one slow disk is
forgotten after a dozen."""
_MAX_KEYS = 20_000


class Predictions:
    """Pure memory. Owner: the event loop. What was not observed for longest goes first."""

    def __init__(self, *, weight: float = _WEIGHT, max_keys: int = _MAX_KEYS) -> None:
        if not 0 < weight <= 1:
            raise ValueError(f"weight = {weight}: must be above 0 and at most 1")
        self._weight = weight
        self._max_keys = max_keys
        self._expected_ms: OrderedDict[tuple[RevisionKey, StartKind], float] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Predictions of {len(self._expected_ms)} rungs>"

    def expect_ms(self, revision: RevisionKey, kind: StartKind) -> float | None:
        """What a start of `kind` is expected to take; None when none was seen."""
        return self._expected_ms.get((revision, kind))

    def observe(self, revision: RevisionKey, kind: StartKind, ms: float) -> None:
        """A start took `ms`. Raises ValueError when that is negative or no number."""
        if not 0 <= ms < float("inf"):
            raise ValueError(f"a start of {ms} ms")
        key = (revision, kind)
        before = self._expected_ms.get(key)
        self._expected_ms[key] = ms if before is None else before + self._weight * (ms - before)
        self._expected_ms.move_to_end(key)
        if len(self._expected_ms) > self._max_keys:
            self._expected_ms.popitem(last=False)

    def forget(self, revision: RevisionKey) -> None:
        """The revision is gone."""
        for kind in StartKind:
            self._expected_ms.pop((revision, kind), None)
