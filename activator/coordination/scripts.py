"""The operations of the shared state as Redis scripts (EVAL is atomic:
https://redis.io/docs/latest/develop/programmability/). Time is the server's, in ms.

Keys, all under `pilotlight:{<platform>}:` (the braces keep them on one slot of a Redis Cluster):
`members` (sorted set: id by the time it lapses), `held:<member>` (hash: instances by revision;
lapses with its member), `wanting:<revision>` and `starving:<revision>` (sorted sets: member by the
time of its last refusal), `stranger:<address>` (hash: tokens, at)."""

from __future__ import annotations

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

JOIN = (
    _NOW
    + """
-- KEYS: members, held:<me>. ARGV: me, ttl_ms.
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 1
"""
)

BEAT = (
    _NOW
    + """
-- KEYS: members, held:<me>. ARGV: me, ttl_ms, prefix, refusal_ms, then revision and count for each holding.
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('DEL', KEYS[2])
local wants = {}
for i = 5, #ARGV, 2 do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
  for _, kind in ipairs({'wanting:', 'starving:'}) do
    local key, since, count = ARGV[3] .. kind .. ARGV[i], now - ARGV[4], 0
    for _, member in ipairs(redis.call('ZRANGEBYSCORE', key, since, '+inf')) do
      if member ~= ARGV[1] then count = count + 1 end
    end
    wants[#wants + 1] = count
  end
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return {redis.call('ZRANGE', KEYS[1], 0, -1), wants}
"""
)

TAKE = (
    _NOW
    + """
-- KEYS: members, held:<me>, wanting:<revision>, starving:<revision>.
-- ARGV: me, ttl_ms, prefix, refusal_ms, revision, held, wanted, limit. Returns the grant; -1 when this member has lapsed.
local me, revision = ARGV[1], ARGV[5]
local held, wanted, limit = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local living = redis.call('ZRANGEBYSCORE', KEYS[1], '(' .. now, '+inf')
local others, is_member = 0, false
for _, member in ipairs(living) do
  if member == me then
    is_member = true
  else
    others = others + tonumber(redis.call('HGET', ARGV[3] .. 'held:' .. member, revision) or 0)
  end
end
if not is_member then return -1 end
local granted = math.max(0, math.min(wanted, limit - others - held))
if held + granted > 0 then
  redis.call('HSET', KEYS[2], revision, held + granted)
  redis.call('PEXPIRE', KEYS[2], ARGV[2])
else
  redis.call('HDEL', KEYS[2], revision)
end
local is_refused = granted < wanted
local fair = math.max(1, math.floor(limit / #living))
for i, applies in ipairs({is_refused, is_refused and held + granted < fair}) do
  if applies then
    redis.call('ZADD', KEYS[2 + i], now, me)
    redis.call('PEXPIRE', KEYS[2 + i], ARGV[4])
  else
    redis.call('ZREM', KEYS[2 + i], me)
  end
end
return granted
"""
)

LEAVE = """
-- KEYS: members, held:<me>. ARGV: me.
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return 1
"""

KNOCK = (
    _NOW
    + """
-- KEYS: stranger:<address>. ARGV: rate_per_s, burst. Takes a token; returns 0, or the milliseconds until there is one.
local rate, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local known = redis.call('HMGET', KEYS[1], 'tokens', 'at')
local tokens = burst
if known[1] then tokens = math.min(burst, tonumber(known[1]) + math.max(0, now - tonumber(known[2])) * rate / 1000) end
local wait_ms = 0
if tokens >= 1 then tokens = tokens - 1 else wait_ms = math.ceil((1 - tokens) * 1000 / rate) end
redis.call('HSET', KEYS[1], 'tokens', tostring(tokens), 'at', now)
redis.call('PEXPIRE', KEYS[1], math.ceil(burst * 1000 / rate) + 1000)
return wait_ms
"""
)
