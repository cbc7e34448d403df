-- Read where a task is and what it waits for.
--
-- @include limits
-- FLAGS no-writes
-- KEYS leases   zset  task id -> end of lease, ms
-- KEYS delayed  zset  task id -> when it becomes ready, ms
-- KEYS tasks    hash  task id -> its document, JSON
-- ARGV id  text  task id
--
-- Returns { } for an unknown task, or { status, time in ms, end of lease or '', due or '', tasks of the
-- user before it, users before its user or -1, parked until or '', settings of the user or '', running
-- tasks of the user, 1 if it is held or 0, limits of the name or '', document or '', other users in the
-- CRITICAL lane, slots of the name in use, when the rate of the name allows a task or '', leases that have
-- not ended }.

local record = read_status(A.id)
if not record then return {} end
local user = record.user
local answer = { redis.call('HGET', K.status, A.id), now,
  redis.call('ZSCORE', K.leases, A.id) or '', redis.call('ZSCORE', K.delayed, A.id) or '',
  0, -1, '', redis.call('HGET', K.users, user) or '', running_of(user),
  redis.call('ZSCORE', K.held, held_member_of(A.id, record)) and 1 or 0,
  redis.call('HGET', K.limits, record.name or '') or '',
  redis.call('HGET', K.tasks, A.id) or '', 0, 0, '',
  redis.call('ZCOUNT', K.leases, string.format('(%.0f', now), '+inf') }
if record.state == 'ready' then
  answer[5] = redis.call('ZLEXCOUNT', K.backlog, '[' .. user .. '\0', '(' .. member_of(A.id, record))
  answer[6] = redis.call('ZRANK', K.ready, user) or -1
  answer[7] = redis.call('ZSCORE', K.parked, user) or ''
  local lane = redis.call('ZRANK', K.critical, user)
  if lane and SETTINGS.critical_share > 0 and string.byte(record.rank, 1) == 48 then
    answer[6] = math.min(answer[6], lane)
  end
  if SETTINGS.critical_share > 0 then
    answer[13] = redis.call('ZCARD', K.critical) - (lane and 1 or 0)
  end
  local name = record.name or ''
  local limits = decode(redis.call('HGET', K.limits, name)) or {}
  answer[14] = redis.call('ZLEXCOUNT', K.slots, '[' .. name .. '\0', '(' .. name .. '\1')
  if type(limits.rate) == 'number' and limits.rate > 0 then
    -- The same as free_at in lib/fair, which writes.
    local interval, burst = 1000 / limits.rate, math.max(1, math.floor(limits.rate * BURST_S))
    local debt = tonumber(redis.call('HGET', K.paced, name) or nil) or 0
    answer[15] = string.format('%.0f', math.min(debt, now + burst * interval) - (burst - 1) * interval)
  end
end
return answer
