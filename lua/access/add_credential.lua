-- Create an API key, or a login that can be exchanged for a session once.
--
-- @include credentials replay
-- FLAGS allow-oom
-- ARGV op      text  random id of this operation
-- ARGV id      text  id of the new credential
-- ARGV record  text  kind, name, role, tenant, by, hash, JSON
-- ARGV ttl_ms  int   it expires after this long; empty: never
-- ARGV source  text  the key or session of the caller, or empty
--
-- Expired credentials are dropped here, some in each call; the time in the record decides.
-- A login is valid only while the key of its creator is, or their session if that has no key. The same
-- holds for the session that it becomes.
--
-- Returns the record, JSON; or 'full' (there are too many keys) or 'gone' (the source is not valid).

local before = first_answer(A.op)
if before then return before end
local source = A.source ~= '' and read_holding(A.source)
if A.source ~= '' and not source then return remember(A.op, 'gone') end
make_room()
local record = cjson.decode(A.record)
if record.kind == 'key' and redis.call('ZCARD', K.api_keys) >= KEY_LIMIT then
  return remember(A.op, 'full')
end
local ends = A.ttl_ms ~= '' and now + tonumber(A.ttl_ms) or nil
if source then record.parent = source.parent or A.source end
return remember(A.op, write_credential(A.id, record, ends))
