-- Store new schedules, all or none of them.
--
-- @include schedules settings moments tenant_schedules changes
-- PROBES itself: what it writes without having read it
-- ARGV op           text  random id of this operation
-- ARGV client_now   int   what the caller, who has computed the next runs, takes for now, ms
-- ARGV on_conflict  text  'error' or 'replace': what to do with an id that is taken
-- ARGV ...  schedules, ten each: id, user, name of its tasks, definition, revision, next moment in ms
--           or empty: it is paused, when to act then, tenant or empty, title or empty, what is noted of
--           its making (see lib/changes)
--
-- A replaced schedule keeps its counts, its last run and its changes, and is as active as it is said.
--
-- Returns { 'added' }; or, with nothing changed, { 'exists', id }, { 'quota', user } (max_schedules) or
-- { 'skewed', ms of the clock }.

local before = first_answer(A.op)
if before then return { before } end
if is_skewed(A.client_now) then return { 'skewed', now } end

local ids = {}
for i = FIRST, #ARGV, 10 do ids[#ids + 1] = ARGV[i] end
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
for i = FIRST, #ARGV, 10 do
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
  'moments', 'tenants', 'tenant_users', 'tenant_schedules', 'changes' }) do
  probe(name)
end
for from = 1, #ids, GROUP do
  local definitions, plans, due, states, index, named, made = {}, {}, {}, {}, {}, {}, {}
  for n = from, math.min(from + GROUP - 1, #ids) do
    local i = FIRST + (n - 1) * 10
    local id, user, name, due_ms = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 6]
    local is_active = ARGV[i + 5] ~= ''
    local state = { user = user, active = is_active, runs = 0, since = now }
    if not is_active then state.paused = now end
    if ARGV[i + 7] ~= '' then state.tenant = ARGV[i + 7] end
    if ARGV[i + 8] ~= '' then state.title = ARGV[i + 8] end
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
    plans[#plans + 1] = ARGV[i + 4] .. ' ' .. (is_active and ARGV[i + 5] or '-')
    if is_active then
      due[#due + 1] = due_ms
      due[#due + 1] = id
      if tonumber(due_ms) < soonest then wake = true end
    elseif old then
      redis.call('ZREM', K.due, id)
    end
    states[#states + 1] = id
    states[#states + 1] = cjson.encode(state)
    index[#index + 1] = 0
    index[#index + 1] = user .. '\0' .. id
    named[#named + 1] = 0
    named[#named + 1] = name .. '\0' .. id
    if taken[id] then
      note_change(id, A.op, ARGV[i + 9])
    elseif ARGV[i + 9] ~= '' then
      made[#made + 1] = 0
      made[#made + 1] = change_member(id, '!' .. A.op, ARGV[i + 9])  -- before all other changes of this ms
    end
  end
  redis.call('HSET', K.schedules, unpack(definitions))
  redis.call('HSET', K.plan, unpack(plans))
  if #due > 0 then redis.call('ZADD', K.due, unpack(due)) end
  redis.call('HSET', K.schedule_state, unpack(states))
  redis.call('ZADD', K.schedule_index, unpack(index))
  redis.call('ZADD', K.schedule_names, unpack(named))
  if #made > 0 then redis.call('ZADD', K.changes, unpack(made)) end
end
if wake then wake_scheduler() end
mark_layout()
return { remember(A.op, 'added') }
