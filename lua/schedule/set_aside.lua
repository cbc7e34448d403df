-- Take a schedule that cannot be planned out of the plan, so that it never stands in others' way.
--
-- @include fence schedules
-- FLAGS allow-oom
-- ARGV op          text  random id of this operation
-- ARGV id          text  the schedule
-- ARGV definition  text  as it was read; empty: there was none
-- ARGV plan        text  as it was read; empty: there was none
-- ARGV kind        text  'broken' (the record cannot be read) or 'cron' (it has no next moment)
-- ARGV reason      text  for whoever has to mend it
--
-- Fence and compare as in fire: what has been saved anew since it was read is left alone.
--
-- Returns 'set_aside', 'moved' or 'stale' (the last two changed nothing).

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
