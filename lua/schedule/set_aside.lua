-- Stop planning a schedule that cannot be planned, so that it does not block others.
--
-- @include fence schedules
-- FLAGS allow-oom
-- ARGV op          text  random id of this operation
-- ARGV id          text  schedule id
-- ARGV definition  text  its definition, as it was read; empty: there was none
-- ARGV plan        text  its plan, as it was read; empty: there was none
-- ARGV kind        text  'broken' (the record cannot be read) or 'cron' (there is no next fire time)
-- ARGV reason      text  what is wrong, for operators
--
-- Fence and compare as in fire: a schedule that was saved since it was read does not change.
--
-- Returns 'set_aside', or 'moved' or 'stale' (nothing changed).

local before = first_answer(A.op)
if before then return before end
if not leads() then return remember(A.op, 'stale') end
if (redis.call('HGET', K.schedules, A.id) or '') ~= A.definition
  or (redis.call('HGET', K.plan, A.id) or '') ~= A.plan then
  return remember(A.op, 'moved')
end
stop_planning(A.id, A.reason)
local revision = read_plan(A.plan)
if revision ~= '' then write_plan(A.id, revision) end
count('set_aside_' .. A.kind, 1)
return remember(A.op, 'set_aside')
