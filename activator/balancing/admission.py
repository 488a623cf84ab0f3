"""Who may go on: pure bounds, checked before anything is started or billed.

Traffic without a valid key is held to a rate per address (a token bucket, Turner 1986), and shares
it with no valid key: that is looked up first, which costs one hash whatever came. Calls that wait
are bounded for the process, for each function, and by every `queued` quota that they count towards.
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
"""Addresses remembered; the least recently seen goes first (it starts again with a full bucket,
which costs us one burst)."""


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Whom an address is counted as: an IPv6 address as its /64, which one host may take any
    address of; any other as itself."""
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
    """`rate_per_s` tokens flow in, at most `burst` are kept. `now` in seconds, any monotonic
    clock."""

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


class UnauthenticatedRateLimiter:
    """A bucket per address (of IPv6, per /64) for requests without a valid key. Owner: the event
    loop."""

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
    """A call that waits."""

    @property
    def bounds(self) -> Sequence[QueueBound]:
        """What it counts towards besides the process."""
        ...

    @property
    def patience_s(self) -> float:
        """When it is worth while to come again, in seconds."""
        ...

    def shed(self, error: errors.TooManyRequests) -> None:
        """It gives its place to another, and is answered so."""
        ...


class GlobalQueue:
    """Who waits in this process, all functions together, and the bounds: the process's own and
    those of `queued` quotas.

    Where a bound is reached, `load_shedding` chooses who goes away. Owner: the event loop.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._all = SheddingIndex()
        self._bounded: dict[tuple[str, str], SheddingIndex] = {}

    def __repr__(self) -> str:
        return f"<GlobalQueue {self.waiting}/{self.limit} waiting>"

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return len(self._all)

    def counts(self) -> dict[tuple[str, str], int]:
        """Calls that wait by (tenant, priority), for metrics; from any thread."""
        return self._all.counts()

    def enter(self, call: QueuedItem) -> None:
        """One more waits, in the place of another where a bound is reached. Raises OverQuota,
        TooManyRequests or Shed: nobody gave way."""
        victims = [self._victim(call, bound) for bound in call.bounds if self._is_full(bound)]
        if self.waiting >= self.limit:
            victims.append(self._victim_of_all(call))
        for victim in victims:
            self._shed(victim)
        self._all.add(call)
        for bound in call.bounds:
            self._bounded.setdefault(bound[:2], SheddingIndex()).add(call)

    def leave(self, call: QueuedItem) -> None:
        """It waits no more; nothing when it left before."""
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
                f"this platform already holds {self.waiting} waiting calls, its bound "
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
        """Its answer; one that stands for two bounds goes once."""
        if victim in self._all:
            self.leave(victim)
            message = (
                f"a waiting call of priority {victim.rank.priority} gave its place to one "
                f"that goes before it: come again"
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
"""What `QueueBound.of` says of the bound that a function's own scaling sets."""


def _over(bound: QueueBound, call: QueuedItem) -> errors.TooManyRequests:
    if bound.of == MAX_QUEUED:
        return errors.TooManyRequests(
            f"this function already has {bound.limit} calls waiting, its bound (max_queued)",
            retry_after_s=call.patience_s,
        )
    return errors.OverQuota(
        f"the {bound.of} already has {bound.limit} calls waiting, its quota (queued)",
        retry_after_s=call.patience_s,
        quota="queued",
        of=bound.of,
        limit=bound.limit,
    )
