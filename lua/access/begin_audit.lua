-- Write down what somebody is about to do.
--
-- @include replay
-- FLAGS allow-oom
-- KEYS audit  zset  id of the entry NUL JSON of its beginning NUL JSON of its end; scores 0
-- ARGV op    text  random id of this operation, a part of the entry's
-- ARGV head  text  JSON: actor, role, via, tenant, action, target, details; without NUL
--
-- An id is the time in 13 digits of ms, a number in 6 digits, which keeps those of one ms in order,
-- and the operation.
--
-- Returns the id of the entry.

local KEPT = 10000   -- the oldest go first
local DROPPED = 100  -- at most so many in one call

local before = first_answer(A.op)
if before then return before end
local moment = string.format('%013d-', now)
local last = redis.call('ZREVRANGEBYLEX', K.audit, '(' .. moment .. ':', '[' .. moment, 'LIMIT', 0, 1)[1]
local number = last and tonumber(string.match(last, '^%d%d%d%d%d%d', #moment + 1)) or -1
local entry = moment .. string.format('%06d-', math.min(number + 1, 999999)) .. A.op
redis.call('ZADD', K.audit, 0, entry .. '\0' .. A.head .. '\0')
local over = math.min(redis.call('ZCARD', K.audit) - KEPT, DROPPED)
if over > 0 then redis.call('ZREMRANGEBYRANK', K.audit, 0, over - 1) end
return remember(A.op, entry)
