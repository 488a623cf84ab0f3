"""Idempotency keys in Redis, for several activators: one key each, a hash of the request's fingerprint and its answer, sealed.

`pilotlight:{<platform>}:once:<name>` (the braces keep them on one slot of a Redis Cluster). EVAL is atomic
(https://redis.io/docs/latest/develop/programmability/). While Redis is away nobody knows whether a request ran: it is refused with 503.
"""

from __future__ import annotations

import base64
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from activator.idempotency.store import LEASE_S, Known
from activator.shared.redis_state import ANSWER_S, address_of
from pilotlight import errors
from pilotlight.seal import PlatformKey, SealBroken

CLAIM = """
-- Returns the fingerprint and the answer ('' while it runs) of what is there; nothing: it was claimed. KEYS: name. ARGV: fingerprint, ms.
local known = redis.call('HMGET', KEYS[1], 'fingerprint', 'answer')
if known[1] then return {known[1], known[2] or ''} end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {}
"""
HOLD = "if redis.call('HEXISTS', KEYS[1], 'answer') == 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end return 1"
KEEP = """
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'answer', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""
FORGET = "if redis.call('HEXISTS', KEYS[1], 'answer') == 0 then redis.call('DEL', KEYS[1]) end return 1"


class RedisIdempotency:
    """See `IdempotencyStore`. Owner: the event loop."""

    def __init__(self, url: str, *, platform: str, key: PlatformKey, lease_s: float = LEASE_S) -> None:
        """Connects with the first claim. Raises ValueError when the URL is none."""
        self._where = address_of(url)
        self._prefix = f"pilotlight:{{{platform}}}:once:"
        self._key = key
        self._lease_ms = int(lease_s * 1000)
        self._redis = Redis.from_url(
            url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, decode_responses=True, retry=Retry(NoBackoff(), 1)
        )

    def __repr__(self) -> str:
        return f"<RedisIdempotency {self._where}>"

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        found = await self._eval(CLAIM, name, fingerprint, self._lease_ms)
        if not found:
            return None
        return Known(fingerprint=str(found[0]), answer=self._opened(str(found[1])) if found[1] else None)

    async def hold(self, name: str) -> None:
        await self._eval(HOLD, name, self._lease_ms)

    async def keep(self, name: str, fingerprint: str, answer: bytes, *, ttl_s: float) -> None:
        sealed = self._key.seal(base64.b64encode(answer).decode())
        await self._eval(KEEP, name, fingerprint, sealed, int(ttl_s * 1000))

    async def forget(self, name: str) -> None:
        await self._eval(FORGET, name)

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _opened(self, sealed: str) -> bytes:
        try:
            return base64.b64decode(self._key.open(sealed))
        except SealBroken as e:
            raise errors.Conflict(f"the answer kept under this idempotency key cannot be read: {e}") from e

    async def _eval(self, script: str, name: str, *args: Any) -> Any:
        try:
            return await self._redis.eval(script, 1, self._prefix + name, *args)
        except (RedisError, OSError) as e:
            raise errors.Unavailable(
                f"idempotency keys are kept in Redis at {self._where}, which does not answer: nobody knows whether this request ran before",
                retry_after_s=1,
            ) from e
