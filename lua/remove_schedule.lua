-- Forget a schedule. Tasks that it has fired stay.
--
-- @include plans
-- FLAGS allow-oom
-- ARGV op  text  random id of this operation
-- ARGV id  text  the schedule
--
-- What is left of a schedule whose definition is gone is forgotten too.
--
-- Returns 'removed' or 'absent'.

local before = first_answer(A.op)
if before then return before end
if redis.call('HEXISTS', K.schedules, A.id) == 0 and redis.call('HEXISTS', K.broken, A.id) == 0 then
  return remember(A.op, 'absent')
end
local user = state_of(A.id).user
redis.call('HDEL', K.schedules, A.id)
if user then redis.call('ZREM', K.schedule_index, user .. '\0' .. A.id) end
redis.call('HDEL', K.plan, A.id)
redis.call('ZREM', K.due, A.id)
redis.call('HDEL', K.schedule_state, A.id)
redis.call('HDEL', K.broken, A.id)
return remember(A.op, 'removed')
