-- Forget a schedule. Tasks that it has fired stay.
--
-- @include plans
-- FLAGS allow-oom
-- ARGV op  text  random id of this operation
-- ARGV id  text  the schedule
--
-- Returns 'removed' or 'absent'.

local before = first_answer(A.op)
if before then return before end
if redis.call('HDEL', K.schedules, A.id) == 0 then return remember(A.op, 'absent') end
local user = state_of(A.id).user
if user then redis.call('ZREM', K.schedule_index, user .. '\0' .. A.id) end
redis.call('HDEL', K.plan, A.id)
redis.call('ZREM', K.due, A.id)
redis.call('HDEL', K.schedule_state, A.id)
redis.call('HDEL', K.broken, A.id)
return remember(A.op, 'removed')
