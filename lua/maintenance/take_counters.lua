-- Set the counters of a queue aside, to be added to those of another queue.
--
-- @include repartition
-- FLAGS allow-oom
-- KEYS stats  hash  counter -> value
--
-- A repeated call returns what is set aside already.
--
-- Returns { 'taken', 0, 0, name, record }, without them if there are no counters; or { 'taken over' } with nothing
-- changed, if another process moves the queue.

if not is_mover('from') then return { 'taken over' } end
local before = moving_away()
if #before > 0 then return { 'taken', 0, 0, unpack(before) } end
local counters = redis.call('HGETALL', K.stats)
if #counters > 0 then
  set_aside('cstats', counters)
  redis.call('UNLINK', K.stats)
end
return { 'taken', 0, 0, unpack(moving_away()) }
