"""Rate limit of requests without a valid key, per address (a token bucket, Turner 1986). Valid keys
do not count towards it: the key is looked up first, at the cost of one hash.

With several activators the local bucket decides at once, the shared one a moment later.
Authentication is synchronous, so it cannot wait for Redis: each failed attempt that the local
bucket admits is reported in the background, and an address whose shared bucket is empty is refused
here until it has a token again. A client that spreads over N activators gains the attempts of one
round trip, not N times the rate. While the shared state does not answer, only the local bucket
applies."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict

from activator.coordination.state import SharedState, SharedStateUnreachable
from activator.http.trusted_proxies import network_of
from pilotlight import errors
from pilotlight.core.background_tasks import cancel_all

MAX_REPORTS = 256
"""Most concurrent reports; further attempts are counted locally only, so that a flood does not
become a queue."""

MAX_ADDRESSES = 10_000
"""Addresses tracked; the least recently seen is evicted first (it starts again with a full bucket,
which admits one more burst)."""


class TokenBucket:
    """A token bucket that gains `rate_per_s` tokens up to `burst`. `now` in seconds of any
    monotonic clock."""

    __slots__ = ("_at", "_burst", "_rate_per_s", "_tokens")

    def __init__(self, *, rate_per_s: float, burst: float, now: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._tokens = burst
        self._at = now

    def take(self, now: float) -> float:
        """Take one token. Returns 0.0, or the seconds until there is one."""
        wait_s = self.wait_s(now)
        if wait_s == 0:
            self._tokens -= 1
        return wait_s

    def wait_s(self, now: float) -> float:
        """Return the seconds until there is a token; 0.0 when there is one."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate_per_s)
        self._at = now
        return 0.0 if self._tokens >= 1 else (1 - self._tokens) / self._rate_per_s


class UnauthenticatedRateLimiter:
    """A token bucket per address (for IPv6, per /64) for requests without a valid key. Owner: the
    event loop."""

    def __init__(self, *, rate_per_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()

    def __repr__(self) -> str:
        return (
            f"<UnauthenticatedRateLimiter {len(self._buckets)} addresses, "
            f"{self._rate_per_s:g}/s each>"
        )

    def guard(self, address: str, now: float) -> None:
        """Refuse an address that has used up its attempts. Raises TooManyRequests with the time to
        wait."""
        bucket = self._buckets.get(network_of(address))
        if bucket is not None and (wait_s := bucket.wait_s(now)) > 0:
            raise _too_many(wait_s)

    def check(self, address: str, now: float) -> None:
        """Count one failed attempt. Raises TooManyRequests with the time to wait."""
        wait_s = self._acquire(network_of(address), now)
        if wait_s > 0:
            raise _too_many(wait_s)

    def _acquire(self, address: str, now: float) -> float:
        bucket = self._buckets.get(address)
        if bucket is None:
            bucket = self._buckets[address] = TokenBucket(
                rate_per_s=self._rate_per_s, burst=2 * self._rate_per_s, now=now
            )
            if len(self._buckets) > MAX_ADDRESSES:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(address)
        return bucket.take(now)


def _too_many(wait_s: float) -> errors.TooManyRequests:
    return errors.TooManyRequests(
        "too many requests without a valid API key from this address", retry_after_s=wait_s
    )


class SharedUnauthenticatedLimit(UnauthenticatedRateLimiter):
    """Local rate limit combined with the shared one. Owner: the event loop."""

    def __init__(self, state: SharedState, *, rate_per_s: float) -> None:
        super().__init__(rate_per_s=rate_per_s)
        self._state = state
        self._rate = rate_per_s
        self._refused_until: dict[str, float] = {}
        self._reports: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return (
            f"<SharedUnauthenticatedLimit {len(self._refused_until)} refused, {len(self._reports)} "
            f"reports under way, {self._rate:g}/s each>"
        )

    def guard(self, address: str, now: float) -> None:
        """Refuse an address that is over either limit, without counting an attempt."""
        super().guard(address, now)
        self._refuse(network_of(address), now)

    def check(self, address: str, now: float) -> None:
        """Count one failed attempt, and report it to the shared state. Raises TooManyRequests."""
        super().check(address, now)
        address = network_of(address)
        self._refuse(address, now)
        if len(self._reports) < MAX_REPORTS:
            report = asyncio.get_running_loop().create_task(
                self._report(address), name="stranger report"
            )
            self._reports.add(report)
            report.add_done_callback(self._reports.discard)

    def _refuse(self, address: str, now: float) -> None:
        until = self._refused_until.get(address, 0.0)
        if until > now:
            raise _too_many(until - now)
        self._refused_until.pop(address, None)

    async def _report(self, address: str) -> None:
        try:
            wait_s = await self._state.stranger_wait_s(
                address, rate_per_s=self._rate, burst=2 * self._rate
            )
        except SharedStateUnreachable:
            return  # the heartbeat logs it once
        if wait_s > 0:
            now = time.monotonic()
            self._refused_until = {
                a: until for a, until in self._refused_until.items() if until > now
            } | {address: now + wait_s}

    async def aclose(self) -> None:
        """Cancel the reports in progress."""
        await cancel_all(self._reports)
