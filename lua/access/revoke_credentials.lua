-- Revoke API keys, logins or sessions.
--
-- @include credentials replay
-- FLAGS allow-oom
-- ARGV op   text  random id of this operation
-- ARGV ...  credentials, at most a few hundred
-- ROW id   text  credential id
--
-- Credentials that came from them are no longer valid; see lib/credentials.
--
-- Returns how many existed.

local before = first_answer(A.op)
if before then return tonumber(before) end
local ids, found = {}, 0
for i = FIRST, #ARGV do
  ids[#ids + 1] = R.id[i]
  found = found + redis.call('HEXISTS', K.credentials, R.id[i])
end
drop_credentials(ids)
return tonumber(remember(A.op, found))
