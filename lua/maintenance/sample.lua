-- Store a sample of counters and gauges for charts, one for each interval of time.
--
-- @include ended_runs active
-- FLAGS allow-oom
-- KEYS samples  zset  <f or c> NUL <start of interval, ms> NUL <JSON>, all scores 0: fine and coarse series
-- KEYS stats    hash  counter -> value
-- KEYS fair     hash  seq: number of tasks ever stored
-- KEYS backlog  zset  waiting tasks
-- KEYS held     zset  tasks that wait for a slot of their name
-- KEYS delayed  zset  delayed tasks
-- KEYS leases   zset  running tasks
-- KEYS dead     zset  dead letters
--
-- The first call in an interval stores the sample; further calls store nothing.
--
-- Returns 1 if a sample was stored, or 0 if the interval has one.

local FINE_MS = 15000           -- between two samples of the fine series,
local FINE_KEPT_MS = 4200000    -- which are kept for 70 minutes
local COARSE_MS = 300000        -- and of the coarse one,
local COARSE_KEPT_MS = 88200000 -- which are kept for 24.5 hours
local MOST_RUNS = 100  -- runs whose waits are read, at most
local TRIMMED = 100    -- old entries that one call drops; later calls drop the others
local COUNTERS = { 'finished', 'buried', 'timed_out', 'cancelled', 'expired_tasks', 'fired', 'missed' }

local function place_of(mark, ms)
  return mark .. '\0' .. end_text(ms)
end

-- The members of the newest runs, without cancelled ones.
local function newest_served(since)
  local found, ends = {}, {}
  for _, outcome in ipairs({ 'succeeded', 'failed', 'timed_out' }) do
    for _, member in ipairs(newest_runs('o' .. LETTERS[outcome], since, MOST_RUNS)) do
      ends[member] = tonumber(string.match(member, '%z(%d+)')) or 0
      found[#found + 1] = member
    end
  end
  table.sort(found, function(a, b) return ends[a] > ends[b] end)
  for i = #found, MOST_RUNS + 1, -1 do found[i] = nil end
  return found
end

-- Read counters and gauges. A counter that is not a number is left out.
local function measure()
  local active = count_active()
  local sample = {
    at = now,
    pushed = tonumber(redis.call('HGET', K.fair, 'seq') or '0'),
    ready = redis.call('ZCARD', K.backlog) + redis.call('ZCARD', K.held),
    delayed = redis.call('ZCARD', K.delayed),
    running = redis.call('ZCARD', K.leases),
    dead = redis.call('ZCARD', K.dead),
    users = active.users,
    tenants = active.tenants,
    held = redis.call('ZCARD', K.held),
  }
  for i, value in ipairs(redis.call('HMGET', K.stats, unpack(COUNTERS))) do
    sample[COUNTERS[i]] = tonumber(value or '0')
  end
  return sample
end

local function drop(from, to)
  local members = redis.call('ZRANGEBYLEX', K.samples, from, to, 'LIMIT', 0, TRIMMED)
  if #members > 0 then redis.call('ZREM', K.samples, unpack(members)) end
end

-- Store a sample for this interval unless there is one. Returns whether it was stored.
local function keep(mark, step_ms, keep_ms)
  local slot = now - now % step_ms
  local here = place_of(mark, slot)
  local last = redis.call('ZREVRANGEBYLEX', K.samples, '(' .. here .. '\1', '[' .. mark .. '\0',
    'LIMIT', 0, 1)[1]
  if last and string.sub(last, 1, #here) == here then return false end
  local sample = measure()
  local since = last and tonumber(string.match(last, '"at":(%d+)')) or now - step_ms
  local waits = waits_of(newest_served(since))
  sample.wait_p50, sample.wait_p95 = percentile(waits, 0.5), percentile(waits, 0.95)
  redis.call('ZADD', K.samples, 0, here .. '\0' .. cjson.encode(sample))
  drop('[' .. mark .. '\0', '(' .. place_of(mark, slot - keep_ms))
  -- After the clock was set back, later samples must not occupy the intervals.
  drop('[' .. place_of(mark, slot + step_ms), '(' .. mark .. '\1')
  return true
end

if not keep('f', FINE_MS, FINE_KEPT_MS) then return 0 end
keep('c', COARSE_MS, COARSE_KEPT_MS)
return 1
