-- How long runs that have ended had waited for a worker.
--
-- @include time outcomes
-- KEYS runs    zset  <kind> <value> NUL <end, ms> <outcome> <task id>, all scores 0: ended runs
-- KEYS status  hash  task id -> JSON
--
-- The numbers are taken from the texts of the records: to decode them would cost ten times as much.
-- In JSON a quote inside a value has a backslash before it, so that a field is found nowhere else.

local OUTCOMES = { 'succeeded', 'failed', 'timed_out', 'cancelled' }

-- A moment as the index of runs has it.
local function end_text(ms)
  return string.format('%013.0f', math.max(0, ms))
end

-- The newest runs of a kind and value that ended at a moment or later: their members.
local function newest_runs(place, since, most)
  return redis.call('ZREVRANGEBYLEX', K.runs, '(' .. place .. '\1', '[' .. place .. '\0' .. end_text(since),
    'LIMIT', 0, most)
end

-- The runs of a kind and value that ended in [since, before), in that order: their members.
local function runs_between(place, since, before)
  return redis.call('ZRANGEBYLEX', K.runs, '[' .. place .. '\0' .. end_text(since),
    '(' .. place .. '\0' .. end_text(before))
end

-- How many runs of a kind and value ended in [since, before), or from then on.
local function count_runs(place, since, before)
  return redis.call('ZLEXCOUNT', K.runs, '[' .. place .. '\0' .. end_text(since),
    before and '(' .. place .. '\0' .. end_text(before) or '(' .. place .. '\1')
end

-- The number behind a name in a record; nil if there is none. To find a plain text first is ten times
-- as fast as to look for a pattern.
local function number_in(text, name)
  local _, last = string.find(text, name, 1, true)
  return last and tonumber(string.match(text, '^%d+', last + 1))
end

-- How long each run of some members had waited before its last attempt, ms, in order of size.
local function waits_of(members)
  local ids, waits = {}, {}
  for _, member in ipairs(members) do ids[#ids + 1] = string.match(member, '%z%d+%a(.*)$') end
  if #ids == 0 then return waits end
  for _, text in ipairs(redis.call('HMGET', K.status, unpack(ids))) do
    local claimed, due = number_in(text or '', '"claimed":'), number_in(text or '', '"due":')
    if claimed and due then waits[#waits + 1] = math.max(0, claimed - due) end
  end
  table.sort(waits)
  return waits
end

-- The value that so large a part of some sorted ones does not exceed; nil of none.
local function percentile(sorted, part)
  return sorted[math.max(1, math.ceil(part * #sorted))]
end
