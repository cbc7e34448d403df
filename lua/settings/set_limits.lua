-- Change the limits of all tasks of a name, over all workers.
--
-- @include limits replay
-- ARGV op      text  random id of this operation
-- ARGV task_name  text  name of the tasks
-- ARGV limits  text  slots, rate, timeout_ms, JSON; empty: no limits
--
-- These limits take precedence over those that workers declare, until they are removed.
--
-- Returns 'set'.

local before = first_answer(A.op)
if before then return before end
if A.limits == '' then
  redis.call('HDEL', K.limits, A.task_name)
  redis.call('HDEL', K.paced, A.task_name)
else
  redis.call('HSET', K.limits, A.task_name, A.limits)
  -- Reduce the debt from a lower rate now, not when the next task of the name is claimed.
  local rate = parse_limits(A.limits).rate
  if rate then free_at(K.paced, A.task_name, rate) end
end
wake_worker()
kinds.wake(A.task_name)
mark_layout()
return remember(A.op, 'set')
