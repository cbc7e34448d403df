-- Look up the credential of a request, and count the request against its rate.
--
-- @include credentials
-- FLAGS allow-oom
-- ARGV id           text   credential id, from the secret
-- ARGV digest       text   SHA-256 of the secret
-- ARGV interval_ms  float  ms between two requests of one credential, on average
-- ARGV burst        int    requests that may come at once
--
-- The client compares the digests in constant time, and that decides. Here they decide only whether the
-- request counts: one with a wrong secret counts for nobody.
-- A call that is repeated after a lost reply may count twice. That can only lower the rate.
--
-- Returns { record (JSON; '' if there is no valid one), ms to wait }.

local record = read_holding(A.id)
if not record then return { '', 0 } end
local text = redis.call('HGET', K.credentials, A.id)
if record.hash ~= A.digest then return { text, 0 } end
return { text, use_pace(A.id, tonumber(A.interval_ms), tonumber(A.burst)) }
