-- Make a key, or a login that can be turned into a session once.
--
-- @include credentials replay
-- FLAGS allow-oom
-- ARGV op      text  random id of this operation
-- ARGV id      text  of the new credential
-- ARGV record  text  JSON: kind, name, role, tenant, by, hash
-- ARGV ttl_ms  int   it ends after so long; empty: when it is revoked
-- ARGV source  text  the key or session that the one who asks came with, or empty
--
-- What has ended is dropped here, a part of it each time: its end is in its record and decides.
-- A login holds only while the key of its maker does, or their session if that has no key, and so
-- does the session that it becomes.
--
-- Returns the record, JSON; or 'full' (there are too many keys) or 'gone' (the source does not hold).

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
