-- Forget a schedule that has left, now that another partition has it: the last step of its move.
--
-- @include json replay
-- FLAGS allow-oom
-- KEYS moving  hash  schedule id -> JSON: a schedule that has left
-- ARGV op    text  random id of this operation
-- ARGV id    text  schedule id
-- ARGV move  text  id of the move: the schedule may be on its way again
--
-- Returns 'ended', or 'absent' if the move was ended before (nothing changed).

local before = first_answer(A.op)
if before then return before end
local record = decode(redis.call('HGET', K.moving, A.id))
if not record or record.move ~= A.move then return remember(A.op, 'absent') end
redis.call('HDEL', K.moving, A.id)
return remember(A.op, 'ended')
