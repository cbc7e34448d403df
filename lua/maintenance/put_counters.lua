-- Add the counters of another queue to those of this one.
--
-- @include repartition stats
-- ARGV moved   text  the name under which they were set aside
-- ARGV record  text  what was set aside
--
-- They are added only once.
--
-- Returns { 'put', 'stored' }, also if they were added before, or { 'taken over' } with nothing changed, if another
-- process moves the queue.

if not is_mover('to') then return { 'taken over' } end
if redis.call('HEXISTS', K.repartition, HAS_ARRIVED .. A.moved) == 1 then return { 'put', 'stored' } end
local parts = parts_in(A.record)
for i = 1, #parts, 2 do
  if tonumber(parts[i + 1] or nil) then count(parts[i], parts[i + 1]) end
end
redis.call('HSET', K.repartition, HAS_ARRIVED .. A.moved, 'stored')
return { 'put', 'stored' }
