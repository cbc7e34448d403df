-- Delete a schedule. Its tasks stay.
--
-- @include schedules moments changes tenant_schedules
-- FLAGS allow-oom
-- ARGV op        text  random id of this operation
-- ARGV id        text  schedule id
-- ARGV revision  text  the revision that it must have; empty: any
--
-- Leftover records of a schedule without a definition are also deleted.
--
-- Returns 'removed', 'absent', or 'stale' if it has another revision (nothing changed).

local before = first_answer(A.op)
if before then return before end
if redis.call('HEXISTS', K.schedules, A.id) == 0 and redis.call('HEXISTS', K.broken, A.id) == 0 then
  return remember(A.op, 'absent')
end
if A.revision ~= '' and revision_of(A.id) ~= A.revision then return remember(A.op, 'stale') end
local state, name = state_of(A.id), name_in(redis.call('HGET', K.schedules, A.id))
redis.call('HDEL', K.schedules, A.id)
if state.user then redis.call('ZREM', K.schedule_index, state.user .. '\0' .. A.id) end
leave_tenant(A.id, state)
redis.call('HDEL', K.plan, A.id)
redis.call('ZREM', K.due, A.id)
redis.call('HDEL', K.schedule_state, A.id)
redis.call('HDEL', K.broken, A.id)
name_schedule(A.id, name, nil)
for _, key in ipairs({ K.moments, K.changes }) do
  redis.call('ZREMRANGEBYLEX', key, '[' .. A.id .. '\0', '(' .. A.id .. '\1')
end
return remember(A.op, 'removed')
