-- Give starts of a limit whose rate all partitions share, in its home.
--
-- @include replay
-- @lazy gates
-- FLAGS allow-oom
-- KEYS permits  hash  \6 gate -> JSON: partition -> since when it waits, as a number that grows, and when it was told to
--                     ask again, ms; '' -> the latest number
-- ARGV op         text  random id of this operation
-- ARGV gate       text  the limit; see lib/gates
-- ARGV partition  int   which asks
-- ARGV first      num   cost of the task that is to start next; 0: none
-- ARGV most       num   cost of all that may start, about
-- ARGV more       num   what attempts have cost more than they declared
--
-- Who has waited longest is served first: others are put off until shortly after it was to ask again.
--
-- Returns { units of cost that may start, ms until more may }, both as text.

local GRACE = 250         -- ms for a partition to ask again, at most
local LONGEST = 86400000  -- a time that is so far ahead was written before the clock was set back

local before = first_answer(A.op)
if before then return cjson.decode(before) end
local limits = gates().limits_of(A.gate)
local grace = limits and limits.rate and math.min(GRACE, 1000 / limits.rate) or GRACE
local turns, mine, put_off = {}, nil, nil
for number, turn in pairs(decode(redis.call('HGET', K.permits, '\6' .. A.gate)) or {}) do
  if number == A.partition then mine = turn end
  if now <= turn[2] + grace and turn[2] < now + LONGEST then turns[number] = turn end
end
for number, turn in pairs(turns) do
  if number ~= A.partition and not (mine and mine[1] < turn[1]) then
    put_off = math.max(put_off or 0, turn[2] + grace - now)
  end
end
local first = put_off and 0 or tonumber(A.first)
local answer = gates().give_starts(A.gate, first, tonumber(A.most), tonumber(A.more))
if put_off then answer[2] = text_of(math.ceil(put_off) + 1) end
if tonumber(answer[1]) > 0 or tonumber(A.first) == 0 then
  turns[A.partition] = nil
else
  local since = mine and mine[1] or redis.call('HINCRBY', K.permits, '', 1)
  turns[A.partition] = { since, now + tonumber(answer[2]) }
end
if next(turns) then
  redis.call('HSET', K.permits, '\6' .. A.gate, cjson.encode(turns))
elseif redis.call('HEXISTS', K.permits, '\6' .. A.gate) == 1 then
  redis.call('HDEL', K.permits, '\6' .. A.gate)
end
remember(A.op, cjson.encode(answer))
return answer
