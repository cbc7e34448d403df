-- Give up a reservation: the request was not done.
--
-- @include requests
-- FLAGS allow-oom
-- ARGV token  text  of the reservation; empty: whosoever it is
--
-- An answer that is kept stays. Repeated, it finds nothing to give up.
--
-- Returns 1, or 0 if there is no such reservation.

local record = read_reply()
if not record or record.status or (A.token ~= '' and record.owner ~= A.token) then return 0 end
drop_reply()
return 1
