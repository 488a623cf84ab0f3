"""A revision's load as its autoscaler reads it: the average of the calls that wait or run."""

from __future__ import annotations

from collections.abc import Callable


class ConcurrencyMeter:
    """The area under the curve of calls over time. Owner: a Throttler.

    Attributes:
        last_call_at: when the last call came, in the clock's seconds.
    """

    __slots__ = ("_area", "_at", "_calls", "_peak", "last_call_at")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._calls = self._peak = 0
        self._area = 0.0
        self._at = self.last_call_at = clock()

    def __repr__(self) -> str:
        return f"<Load {self._calls} calls>"

    def add(self, now: float) -> None:
        """A call came: it waits, or has a slot."""
        self._area += self._calls * (now - self._at)  # `_pass`, which a call pays for twice
        self._at = now
        self._calls += 1
        self._peak = max(self._peak, self._calls)
        self.last_call_at = now

    def remove(self, now: float) -> None:
        """A call ended, or gave up."""
        self._area += self._calls * (now - self._at)
        self._at = now
        self._calls -= 1

    def take(self, now: float, elapsed_s: float) -> float:
        """Average calls since the last take, which was `elapsed_s` ago."""
        self._pass(now)
        area, self._area = self._area, 0.0
        return area / elapsed_s if elapsed_s > 0 else float(self._calls)

    def take_peak(self) -> int:
        """Most calls at once since the last time."""
        peak, self._peak = self._peak, self._calls
        return peak

    def _pass(self, now: float) -> None:
        self._area += self._calls * (now - self._at)
        self._at = now
