-- Replace the definition of a schedule, if it is still the one that the change was made from.
--
-- @include schedules moments changes settings tenant_schedules
-- ARGV op          text  random id of this operation
-- ARGV client_now  int   what the caller, who has computed the next run, takes for now, ms
-- ARGV id          text  the schedule
-- ARGV expected    text  the definition as it was read
-- ARGV base        text  the revision of the plan as it was read: a save may leave the text as it is
-- ARGV definition  text  the new one
-- ARGV user        text  whose it is now
-- ARGV tenant      text  of which tenant it is now, or empty
-- ARGV title       text  what people call it now, or empty
-- ARGV revision    text  random, new with every save
-- ARGV old_name    text  of its tasks, as it was read
-- ARGV task_name   text  of its tasks from now on
-- ARGV next_ms     text  the new next moment, or empty: the plan stays
-- ARGV due_ms      text  when to act at that moment
-- ARGV active      text  '1', '0', or empty: as it was
-- ARGV pause       text  JSON: note, by and until, of one that is paused; empty: it is not
-- ARGV noted       text  moments that passed while it was paused (see lib/moments), or empty
-- ARGV change      text  JSON: by whom, and what has changed (see lib/changes), or empty
--
-- Returns { 'updated' }; or, with nothing changed, { 'changed' } (by somebody else), { 'absent' },
-- { 'quota', user } (max_schedules) or { 'skewed', ms of the clock }.

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
  -- The second: it was set aside while the change was on its way, and the change plans it anew.
  state.active, state.reason, state.failures = true, nil, nil
  state.paused, state.note, state.by, state['until'] = nil, nil, nil, nil
elseif A.active == '0' then
  -- Off because its user wants it off: a mended cron alone does not switch it on again.
  local pause = decode(A.pause) or {}
  -- One that is paused again has been paused since the first time.
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
