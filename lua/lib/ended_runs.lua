-- Read the index of ended runs, and how long runs had waited for a worker.
--
-- @include time outcomes
-- KEYS runs    zset  <kind> <value> NUL <end, ms> <outcome> <task id>, all scores 0: ended runs
-- KEYS status  hash  task id -> JSON
--
-- Numbers are read from the texts of records, because decoding them would cost ten times as much. JSON
-- escapes quotes inside values, so the name of a field matches nothing else.

local OUTCOMES = { 'succeeded', 'failed', 'timed_out', 'cancelled' }

-- A time in the format of the index.
local function end_text(ms)
  return string.format('%013.0f', math.max(0, ms))
end

-- The members of the newest runs of a kind and value that ended at a time or later.
local function newest_runs(place, since, most)
  return redis.call('ZREVRANGEBYLEX', K.runs, '(' .. place .. '\1', '[' .. place .. '\0' .. end_text(since),
    'LIMIT', 0, most)
end

-- The members of the runs of a kind and value that ended in [since, before), oldest first.
local function runs_between(place, since, before)
  return redis.call('ZRANGEBYLEX', K.runs, '[' .. place .. '\0' .. end_text(since),
    '(' .. place .. '\0' .. end_text(before))
end

-- The number of runs of a kind and value that ended in [since, before), or since then.
local function count_runs(place, since, before)
  return redis.call('ZLEXCOUNT', K.runs, '[' .. place .. '\0' .. end_text(since),
    before and '(' .. place .. '\0' .. end_text(before) or '(' .. place .. '\1')
end

-- The number after a field name in a record, or nil. Finding plain text first is ten times as fast as
-- matching a pattern.
local function number_in(text, name)
  local _, last = string.find(text, name, 1, true)
  return last and tonumber(string.match(text, '^%d+', last + 1))
end

-- How long each of these runs had waited before its last attempt, ms, sorted.
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

-- A percentile of sorted values; `part` is between 0 and 1. Returns nil if there are none.
local function percentile(sorted, part)
  return sorted[math.max(1, math.ceil(part * #sorted))]
end
