-- Drop ended tasks that are older than a moment, before their retention is over.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op         text  random id of this operation
-- ARGV before_ms  int   those that ended before this moment
-- ARGV limit      int   at most so many finished ones, and so many dead letters
--
-- The caller calls it until nothing is left.
--
-- Returns how many were dropped.

local function prune(key)
  local ids = redis.call('ZRANGE', key, '-inf', '(' .. A.before_ms, 'BYSCORE', 'LIMIT', 0, A.limit)
  return #ids > 0 and drop(key, ids) or 0
end

local before = first_answer(A.op)
if before then return tonumber(before) end
return tonumber(remember(A.op, prune(K.ended) + prune(K.dead)))
