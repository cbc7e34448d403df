-- Begin a session with a login, which is used up by it, or with an API key, which stays.
--
-- @include credentials replay
-- FLAGS allow-oom
-- ARGV op          text  random id of this operation
-- ARGV id          text  id of the login or key
-- ARGV digest      text  SHA-256 of the secret that came with it
-- ARGV new_id      text  id of the session
-- ARGV new_digest  text  SHA-256 of the secret of the session
-- ARGV ttl_ms      int   the session ends after this long, or with its key
--
-- Digests are compared here, so that a login is checked and used up in one step, and a wrong secret does
-- not use it up. Lua compares strings by address, not byte by byte, and the bytes of a digest could not be
-- guessed one by one anyway.
--
-- The number of sessions is bounded, and the oldest make room. So a key may begin one only every so often:
-- otherwise its owner could end the sessions of everybody else.
--
-- Returns the record of the session, JSON; or, with nothing changed, '' if the secret is not valid, or '+'
-- and the ms to wait.

local EVERY_MS, AT_ONCE = 60000, 20  -- between two sessions of one key, and at once: 740 in twelve hours

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
