-- Say where a task is and what it waits for.
--
-- @include fair
-- FLAGS no-writes
-- KEYS leases   zset  task id -> end of lease, ms
-- KEYS delayed  zset  task id -> when it becomes ready, ms
-- ARGV id  text  the task
--
-- Returns { } for an unknown task, or { status, ms of the clock, lease end or '', due or '',
-- tasks of the user before it, users served before its user or -1, parked until or '',
-- settings of the user or '', running tasks of the user }.

local record = read_status(A.id)
if not record then return {} end
local user = record.user
local answer = { redis.call('HGET', K.status, A.id), now,
  redis.call('ZSCORE', K.leases, A.id) or '', redis.call('ZSCORE', K.delayed, A.id) or '',
  0, -1, '', redis.call('HGET', K.users, user) or '', running_of(user) }
if record.state == 'ready' then
  local member = user .. '\0' .. record.rank .. '\0' .. A.id
  answer[5] = redis.call('ZLEXCOUNT', K.backlog, '[' .. user .. '\0', '(' .. member)
  answer[6] = redis.call('ZRANK', K.ready, user) or -1
  answer[7] = redis.call('ZSCORE', K.parked, user) or ''
  local lane = redis.call('ZRANK', K.critical, user)
  if lane and SETTINGS.critical_share > 0 and string.byte(record.rank, 1) == 48 then
    answer[6] = math.min(answer[6], lane)
  end
end
return answer
