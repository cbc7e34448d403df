-- Write down how it went.
--
-- FLAGS allow-oom
-- KEYS audit  zset  id of the entry NUL JSON of its beginning NUL JSON of its end; scores 0
-- ARGV entry  text  its id
-- ARGV tail   text  JSON: outcome, error, details; without NUL
--
-- The first end stands; the same one once more changes nothing.
--
-- Returns 1; or 0 if the entry is gone or has another end (nothing was changed).

local member = redis.call('ZRANGEBYLEX', K.audit, '[' .. A.entry .. '\0', '(' .. A.entry .. '\1',
  'LIMIT', 0, 1)[1]
if not member then return 0 end
local start, tail = string.match(member, '^(%Z*%z%Z*%z)(%Z*)$')
if tail == A.tail then return 1 end
if tail ~= '' then return 0 end
redis.call('ZREM', K.audit, member)
redis.call('ZADD', K.audit, 0, start .. A.tail)
return 1
