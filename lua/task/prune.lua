-- Delete ended tasks that are older than a given time, before their retention is over.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op         text  random id of this operation
-- ARGV before_ms  int   delete tasks that ended before this time
-- ARGV limit      int   at most this many finished tasks, and as many dead letters
--
-- The caller repeats the call until it returns 0.
--
-- Returns the number of tasks deleted.

local function prune(key)
  local ids = redis.call('ZRANGE', key, '-inf', '(' .. A.before_ms, 'BYSCORE', 'LIMIT', 0, A.limit)
  return #ids > 0 and drop_tasks(key, ids) or 0
end

local before = first_answer(A.op)
if before then return tonumber(before) end
return tonumber(remember(A.op, prune(K.ended) + prune(K.dead)))
