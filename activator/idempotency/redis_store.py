"""Idempotency keys in Redis, for several activators: each is a hash of the request's fingerprint
and its sealed response.

`pilotlight:{<platform>}:once:<name>` (the braces keep them on one slot of a Redis Cluster). Sizes
of responses are counted in: `…:once-of:<tenant>`, a tenant's names and sizes by expiry time,
`…:once-bytes`, each tenant's sum, `…:once-ends`, the first expiry of each tenant, and
`…:once-total`, the sum of all. EVAL is atomic
(https://redis.io/docs/latest/develop/programmability/). While Redis does not answer, requests are
refused with 503, because it is unknown whether they ran."""

from __future__ import annotations

import base64
from typing import Any

from redis.exceptions import RedisError

from activator.coordination.redis_client import redis_client
from activator.coordination.redis_state import address_of
from activator.idempotency.store_protocol import (
    LEASE_S,
    OVERHEAD_BYTES,
    TENANT_BYTES,
    TOTAL_BYTES,
    Claim,
    Known,
)
from pilotlight import errors
from pilotlight.core.crypto import DecryptionFailed, Sealer

CLAIM = """
-- Returns the fingerprint and the response ('' while it runs) of an existing entry; nothing when the name was claimed. KEYS: name. ARGV: fingerprint, ms.
local known = redis.call('HMGET', KEYS[1], 'fingerprint', 'answer')
if known[1] then return {known[1], known[2] or ''} end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {}
"""
HOLD = (
    "if redis.call('HEXISTS', KEYS[1], 'answer') == 0 then redis.call('PEXPIRE', KEYS[1], "
    "ARGV[1]) end return 1"
)
KEEP = """
-- Evicts the tenant's oldest responses, then those of the tenant with the most bytes.
-- KEYS: name, names of the tenant, bytes by tenant, earliest ends by tenant, bytes of all.
-- ARGV: fingerprint, answer, ms, name, tenant, prefix of names, prefix of tenants' names, bound of a tenant, bound of all, overhead.
local time = redis.call('TIME')
local now, ttl, own = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[3]), ARGV[5]
local function bytes_of(tenant) return tonumber(redis.call('ZSCORE', KEYS[3], tenant) or 0) end
local function count(tenant, change)
  change = math.max(change, -bytes_of(tenant)) -- entries of an earlier release were not counted
  if change == 0 then return end
  redis.call('ZINCRBY', KEYS[3], change, tenant)
  redis.call('INCRBY', KEYS[5], change)
end
local function gone(tenant, member)
  if redis.call('ZREM', ARGV[7] .. tenant, member) == 1 then count(tenant, -tonumber(string.match(member, '^%d+'))) end
end
local function settle(tenant) -- removes expired entries
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', ARGV[7] .. tenant, '-inf', now, 'LIMIT', 0, 1000)) do gone(tenant, member) end
  local first = redis.call('ZRANGE', ARGV[7] .. tenant, 0, 0, 'WITHSCORES')[2]
  if first then redis.call('ZADD', KEYS[4], first, tenant) return end
  count(tenant, -bytes_of(tenant))
  redis.call('ZREM', KEYS[3], tenant)
  redis.call('ZREM', KEYS[4], tenant)
end
local function make_room(tenant)
  local oldest = redis.call('ZRANGE', ARGV[7] .. tenant, 0, 0)[1]
  if not oldest then settle(tenant) return end
  gone(tenant, oldest)
  redis.call('DEL', ARGV[6] .. string.match(oldest, ':(.*)$'))
end
local before = redis.call('HGET', KEYS[1], 'answer')
if before then gone(own, #before + ARGV[10] .. ':' .. ARGV[4]) end
settle(own)
for _, tenant in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, 100)) do settle(tenant) end
local size = #ARGV[2] + ARGV[10]
while bytes_of(own) > 0 and bytes_of(own) + size > tonumber(ARGV[8]) do make_room(own) end
while true do
  local most = redis.call('ZREVRANGE', KEYS[3], 0, 0)[1]
  if not most or tonumber(redis.call('GET', KEYS[5]) or 0) + size <= tonumber(ARGV[9]) then break end
  make_room(most)
  if bytes_of(most) == 0 then settle(most) end
end
redis.call('HSET', KEYS[1], 'fingerprint', ARGV[1], 'answer', ARGV[2])
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('ZADD', KEYS[2], now + ttl, size .. ':' .. ARGV[4])
redis.call('PEXPIREAT', KEYS[2], redis.call('ZRANGE', KEYS[2], -1, -1, 'WITHSCORES')[2])
count(own, size)
settle(own)
for _, key in ipairs({KEYS[3], KEYS[4], KEYS[5]}) do redis.call('PEXPIRE', key, ttl) end
return 1
"""
FORGET = (
    "if redis.call('HEXISTS', KEYS[1], 'answer') == 0 then redis.call('DEL', KEYS[1]) end return 1"
)


