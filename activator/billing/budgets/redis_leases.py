"""`BudgetLeaseStore` in Redis: one script, one round trip (EVAL is atomic:
https://redis.io/docs/latest/develop/programmability/).

Keys have the prefix `pilotlight:{<platform>}:money:`; the braces keep them in one slot of a Redis
Cluster. `epoch` is when this data set began, in ms. Each budget and period has a hash with `base`
and, for each member, `h:<member>` (its claim) and `s:<member>` (the number of its latest claim, so
that a delayed claim cannot overwrite a later one). Redis must not evict keys (`maxmemory-policy
noeviction`)."""

from __future__ import annotations

import uuid

from redis.exceptions import RedisError

from activator.billing.budgets.leases import BudgetClaim, BudgetGrant
from activator.coordination.redis_client import redis_client
from activator.coordination.redis_state import address_of
from activator.coordination.state import SharedStateUnreachable

GRACE_S = 2.0
"""For this long after a loss of data nothing is granted: four rounds, in which every living member
states its claims again."""
KEPT_MS = 2 * 86_400_000
"""How long the numbers of a period are kept after its end, and after each claim: a member whose
clock is behind still uses them. A claim that expired would free money that is still claimed."""

CLAIM = """
-- Returns what is granted (-1: this claim, or a later one, was processed already), base, milliseconds to wait, epoch.
-- KEYS: epoch, the budget's hash. ARGV: me, life, n, amount, base, held, need, want, grace_ms, kept until (ms), kept at least (ms).
local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)
redis.call('SET', KEYS[1], now, 'NX')
local epoch = tonumber(redis.call('GET', KEYS[1]))
if epoch > now then  -- the server's clock stepped back
  epoch = now
  redis.call('SET', KEYS[1], now)
end
local me, amount, held = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[6])
local need, want = tonumber(ARGV[7]), tonumber(ARGV[8])
local life, n = string.match(redis.call('HGET', KEYS[2], 's:' .. me) or '', '^(%w+):(%d+)$')
if life == ARGV[2] and tonumber(n) >= tonumber(ARGV[3]) then return {-1, '0', 0, tostring(epoch)} end
local base, others = tonumber(ARGV[5]), 0
local known = redis.call('HGETALL', KEYS[2])
for i = 1, #known, 2 do
  if known[i] == 'base' then
    base = math.max(base, tonumber(known[i + 1]))
  elseif string.sub(known[i], 1, 2) == 'h:' and known[i] ~= 'h:' .. me then
    others = others + tonumber(known[i + 1])
  end
end
local wait, granted = math.max(0, epoch + ARGV[9] - now), 0
local room = amount - base - others - held
if want > 0 and wait == 0 and room >= need then
  granted = math.min(room, math.max(need, math.min(want, math.floor(room / 8))))
end
redis.call('HSET', KEYS[2], 'base', string.format('%.0f', base), 'h:' .. me, string.format('%.0f', held + granted),
           's:' .. me, ARGV[2] .. ':' .. ARGV[3])
-- at least as long as KEPT_MS from now by the server's clock: members' clocks may be wrong
redis.call('PEXPIREAT', KEYS[2], math.max(tonumber(ARGV[10]), now + ARGV[11]))
return {string.format('%.0f', granted), string.format('%.0f', base), wait, tostring(epoch)}
"""


class RedisMoney:
    """Connection of one member to the store. Owner: the event loop."""

    def __init__(self, url: str, *, platform: str, member: str, grace_s: float = GRACE_S) -> None:
        """Connects with the first claim. Raises ValueError when the URL is invalid."""
        self._where = address_of(url)
        self._prefix = f"pilotlight:{{{platform}}}:money:"
        self._member = member
        self._life = uuid.uuid4().hex
        self._claims_sent = 0
        self._grace_ms = int(grace_s * 1000)
        self._redis = redis_client(url)
        self._claim = self._redis.register_script(CLAIM)

    def __repr__(self) -> str:
        return f"<RedisMoney {self._where} member {self._member}>"

    async def claim(self, claim: BudgetClaim) -> BudgetGrant:
        """Send the claim to Redis. Raises SharedStateUnreachable."""
        self._claims_sent += 1
        until_ms = claim.ends_ns // 1_000_000 + KEPT_MS
        numbers = (
            claim.amount,
            claim.base,
            claim.held,
            claim.need,
            claim.want,
            self._grace_ms,
            until_ms,
            KEPT_MS,
        )
        try:
            granted, base, wait_ms, epoch = await self._claim(
                keys=[f"{self._prefix}epoch", f"{self._prefix}{claim.budget}:{claim.period}"],
                args=[self._member, self._life, self._claims_sent, *numbers],
            )
        except (RedisError, OSError) as e:
            raise SharedStateUnreachable(
                f"Redis at {self._where} does not answer ({type(e).__name__})"
            ) from e
        if int(granted) < 0:  # the client retried it, and the first answer was lost
            return await self.claim(claim)
        return BudgetGrant(
            granted=int(granted), base=int(base), wait_s=int(wait_ms) / 1000, epoch=str(epoch)
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._redis.aclose()
