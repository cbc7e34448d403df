-- End a session, if the caller has its secret.
--
-- @include credentials
-- FLAGS allow-oom
-- ARGV id      text  id of the session
-- ARGV digest  text  SHA-256 of its secret
--
-- A repeated call finds nothing to end.
--
-- Returns 1, or 0 if there is no such session.

local record = read_credential(A.id)
if not record or record.kind ~= 'session' or record.hash ~= A.digest then return 0 end
drop_credentials({ A.id })
return 1
