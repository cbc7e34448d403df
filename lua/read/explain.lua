-- Read where a task is and what it waits for.
--
-- @include ahead
-- @lazy gates rings level
-- FLAGS no-writes
-- KEYS leases   zset  task id -> end of lease, ms
-- KEYS delayed  zset  task id -> when it becomes ready, ms
-- KEYS tasks    hash  task id -> its document, JSON
-- ARGV id  text  task id
--
-- Returns { } for an unknown task, or a flat list of names and values: status, now, document; lease_end and due;
-- leases (that have not ended); settings, running, parked and free (when its rate allows a task) of the user, and
-- of its tenant with `tenant_` before the name. Of a waiting task also: own (tasks of the user before it), users (before its user in their ring),
-- ring (users in that ring), tenants (before its tenant), critical (others in the CRITICAL lane), held (the
-- limit for which it waits), before (tasks that are served before it), level (at which it is served, see
-- lib/level), and clock_level (that of the clock, if nothing waited before in its pool). pace: tasks of its pool, the ms in
-- which they were claimed, when the last was, and 1 if tasks waited after it. Last, for each limit that it has to pass: 'gate', the limit, slots, how many are in use, rate, when
-- it allows a task, how many tasks come first in its order, and how many reserve it; '' for none.

local record = read_status(A.id)
if not record then return {} end
local owner, seat = owner_of(record), seat_of(record)
local group = group_of(seat)
local answer = {}
local function say(name, value)
  answer[#answer + 1] = name
  answer[#answer + 1] = value or ''
end

say('status', redis.call('HGET', K.status, A.id))
say('now', now)
say('document', redis.call('HGET', K.tasks, A.id))
say('lease_end', redis.call('ZSCORE', K.leases, A.id))
say('due', redis.call('ZSCORE', K.delayed, A.id))
say('pace', pace_of(record.pool))
say('leases', redis.call('ZCOUNT', K.leases, string.format('(%.0f', now), '+inf'))
local function say_of(prefix, whose, place)
  local text = redis.call('HGET', K.users, whose)
  say(prefix .. 'settings', text or string.byte(whose) == 2 and rings().inherited(whose))
  say(prefix .. 'running', running_of(whose))
  say(prefix .. 'parked', redis.call('ZSCORE', K.parked, place))
  local rate = settings_of(whose).rate
  say(prefix .. 'free', rate and string.format('%.0f', allowed_at(K.throttle, whose, rate)))
end
say_of('', owner, seat)
if group then say_of('tenant_', owner_in(group), group) end

local task = waiting_task(A.id, record)
local function rank_in_ring(place)
  if in_root(place) then return redis.call('ZRANK', K.ready, place) end
  return rings().rank(place)
end

local function say_before(own)
  local before, tag = served_before(seat, own)
  local offset, rests = level().of_ring(record.pool and '\3' .. record.pool or '')
  say('before', before)
  say('level', text_of(offset + tag))
  say('clock_level', rests and text_of(offset + ring_of(group or seat).clock))
end

-- The limits that the task may wait for, without changing anything.
local function say_gates()
  for _, pair in ipairs(gates().of_task(task)) do
    local gate, limits = pair[1], pair[2]
    local used = redis.call('ZLEXCOUNT', K.slots, '[' .. gate .. '\0', '(' .. gate .. '\1')
    local free = ''
    if limits.rate then
      local at = gates().starts_at(gate, limits, task.cost) or allowed_at(K.paced, gate, limits.rate, task.cost)
      free = string.format('%.0f', at)
    end
    local first, reserved = gates().before(gate, limits, task)
    for _, value in ipairs({ 'gate', gate, limits.slots or '', used, limits.rate and text_of(limits.rate) or '',
      free, first, reserved }) do answer[#answer + 1] = value end
  end
end

if record.state == 'ready' then
  local own = redis.call('ZLEXCOUNT', K.backlog, '[' .. seat .. '\0', '(' .. member_of(A.id, record))
  local users = rank_in_ring(seat)
  local lane = in_root(seat) and redis.call('ZRANK', K.critical, seat)
  local in_lane = SETTINGS.critical_share > 0 and string.byte(record.rank, 1) == 48
  if users and lane and in_lane then users = math.min(users, lane) end
  say('own', own)
  say('users', users)
  local _, size = ring_around(seat)
  say('ring', size)
  if group then say('tenants', rank_in_ring(group)) end
  if SETTINGS.critical_share > 0 and not record.pool then
    local me = group or seat
    say('critical', redis.call('ZCARD', K.critical) - (redis.call('ZSCORE', K.critical, me) and 1 or 0))
  end
  say('held', gates().held_at(task))
  if users and (not group or rank_in_ring(group)) then say_before(own) end
  say_gates()
end
if record.state == 'delayed' and not record.buffered and not record.behind then
  say_before(count_waiting(seat))
end
return answer
