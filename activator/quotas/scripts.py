"""The decision of `decision` as a Redis script: many calls in one round trip, each with all rules
that apply to it (EVAL is atomic).

Time is the server's, in seconds, unless a test supplies it. Keys, all under
`pilotlight:{<platform>}:quota:`: `members` (sorted set: activator by the ms at which it expires),
`held:<activator>` (hash: calls that run there, by subject; expires with its activator),
`bucket:<subject>` (hash: `requests`, `tokens` and `at`; expires when it would be full)."""

from __future__ import annotations

DECIDE = """
-- KEYS: members, held:<me>. ARGV: me, ttl_ms, prefix, now ('' = the server's), document.
-- document: is_full, held {subject = count},
-- rules [[subject, per_s, depth, concurrent (-1 = no limit), tokens_per_s, token_depth, held]],
-- calls [[verb, a, b, c, rule, rule...]]: verb 0 acquires a requests, b slots and c tokens, all or nothing; 1 refunds a requests and c
-- tokens; 2 settles b reserved tokens as c used ones.
-- Returns the result of each call, and what is left of each rule in millionths.
local me, ttl, prefix, doc = ARGV[1], ARGV[2], ARGV[3], cjson.decode(ARGV[5])
local t = redis.call('TIME')
local server_ms = t[1] * 1000 + math.floor(t[2] / 1000)
local now = tonumber(ARGV[4]) or (t[1] + t[2] / 1000000)

redis.call('ZADD', KEYS[1], server_ms + ttl, me)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', server_ms)
local others = {}
for _, member in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  if member ~= me then others[#others + 1] = prefix .. 'held:' .. member end
end
local function state(subject, count)
  if count > 0 then redis.call('HSET', KEYS[2], subject, count) else redis.call('HDEL', KEYS[2], subject) end
end
if doc.is_full then redis.call('DEL', KEYS[2]) end
for subject, count in pairs(doc.held) do state(subject, count) end

local rules = {}
for i, given in ipairs(doc.rules) do
  local rule = {subject = given[1], per_s = given[2], depth = given[3], concurrent = given[4], tokens_per_s = given[5],
                token_depth = given[6], held = given[7], others = 0, key = prefix .. 'bucket:' .. given[1]}
  local kept = redis.call('HMGET', rule.key, 'requests', 'tokens', 'at')
  local at = tonumber(kept[3] or now)
  local elapsed = math.max(0, now - at)
  rule.requests = math.min(rule.depth, tonumber(kept[1] or rule.depth) + elapsed * rule.per_s)
  rule.tokens = math.min(rule.token_depth, tonumber(kept[2] or rule.token_depth) + elapsed * rule.tokens_per_s)
  rule.is_changed = now ~= at -- a refused call also advances the time, so that a clock that steps back afterwards changes nothing
  if rule.concurrent >= 0 then
    for _, key in ipairs(others) do rule.others = rule.others + tonumber(redis.call('HGET', key, rule.subject) or 0) end
  end
  rules[i] = rule
end

local function lack(rule, requests, holds, tokens)
  local quota, wait = 0, -1
  if holds > 0 and rule.concurrent >= 0 and rule.held + rule.others + holds > rule.concurrent then quota, wait = 2, 1 end
  if rule.per_s > 0 and requests > rule.requests + 1e-9 then
    local wait_s = (requests - rule.requests) / rule.per_s
    if wait_s > wait then quota, wait = 1, wait_s end
  end
  local wanted = math.min(tokens, rule.token_depth)
  if rule.tokens_per_s > 0 and wanted > 0 and wanted > rule.tokens + 1e-9 then
    local wait_s = (wanted - rule.tokens) / rule.tokens_per_s
    if wait_s > wait then quota, wait = 3, wait_s end
  end
  return quota, wait
end

local function take(call)
  local at, quota, wait = 0, 0, -1
  for i = 5, #call do
    local short, wait_s = lack(rules[call[i]], call[2], call[3], call[4])
    if short > 0 and wait_s > wait then at, quota, wait = i - 4, short, wait_s end
  end
  if quota > 0 then return {at, quota, math.ceil(wait * 1000000)} end
  for i = 5, #call do
    local rule = rules[call[i]]
    rule.requests = rule.requests - call[2]
    rule.held = rule.held + call[3]
    rule.tokens = rule.tokens - math.min(call[4], rule.token_depth)
    rule.is_changed = true
  end
  return {0, 0, 0}
end

local function give_back(call)
  for i = 5, #call do
    local rule = rules[call[i]]
    rule.requests = math.min(rule.depth, rule.requests + call[2])
    rule.tokens = math.min(rule.token_depth, rule.tokens + math.min(call[4], rule.token_depth))
    rule.is_changed = true
  end
  return {0, 0, 0}
end

local function settle(call)
  for i = 5, #call do
    local rule = rules[call[i]]
    local left = rule.tokens + math.min(call[3], rule.token_depth) - call[4]
    rule.tokens = math.max(-rule.token_depth, math.min(rule.token_depth, left))
    rule.is_changed = true
  end
  return {0, 0, 0}
end

local verbs, became, left = {[0] = take, give_back, settle}, {}, {}
for i, call in ipairs(doc.calls) do became[i] = verbs[call[1]](call) end

for i, rule in ipairs(rules) do
  if rule.concurrent >= 0 then state(rule.subject, rule.held) end
  if rule.is_changed and (rule.per_s > 0 or rule.tokens_per_s > 0) then
    local fills_in = 0
    if rule.per_s > 0 then fills_in = (rule.depth - rule.requests) / rule.per_s end
    if rule.tokens_per_s > 0 then fills_in = math.max(fills_in, (rule.token_depth - rule.tokens) / rule.tokens_per_s) end
    redis.call('HSET', rule.key, 'requests', string.format('%.17g', rule.requests), 'tokens', string.format('%.17g', rule.tokens),
               'at', string.format('%.17g', now))
    redis.call('PEXPIRE', rule.key, math.ceil(fills_in * 1000) + 1000)
  end
  left[i] = {0, 0, rule.others}
  if rule.per_s > 0 then left[i][1] = math.floor(rule.requests * 1000000) end
  if rule.tokens_per_s > 0 then left[i][2] = math.floor(rule.tokens * 1000000) end
end
redis.call('PEXPIRE', KEYS[2], ttl)
return {became, left}
"""

LEAVE = """
-- KEYS: members, held:<me>. ARGV: me.
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('DEL', KEYS[2])
return 1
"""
