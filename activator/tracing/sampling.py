"""Which traces are kept. Callers and chance decide at the beginning of a call, its end may decide
better; a rate bounds all of it.

A flood of calls that ask to be traced, that fail, or that are slow, must not become a flood of
traces: of each tenant and reason some are kept in a second, and a burst of them."""

from __future__ import annotations

from activator.tracing.context import ASKED, COLD, DRAWN, ERROR, SHADOWED, SLOW

RATES = {ASKED: 10.0, DRAWN: 10.0, ERROR: 5.0, COLD: 5.0, SLOW: 2.0, SHADOWED: 2.0}
"""Traces in a second, of one tenant: enough to see what goes on, and some kilobytes a second at
most."""
BURST_S = 5.0
"""What was not kept in so long may be kept at once."""
MAX_BUCKETS = 16_384
"""Each tenant and reason has one; a full one says nothing, so all may be forgotten at any time."""


class Sampling:
    """Buckets by tenant and reason. Owner: the event loop. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"<Sampling {len(self._buckets)} buckets>"

    def take(self, tenant: str, reason: str, now: float) -> bool:
        """Whether one more trace of this tenant may be kept for this reason."""
        rate = RATES[reason]
        full = rate * BURST_S
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()
        tokens, at = self._buckets.get((tenant, reason), (full, now))
        tokens = min(full, tokens + (now - at) * rate)
        if tokens < 1:
            self._buckets[tenant, reason] = (tokens, now)
            return False
        self._buckets[tenant, reason] = (tokens - 1, now)
        return True
