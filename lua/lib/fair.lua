-- Decide who is served next: start-time fair queueing between users.
--
-- @include time settings status kinds
-- KEYS fair      hash  clock, critical_clock, credit, seq, average, window, alarm, turn, passes,
--                      seen (when a claim last changed something, ms), recheck, ...
-- KEYS ready     zset  user -> virtual start tag; all who may be served now
-- KEYS critical  zset  user -> start tag in the CRITICAL lane; users in ready whose next task is CRITICAL
-- KEYS parked    zset  user -> when to look again, ms, or +inf: has waiting tasks but may not be served
-- KEYS idle      zset  user -> finish tag of a user who is not in ready
-- KEYS running   hash  user -> number of leased tasks
-- KEYS users     hash  user -> settings, JSON
-- KEYS throttle  hash  user -> when the rate limit is free of debt, ms
-- KEYS usage     hash  user -> average seconds that a task takes (only with cost = 'time')
-- KEYS backlog   zset  user NUL rank NUL task id NUL name, all scores 0
-- KEYS leases    zset  task id -> end of lease, ms
-- KEYS served    hash  user -> service / weight in this window, or 'late' without a backlog during all of it
--
-- A user with tasks in the backlog is in exactly one of ready and parked. Other users are in neither.

local BURST_S = 0.1  -- a rate limit allows this many seconds' worth of tasks at once, and at least one task

local fair = {}
local fair_dirty = false
local function load_fair()
  local v = redis.call('HMGET', K.fair, 'clock', 'critical_clock', 'credit', 'seq', 'average',
    'seen', 'recheck', 'mixed', 'behind', 'layout')
  check_layout(v[10])
  fair.clock = tonumber(v[1] or nil) or 0
  fair.critical_clock = tonumber(v[2] or nil) or 0
  fair.credit = tonumber(v[3] or nil)
  fair.seq = tonumber(v[4] or nil) or 0
  fair.average = tonumber(v[5] or nil)
  fair.seen = tonumber(v[6] or nil)
  fair.recheck = tonumber(v[7] or nil)
  kinds.mixed = tonumber(v[8] or nil)
  fair.behind = v[9] ~= false  -- there are old records to drop
end
load_fair()

local running_cache, running_dirty = {}, {}

