-- Replace the definition of a schedule, unless it has changed since it was read.
--
-- @include schedules moments changes settings tenant_schedules
-- ARGV op          text  random id of this operation
-- ARGV client_now  int   the time by which the caller computed the fire time, ms
-- ARGV id          text  schedule id
-- ARGV expected    text  its definition, as it was read
-- ARGV base        text  the revision of its plan, as it was read: a save may keep the same text
-- ARGV definition  text  its new definition, JSON
-- ARGV user        text  its new user
-- ARGV tenant      text  its new tenant, or empty
-- ARGV title       text  its new title, or empty
-- ARGV revision    text  random, new with every save
-- ARGV old_name    text  name of its tasks, as it was read
-- ARGV task_name   text  new name of its tasks
-- ARGV next_ms     text  the new next fire time, ms; empty: the plan does not change
-- ARGV due_ms      text  when to act on that fire time, ms
-- ARGV active      text  '1', '0', or empty: no change
-- ARGV pause       text  note, by and until of a pause, JSON; empty: it is not paused
-- ARGV noted       text  fire times that passed during a pause (see lib/moments), or empty
-- ARGV change      text  who changed what (see lib/changes), JSON, or empty
--
-- Returns { 'updated' }; or, with nothing changed, { 'changed' } (it was saved meanwhile), { 'absent' },
-- { 'quota', user } (max_schedules) or { 'skewed', time in ms }.

local before = first_answer(A.op)
if before then return { before } end
local text = redis.call('HGET', K.schedules, A.id)
if not text then return { remember(A.op, 'absent') } end
if text ~= A.expected or revision_of(A.id) ~= A.base then
  return { remember(A.op, 'changed') }
end
if A.next_ms ~= '' and is_skewed(A.client_now) then return { 'skewed', now } end

local state = state_of(A.id)
if state.user ~= A.user and SETTINGS.max_schedules > 0
  and schedules_of(A.user) >= SETTINGS.max_schedules then return { 'quota', A.user } end
if A.next_ms ~= '' or A.active == '0' then
  local dropped = count_dropped(A.id, state)
  if dropped then note_moment(A.id, dropped, 'missed') end
end
leave_tenant(A.id, state)
if state.user ~= A.user then
  if state.user then redis.call('ZREM', K.schedule_index, state.user .. '\0' .. A.id) end
  redis.call('ZADD', K.schedule_index, 0, A.user .. '\0' .. A.id)
  state.user = A.user
end
state.tenant = A.tenant ~= '' and A.tenant or nil
enter_tenant(A.id, state)
state.title = A.title ~= '' and A.title or nil
local set_aside = state.reason and not state.paused
if A.active == '1' or (A.active == '' and set_aside and A.next_ms ~= '') then
  -- In the second case it was set aside meanwhile, and this change plans it again.
  state.active, state.reason, state.failures = true, nil, nil
  end_pause(state)
elseif A.active == '0' then
  -- Paused on request: a corrected rule alone does not resume it.
  local pause = decode(A.pause) or {}
  -- A schedule that is paused again counts as paused since the first time.
  state.active, state.reason, state.paused = false, nil, not state.active and state.paused or now
  state.note, state.by, state['until'] = pause.note, pause.by, pause['until']
end
if A.next_ms ~= '' then state.since = now end
redis.call('HSET', K.schedules, A.id, A.definition)
local _, planned = plan_of(A.id)
local moment = A.next_ms ~= '' and A.next_ms or planned
if A.next_ms ~= '' and state.active then
  local wake = tonumber(A.due_ms) < soonest_due()
  redis.call('ZADD', K.due, A.due_ms, A.id)
  if wake then wake_scheduler() end
end
if not state.active then
  moment = nil
  redis.call('ZREM', K.due, A.id)
  if state['until'] then redis.call('ZADD', K.due, state['until'], A.id) end
end
write_plan(A.id, A.revision, moment)
if not state.reason then redis.call('HDEL', K.broken, A.id) end
write_state(A.id, state)
name_schedule(A.id, A.old_name, A.task_name)
if A.noted ~= '' then note_moments(A.id, A.noted) end
note_change(A.id, A.op, A.change)
return { remember(A.op, 'updated') }
