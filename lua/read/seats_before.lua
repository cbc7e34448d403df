-- Count who is served by a partition before those of other partitions. One bounded read.
--
-- @include fair
-- @lazy level
-- FLAGS no-writes
-- KEYS ready  zset  seats in the ring of the default pool that may be served -> start tag
-- ARGV ...    levels at which those of other partitions are served; see lib/level
-- ROW level   text  a level
--
-- Returns { the level at which the default pool is served next, or '' if nothing waits or nothing waited before; for
-- each level how many seats of the default pool are served before }.

local offset, rests = level().of_ring('')
local first = not rests and level().first(K.ready, '')
local answer = { first and string.format('%.17g', first + offset) or '' }
for i = FIRST, #ARGV do
  local tag = string.format('(%.17g', tonumber(R.level[i]) - offset)
  answer[#answer + 1] = redis.call('ZCOUNT', K.ready, '-inf', tag)
end
return answer
