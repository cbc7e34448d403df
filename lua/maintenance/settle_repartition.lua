-- Forget records that were moved: those that the other queue has, or notes of arrivals.
--
-- @include repartition
-- FLAGS allow-oom
-- ARGV ...  fields, a few hundred at most
-- ROW field  text  a field of `repartition`
--
-- Returns 'settled', or 'taken over' with nothing changed, if another process moves the queue.

local move = read_move()
if not move or move.token ~= A.token then return 'taken over' end
for i = FIRST, #ARGV do
  if R.field[i] ~= '' then redis.call('HDEL', K.repartition, R.field[i]) end
end
return 'settled'
