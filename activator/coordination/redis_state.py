"""`SharedState` in Redis: each operation is one script and one round trip."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from redis.exceptions import RedisError

from activator.coordination import scripts
from activator.coordination.redis_client import redis_client
from activator.coordination.state import (
    TTL_S,
    HeartbeatReply,
    InstanceDemand,
    SharedStateUnreachable,
    SharedStatistics,
    share_of,
)

log = logging.getLogger(__name__)

REFUSAL_S = 1.5
"""A refusal counts for this long; a member that still needs instances requests them again well
before (balancing.instance_lifecycle.FIRST_ALLOWANCE_RETRY_S)."""


class RedisState:
    """One member's view of the shared state. Owner: the event loop.

    `_held` is what this member holds now, `_stated` what it last reported to Redis; the lock
    serializes heartbeats and acquisitions."""

    def __init__(
        self,
        url: str,
        *,
        platform: str,
        member: str,
        ttl_s: float = TTL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connects with the first operation. Raises ValueError for an invalid URL."""
        self.member = member
        self._where = address_of(url)
        self._prefix = f"pilotlight:{{{platform}}}:"
        self._ttl_s = ttl_s
        self._clock = clock
        self._redis = redis_client(url)
        self._join, self._beat, self._take, self._leave, self._knock = (
            self._redis.register_script(text)
            for text in (scripts.JOIN, scripts.BEAT, scripts.TAKE, scripts.LEAVE, scripts.KNOCK)
        )
        self._held: Counter[str] = Counter()
        self._stated: dict[str, int] = {}
        self._counts_until = -math.inf
        self._members = frozenset({member})
        self._lock = asyncio.Lock()
        self._first_beat = asyncio.Event()
        self._news = asyncio.Event()
        self._refused = 0
        self._is_reachable = True

    def __repr__(self) -> str:
        state = "" if self._is_reachable else ", unreachable"
        return (
            f"<RedisState {self._where} member {self.member} of {len(self._members)}, "
            f"{self._held.total()} instances{state}>"
        )

    # -- membership --------------------------------------------------------------------------------
    async def join(self) -> None:
        """Become a member; what an earlier process of the same id held stays counted."""
        try:
            await self._join(keys=self._own_keys(), args=[self.member, self._ttl_ms()])
        except (RedisError, OSError) as e:
            raise SharedStateUnreachable(
                f"Redis at {self._where} does not answer ({_error_name(e)}): start it, or correct "
                f"redis_url"
            ) from e

    async def beat(self) -> HeartbeatReply | None:
        """State the holdings and stay a member; None when Redis does not answer."""
        async with self._lock:
            reply = await self._beat_now()
        self._first_beat.set()
        return reply

    async def _beat_now(self) -> HeartbeatReply | None:
        self._news.clear()
        sent_at = self._clock()
        holdings = {key: count for key, count in self._held.items() if count > 0}
        flat = [part for pair in holdings.items() for part in pair]
        try:
            names, counts = await self._beat(
                keys=self._own_keys(), args=[*self._common_args(), *flat]
            )
        except (RedisError, OSError) as e:
            self._failed(e)
            return None
        self._on_answer(sent_at)
        self._stated = holdings
        self._members = frozenset(names)
        pairs = zip(holdings, zip(counts[0::2], counts[1::2], strict=True), strict=True)
        return HeartbeatReply(
            members=self._members,
            wants={key: InstanceDemand(wanting=w, starving=s) for key, (w, s) in pairs if w},
        )

    @property
    def is_member(self) -> bool:
        """Whether the holdings have reached Redis at least once."""
        return self._first_beat.is_set() and self._counts_until > -math.inf

    async def wait_for_changes(self, timeout_s: float) -> None:
        """Return when the holdings have changed, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._news.wait()
        except TimeoutError:
            return

    async def leave(self) -> None:
        """End the membership; when Redis does not answer, it lapses by itself."""
        async with self._lock:
            self._held.clear()
            try:
                await self._leave(keys=self._own_keys(), args=[self.member])
            except (RedisError, OSError) as e:
                self._failed(e)

    def members(self) -> frozenset[str]:
        """Return the members as of the last heartbeat."""
        return self._members

    # -- allowance ---------------------------------------------------------------------------------
    async def acquire_instances(self, key: str, wanted: int, limit: int) -> int:
        """Request `wanted` more instances; returns how many were granted. Waits for the first
        heartbeat: until then the holdings of an earlier process of this member are unknown."""
        await self._first_beat.wait()
        async with self._lock:
            try:
                granted = await self._request_grant(key, wanted, limit)
                if granted < 0 and await self._beat_now() is not None:
                    granted = await self._request_grant(key, wanted, limit)
                granted = max(0, granted)
                self._stated[key] = self._held[key] + granted
            except (RedisError, OSError) as e:
                self._failed(e)
                granted = self._credit(key, wanted)
            self._held[key] += granted
        self._refused += granted < wanted
        return granted

    async def _request_grant(self, key: str, wanted: int, limit: int) -> int:
        keys = [*self._own_keys(), f"{self._prefix}wanting:{key}", f"{self._prefix}starving:{key}"]
        return int(
            await self._take(
                keys=keys, args=[*self._common_args(), key, self._held[key], wanted, limit]
            )
        )

    def _credit(self, key: str, wanted: int) -> int:
        """Instances that the others still count as ours and that we do not use: all that may be
        started while Redis does not answer."""
        if self._clock() >= self._counts_until:
            return 0
        return max(0, min(wanted, self._stated.get(key, 0) - self._held[key]))

    def record_held(self, key: str, count: int = 1) -> None:
        """Count `count` adopted instances without a request; the next heartbeat reports them."""
        self._held[key] += count
        self._news.set()

    def release(self, key: str, count: int = 1) -> None:
        """Release the allowance of `count` instances, and report it at once."""
        self._held[key] = max(0, self._held[key] - count)
        if not self._held[key]:
            del self._held[key]
        self._news.set()

    def share(self, count: int) -> int:
        """Return this member's part of a number that all members provide together."""
        return share_of(count, self.member, self._members)

    # -- unauthenticated callers -------------------------------------------------------------------
    async def stranger_wait_s(self, address: str, *, rate_per_s: float, burst: float) -> float:
        """Take one token from the shared bucket of `address`: 0.0, or seconds until there is
        one."""
        try:
            return (
                int(
                    await self._knock(
                        keys=[f"{self._prefix}stranger:{address}"], args=[rate_per_s, burst]
                    )
                )
                / 1000
            )
        except (RedisError, OSError) as e:
            raise SharedStateUnreachable(
                f"Redis at {self._where} does not answer ({_error_name(e)})"
            ) from e

    # -- the rest ----------------------------------------------------------------------------------
    def statistics(self) -> SharedStatistics:
        """Return the values for metrics."""
        return SharedStatistics(
            members=len(self._members),
            allowance=dict(self._held),
            refused=self._refused,
            is_reachable=self._is_reachable,
        )

    async def aclose(self) -> None:
        """End the membership if nothing is held (instances outlive the process: its successor
        adopts them), and close the connections."""
        if not self._held.total():
            await self.leave()
        await self._redis.aclose()

    def _own_keys(self) -> list[str]:
        return [f"{self._prefix}members", f"{self._prefix}held:{self.member}"]

    def _common_args(self) -> list[Any]:
        return [self.member, self._ttl_ms(), self._prefix, int(REFUSAL_S * 1000)]

    def _ttl_ms(self) -> int:
        return int(self._ttl_s * 1000)

    def _failed(self, error: Exception) -> None:
        if self._is_reachable:
            log.warning(
                "redis does not answer; keeping the current instances address=%s error=%s",
                self._where,
                _error_name(error),
            )
        self._is_reachable = False

    def _on_answer(self, sent_at: float) -> None:
        if not self._is_reachable:
            log.info("redis answers again address=%s", self._where)
        self._is_reachable = True
        self._counts_until = sent_at + self._ttl_s


def address_of(url: str) -> str:
    """Return host and port, or the socket's path, of a Redis URL: never its user or password."""
    parts = urlsplit(url)
    return (
        parts.path
        if parts.scheme == "unix"
        else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    )


def _error_name(error: Exception) -> str:
    """Return the class name of an error: some messages contain the URL."""
    return type(error).__name__
