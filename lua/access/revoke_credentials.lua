-- Take back keys, logins or sessions.
--
-- @include credentials replay
-- FLAGS allow-oom
-- ARGV op   text  random id of this operation
-- ARGV ...  credentials, at most a few hundred
-- ROW id   text  of the credential
--
-- What came from them holds no longer from now on; see lib/credentials.
--
-- Returns how many there were.

local before = first_answer(A.op)
if before then return tonumber(before) end
local ids, found = {}, 0
for i = FIRST, #ARGV do
  ids[#ids + 1] = R.id[i]
  found = found + redis.call('HEXISTS', K.credentials, R.id[i])
end
drop_credentials(ids)
return tonumber(remember(A.op, found))
