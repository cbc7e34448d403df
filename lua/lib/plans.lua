-- Keep what is planned for schedules: revision and next moment, state, index, problems.
--
-- @include replay json stats
-- KEYS schedules       hash  schedule id -> definition, JSON: what the user wrote
-- KEYS plan            hash  schedule id -> random revision, space, nominal next moment in ms or '-'
-- KEYS due             zset  schedule id -> when to act, ms; active schedules only
-- KEYS schedule_state  hash  schedule id -> JSON: user, active, reason, last_run, runs, missed, refused, skipped
-- KEYS schedule_index  zset  user NUL schedule id, all scores 0
-- KEYS broken          hash  schedule id -> JSON: why the scheduler set it aside, and when
-- KEYS scheduler_wake  list  at most one token, for a leader that waits

-- A moment computed from a clock that is this far from ours would be a wrong one.
local SKEW_MS = 1000

local function is_skewed(client_now)
  return math.abs(tonumber(client_now) - now) > SKEW_MS
end

local STATE_TYPES = { user = 'string', active = 'boolean', reason = 'string', last_run = 'number',
  runs = 'number', missed = 'number', refused = 'number', skipped = 'number' }

-- A state as a table without fields of a wrong type: one that somebody has spoilt must not raise in
-- the middle of a script, nor stop the other schedules of a batch.
local function read_state(text)
  local state = decode(text) or {}
  for field, kind in pairs(STATE_TYPES) do
    local value = state[field]
    if type(value) ~= kind or (kind == 'number' and math.abs(value) > 2 ^ 53) then
      state[field] = nil
    end
  end
  return state
end

local function state_of(id)
  return read_state(redis.call('HGET', K.schedule_state, id))
end

local function write_state(id, state)
  redis.call('HSET', K.schedule_state, id, cjson.encode(state))
end

local function revision_of(id)
  return string.match(redis.call('HGET', K.plan, id) or '', '^(%S+)') or ''
end

-- A plan is given up: if its moment has come and was not fired, it is one that was missed.
local function count_dropped(id, state)
  local nominal = tonumber(string.match(redis.call('HGET', K.plan, id) or '', ' (%d+)$') or nil)
  if state.active and nominal and nominal <= now then
    state.missed = (state.missed or 0) + 1
    count('missed', 1)
  end
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
