-- Store new schedules, all of them or none.
--
-- @include schedules settings moments tenant_schedules changes
-- PROBES itself: the keys that it writes without having read them
-- ARGV op           text  random id of this operation
-- ARGV client_now   int   the time by which the caller computed the fire times, ms
-- ARGV on_conflict  text  what to do if an id exists: 'error' or 'replace'
-- ARGV ...  schedules, at most a few thousand
-- ROW id          text  schedule id
-- ROW user        text  user id
-- ROW name        text  name of its tasks
-- ROW definition  text  what the user wrote, JSON
-- ROW revision    text  random, new with every save
-- ROW next_ms     int   the next fire time, ms; empty: it is paused
-- ROW due_ms      int   when to act on that fire time, ms
-- ROW tenant      text  its tenant, or empty
-- ROW title       text  its title, or empty
-- ROW change      text  who created it (see lib/changes), or empty
--
-- A replaced schedule keeps its counts, its last run and its changes. It is active if the new one is.
--
-- Returns { 'added' }; or, with nothing changed, { 'exists', id }, { 'quota', user } (max_schedules) or
-- { 'skewed', time in ms }.

local before = first_answer(A.op)
if before then return { before } end
if is_skewed(A.client_now) then return { 'skewed', now } end

local ids = {}
for i = FIRST, #ARGV, ROW do ids[#ids + 1] = R.id[i] end
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
  -- A schedule whose definition is gone may still have a state and an entry in the index.
  for i, text in ipairs(redis.call('HMGET', K.schedule_state, unpack(group))) do
    if text then left[group[i]] = read_state(text) end
  end
end

local more = {}
for i = FIRST, #ARGV, ROW do
  local id, user = R.id[i], R.user[i]
  local old = taken[id] and left[id]
  if not old or old.user ~= user then more[user] = (more[user] or 0) + 1 end
end
if SETTINGS.max_schedules > 0 then
  for user, added in pairs(more) do
    if schedules_of(user) + added > SETTINGS.max_schedules then return { 'quota', user } end
  end
end

local soonest = soonest_due()
local wake = false
probe('plan')
probe('schedule_index')
probe('schedule_names')
probe('broken')
probe('scheduler_wake')
probe('stats')
probe('moments')
probe('user_tenants')
probe('tenant_users')
probe('tenant_schedules')
probe('changes')
for from = 1, #ids, GROUP do
  local definitions, plans, due, states, index, named, made = {}, {}, {}, {}, {}, {}, {}
  for n = from, math.min(from + GROUP - 1, #ids) do
    local i = FIRST + (n - 1) * ROW
    local id, user, name, due_ms = R.id[i], R.user[i], R.name[i], R.due_ms[i]
    local is_active = R.next_ms[i] ~= ''
    local state = { user = user, active = is_active, runs = 0, since = now }
    if not is_active then state.paused = now end
    if R.tenant[i] ~= '' then state.tenant = R.tenant[i] end
    if R.title[i] ~= '' then state.title = R.title[i] end
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
    definitions[#definitions + 1] = R.definition[i]
    plans[#plans + 1] = id
    plans[#plans + 1] = make_plan(R.revision[i], R.next_ms[i])
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
      note_change(id, A.op, R.change[i])
    elseif R.change[i] ~= '' then
      made[#made + 1] = 0
      made[#made + 1] = change_member(id, '!' .. A.op, R.change[i])  -- sorts before other changes
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
