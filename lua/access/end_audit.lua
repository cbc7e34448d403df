-- Complete an audit entry with the outcome of the action.
--
-- FLAGS allow-oom
-- KEYS audit  zset  entry id NUL JSON of the beginning NUL JSON of the end, all scores 0
-- ARGV entry  text  entry id
-- ARGV tail   text  outcome, error, details, JSON without NUL
--
-- The first end stays; writing the same one again changes nothing.
--
-- Returns 1; or 0 if the entry is gone or has another end (nothing changed).

local member = redis.call('ZRANGEBYLEX', K.audit, '[' .. A.entry .. '\0', '(' .. A.entry .. '\1',
  'LIMIT', 0, 1)[1]
if not member then return 0 end
local start, tail = string.match(member, '^(%Z*%z%Z*%z)(%Z*)$')
if tail == A.tail then return 1 end
if tail ~= '' then return 0 end
redis.call('ZREM', K.audit, member)
redis.call('ZADD', K.audit, 0, start .. A.tail)
return 1
