-- Reserve a request for whoever came first with its key, or say what became of it.
--
-- @include requests
-- FLAGS allow-oom
-- ARGV digest  text  of the request: two with the same key may differ
-- ARGV token   text  random, of the one who asks; sent again, it is recognised by it
--
-- Returns { 'new' } (it is reserved), { 'running' }, { 'other' } (the key is of another request), or
-- { 'done', status, headers (JSON; '': they were too long, or the body was), body }.

local RESERVED_MS = 60000  -- after so long its owner counts as gone

local record = read_reply()
if record then
  if record.digest ~= A.digest then return { 'other' } end
  if record.status then return { 'done', record.status, record.headers, record.body } end
  if record.owner ~= A.token and math.abs(now - record.at) < RESERVED_MS then return { 'running' } end
end
write_reply({ digest = A.digest, owner = A.token, at = now })
return { 'new' }
