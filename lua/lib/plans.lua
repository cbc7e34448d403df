-- Keep what is planned for schedules: revision and next moment, state, index, problems.
--
-- @include replay records
-- KEYS schedules       hash  schedule id -> definition, JSON: what the user wrote
-- KEYS plan            hash  schedule id -> random revision, space, nominal next moment in ms or '-'
-- KEYS due             zset  schedule id -> when to act, ms; active schedules only
-- KEYS schedule_state  hash  schedule id -> JSON: user, active, reason, last_run, runs, missed, refused
-- KEYS schedule_index  zset  user NUL schedule id, all scores 0
-- KEYS broken          hash  schedule id -> JSON: why the scheduler set it aside, and when
-- KEYS scheduler_wake  list  at most one token, for a leader that waits

-- A moment computed from a clock that is this far from ours would be a wrong one.
local SKEW_MS = 1000

local function is_skewed(client_now)
  return math.abs(tonumber(client_now) - now) > SKEW_MS
end

local function state_of(id)
  return decode(redis.call('HGET', K.schedule_state, id)) or {}
end

local function write_state(id, state)
  redis.call('HSET', K.schedule_state, id, cjson.encode(state))
end

local function soonest_due()
  return tonumber(redis.call('ZRANGE', K.due, 0, 0, 'WITHSCORES')[2] or nil) or math.huge
end

local function wake_scheduler()
  if redis.call('LLEN', K.scheduler_wake) == 0 then redis.call('LPUSH', K.scheduler_wake, '1') end
end

-- Take a schedule out of the plan, with the reason where an operator finds it.
local function stop_planning(id, reason)
  local state = state_of(id)
  state.active, state.reason = false, reason
  write_state(id, state)
  redis.call('ZREM', K.due, id)
  redis.call('HSET', K.broken, id, cjson.encode({ reason = reason, since = now }))
end
