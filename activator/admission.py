"""Who may go on: pure bounds, checked before anything is started or billed.

Unauthenticated traffic is held to a rate per address (a token bucket, Turner 1986) before a key is looked up; calls that wait are bounded
for
the process and, in the throttler, for each function.
"""

from __future__ import annotations

from collections import OrderedDict

from pilotlight import errors

MAX_ADDRESSES = 10_000
"""Addresses remembered; the least recently seen goes first (it starts again with a full bucket, which costs us one burst)."""


class TokenBucket:
    """`rate_per_s` tokens flow in, at most `burst` are kept. `now` in seconds, any monotonic clock."""

    __slots__ = ("_at", "_burst", "_rate_per_s", "_tokens")

    def __init__(self, *, rate_per_s: float, burst: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float) -> float:
        """Take one token: 0.0, or the seconds until there is one."""
        wait_s = self.wait_s(now)
        if wait_s == 0:
            self._tokens -= 1
        return wait_s

    def wait_s(self, now: float) -> float:
        """Seconds until there is a token; 0.0 when there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate_per_s)
        self._at = now
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._rate_per_s


class StrangerLimit:
    """A bucket per address for requests without a valid key. Owner: the event loop."""

    def __init__(self, *, rate_per_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __repr__(self) -> str:
        return f"<StrangerLimit {len(self._buckets)} addresses, {self._rate_per_s:g}/s each>"

    def guard(self, address: str, now: float) -> None:
        """Before a key is looked up: refuse an address that has used up its attempts. Raises TooManyRequests with the time to wait."""
        bucket = self._buckets.get(address)
        if bucket is not None and (wait_s := bucket.wait_s(now)) > 0:
            raise _too_many(wait_s)

    def check(self, address: str, now: float) -> None:
        """Count one failed attempt. Raises TooManyRequests with the time to wait."""
        wait_s = self._take(address, now)
        if wait_s > 0:
            raise _too_many(wait_s)

    def _take(self, address: str, now: float) -> float:
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = TokenBucket(rate_per_s=self._rate_per_s, burst=2 * self._rate_per_s, now=now)
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(address)
        return bucket.take(now)


def _too_many(wait_s: float) -> errors.TooManyRequests:
    return errors.TooManyRequests("too many requests without a valid API key from this address", retry_after_s=wait_s)


class ProcessQueue:
    """How many calls wait in this process, all functions together, and the bound. Owner: the event loop."""

    __slots__ = ("limit", "waiting")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.waiting = 0

    def __repr__(self) -> str:
        return f"<ProcessQueue {self.waiting}/{self.limit} waiting>"

    def enter(self) -> None:
        """One more waits. Raises TooManyRequests when the process holds its bound."""
        if self.waiting >= self.limit:
            raise errors.TooManyRequests(
                f"this platform already holds {self.waiting} waiting calls, its bound (activator.max_queued)", retry_after_s=1
            )
        self.waiting += 1

    def leave(self) -> None:
        """One fewer waits."""
        self.waiting -= 1
