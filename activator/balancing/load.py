"""The load of a revision: the average number of its waiting and running calls, and what the engines
of a language model report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


class ConcurrencyMeter:
    """Integrates the number of calls over time. Owner: a Throttler.

    Attributes:
        last_call_at: when the last call arrived, in the clock's seconds."""

    __slots__ = ("_area", "_at", "_calls", "_peak", "last_call_at")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._calls = self._peak = 0
        self._area = 0.0
        self._at = self.last_call_at = clock()

    def __repr__(self) -> str:
        return f"<Load {self._calls} calls>"

    def add(self, now: float) -> None:
        """Count an arriving call, waiting or running."""
        self._area += self._calls * (now - self._at)  # `_advance`, inlined for speed
        self._at = now
        self._calls += 1
        self._peak = max(self._peak, self._calls)
        self.last_call_at = now

    def remove(self, now: float) -> None:
        """Count the end of a call, or that its caller left."""
        self._area += self._calls * (now - self._at)
        self._at = now
        self._calls -= 1

    def consume_average(self, now: float, elapsed_s: float) -> float:
        """Return the average number of calls since the previous call of this method, `elapsed_s`
        ago."""
        self._advance(now)
        area, self._area = self._area, 0.0
        return area / elapsed_s if elapsed_s > 0 else float(self._calls)

    def consume_peak(self) -> int:
        """Return the maximum number of concurrent calls since the previous call of this method."""
        peak, self._peak = self._peak, self._calls
        return peak

    def _advance(self, now: float) -> None:
        self._area += self._calls * (now - self._at)
        self._at = now


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """What the engines of a language model report; only ready instances whose engine answered.

    Attributes:
        slots: average concurrent calls of one instance, by its KV memory.
        queued_tokens: prompt tokens of the calls that wait, for a slot or inside an engine.
        tokens_per_s: prompt tokens that one instance processes, including generation: the recent
            peak; None = unknown.
        first_tokens: number of recent first tokens since the newest instance started.
        late: the share of them that exceeded the objective; None = there is no objective."""

    slots: float
    queued_tokens: int = 0
    tokens_per_s: float | None = None
    first_tokens: int = 0
    late: float | None = None
