-- Become or stay the leader, and read the due schedules: one round trip for an idle tick.
--
-- @include fence stats
-- FLAGS allow-oom
-- KEYS epoch      string  number of terms so far
-- KEYS due        zset    schedule id -> when to act, ms
-- KEYS schedules  hash    schedule id -> definition
-- KEYS plan       hash    schedule id -> plan; see lib/plan
-- ARGV scheduler  text  id of the caller, for operators
-- ARGV term_ms    int   length of the term
-- ARGV limit      int   at most this many due schedules
--
-- A repeated call with the same token renews the term and returns 'leader' with the same epoch.
--
-- Returns { 'leader', 'elected' or 'follower', epoch, time in ms, µs beyond that, end of the term in ms,
-- next time to act in ms or -1; then for each due schedule: id, definition, plan }.

local GROUP, MAX_BYTES = 20, 1048576

local leader = read_leader()
local word = 'leader'
if leader and leader.token ~= A.token then
  return { 'follower', leader.epoch, now, now_us, leader.ends, -1 }
end
if not leader then
  word = 'elected'
  leader = { token = A.token, scheduler = A.scheduler, epoch = redis.call('INCR', K.epoch) }
  count('terms', 1)
end
write_leader(leader, tonumber(A.term_ms))

local limit = tonumber(A.limit)
local found = redis.call('ZRANGE', K.due, '-inf', now, 'BYSCORE', 'LIMIT', 0, limit)
local answer = { word, leader.epoch, now, now_us, leader.ends, -1 }
if #found == limit then
  answer[6] = now
else
  local later = redis.call('ZRANGE', K.due, '(' .. string.format('%.0f', now), '+inf', 'BYSCORE',
    'LIMIT', 0, 1, 'WITHSCORES')[2]
  if later then answer[6] = math.ceil(tonumber(later)) end
end
-- Read in groups, and stop when there are many bytes: payloads may be large.
local bytes = 0
for from = 1, #found, GROUP do
  local ids = { unpack(found, from, math.min(from + GROUP - 1, #found)) }
  local definitions = redis.call('HMGET', K.schedules, unpack(ids))
  local plans = redis.call('HMGET', K.plan, unpack(ids))
  for i, id in ipairs(ids) do
    local definition = definitions[i] or ''
    bytes = bytes + #definition
    answer[#answer + 1] = id
    answer[#answer + 1] = definition
    answer[#answer + 1] = plans[i] or ''
  end
  if bytes > MAX_BYTES then
    answer[6] = now
    break
  end
end
return answer
