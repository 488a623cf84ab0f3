"""Idempotency keys in Redis, for several activators: one key each, a hash of the request's fingerprint and its answer, sealed.

`pilotlight:{<platform>}:once:<name>` (the braces keep them on one slot of a Redis Cluster). What a tenant's answers take is counted beside
them: `…:once-of:<tenant>` has their names and sizes by the time at which they end, `…:once-bytes:<tenant>` the sum. EVAL is atomic
(https://redis.io/docs/latest/develop/programmability/). While Redis is away nobody knows whether a request ran: it is refused with 503.
"""

from __future__ import annotations

import base64
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from activator.idempotency.store import LEASE_S, OVERHEAD_BYTES, TENANT_BYTES, Claim, Known
from activator.shared.redis_state import ANSWER_S, address_of
from pilotlight import errors
from pilotlight.seal import SealBroken, Sealer

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
-- The tenant's oldest answers make room. KEYS: name, names of the tenant, its bytes.
-- ARGV: fingerprint, answer, ms, name, prefix, bound, overhead.
local time = redis.call('TIME')
local now, ttl = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[3])
local bytes = tonumber(redis.call('GET', KEYS[3]) or 0)
local function gone(member)
  if redis.call('ZREM', KEYS[2], member) == 1 then bytes = bytes - tonumber(string.match(member, '^%d+')) end
end
local before = redis.call('HGET', KEYS[1], 'answer')
if before then gone(#before + ARGV[7] .. ':' .. ARGV[4]) end
for _, member in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000)) do gone(member) end
local size = #ARGV[2] + ARGV[7]
while bytes + size > tonumber(ARGV[6]) do
  local oldest = redis.call('ZRANGE', KEYS[2], 0, 0)[1]
  if not oldest then bytes = 0 break end
  gone(oldest)
  redis.call('DEL', ARGV[5] .. string.match(oldest, ':(.*)$'))
end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'answer', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('ZADD', KEYS[2], now + ttl, size .. ':' .. ARGV[4])
redis.call('SET', KEYS[3], bytes + size)
local last = redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2]
redis.call('PEXPIREAT', KEYS[2], last)
redis.call('PEXPIREAT', KEYS[3], last)
return 1
"""
FORGET = "if redis.call('HEXISTS', KEYS[1], 'answer') == 0 then redis.call('DEL', KEYS[1]) end return 1"


class RedisIdempotency:
    """See `IdempotencyStore`. Owner: the event loop."""

    def __init__(self, url: str, *, platform: str, sealer: Sealer, lease_s: float = LEASE_S, tenant_bytes: int = TENANT_BYTES) -> None:
        """Connects with the first claim. Raises ValueError when the URL is none."""
        self._where = address_of(url)
        self._platform = f"pilotlight:{{{platform}}}:"
        self._prefix = f"{self._platform}once:"
        self._tenant_bytes = tenant_bytes
        self._sealer = sealer
        self._lease_ms = int(lease_s * 1000)
        self._redis = Redis.from_url(
            url, socket_timeout=ANSWER_S, socket_connect_timeout=ANSWER_S, decode_responses=True, retry=Retry(NoBackoff(), 1)
        )

    def __repr__(self) -> str:
        return f"<RedisIdempotency {self._where}>"

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        found = await self._eval(CLAIM, [name], fingerprint, self._lease_ms)
        if not found:
            return None
        return Known(fingerprint=str(found[0]), answer=self._opened(str(found[1])) if found[1] else None)

    async def hold(self, name: str) -> None:
        await self._eval(HOLD, [name], self._lease_ms)

    async def keep(self, claim: Claim, answer: bytes, *, ttl_s: float) -> None:
        sealed = self._sealer.seal(base64.b64encode(answer).decode())
        names, total = (f"{self._platform}{kind}:{claim.tenant}" for kind in ("once-of", "once-bytes"))
        await self._eval(
            KEEP, [claim.name, names, total], claim.fingerprint, sealed, int(ttl_s * 1000), claim.name, self._prefix, self._tenant_bytes,
            OVERHEAD_BYTES,
        )  # fmt: skip

    async def forget(self, name: str) -> None:
        await self._eval(FORGET, [name])

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _opened(self, sealed: str) -> bytes:
        try:
            return base64.b64decode(self._sealer.open(sealed))
        except SealBroken as e:
            raise errors.Conflict(f"the answer kept under this idempotency key cannot be read: {e}") from e

    async def _eval(self, script: str, keys: list[str], *args: Any) -> Any:
        """`keys`: a name, and keys as they are behind it."""
        try:
            return await self._redis.eval(script, len(keys), self._prefix + keys[0], *keys[1:], *args)
        except (RedisError, OSError) as e:
            raise errors.Unavailable(
                f"idempotency keys are kept in Redis at {self._where}, which does not answer: nobody knows whether this request ran before",
                retry_after_s=1,
            ) from e
