"""Values in Redis that are limited in bytes, for each owner and for all.

A value is a hash `<prefix>:<name>` of a fingerprint and the value (`answer`), which expires. Sizes
are counted in: `<prefix>-of:<owner>`, an owner's names and sizes by expiry time, `<prefix>-bytes`,
each owner's sum, `<prefix>-ends`, the first expiry of each owner, and `<prefix>-total`, the sum of
all. Beyond a limit the oldest values are evicted: of the owner, or of the owner with the most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from redis.asyncio import Redis

OVERHEAD_BYTES = 768
"""Size of an entry without its value, as measured in Redis 7: names, fingerprint, counters."""
STORE = """
-- Evicts the tenant's oldest responses, then those of the tenant with the most bytes.
-- KEYS: name, names of the tenant, bytes by tenant, earliest ends by tenant, bytes of all.
-- ARGV: fingerprint, answer, ms, name, tenant, prefix of names, prefix of tenants' names, bound of a tenant, bound of all, overhead.
redis.call('INCRBY', KEYS[5], 0) -- a full Redis refuses this, before anything else is written
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundedValue:
    """A value to store. `name`: without the prefix; `owner`: whose bytes it counts as."""

    name: str
    owner: str
    value: str
    ttl_ms: int
    fingerprint: str = ""


class BoundedValues:
    """Stores values below one prefix. Owner: the event loop."""

    def __init__(self, redis: Redis, *, prefix: str, total_bytes: int) -> None:
        self._redis = redis
        self._prefix = prefix
        self._total_bytes = total_bytes

    def __repr__(self) -> str:
        return f"<BoundedValues {self._prefix}, at most {self._total_bytes} bytes>"

    async def store(self, value: BoundedValue, *, owner_bytes: int) -> None:
        """Store a value, evicting others where it exceeds a limit: `owner_bytes` of its owner.
        Raises RedisError, OSError."""
        owners, *counts = (f"{self._prefix}-{kind}" for kind in ("of:", "bytes", "ends", "total"))
        names = f"{self._prefix}:"
        keys = [names + value.name, owners + value.owner, *counts]
        await self._redis.eval(
            STORE,
            len(keys),
            *keys,
            value.fingerprint,
            value.value,
            str(value.ttl_ms),
            value.name,
            value.owner,
            names,
            owners,
            str(owner_bytes),
            str(self._total_bytes),
            str(OVERHEAD_BYTES),
        )
