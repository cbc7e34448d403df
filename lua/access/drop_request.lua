-- Give up the reservation of a request that was not carried out.
--
-- @include requests
-- FLAGS allow-oom
-- ARGV token  text  token of the reservation; empty: any
--
-- A reply that is stored stays. A repeated call finds nothing to give up.
--
-- Returns 1, or 0 if there is no such reservation.

local record = read_reply()
if not record or record.status or (A.token ~= '' and record.owner ~= A.token) then return 0 end
drop_reply()
return 1
