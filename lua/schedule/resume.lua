-- Resume a schedule whose pause has ended.
--
-- @include fence schedules moments
-- ARGV op       text  random id of this operation
-- ARGV id       text  schedule id
-- ARGV plan     text  its plan, as it was read
-- ARGV next_ms  text  the next fire time, ms; empty: there is none
-- ARGV due_ms   text  when to act on that fire time, ms
-- ARGV noted    text  fire times that passed during the pause (see lib/moments), or empty
-- ARGV reason   text  why it is completed, if there is no next fire time
--
-- Fence and compare as in fire: a schedule that was saved since it was read does not change.
--
-- Returns 'resumed', 'completed' (there is no next fire time), or 'moved' or 'stale' (nothing changed).

local before = first_answer(A.op)
if before then return before end
if not leads() then return remember(A.op, 'stale') end
local state = state_of(A.id)
if redis.call('HGET', K.plan, A.id) ~= A.plan or not state['until'] then
  return remember(A.op, 'moved')
end
state.active, state.reason, state.since, state.failures = true, nil, now, nil
end_pause(state)
write_state(A.id, state)
if A.noted ~= '' then note_moments(A.id, A.noted) end
if A.next_ms == '' then
  stop_planning(A.id, A.reason, true)
  return remember(A.op, 'completed')
end
write_plan(A.id, revision_of(A.id), A.next_ms)
redis.call('ZADD', K.due, A.due_ms, A.id)
return remember(A.op, 'resumed')
