"""Decides which traces are kept: by the caller or by chance at the begin of a call, or by its end;
a rate limits all of them.

A flood of calls that request a trace, fail, or are slow, must not become a flood of traces: per
tenant and reason a number per second and a burst are kept."""

from __future__ import annotations

from activator.calls.trace_context import ASKED, COLD, DRAWN, ERROR, SHADOWED, SLOW

RATES = {ASKED: 10.0, DRAWN: 10.0, ERROR: 5.0, COLD: 5.0, SLOW: 2.0, SHADOWED: 2.0}
"""Traces per second and tenant: enough to observe the system, at most some kilobytes a second."""
BURST_S = 5.0
"""Unused rate of this long may be used at once."""
MAX_BUCKETS = 16_384
"""Maximum number of buckets, one per tenant and reason. A full bucket needs no state, so all may be
cleared at any time."""


class Sampling:
    """Token buckets by tenant and reason. Owner: the event loop. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}

    def __repr__(self) -> str:
        return f"<Sampling {len(self._buckets)} buckets>"

    def try_acquire(self, tenant: str, reason: str, now: float) -> bool:
        """Whether one more trace of this tenant may be kept for this reason; if so, count it."""
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
