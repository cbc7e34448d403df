-- Take back keys, logins or sessions.
--
-- @include credentials replay
-- FLAGS allow-oom
-- ARGV op   text  random id of this operation
-- ARGV ...  their ids, at most a few hundred
--
-- What came from them holds no longer from now on; see lib/credentials.
--
-- Returns how many there were.

local before = first_answer(A.op)
if before then return tonumber(before) end
local ids, found = {}, 0
for i = FIRST, #ARGV do
  ids[#ids + 1] = ARGV[i]
  found = found + redis.call('HEXISTS', K.credentials, ARGV[i])
end
drop_credentials(ids)
return tonumber(remember(A.op, found))
