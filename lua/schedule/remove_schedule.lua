-- Delete a schedule. Its tasks stay.
--
-- @include erase
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
erase_schedule(A.id)
return remember(A.op, 'removed')