class RedisIdempotency:
    """`IdempotencyStore` in Redis. Owner: the event loop."""

    def __init__(
        self,
        url: str,
        *,
        platform: str,
        sealer: Sealer,
        tenant_bytes: int = TENANT_BYTES,
        total_bytes: int = TOTAL_BYTES,
    ) -> None:
        """Connects with the first claim. Raises ValueError for an invalid URL."""
        self._where = address_of(url)
        self._platform = f"pilotlight:{{{platform}}}:"
        self._prefix = f"{self._platform}once:"
        self._tenant_bytes = tenant_bytes
        self._total_bytes = total_bytes
        self._sealer = sealer
        self._lease_ms = int(LEASE_S * 1000)
        self._redis = redis_client(url)

    def __repr__(self) -> str:
        return (
            f"<RedisIdempotency {self._where}, at most {self._tenant_bytes} bytes each, "
            f"{self._total_bytes} bytes of all>"
        )

    async def claim(self, name: str, fingerprint: str) -> Known | None:
        found = await self._eval(CLAIM, [name], fingerprint, self._lease_ms)
        if not found:
            return None
        return Known(
            fingerprint=str(found[0]), answer=self._opened(str(found[1])) if found[1] else None
        )

    async def renew(self, name: str) -> None:
        await self._eval(HOLD, [name], self._lease_ms)

    async def store(self, claim: Claim, answer: bytes, *, ttl_s: float) -> None:
        sealed = self._sealer.seal(base64.b64encode(answer).decode())
        names, *counts = (
            f"{self._platform}once-{kind}" for kind in ("of:", "bytes", "ends", "total")
        )
        await self._eval(
            KEEP,
            [claim.name, names + claim.tenant, *counts],
            claim.fingerprint,
            sealed,
            int(ttl_s * 1000),
            claim.name,
            claim.tenant,
            self._prefix,
            names,
            self._tenant_bytes,
            self._total_bytes,
            OVERHEAD_BYTES,
        )

    async def release(self, name: str) -> None:
        await self._eval(FORGET, [name])

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _opened(self, sealed: str) -> bytes:
        try:
            return base64.b64decode(self._sealer.open(sealed))
        except DecryptionFailed as e:
            raise errors.Conflict(
                f"the response stored under this idempotency key cannot be decrypted: {e}"
            ) from e

    async def _eval(self, script: str, keys: list[str], *args: Any) -> Any:
        """`keys`: a name, which gets the prefix, followed by complete keys."""
        try:
            return await self._redis.eval(
                script, len(keys), self._prefix + keys[0], *keys[1:], *args
            )
        except (RedisError, OSError) as e:
            raise errors.Unavailable(
                f"idempotency keys are stored in Redis at {self._where}, which does not answer: it "
                f"is unknown whether this request ran before",
                retry_after_s=1,
            ) from e
