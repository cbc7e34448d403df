-- Keep the answer to a request that was reserved.
--
-- @include requests
-- FLAGS allow-oom
-- ARGV token    text  of the reservation; empty: whosoever it is
-- ARGV status   int   of the answer
-- ARGV headers  text  JSON
-- ARGV body     text  may be empty
--
-- The first answer stands; the same one once more changes nothing.
--
-- Returns 1; or 0 if it is not reserved, or is another's (nothing was changed).

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
