"""The operations on claims as Redis scripts (EVAL is atomic:
https://redis.io/docs/latest/develop/programmability/). Time is the server's, ms.

Keys have the prefix `pilotlight:{<platform>}:` like those of `activator.coordination.scripts`, whose
`members`, `wanting:<revision>` and `starving:<revision>` are used here too: `claims:<revision>`
(hash: a pod's life → `<member> <instance>`), `claimed:<member>` (hash: a pod's life → `<revision>
<instance>`). `claimed` restores a member's claims after its restart; where the two differ,
`pod_leases` is right."""

from __future__ import annotations

_NOW = "local t = redis.call('TIME'); local now = t[1] * 1000 + math.floor(t[2] / 1000)\n"

_OWNERS = """
local function is_living(member)
  local lapses = redis.call('ZSCORE', KEYS[1], member)
  return lapses and tonumber(lapses) > now
end
local function owner_of(text)
  if not text then return nil, nil end
  return string.match(text, '^(%S+) (%S+)$')
end
"""

CLAIM = (
    _NOW
    + _OWNERS
    + """
-- KEYS: members, claims:<revision>, claimed:<me>, wanting:<revision>, starving:<revision>.
-- ARGV: me, keep_ms, refusal_ms, revision, instance, held, pods, then lives.
-- Returns a life; '' when none is free; '-' when this member is unknown. With pods = 0 a refusal is no want.
local me, revision, instance = ARGV[1], ARGV[4], ARGV[5]
if not is_living(me) then return '-' end
local found = nil
for i = 8, #ARGV do
  local owner, theirs = owner_of(redis.call('HGET', KEYS[2], ARGV[i]))
  if owner == me and theirs == instance then found = ARGV[i] break end
end
if not found then
  for i = 8, #ARGV do
    local owner = owner_of(redis.call('HGET', KEYS[2], ARGV[i]))
    if not owner or (owner ~= me and not is_living(owner)) then found = ARGV[i] break end
  end
end
local fair = math.max(1, math.floor(tonumber(ARGV[7]) / redis.call('ZCOUNT', KEYS[1], '(' .. now, '+inf')))
local is_short = not found
for i, applies in ipairs(tonumber(ARGV[7]) > 0 and {is_short, is_short and tonumber(ARGV[6]) < fair} or {}) do
  if applies then
    redis.call('ZADD', KEYS[3 + i], now, me)
    redis.call('PEXPIRE', KEYS[3 + i], ARGV[3])
  elseif found then
    redis.call('ZREM', KEYS[3 + i], me)
  end
end
if not found then return '' end
redis.call('HSET', KEYS[2], found, me .. ' ' .. instance)
redis.call('HSET', KEYS[3], found, revision .. ' ' .. instance)
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('PEXPIRE', KEYS[3], ARGV[2])
return found
"""
)

FREE = (
    _NOW
    + _OWNERS
    + """
-- KEYS: members, claims:<revision>. ARGV: me, then lives. Returns those that no living member has.
local found = {}
if not is_living(ARGV[1]) then return found end
for i = 2, #ARGV do
  local owner = owner_of(redis.call('HGET', KEYS[2], ARGV[i]))
  if not owner or not is_living(owner) then found[#found + 1] = ARGV[i] end
end
return found
"""
)

STATE = (
    _NOW
    + _OWNERS
    + """
-- KEYS: members, claimed:<me>. ARGV: me, keep_ms, prefix, then life, revision and instance of each claim. Returns {is member, lost lives…}.
local me, prefix = ARGV[1], ARGV[3]
if not is_living(me) then return {'0'} end
local answer, stated = {'1'}, {}
for i = 4, #ARGV, 3 do
  local life, revision, instance = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local key = prefix .. 'claims:' .. revision
  local owner = owner_of(redis.call('HGET', key, life))
  if owner and owner ~= me and is_living(owner) then
    answer[#answer + 1] = life
  else
    stated[life] = true
    redis.call('HSET', key, life, me .. ' ' .. instance)
    redis.call('HSET', KEYS[2], life, revision .. ' ' .. instance)
    redis.call('PEXPIRE', key, ARGV[2])
  end
end
local known = redis.call('HGETALL', KEYS[2])
for i = 1, #known, 2 do
  if not stated[known[i]] then
    local revision = owner_of(known[i + 1])
    local key = prefix .. 'claims:' .. revision
    if owner_of(redis.call('HGET', key, known[i])) == me then redis.call('HDEL', key, known[i]) end
    redis.call('HDEL', KEYS[2], known[i])
  end
end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return answer
"""
)

RELEASE = (
    _NOW
    + _OWNERS
    + """
-- KEYS: members, claims:<revision>, claimed:<me>. ARGV: me, life.
if owner_of(redis.call('HGET', KEYS[2], ARGV[2])) == ARGV[1] then redis.call('HDEL', KEYS[2], ARGV[2]) end
redis.call('HDEL', KEYS[3], ARGV[2])
return 1
"""
)

MINE = (
    _NOW
    + _OWNERS
    + """
-- KEYS: members, claimed:<me>. ARGV: me, prefix. Returns life, revision and instance of each claim that is ours.
local mine = {}
local known = redis.call('HGETALL', KEYS[2])
for i = 1, #known, 2 do
  local revision, instance = owner_of(known[i + 1])
  if owner_of(redis.call('HGET', ARGV[2] .. 'claims:' .. revision, known[i])) == ARGV[1] then
    mine[#mine + 1] = known[i]
    mine[#mine + 1] = revision
    mine[#mine + 1] = instance
  else
    redis.call('HDEL', KEYS[2], known[i])
  end
end
return mine
"""
)
