"""Averages and maxima over sliding windows, with the semantics of Knative's aggregation package.

Time is in seconds since any fixed origin, in whole buckets of `granularity_s`. Values recorded into
the same bucket add up (several reporters). The mutable windows belong to one scaler task; no lock
is needed.

Source: knative/serving pkg/autoscaler/aggregation (Apache-2.0), semantics restated."""

from __future__ import annotations

import math
from dataclasses import dataclass

_DIGITS = 10**6
"""Averages are rounded down to six digits, so that rounding errors in the running total never
request another instance."""


class TimeWindow:
    """Linear average over the last `window_s` seconds in buckets of `granularity_s`.

    The divisor is the number of buckets since the first write, at most the window, without the
    empty ones at the end: a reporter that stopped does not lower the average. A window without any
    write is 0 (`is_empty` distinguishes that from a measured 0)."""

    def __init__(self, window_s: float, *, granularity_s: int = 1) -> None:
        self._granularity_s = granularity_s
        self._size = math.ceil(window_s / granularity_s)
        self._buckets = [0.0] * self._size
        self._total = 0.0
        self._first: int | None = None
        self._last: int | None = None

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self._size}x{self._granularity_s}s first={self._first} "
            f"last={self._last} total={self._total:g}>"
        )

    def record(self, now_s: float, value: float) -> None:
        """Add `value` to the bucket of `now_s`; buckets in between become 0. Values older than the
        window are ignored."""
        index = self._index(now_s)
        if self._last is None:
            self._first = self._last = index
        elif index + self._size <= self._last:
            return
        elif index > self._last:
            self._advance(index)
        self._first = index if self._first is None else min(self._first, index)
        self._buckets[index % self._size] += value
        self._total += value

    def average(self, now_s: float) -> float:
        """The average as of `now_s`; 0.0 when nothing was written for a whole window."""
        if self._last is None or self._first is None:
            return 0.0
        silent = max(0, self._index(now_s) - self._last)
        if silent >= self._size:
            return 0.0
        divisor = min(self._last - self._first + 1, self._size - silent)
        return math.floor(self._sum_without(silent) / divisor * _DIGITS) / _DIGITS

    def total(self, now_s: float) -> float:
        """Sum of the buckets that are inside the window at `now_s`."""
        if self._last is None:
            return 0.0
        silent = max(0, self._index(now_s) - self._last)
        return 0.0 if silent >= self._size else self._sum_without(silent)

    def is_empty(self, now_s: float) -> bool:
        """Whether nothing was written for more than a window: there is no data, which is not the
        same as zero."""
        return self._last is None or self._index(now_s) - self._last > self._size

    def _index(self, now_s: float) -> int:
        return math.floor(now_s) // self._granularity_s

    def _advance(self, index: int) -> None:
        assert self._last is not None
        if index - self._last >= self._size:
            self._buckets = [0.0] * self._size
            self._total = 0.0
            self._first = index
        else:
            for stale in range(self._last + 1, index + 1):
                self._total -= self._buckets[stale % self._size]
                self._buckets[stale % self._size] = 0.0
        self._last = index

    def _sum_without(self, silent: int) -> float:
        assert self._last is not None
        return self._total - sum(
            self._buckets[i % self._size] for i in range(self._last + 1, self._last + silent + 1)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MaxWindow:
    """The maximum of the values recorded at the last `size` indexes, as an immutable descending
    list.

    Indexes never decrease. Of two values at the same index the larger one counts."""

    size: int
    entries: tuple[tuple[int, int], ...] = ()

    @property
    def current(self) -> int | None:
        """The maximum; None before the first value."""
        return self.entries[0][1] if self.entries else None

    def record(self, index: int, value: int) -> MaxWindow:
        """The window after recording `value` at `index`."""
        kept = [e for e in self.entries if e[1] > value and index - e[0] < self.size]
        if kept and kept[-1][0] == index:
            return MaxWindow(size=self.size, entries=tuple(kept))
        return MaxWindow(size=self.size, entries=(*kept, (index, value)))
