-- Say where a task is and what it waits for.
--
-- @include limits
-- FLAGS no-writes
-- KEYS leases   zset  task id -> end of lease, ms
-- KEYS delayed  zset  task id -> when it becomes ready, ms
-- ARGV id  text  the task
--
-- Returns { } for an unknown task, or { status, ms of the clock, lease end or '', due or '',
-- tasks of the user before it, users served before its user or -1, parked until or '',
-- settings of the user or '', running tasks of the user, 1 if it waits for a slot of its name or 0,
-- limits of the name or '' }.

local record = read_status(A.id)
if not record then return {} end
local user = record.user
local answer = { redis.call('HGET', K.status, A.id), now,
  redis.call('ZSCORE', K.leases, A.id) or '', redis.call('ZSCORE', K.delayed, A.id) or '',
  0, -1, '', redis.call('HGET', K.users, user) or '', running_of(user),
  redis.call('ZSCORE', K.held, held_member_of(A.id, record)) and 1 or 0,
  redis.call('HGET', K.limits, record.name or '') or '' }
if record.state == 'ready' then
  answer[5] = redis.call('ZLEXCOUNT', K.backlog, '[' .. user .. '\0', '(' .. member_of(A.id, record))
  answer[6] = redis.call('ZRANK', K.ready, user) or -1
  answer[7] = redis.call('ZSCORE', K.parked, user) or ''
  local lane = redis.call('ZRANK', K.critical, user)
  if lane and SETTINGS.critical_share > 0 and string.byte(record.rank, 1) == 48 then
    answer[6] = math.min(answer[6], lane)
  end
end
return answer
