-- Say whose a secret is, and whether they have requests left.
--
-- @include credentials
-- FLAGS allow-oom
-- ARGV id           text   in the secret
-- ARGV digest       text   SHA-256 of the secret
-- ARGV interval_ms  float  between two requests of one credential, in the long run
-- ARGV burst        int    requests that may come at once
--
-- The client compares the digests too, in constant time, and decides by that. Here they only say
-- whose pace a request counts for: one with a wrong secret counts for nobody's.
-- Sent again after a lost reply it may count twice, which lets in less and never more.
--
-- Returns { record (JSON; '' if there is none that holds), ms to wait }.

local record = read_holding(A.id)
if not record then return { '', 0 } end
local text = redis.call('HGET', K.credentials, A.id)
if record.hash ~= A.digest then return { text, 0 } end
return { text, use_pace(A.id, tonumber(A.interval_ms), tonumber(A.burst)) }
