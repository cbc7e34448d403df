-- Begin a session with a login, which is used up by it, or with a key, which stays.
--
-- @include credentials replay
-- FLAGS allow-oom
-- ARGV op          text  random id of this operation
-- ARGV id          text  of the login or key
-- ARGV digest      text  SHA-256 of the secret that came with it
-- ARGV new_id      text  of the session
-- ARGV new_digest  text  SHA-256 of its secret
-- ARGV ttl_ms      int   it ends after so long, or with its key
--
-- Digests are compared here, so that a login is looked at and used up in one step, and a wrong
-- secret does not use it up. Lua compares two strings by where they are and not byte by byte; nor
-- could the bytes of a digest be guessed one after the other.
--
-- Sessions are many but not without number, and the oldest make room: a key begins one every so often,
-- or whoever has one could end those of all others.
--
-- Returns the record of the session, JSON; or '', or '+' and ms to wait (nothing was changed).

local EVERY_MS, AT_ONCE = 60000, 20  -- of the sessions of one key: 740 in twelve hours

local before = first_answer(A.op)
if before then return before end
local found = read_holding(A.id)
if not found or found.hash ~= A.digest or (found.kind ~= 'login' and found.kind ~= 'key') then
  return remember(A.op, '')
end
local wait = found.kind == 'key' and use_pace('+' .. A.id, EVERY_MS, AT_ONCE) or 0
if wait > 0 then return remember(A.op, '+' .. wait) end
local parent = found.kind == 'key' and A.id or found.parent
local source = parent and read_credential(parent)
local ends = now + tonumber(A.ttl_ms)
if source and source.ends then ends = math.min(ends, source.ends) end
if found.kind == 'login' then drop_credentials({ A.id }) end
make_room()
return remember(A.op, write_credential(A.new_id, {
  kind = 'session', name = found.name, role = found.role, tenant = found.tenant, by = found.by,
  hash = A.new_digest, parent = parent,
}, ends))
