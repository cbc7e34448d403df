-- Replace the definition of a schedule, if it is still the one that the change was made from.
--
-- @include plans
-- ARGV op          text  random id of this operation
-- ARGV client_now  int   the moment from which the next run was computed, ms
-- ARGV id          text  the schedule
-- ARGV expected    text  the definition as it was read
-- ARGV base        text  the revision of the plan as it was read: a save may leave the text as it is
-- ARGV definition  text  the new one
-- ARGV user        text  whose it is now
-- ARGV revision    text  random, new with every save
-- ARGV next_ms     text  the new next moment, or empty: the plan stays
-- ARGV active      text  '1', '0', or empty: as it was
--
-- Returns { 'updated' }; or, with nothing changed, { 'changed' } (by somebody else), { 'absent' },
-- or { 'skewed', ms of the clock }.

local before = first_answer(A.op)
if before then return { before } end
local text = redis.call('HGET', K.schedules, A.id)
if not text then return { remember(A.op, 'absent') } end
if text ~= A.expected or revision_of(A.id) ~= A.base then
  return { remember(A.op, 'changed') }
end
if A.next_ms ~= '' and is_skewed(A.client_now) then return { 'skewed', now } end

local state = state_of(A.id)
if A.next_ms ~= '' or A.active == '0' then count_dropped(A.id, state) end
if state.user ~= A.user then
  if state.user then redis.call('ZREM', K.schedule_index, state.user .. '\0' .. A.id) end
  redis.call('ZADD', K.schedule_index, 0, A.user .. '\0' .. A.id)
  state.user = A.user
end
if A.active == '1' or (A.active == '' and state.reason and A.next_ms ~= '') then
  -- The second: it was set aside while the change was on its way, and the change plans it anew.
  state.active, state.reason = true, nil
elseif A.active == '0' then
  -- Off because its user wants it off: a mended cron alone does not switch it on again.
  state.active, state.reason = false, nil
end
redis.call('HSET', K.schedules, A.id, A.definition)
local nominal = A.next_ms
if nominal == '' then
  nominal = string.match(redis.call('HGET', K.plan, A.id) or '', ' (.*)$') or '-'
end
if A.next_ms ~= '' and state.active then
  local wake = tonumber(A.next_ms) < soonest_due()
  redis.call('ZADD', K.due, A.next_ms, A.id)
  if wake then wake_scheduler() end
end
if not state.active then
  nominal = '-'
  redis.call('ZREM', K.due, A.id)
end
redis.call('HSET', K.plan, A.id, A.revision .. ' ' .. nominal)
if not state.reason then redis.call('HDEL', K.broken, A.id) end
write_state(A.id, state)
return { remember(A.op, 'updated') }
