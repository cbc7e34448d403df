-- Store new schedules, all or none of them.
--
-- @include plans settings moments tenancy
-- PROBES itself: what it writes without having read it
-- ARGV op           text  random id of this operation
-- ARGV client_now   int   what the caller, who has computed the next runs, takes for now, ms
-- ARGV on_conflict  text  'error' or 'replace': what to do with an id that is taken
-- ARGV ...  schedules, eight each: id, user, name of its tasks, definition, revision, next moment in ms,
--           when to act then, tenant or empty
--
-- A replaced schedule keeps its counts and its last run, and is active again.
--
-- Returns { 'added' }; or, with nothing changed, { 'exists', id }, { 'quota', user } (max_schedules) or
-- { 'skewed', ms of the clock }.

local before = first_answer(A.op)
if before then return { before } end
if is_skewed(A.client_now) then return { 'skewed', now } end

local ids = {}
for i = FIRST, #ARGV, 8 do ids[#ids + 1] = ARGV[i] end
local GROUP = 500  -- unpack() has room for a few thousand values
local taken, left = {}, {}
for from = 1, #ids, GROUP do
  local group = { unpack(ids, from, math.min(from + GROUP - 1, #ids)) }
  for i, text in ipairs(redis.call('HMGET', K.schedules, unpack(group))) do
    if text then
      if A.on_conflict == 'error' then return { 'exists', group[i] } end
      taken[group[i]] = text
    end
  end
  -- Of a schedule whose definition is gone there may be a state, with its place in the index.
  for i, text in ipairs(redis.call('HMGET', K.schedule_state, unpack(group))) do
    if text then left[group[i]] = read_state(text) end
  end
end

local more = {}
for i = FIRST, #ARGV, 8 do
  local old = taken[ARGV[i]] and left[ARGV[i]]
  if not old or old.user ~= ARGV[i + 1] then more[ARGV[i + 1]] = (more[ARGV[i + 1]] or 0) + 1 end
end
if SETTINGS.max_schedules > 0 then
  for user, added in pairs(more) do
    if schedules_of(user) + added > SETTINGS.max_schedules then return { 'quota', user } end
  end
end

local soonest = soonest_due()
local wake = false
for _, name in ipairs({ 'plan', 'schedule_index', 'schedule_names', 'broken', 'scheduler_wake', 'stats',
  'moments', 'tenants', 'tenant_users', 'tenant_schedules' }) do
  probe(name)
end
for from = 1, #ids, GROUP do
  local definitions, plans, due, states, index, named = {}, {}, {}, {}, {}, {}
  for n = from, math.min(from + GROUP - 1, #ids) do
    local i = FIRST + (n - 1) * 8
    local id, user, name, due_ms = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 6]
    local state = { user = user, active = true, runs = 0, since = now }
    if ARGV[i + 7] ~= '' then state.tenant = ARGV[i + 7] end
    local old, old_name = left[id], taken[id] and name_in(taken[id])
    if old_name and old_name ~= name then name_schedule(id, old_name, nil) end
    if old then
      if old.user and old.user ~= user then
        redis.call('ZREM', K.schedule_index, old.user .. '\0' .. id)
      end
      leave_tenant(id, old)
      if taken[id] then
        local dropped = count_dropped(id, old)
        if dropped then note_moment(id, dropped, 'missed') end
        state.last_run, state.runs = old.last_run, old.runs or 0
        state.missed, state.skipped = old.missed, old.skipped
      end
      redis.call('HDEL', K.broken, id)
    end
    enter_tenant(id, state)
    definitions[#definitions + 1] = id
    definitions[#definitions + 1] = ARGV[i + 3]
    plans[#plans + 1] = id
    plans[#plans + 1] = ARGV[i + 4] .. ' ' .. ARGV[i + 5]
    due[#due + 1] = due_ms
    due[#due + 1] = id
    states[#states + 1] = id
    states[#states + 1] = cjson.encode(state)
    index[#index + 1] = 0
    index[#index + 1] = user .. '\0' .. id
    named[#named + 1] = 0
    named[#named + 1] = name .. '\0' .. id
    if tonumber(due_ms) < soonest then wake = true end
  end
  redis.call('HSET', K.schedules, unpack(definitions))
  redis.call('HSET', K.plan, unpack(plans))
  redis.call('ZADD', K.due, unpack(due))
  redis.call('HSET', K.schedule_state, unpack(states))
  redis.call('ZADD', K.schedule_index, unpack(index))
  redis.call('ZADD', K.schedule_names, unpack(named))
end
if wake then wake_scheduler() end
return { remember(A.op, 'added') }