-- Write what has changed. Every script that changes something calls it at its end.
local function save_fair()
  if fair_dirty then
    local values = { 'layout', LAYOUT, 'clock', fair.clock, 'critical_clock', fair.critical_clock,
      'seq', fair.seq }
    for _, name in ipairs({ 'credit', 'average', 'seen' }) do
      if fair[name] then
        values[#values + 1] = name
        values[#values + 1] = fair[name]
      end
    end
    redis.call('HSET', K.fair, unpack(values))
  end
  local counts, none = {}, {}
  for user in pairs(running_dirty) do
    if running_cache[user] > 0 then
      counts[#counts + 1] = user
      counts[#counts + 1] = text_of(running_cache[user])
    else
      none[#none + 1] = user
    end
  end
  if #counts > 0 then redis.call('HSET', K.running, unpack(counts)) end
  if #none > 0 then redis.call('HDEL', K.running, unpack(none)) end
end

-- Parse the settings of a user. Fields of a wrong type are left out: damage must not stop a transition.
local USER_NUMBERS = { 'weight', 'max_running', 'max_waiting', 'rate' }
local PAUSE_TYPES = { paused_at = 'number', paused_until = 'number', paused_by = 'string',
  pause_note = 'string' }
local function parse_settings(text)
  local stored, usable = decode(text) or {}, {}
  for _, field in ipairs(USER_NUMBERS) do
    local value = stored[field]
    if type(value) == 'number' and value > 0 then usable[field] = value end
  end
  if type(stored.paused) == 'boolean' then usable.paused = stored.paused end
  for field, kind in pairs(PAUSE_TYPES) do
    if usable.paused and type(stored[field]) == kind then usable[field] = stored[field] end
  end
  -- A pause ends by its time, whether or not its record was removed.
  if usable.paused_until and usable.paused_until <= now then
    usable.paused = nil
    for field in pairs(PAUSE_TYPES) do usable[field] = nil end
  end
  return usable
end

local DEFAULT_USER = { weight = 1 }
local user_cache = {}
local function keep_settings(user, text)
  local found = DEFAULT_USER
  if text then
    found = parse_settings(text)
    found.weight = found.weight or 1
  end
  user_cache[user] = found
  return found
end

local function settings_of(user)
  return user_cache[user] or keep_settings(user, redis.call('HGET', K.users, user))
end

local function running_of(user)
  local found = running_cache[user]
  if not found then
    found = tonumber(redis.call('HGET', K.running, user) or nil) or 0
    running_cache[user] = found
  end
  return found
end

local function change_running(user, by)
  running_cache[user] = math.max(0, running_of(user) + by)
  running_dirty[user] = true
end

-- Read settings and running counts of many users in two calls.
local function prefetch_users(names)
  local missing = {}
  for _, name in ipairs(names) do
    if not user_cache[name] or not running_cache[name] then missing[#missing + 1] = name end
  end
  if #missing == 0 then return end
  local any = redis.call('HLEN', K.users) > 0
  local settings = any and redis.call('HMGET', K.users, unpack(missing)) or {}
  local counts = redis.call('HMGET', K.running, unpack(missing))
  for i, name in ipairs(missing) do
    keep_settings(name, settings[i])
    running_cache[name] = running_cache[name] or tonumber(counts[i] or nil) or 0
  end
end

local function cost_of(user)
  if SETTINGS.cost ~= 'time' then return 1 end
  return tonumber(redis.call('HGET', K.usage, user) or nil) or fair.average or 1
end

-- When a rate allows the next task, ms, and how many tasks it allows at once. A debt that is larger than
-- the rate can have caused is reduced: the clock was set back, or the rate was lower.
local function free_at(key, field, rate)
  local interval, burst = 1000 / rate, math.max(1, math.floor(rate * BURST_S))
  local debt_until, most = tonumber(redis.call('HGET', key, field) or nil) or 0, now + burst * interval
  -- Ignore rounding errors: the same sum may have been computed in another order.
  if debt_until > most + 0.001 then
    debt_until = most
    redis.call('HSET', key, field, debt_until)
  end
  return debt_until - (burst - 1) * interval, burst
end

-- Until when the user may not be served: ms, '+inf' until a change, or nil if the user may be served now.
local function blocked_until(user)
  local s = settings_of(user)
  if s.paused then return s.paused_until or '+inf' end
  if s.max_running and running_of(user) >= s.max_running then return '+inf' end
  if s.rate then
    local free = free_at(K.throttle, user, s.rate)
    if free > now then return math.ceil(free) end
  end
  return nil
end

local function spend_rate(user)
  local s = settings_of(user)
  if not s.rate then return end
  local debt = math.max(now, tonumber(redis.call('HGET', K.throttle, user) or nil) or 0)
  redis.call('HSET', K.throttle, user, debt + 1000 / s.rate)
end

local function first_waiting(user, how_many)
  return redis.call('ZRANGEBYLEX', K.backlog, '[' .. user .. '\0', '(' .. user .. '\1',
    'LIMIT', 0, how_many)
end

-- True if the level digit of a backlog member is '0'.
local function is_critical(user, member)
  return string.byte(member, #user + 2) == 48
end

local function enter_critical(user)
  redis.call('ZADD', K.critical, 'NX',
    fair.critical_clock + cost_of(user) / settings_of(user).weight, user)
end

-- When nothing is ready and nothing is leased, past service no longer counts.
local function settle()
  if redis.call('ZCARD', K.ready) > 0 or redis.call('ZCARD', K.leases) > 0 then return end
  local top = redis.call('ZRANGE', K.idle, -1, -1, 'WITHSCORES')
  if top[2] then
    fair.clock = math.max(fair.clock, tonumber(top[2]))
    fair_dirty = true
    redis.call('UNLINK', K.idle, K.usage)
  end
end

-- Add a user with waiting tasks to ready or parked. The user must be in neither. Returns true for ready.
local function place(user, newcomer)
  local wait = blocked_until(user)
  if wait then
    redis.call('ZADD', K.parked, wait, user)
    return false
  end
  local tag = tonumber(redis.call('ZSCORE', K.idle, user) or nil)
  local start = fair.clock
  if tag then
    start = math.max(start, tag)
    redis.call('ZREM', K.idle, user)
  elseif newcomer then
    -- A newcomer enters one stride after the clock. At the clock, a steady stream of new users would starve
    -- those who have waited.
    start = start + cost_of(user) / settings_of(user).weight
  end
  redis.call('ZADD', K.ready, start, user)
  redis.call('HSET', K.served, user, 'late')
  local head = first_waiting(user, 1)[1]
  if head and is_critical(user, head) then enter_critical(user) end
  return true
end

local TOLD = 20  -- tasks of a user whose names are read when the user may be served again

-- Tell workers that take only some names that a user may be served again.
local function tell_of(user)
  if #kinds.all() == 0 then return end
  local list = {}
  for i, found in ipairs(first_waiting(user, TOLD)) do
    list[i] = { user = user, name = string.match(found, '%z(%Z*)$') }
  end
  kinds.tell(list, #list == TOLD and user)
end

-- Park or unpark a user whose limits or running count may have changed. Returns true if the user is in ready.
local function review(user)
  local wait = blocked_until(user)
  if redis.call('ZSCORE', K.parked, user) then
    if wait then
      redis.call('ZADD', K.parked, wait, user)
      return false
    end
    redis.call('ZREM', K.parked, user)
    place(user, false)
    tell_of(user)
    return true
  end
  local tag = redis.call('ZSCORE', K.ready, user)
  if not tag then return false end
  if not wait then return true end
  redis.call('ZREM', K.ready, user)
  redis.call('ZREM', K.critical, user)
  redis.call('ZADD', K.idle, tag, user)
  redis.call('ZADD', K.parked, wait, user)
  return false
end

-- Remove a user who has no more waiting tasks.
local function leave(user)
  local tag = redis.call('ZSCORE', K.ready, user)
  if tag then
    redis.call('ZREM', K.ready, user)
    redis.call('ZADD', K.idle, tag, user)
    redis.call('HSET', K.served, user, 'late')
  end
  redis.call('ZREM', K.parked, user)
  redis.call('ZREM', K.critical, user)
end

-- Move the user's tag by an amount of virtual time, but not below the clock.
local function adjust(user, by)
  local tag = tonumber(redis.call('ZSCORE', K.ready, user) or nil)
  if tag then
    redis.call('ZADD', K.ready, 'XX', math.max(fair.clock, tag + by), user)
    return
  end
  -- Also if it is not ahead of the clock: the records of a user are dropped together with the tag.
  tag = tonumber(redis.call('ZSCORE', K.idle, user) or nil) or fair.clock
  redis.call('ZADD', K.idle, math.max(fair.clock, tag + by), user)
end

-- Charge the user for the time of a lease that has ended, instead of the estimate charged before.
local function pay_for_time(user, charge, held_ms)
  if SETTINGS.cost ~= 'time' then return end
  local seconds = math.max(held_ms, 1) / 1000
  adjust(user, (seconds - charge) / settings_of(user).weight)
  local own = tonumber(redis.call('HGET', K.usage, user) or nil) or seconds
  redis.call('HSET', K.usage, user, own + (seconds - own) / 4)
  fair.average = (fair.average or seconds) + (seconds - (fair.average or seconds)) / 16
  fair_dirty = true
end
