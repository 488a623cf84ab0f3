"""Retry budgets: the retries of a caller are limited to a share of its calls, so that retries do
not overload a failing function.

(Google SRE Book, ch. 22, "Addressing cascading failures": per-client retry budget.) Each call adds
`share` of a token to its caller's bucket, each retry removes one; a bucket has at most BURST tokens
and gains TRICKLE_PER_S, so that callers with few calls can retry, too. Each activator counts
separately."""

from __future__ import annotations

from collections import OrderedDict

BURST = 10.0
"""Capacity of a bucket, and its initial tokens."""
TRICKLE_PER_S = 0.1
"""Tokens added per second without calls."""
MAX_CALLERS = 16_384
"""Callers tracked; the least recently used is evicted first (and starts again with a full
bucket)."""


class CallerRetryBudget:
    """The retry bucket of one caller. Code that accepts a call increments `calls`. Owner: the event
    loop."""

    __slots__ = ("_at", "_seen", "_share", "_tokens", "calls")

    def __init__(self, share: float, now: float) -> None:
        self._share = share
        self._tokens = BURST
        self._at = now
        self._seen = 0
        self.calls = 0

    def __repr__(self) -> str:
        return f"<CallerRetryBudget {self.calls} calls, {self._tokens:.1f} retries left>"

    def try_acquire(self, now: float) -> bool:
        """Take one retry; False when none is left."""
        earned = (self.calls - self._seen) * self._share + max(0.0, now - self._at) * TRICKLE_PER_S
        self._seen, self._at = self.calls, now
        self._tokens = min(BURST, self._tokens + earned)
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class RetryBudgets:
    """The retry buckets of all callers, by key id. Owner: the event loop."""

    def __init__(self, share: float) -> None:
        """`share`: retries per call, 0 to 1; 0 = no retries."""
        self._share = share
        self._tallies: OrderedDict[str, CallerRetryBudget] = OrderedDict()

    def __repr__(self) -> str:
        return f"<RetryBudgets {len(self._tallies)} callers, {self._share:g} per call>"

    def for_caller(self, key_id: str, now: float) -> CallerRetryBudget:
        """Return the bucket of one caller. A stored reference may have been evicted after very many
        other callers; then it has no effect."""
        tally = self._tallies.get(key_id)
        if tally is None:
            tally = self._tallies[key_id] = CallerRetryBudget(self._share, now)
            if len(self._tallies) > MAX_CALLERS:
                self._tallies.popitem(last=False)
        else:
            self._tallies.move_to_end(key_id)
        return tally

    def try_acquire(self, key_id: str, now: float) -> bool:
        """Take one retry of this caller; False when it has none."""
        return self._share > 0 and self.for_caller(key_id, now).try_acquire(now)
