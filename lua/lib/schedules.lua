-- Keep schedules: definitions, index, names, and those that were set aside.
--
-- @include schedule_state plan replay stats
-- KEYS schedules       hash  schedule id -> definition, JSON: what the user wrote
-- KEYS schedule_index  zset  user NUL schedule id, all scores 0
-- KEYS broken          hash  schedule id -> JSON: why the scheduler set it aside, and when
-- KEYS scheduler_wake  list  at most one token, for a leader that waits
-- KEYS schedule_names  zset  name NUL schedule id, all scores 0

-- A fire time computed by a clock that differs by more than this, in ms, would be wrong.
local SKEW_MS = 1000

local function is_skewed(client_now)
  return math.abs(tonumber(client_now) - now) > SKEW_MS
end

-- Count the fire time of a plan that is given up as missed, if it has come and was not fired. Returns that
-- fire time, or nil.
local function count_dropped(id, state)
  local moment = planned_ms(id)
  if state.active and moment and moment <= now then
    state.missed = (state.missed or 0) + 1
    count('missed', 1)
    return moment
  end
end

-- Change the entry of a schedule in the index by name.
local function name_schedule(id, old_name, name)
  if old_name == name then return end
  if old_name then redis.call('ZREM', K.schedule_names, old_name .. '\0' .. id) end
  if name then redis.call('ZADD', K.schedule_names, 0, name .. '\0' .. id) end
end

-- The name in a definition; nil if it cannot be read.
local function name_in(definition)
  local name = (decode(definition) or {}).name
  return type(name) == 'string' and name or nil
end

local function schedules_of(user)
  return redis.call('ZLEXCOUNT', K.schedule_index, '[' .. user .. '\0', '(' .. user .. '\1')
end

local function soonest_due()
  return tonumber(redis.call('ZRANGE', K.due, 0, 0, 'WITHSCORES')[2] or nil) or math.huge
end

local function wake_scheduler()
  if redis.call('LLEN', K.scheduler_wake) == 0 then redis.call('LPUSH', K.scheduler_wake, '1') end
end

-- Stop planning a schedule: it is completed, or it cannot be planned and is listed as broken with the reason.
local function stop_planning(id, reason, completed)
  local state = state_of(id)
  state.active, state.reason = false, reason
  end_pause(state)
  write_state(id, state)
  redis.call('ZREM', K.due, id)
  if not completed then
    redis.call('HSET', K.broken, id, cjson.encode({ reason = reason, since = now }))
  end
end
