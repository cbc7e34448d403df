-- Store a schedule that has left another partition: the second step of its move.
--
-- @include schedules moments changes tenant_schedules
-- ARGV op      text  id of the move
-- ARGV id      text  schedule id
-- ARGV record  text  JSON, as move_out made it: move, to, and what the partition had of the schedule (definition,
--                    plan, state, broken, due, moments, changes)
--
-- Returns 'moved', or 'exists' if there is a schedule with that id (nothing changed).

local before = first_answer(A.op)
if before then return before end
if redis.call('HEXISTS', K.schedules, A.id) == 1 then return remember(A.op, 'exists') end

local record = decode(A.record)
local state, name = read_state(record.state), name_in(record.definition)
local wake = record.due ~= '' and tonumber(record.due) < soonest_due()
redis.call('HSET', K.schedules, A.id, record.definition)
if record.plan ~= '' then redis.call('HSET', K.plan, A.id, record.plan) end
if record.state ~= '' then redis.call('HSET', K.schedule_state, A.id, record.state) end
if record.broken ~= '' then redis.call('HSET', K.broken, A.id, record.broken) end
if state.user then
  redis.call('ZADD', K.schedule_index, 0, state.user .. '\0' .. A.id)
  enter_tenant(A.id, state)
end
name_schedule(A.id, nil, name)
for _, member in ipairs(record.moments) do redis.call('ZADD', K.moments, 0, member) end
for _, member in ipairs(record.changes) do redis.call('ZADD', K.changes, 0, member) end
if record.due ~= '' then redis.call('ZADD', K.due, record.due, A.id) end
if wake then wake_scheduler() end
mark_layout()
return remember(A.op, 'moved')
