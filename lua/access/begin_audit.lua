-- Write an audit entry before an action is carried out.
--
-- @include replay
-- FLAGS allow-oom
-- KEYS audit  zset  entry id NUL JSON of the beginning NUL JSON of the end, all scores 0
-- ARGV op    text  random id of this operation, part of the entry id
-- ARGV head  text  actor, role, via, tenant, action, target, details, JSON without NUL
--
-- An entry id is the time in 13 digits of ms, a number in 6 digits, which orders the entries of one ms, and
-- the operation id.
--
-- Returns the entry id.

local KEPT = 10000   -- entries; the oldest go first
local DROPPED = 100  -- entries in one call, at most

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
