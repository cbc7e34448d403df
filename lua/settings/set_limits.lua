-- Change the limits that hold for all tasks of a name, over all workers.
--
-- @include limits replay
-- ARGV op      text  random id of this operation
-- ARGV task_name  text  name of the tasks
-- ARGV limits  text  JSON: slots, rate, timeout_ms; empty: none
--
-- An operator's word: it stands over what workers declare until it is taken back.
--
-- Returns 'set'.

local before = first_answer(A.op)
if before then return before end
if A.limits == '' then
  redis.call('HDEL', K.limits, A.task_name)
  redis.call('HDEL', K.paced, A.task_name)
else
  redis.call('HSET', K.limits, A.task_name, A.limits)
  -- What is owed from a lower rate is cut down now, and not when a worker next comes to it.
  local rate = parse_limits(A.limits).rate
  if rate then free_at(K.paced, A.task_name, rate) end
end
wake_worker()
kinds.wake(A.task_name)
mark_layout()
return remember(A.op, 'set')
