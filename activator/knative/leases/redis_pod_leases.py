"""`PodLeaseStore` in Redis: one script and one round trip per operation. Members are those of
`activator.coordination.redis_state`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from redis.exceptions import RedisError

from activator.coordination.redis_client import redis_client
from activator.coordination.redis_state import REFUSAL_S, address_of
from activator.knative.leases import scripts
from activator.knative.leases.pod_leases import ClaimsUnreachable, PodLease

log = logging.getLogger(__name__)

KEEP_S = 600.0
"""Claims that no member states are deleted after this long: far above a membership, which is
decisive."""


class RedisPodLeases:
    """The claims of one member. Owner: the event loop. The lock keeps claims, releases and
    statements in order."""

    def __init__(self, url: str, *, platform: str, member: str) -> None:
        """Connects with the first operation. Raises ValueError when the URL is invalid."""
        self._member = member
        self._where = address_of(url)
        self._prefix = f"pilotlight:{{{platform}}}:"
        self._redis = redis_client(url)
        self._claim, self._state, self._release, self._mine, self._free = (
            self._redis.register_script(text)
            for text in (
                scripts.CLAIM,
                scripts.STATE,
                scripts.RELEASE,
                scripts.MINE,
                scripts.FREE,
            )
        )
        self._held: dict[str, PodLease] = {}
        self._lock = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<RedisPodLeases {self._where} of {self._member}: {len(self._held)}>"

    async def claim(
        self, revision: str, instance: str, lives: Sequence[str], *, pods: int
    ) -> str | None:
        """Claim the first free one of `lives`. Also None while this activator is not a member; its
        next heartbeat makes it one."""
        wanted = [
            life
            for life in lives
            if life not in self._held or self._held[life].instance == instance
        ]
        async with self._lock:
            held = sum(claim.revision == revision for claim in self._held.values())
            args: list[str | int] = [
                self._member,
                int(KEEP_S * 1000),
                int(REFUSAL_S * 1000),
                revision,
                instance,
                held,
                pods,
                *wanted,
            ]
            shared = [f"{self._prefix}{kind}:{revision}" for kind in ("wanting", "starving")]
            keys = [self._members, self._claims(revision), self._claimed, *shared]
            try:
                life = str(await self._claim(keys=keys, args=args))
            except (RedisError, OSError) as e:
                raise self._unreachable(e) from e
            if life in ("", "-"):
                return None
            self._held[life] = PodLease(life=life, revision=revision, instance=instance)
            return life

    async def release(self, life: str) -> None:
        """Release a claim."""
        async with self._lock:
            claim = self._held.pop(life, None)
            if claim is None:
                return
            try:
                await self._release(
                    keys=[self._members, self._claims(claim.revision), self._claimed],
                    args=[self._member, life],
                )
            except (RedisError, OSError) as e:
                log.warning(
                    "pod not released, retrying with the next heartbeat life=%s error=%s",
                    life,
                    type(e).__name__,
                )

    async def free(self, revision: str, lives: Sequence[str]) -> frozenset[str]:
        """Those of `lives` that no member has claimed; none while this activator is no member."""
        wanted = [life for life in lives if life not in self._held]
        if not wanted:
            return frozenset()
        try:
            found = await self._free(
                keys=[self._members, self._claims(revision)], args=[self._member, *wanted]
            )
        except (RedisError, OSError) as e:
            raise self._unreachable(e) from e
        return frozenset(found)

    async def state(self) -> frozenset[str]:
        """State our claims. Does nothing while this activator is not a member."""
        async with self._lock:
            flat = [
                part
                for claim in self._held.values()
                for part in (claim.life, claim.revision, claim.instance)
            ]
            try:
                answer = await self._state(
                    keys=[self._members, self._claimed],
                    args=[self._member, int(KEEP_S * 1000), self._prefix, *flat],
                )
            except (RedisError, OSError) as e:
                raise self._unreachable(e) from e
            for life in answer[1:]:
                self._held.pop(life, None)
            return frozenset(answer[1:])

    async def mine(self) -> list[PodLease]:
        """Restore this member's claims from Redis."""
        async with self._lock:
            try:
                flat = await self._mine(
                    keys=[self._members, self._claimed], args=[self._member, self._prefix]
                )
            except (RedisError, OSError) as e:
                raise self._unreachable(e) from e
            triples = zip(flat[0::3], flat[1::3], flat[2::3], strict=True)
            self._held = {
                life: PodLease(life=life, revision=revision, instance=instance)
                for life, revision, instance in triples
            }
            return list(self._held.values())

    async def aclose(self) -> None:
        """Close the connections; claims remain."""
        await self._redis.aclose()

    @property
    def _members(self) -> str:
        return f"{self._prefix}members"

    @property
    def _claimed(self) -> str:
        return f"{self._prefix}claimed:{self._member}"

    def _claims(self, revision: str) -> str:
        return f"{self._prefix}claims:{revision}"

    def _unreachable(self, error: Exception) -> ClaimsUnreachable:
        return ClaimsUnreachable(f"Redis at {self._where} does not answer ({type(error).__name__})")
