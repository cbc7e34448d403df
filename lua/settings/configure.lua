-- Change settings of the queue.
--
-- @include replay
-- KEYS settings  hash  name -> value
-- KEYS backlog   zset  waiting tasks
-- KEYS held      zset  tasks that wait for a slot
-- KEYS delayed   zset  delayed tasks
-- KEYS leases    zset  running tasks
-- ARGV op  text  random id of this operation
-- ARGV ...    settings
-- ROW name   text  name of the setting
-- ROW value  text  its new value
--
-- Ageing is part of the rank that a task gets when it is pushed. Ranks with and without it do not compare,
-- so it can be changed only while no task is queued.
--
-- Returns 'configured', or 'not_empty' (nothing changed).

local before = first_answer(A.op)
if before then return before end
for i = FIRST, #ARGV, ROW do
  if R.name[i] == 'ageing_ms'
    and tonumber(R.value[i]) ~= tonumber(redis.call('HGET', K.settings, R.name[i]) or 0)
    and redis.call('EXISTS', K.backlog, K.held, K.delayed, K.leases) > 0 then
    return remember(A.op, 'not_empty')
  end
end
for i = FIRST, #ARGV, ROW do redis.call('HSET', K.settings, R.name[i], R.value[i]) end
mark_layout()
return remember(A.op, 'configured')
