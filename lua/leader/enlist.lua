-- Note that a scheduler is alive and which partitions it leads, and return which others are alive.
--
-- @include json time
-- FLAGS allow-oom
-- KEYS schedulers  hash  token of a scheduler -> JSON: scheduler, leads, since and ends (ms), term (ms)
-- ARGV token      text  random token of the caller
-- ARGV scheduler  text  id of the caller, for operators
-- ARGV term_ms    int   how long the caller counts as alive; 0: it stops
-- ARGV leads      text  the partitions that it leads: their numbers, with commas
--
-- Called in the home partition. This only spreads work: who fires is decided in each partition, see lead. A
-- repeated call gives the same answer. A scheduler that was not heard of in time begins anew (`since`).
--
-- Returns the time in ms, then for each scheduler that is alive: token, since, ends, leads.

local term = tonumber(A.term_ms)
local answer = { now }
local gone, mine = {}, nil
local flat = redis.call('HGETALL', K.schedulers)
for i = 1, #flat, 2 do
  local record = decode(flat[i + 1]) or {}
  local ends, length = tonumber(record.ends) or 0, tonumber(record.term) or 0
  -- One that ends later than it can was written before the clock was set back.
  local is_alive = ends > now and ends <= now + 2 * length and tonumber(record.since) ~= nil
  if flat[i] == A.token then
    mine = is_alive and record or nil
  elseif is_alive then
    answer[#answer + 1] = flat[i]
    answer[#answer + 1] = record.since
    answer[#answer + 1] = ends
    answer[#answer + 1] = type(record.leads) == 'string' and record.leads or ''
  elseif #gone < 100 then
    gone[#gone + 1] = flat[i]
  end
end
if term > 0 then
  local since = mine and mine.since or now
  local record = { scheduler = A.scheduler, leads = A.leads, since = since, ends = now + term, term = term }
  redis.call('HSET', K.schedulers, A.token, cjson.encode(record))
  answer[#answer + 1] = A.token
  answer[#answer + 1] = since
  answer[#answer + 1] = now + term
  answer[#answer + 1] = A.leads
else
  gone[#gone + 1] = A.token
end
if #gone > 0 then redis.call('HDEL', K.schedulers, unpack(gone)) end
return answer
