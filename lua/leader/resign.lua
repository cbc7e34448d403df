-- Give up leadership.
--
-- @include fence replay
-- FLAGS allow-oom
-- ARGV op  text  random id of this operation
--
-- Returns 'resigned', or 'stale' if the caller does not lead (nothing changed).

local before = first_answer(A.op)
if before then return before end
if not leads() then return remember(A.op, 'stale') end
redis.call('DEL', K.leader)
return remember(A.op, 'resigned')
