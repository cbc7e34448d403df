-- Read what decides when a task would start if it were pushed now.
--
-- @include ahead
-- @lazy gates rings level
-- FLAGS no-writes
-- ARGV owner  text  a user, or a user of a tenant; see lib/owners
-- ARGV pool   text  its pool; empty: the default one
-- ARGV name   text  its name
--
-- Returns a flat list of names and values: now; settings, running, parked and free (when its rate allows a task)
-- of the user, and of its tenant with `tenant_` before the name; own (waiting tasks of the user in the pool); before (tasks that would be served
-- before it); level (at which it would be served, see lib/level), and clock_level (that of the clock, if nothing
-- waited before in the pool); pace (tasks, ms, when the last was claimed, and 1 if tasks waited after it); full (1 if its name
-- has no slot free or waits for its rate).

local pool = A.pool ~= '' and A.pool or nil
local seat = pool and A.owner .. '\3' .. pool or A.owner
local group = group_of(seat)
local answer = {}
local function say(name, value)
  answer[#answer + 1] = name
  answer[#answer + 1] = value or ''
end

local function say_of(prefix, whose, place)
  local text = redis.call('HGET', K.users, whose)
  say(prefix .. 'settings', text or string.byte(whose) == 2 and rings().inherited(whose))
  say(prefix .. 'running', running_of(whose))
  say(prefix .. 'parked', redis.call('ZSCORE', K.parked, place))
  local rate = settings_of(whose).rate
  say(prefix .. 'free', rate and string.format('%.0f', allowed_at(K.throttle, whose, rate)))
end

say('now', now)
say_of('', A.owner, seat)
if group then say_of('tenant_', owner_in(group), group) end
local own = count_waiting(seat)
say('own', own)
local before, tag = served_before(seat, own)
local offset, rests = level().of_ring(pool and '\3' .. pool or '')
say('before', before)
say('level', text_of(offset + tag))
say('clock_level', rests and text_of(offset + ring_of(group or seat).clock))
say('pace', pace_of(pool))
say('full', gates().is_full({ id = '', seat = seat, rank = '', label = A.name }) and 1 or 0)
return answer
