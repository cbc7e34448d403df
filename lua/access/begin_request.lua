-- Reserve a request that has an idempotency key, or return the reply to an earlier one.
--
-- @include requests
-- FLAGS allow-oom
-- ARGV digest  text  digest of the request: two requests with one key may differ
-- ARGV token   text  random id of the caller, by which a repeated call is recognised
--
-- Returns { 'new' } (it is reserved), { 'running' }, { 'other' } (the key belongs to another request), or
-- { 'done', status, headers (JSON; '' if headers or body were too long to keep), body }.

local RESERVED_MS = 60000  -- after this long its owner counts as gone

local record = read_reply()
if record then
  if record.digest ~= A.digest then return { 'other' } end
  if record.status then return { 'done', record.status, record.headers, record.body } end
  if record.owner ~= A.token and math.abs(now - record.at) < RESERVED_MS then return { 'running' } end
end
write_reply({ digest = A.digest, owner = A.token, at = now })
return { 'new' }
