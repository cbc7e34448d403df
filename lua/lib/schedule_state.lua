-- Keep the state of schedules: what happens to them while they run.
--
-- @include json
-- KEYS due             zset  schedule id -> when to act, ms: active ones, and those paused until then
-- KEYS schedule_state  hash  schedule id -> JSON: user, tenant, title, active, since, reason, paused, note,
--                            by, until, last_run, counts

local STATE_TYPES = { user = 'string', active = 'boolean', reason = 'string', last_run = 'number',
  runs = 'number', missed = 'number', refused = 'number', skipped = 'number', failures = 'number',
  since = 'number', paused = 'number', note = 'string', by = 'string', ['until'] = 'number',
  tenant = 'string', title = 'string', cancelled_to = 'string' }

-- Parse a state, without fields of a wrong type: a damaged state must not raise in the middle of a script,
-- nor stop the other schedules of a batch.
local function read_state(text)
  local state = decode(text) or {}
  -- Setting an absent field to nil would make room for it in the table.
  for field, value in pairs(state) do
    local kind = STATE_TYPES[field]
    if kind and (type(value) ~= kind or (kind == 'number' and math.abs(value) > 2 ^ 53)) then
      state[field] = nil
    end
  end
  return state
end

local function state_of(id)
  return read_state(redis.call('HGET', K.schedule_state, id))
end

local function end_pause(state)
  state.paused, state.note, state.by, state['until'] = nil, nil, nil, nil
end

local function write_state(id, state)
  redis.call('HSET', K.schedule_state, id, cjson.encode(state))
end
