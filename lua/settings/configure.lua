-- Change settings of the queue.
--
-- @include replay
-- KEYS settings  hash  name -> value
-- KEYS backlog   zset  waiting tasks
-- KEYS held      zset  tasks that wait for a slot
-- KEYS delayed   zset  delayed tasks
-- KEYS leases    zset  running tasks
-- ARGV op  text  random id of this operation
-- ARGV ...  settings, two each: name, value
--
-- Ageing is part of the rank that a task gets when it is pushed: ranks of two kinds do not compare,
-- so that it can be changed only while no task is queued.
--
-- Returns 'configured', or 'not_empty' (nothing was changed).

local before = first_answer(A.op)
if before then return before end
for i = FIRST, #ARGV, 2 do
  if ARGV[i] == 'ageing_ms'
    and tonumber(ARGV[i + 1]) ~= tonumber(redis.call('HGET', K.settings, ARGV[i]) or 0)
    and redis.call('EXISTS', K.backlog, K.held, K.delayed, K.leases) > 0 then
    return remember(A.op, 'not_empty')
  end
end
for i = FIRST, #ARGV, 2 do redis.call('HSET', K.settings, ARGV[i], ARGV[i + 1]) end
mark_layout()
return remember(A.op, 'configured')
