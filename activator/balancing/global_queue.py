"""Admission limits, checked before anything is started or billed.

Requests without a valid key have a rate limit per address (a token bucket, Turner 1986). Valid keys
do not count towards it: the key is looked up first, at the cost of one hash. Waiting calls are
limited for the process, for each function, and by every `queued` quota that applies to them.
"""

from __future__ import annotations

import ipaddress
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, cast

from activator.fairness.load_shedding import Prioritized, SheddingIndex
from activator.fairness.queue_priority import QueueBound
from pilotlight import errors

MAX_ADDRESSES = 10_000
"""Addresses tracked; the least recently seen is evicted first (it starts again with a full bucket,
which admits one more burst)."""


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the unit that an address is counted as: for IPv6 its /64, because one host may use any
    address of it; for others the address itself."""
    if ":" not in address:
        return address
    try:
        found = ipaddress.IPv6Address(address.partition("%")[0])
    except ValueError:
        return address
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return f"{ipaddress.IPv6Address(int(found) >> 64 << 64)}/64"


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
        wait_s = self._take(network_of(address), now)
        if wait_s > 0:
            raise _too_many(wait_s)

    def _take(self, address: str, now: float) -> float:
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


class QueuedItem(Prioritized, Protocol):
    """A waiting call."""

    @property
    def bounds(self) -> Sequence[QueueBound]:
        """The queue limits that apply to it besides the process's."""
        ...

    @property
    def patience_s(self) -> float:
        """Seconds after which a retry makes sense."""
        ...

    def shed(self, error: errors.TooManyRequests) -> None:
        """Remove it for a call of higher rank, and answer it with `error`."""
        ...


class GlobalQueue:
    """All waiting calls of this process, with its limit and those of `queued` quotas.

    Where a limit is reached, `load_shedding` chooses the call to drop. Owner: the event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._all = SheddingIndex()
        self._bounded: dict[tuple[str, str], SheddingIndex] = {}

    def __repr__(self) -> str:
        return f"<GlobalQueue {self.waiting}/{self.limit} waiting>"

    @property
    def waiting(self) -> int:
        """Number of waiting calls."""
        return len(self._all)

    def counts(self) -> dict[tuple[str, str], int]:
        """Return waiting calls by (tenant, priority), for metrics. Thread-safe."""
        return self._all.counts()

    def enter(self, call: QueuedItem) -> None:
        """Add a waiting call, dropping another where a limit is reached. Raises OverQuota,
        TooManyRequests or Shed when no other call can be dropped."""
        victims = [self._victim(call, bound) for bound in call.bounds if self._is_full(bound)]
        if self.waiting >= self.limit:
            victims.append(self._victim_of_all(call))
        for victim in victims:
            self._shed(victim)
        self._all.add(call)
        for bound in call.bounds:
            self._bounded.setdefault(bound[:2], SheddingIndex()).add(call)

    def leave(self, call: QueuedItem) -> None:
        """Remove a call. Idempotent."""
        if self._all.remove(call):
            for bound in call.bounds:
                crowd = self._bounded[bound[:2]]
                crowd.remove(call)
                if not len(crowd):
                    del self._bounded[bound[:2]]

    def _is_full(self, bound: QueueBound) -> bool:
        crowd = self._bounded.get(bound[:2])
        return (len(crowd) if crowd is not None else 0) >= bound.limit

    def _victim(self, call: QueuedItem, bound: QueueBound) -> QueuedItem:
        crowd = self._bounded.get(bound[:2])
        victim = crowd.victim(call.rank, bound.limit) if crowd is not None else None
        if victim is None:
            raise _over(bound, call)
        return cast(QueuedItem, victim)

    def _victim_of_all(self, call: QueuedItem) -> QueuedItem:
        victim = self._all.victim(call.rank, self.limit)
        if victim is None:
            message = (
                f"this activator already has {self.waiting} waiting calls, its limit "
                f"(activator.max_queued)"
            )
            raise errors.Shed(
                message,
                retry_after_s=call.patience_s,
                priority=str(call.rank.priority),
                tenant=call.rank.tenant,
            )
        return cast(QueuedItem, victim)

    def _shed(self, victim: QueuedItem) -> None:
        """Drop a waiting call. A call chosen for two limits is dropped once."""
        if victim in self._all:
            self.leave(victim)
            message = (
                f"a waiting call of priority {victim.rank.priority} was dropped for one of higher "
                f"rank: retry later"
            )
            victim.shed(
                errors.Shed(
                    message,
                    retry_after_s=victim.patience_s,
                    priority=str(victim.rank.priority),
                    tenant=victim.rank.tenant,
                )
            )


MAX_QUEUED = "max_queued"
"""`QueueBound.of` for the limit in a function's own scaling settings."""


def _over(bound: QueueBound, call: QueuedItem) -> errors.TooManyRequests:
    if bound.of == MAX_QUEUED:
        return errors.TooManyRequests(
            f"this function already has {bound.limit} calls waiting, its limit (max_queued)",
            retry_after_s=call.patience_s,
        )
    return errors.OverQuota(
        f"the {bound.of} already has {bound.limit} calls waiting, its quota (queued)",
        retry_after_s=call.patience_s,
        quota="queued",
        of=bound.of,
        limit=bound.limit,
    )
