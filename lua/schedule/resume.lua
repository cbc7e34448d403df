-- Let a schedule that was paused until a moment go on.
--
-- @include fence schedules moments
-- ARGV op       text  random id of this operation
-- ARGV id       text  the schedule
-- ARGV plan     text  as it was read
-- ARGV next_ms  text  its next moment, or empty: it has none
-- ARGV due_ms   text  when to act then
-- ARGV noted    text  moments that passed while it was paused (see lib/moments), or empty
-- ARGV reason   text  that it is completed, when there is no next moment
--
-- Fence and compare as in fire: what has been saved anew since it was read is left alone.
--
-- Returns 'resumed', 'completed' (it has no next moment), or 'moved' or 'stale' (these changed nothing).

local before = first_answer(A.op)
if before then return before end
if not leads() then return remember(A.op, 'stale') end
local state = state_of(A.id)
if redis.call('HGET', K.plan, A.id) ~= A.plan or not state['until'] then
  return remember(A.op, 'moved')
end
state.active, state.reason, state.since, state.failures = true, nil, now, nil
state.paused, state.note, state.by, state['until'] = nil, nil, nil, nil
write_state(A.id, state)
if A.noted ~= '' then note_moments(A.id, A.noted) end
if A.next_ms == '' then
  stop_planning(A.id, A.reason, true)
  return remember(A.op, 'completed')
end
write_plan(A.id, revision_of(A.id), A.next_ms)
redis.call('ZADD', K.due, A.due_ms, A.id)
return remember(A.op, 'resumed')
