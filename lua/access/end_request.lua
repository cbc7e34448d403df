-- Store the reply to a reserved request.
--
-- @include requests
-- FLAGS allow-oom
-- ARGV token    text  token of the reservation; empty: any
-- ARGV status   int   HTTP status
-- ARGV headers  text  JSON
-- ARGV body     text  may be empty
--
-- The first reply stays; storing the same one again changes nothing.
--
-- Returns 1; or 0 if there is no such reservation, or another reply is stored (nothing changed).

local record = read_reply()
if not record or (A.token ~= '' and record.owner ~= A.token) then return 0 end
local status = tonumber(A.status)
if record.status then
  local is_same = record.status == status and record.headers == A.headers and record.body == A.body
  return is_same and 1 or 0
end
record.status, record.headers, record.body = status, A.headers, A.body
write_reply(record)
return 1
