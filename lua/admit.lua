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
local interval, burst = tonumber(A.interval_ms), tonumber(A.burst)
local most = now + burst * interval
local free = tonumber(redis.call('HGET', K.api_pace, A.id) or nil) or now
if not (free > now) then free = now end
if free > most then
  -- The clock was set back, or the pace was another: nobody waits for longer than for one request.
  free = most
  redis.call('HSET', K.api_pace, A.id, text_of(free))
end
local wait = free + interval - most
if wait > 0.001 then return { text, math.ceil(wait) } end
redis.call('HSET', K.api_pace, A.id, text_of(free + interval))
return { text, 0 }
