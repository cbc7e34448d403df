-- Decide who is served next: start-time fair queueing between users, and between tenants.
--
-- @include time settings status owners
-- @lazy rings kinds level
-- KEYS fair      hash  clock, critical_clock, credit, seq, average, window, alarm, turn, passes,
--                      seen (when a claim last changed something, ms), recheck, pools (their names), pace
--                      (see lib/serving), shift (see lib/level), ...
-- KEYS ready     zset  seat -> virtual start tag; all in the ring of the default pool who may be served now
-- KEYS critical  zset  seat -> start tag in the CRITICAL lane; seats in ready whose next task is CRITICAL
-- KEYS parked    zset  seat -> when to look again, ms, or +inf: has waiting tasks but may not be served
-- KEYS idle      zset  seat -> finish tag of a seat that is not in ready
-- KEYS running   hash  owner or tenant -> number of leased tasks
-- KEYS users     hash  owner or tenant -> settings, JSON
-- KEYS throttle  hash  owner or tenant -> when the rate limit is free of debt, ms; then the last cost if
--                      it was declared
-- KEYS averages  hash  owner -> average seconds that a task takes (only with cost = 'time')
-- KEYS backlog   zset  seat NUL rank NUL task id NUL label, all scores 0
-- KEYS leases    zset  task id -> end of lease, ms
-- KEYS served    hash  seat -> service / weight in this window, or 'late' without a backlog during all of it
--
-- A ring is a fair order with clocks of its own. The ring of a pool serves seats: of users without a tenant,
-- and of tenants. The ring of a tenant in a pool serves the seats of its users. The ring of the default pool
-- is in the keys above; lib/rings has all others. `layout` > 1 tells whether there can be others.
--
-- A seat with tasks in the backlog is in exactly one of ready and parked. Other seats are in neither. A
-- tenant's seat counts as one with tasks while a seat is ready in its ring.

local BURST_S = 0.1  -- a rate limit allows this many seconds' worth of tasks at once, and at least one task

local fair = {}
local fair_dirty = false
-- Functions that save_fair calls before it writes; see lib/rings and lib/gates.
fair.unsaved = {}
local function load_fair()
  local v = redis.call('HMGET', K.fair, 'clock', 'critical_clock', 'credit', 'seq', 'average',
    'seen', 'recheck', 'mixed', 'behind', 'layout', 'pools', 'pace', 'shift')
  check_layout(v[10])
  fair.clock = tonumber(v[1] or nil) or 0
  fair.critical_clock = tonumber(v[2] or nil) or 0
  fair.credit = tonumber(v[3] or nil)
  fair.seq = tonumber(v[4] or nil) or 0
  fair.average = tonumber(v[5] or nil)
  fair.seen = tonumber(v[6] or nil)
  fair.recheck = tonumber(v[7] or nil)
  fair.mixed = tonumber(v[8] or nil)
  fair.behind = v[9] ~= false  -- there are old records to drop
  fair.pools = v[11] or nil
  fair.pace = v[12] or nil
  fair.shift = v[13] or nil
end
load_fair()

local running_cache, running_dirty = {}, {}
fair.running_change = {}  -- owner -> change of a number that was not read yet

-- Write what has changed. Every script that changes something calls it at its end.
local function save_fair()
  for _, save in ipairs(fair.unsaved) do save() end
  if fair_dirty then
    local values = { 'layout', layout, 'clock', fair.clock, 'critical_clock', fair.critical_clock,
      'seq', fair.seq }
    for _, name in ipairs({ 'credit', 'average', 'seen', 'pace' }) do
      if fair[name] then
        values[#values + 1] = name
        values[#values + 1] = fair[name]
      end
    end
    redis.call('HSET', K.fair, unpack(values))
  end
  local unread = {}
  for owner in pairs(fair.running_change) do unread[#unread + 1] = owner end
  for i, count in ipairs(#unread > 0 and redis.call('HMGET', K.running, unpack(unread)) or {}) do
    local owner = unread[i]
    running_cache[owner] = math.max(0, (tonumber(count or nil) or 0) + fair.running_change[owner])
    fair.running_change[owner] = nil
  end
  local counts, none = {}, {}
  for owner in pairs(running_dirty) do
    if running_cache[owner] > 0 then
      counts[#counts + 1] = owner
      counts[#counts + 1] = text_of(running_cache[owner])
    else
      none[#none + 1] = owner
    end
  end
  if #counts > 0 then redis.call('HSET', K.running, unpack(counts)) end
  if #none > 0 then redis.call('HDEL', K.running, unpack(none)) end
end

-- Parse settings. Fields of a wrong type are left out: damage must not stop a transition.
local USER_NUMBERS = { 'weight', 'max_running', 'max_waiting', 'rate' }
local PAUSE_TYPES = { paused_at = 'number', paused_until = 'number', paused_by = 'string',
  pause_note = 'string' }
local function parse_settings(text)
  local stored, usable = decode(text) or {}, {}
  for _, field in ipairs(USER_NUMBERS) do
    local value = stored[field]
    if type(value) == 'number' and value > 0 then usable[field] = value end
  end
  if type(stored.paused) == 'boolean' then usable.paused = stored.paused end
  for field, kind in pairs(PAUSE_TYPES) do
    if usable.paused and type(stored[field]) == kind then usable[field] = stored[field] end
  end
  -- A pause ends by its time, whether or not its record was removed.
  if usable.paused_until and usable.paused_until <= now then
    usable.paused = nil
    for field in pairs(PAUSE_TYPES) do usable[field] = nil end
  end
  return usable
end

local DEFAULT_USER = { weight = 1 }
local user_cache = {}
local function keep_settings(owner, text)
  local found = DEFAULT_USER
  text = text or string.byte(owner) == 2 and rings().inherited(owner)
  if text then
    found = parse_settings(text)
    found.weight = found.weight or 1
  end
  user_cache[owner] = found
  return found
end

-- The settings of an owner or a tenant.
local function settings_of(owner)
  return user_cache[owner] or keep_settings(owner, redis.call('HGET', K.users, owner))
end

local function running_of(owner)
  local found = running_cache[owner]
  if not found then
    found = tonumber(redis.call('HGET', K.running, owner) or nil) or 0
    found = math.max(0, found + (fair.running_change[owner] or 0))
    running_cache[owner], fair.running_change[owner] = found, nil
  end
  return found
end

-- Change the number of leased tasks of an owner and of its tenant.
local function change_running(owner, by)
  if running_cache[owner] then
    running_cache[owner] = math.max(0, running_cache[owner] + by)
  else
    fair.running_change[owner] = (fair.running_change[owner] or 0) + by
  end
  running_dirty[owner] = true
  local tenant = group_of(owner)
  if tenant then change_running(tenant, by) end
end

-- Read settings of many owners in one call; and in another their running counts, unless `settings_only`.
local function prefetch_users(names, settings_only)
  local missing, uncounted = {}, {}
  for _, name in ipairs(names) do
    if not user_cache[name] then missing[#missing + 1] = name end
    if not running_cache[name] and not fair.running_change[name] then uncounted[#uncounted + 1] = name end
  end
  if #missing > 0 then
    if fair.any_users == nil then fair.any_users = redis.call('HLEN', K.users) > 0 end
    local settings = fair.any_users and redis.call('HMGET', K.users, unpack(missing)) or {}
    for i, name in ipairs(missing) do keep_settings(name, settings[i]) end
  end
  if settings_only or #uncounted == 0 then return end
  local counts = redis.call('HMGET', K.running, unpack(uncounted))
  for i, name in ipairs(uncounted) do running_cache[name] = tonumber(counts[i] or nil) or 0 end
end

-- The cost of a task that declares none.
local function cost_of(owner)
  if SETTINGS.cost ~= 'time' then return 1 end
  return tonumber(redis.call('HGET', K.averages, owner) or nil) or fair.average or 1
end

-- When a rate allows the next task of a cost, ms, and how much it allows at once. A debt that is larger than
-- the rate can have caused is reduced: the clock was set back, or the rate was lower. A task that costs more
-- than the rate allows at once starts when there is no debt.
local function free_at(key, field, rate, cost)
  local interval, burst = 1000 / rate, math.max(1, math.floor(rate * BURST_S))
  local debt, last = string.match(redis.call('HGET', key, field) or '0', '^(%S+) ?(%S*)')
  local debt_until = tonumber(debt) or 0
  local most = now + math.max(burst, tonumber(last) or 1) * interval
  -- Ignore rounding errors: the same sum may have been computed in another order.
  if debt_until > most + 0.001 then
    debt_until = most
    redis.call('HSET', key, field, debt_until)
  end
  return debt_until - math.max(0, burst - (cost or 1)) * interval, burst
end

-- Add a cost to the debt of a rate; `declared`: the cost of the task, if it is not 1. `settles`: the cost is what
-- a task has cost more, or less, than it declared; the debt may then be that of several tasks. Returns when the
-- rate is free of debt.
local function add_debt(key, field, rate, cost, declared, settles)
  local debt = tonumber(string.match(redis.call('HGET', key, field) or '0', '^%S+')) or 0
  debt = math.max(now, debt) + cost * 1000 / rate
  if settles then declared = math.max(declared, (debt - now) * rate / 1000) end
  redis.call('HSET', key, field, declared and text_of(debt) .. ' ' .. text_of(declared) or debt)
  return debt
end

-- Until when an owner or a tenant may not be served: ms, '+inf' until a change, or nil for now. `cost`: what
-- the next task declares.
local function blocked_until(owner, cost)
  local s = settings_of(owner)
  if s.paused then return s.paused_until or '+inf' end
  if s.max_running and running_of(owner) >= s.max_running then return '+inf' end
  if s.rate then
    local free = free_at(K.throttle, owner, s.rate, cost)
    if free > now then return math.ceil(free) end
  end
  return nil
end

local function spend_rate(owner, cost)
  local rate = settings_of(owner).rate
  if rate then add_debt(K.throttle, owner, rate, cost or 1, cost) end
end

local function first_waiting(seat, how_many)
  return redis.call('ZRANGEBYLEX', K.backlog, '[' .. seat .. '\0', '(' .. seat .. '\1',
    'LIMIT', 0, how_many)
end

-- True if the level digit of a backlog member is '0'.
local function is_critical(seat, member)
  return string.byte(member, #seat + 2) == 48
end

-- --- tags ---

-- Whether a seat is in the ring of the default pool.
local function in_root(seat)
  return layout == 1 or not string.find(seat, '[\2\3]', 2)
end

-- The clocks of the ring of a seat.
local function ring_of(seat)
  return in_root(seat) and fair or rings().of(seat)
end

-- The tag of a seat in ready, critical or idle, whose key is given; nil if it is not there.
local function tag_in(key, seat)
  if in_root(seat) then return tonumber(redis.call('ZSCORE', key, seat) or nil) end
  return rings().tag_in(key, seat)
end

local function put_tag(key, seat, tag)
  if in_root(seat) then redis.call('ZADD', key, tag, seat) else rings().put(key, seat, tag) end
end

local function drop_tag(key, seat)
  if in_root(seat) then redis.call('ZREM', key, seat) else rings().drop(key, seat) end
end

-- Add a seat, and its tenant, to the CRITICAL lane.
local function enter_critical(seat, cost)
  local owner = owner_in(seat)
  if not tag_in(K.critical, seat) then
    local stride = (cost or cost_of(owner)) / settings_of(owner).weight
    if fair.shift and in_root(seat) then level().note_start(K.critical) end
    put_tag(K.critical, seat, ring_of(seat).critical_clock + stride)
  end
  local group = group_of(seat)
  if group and tag_in(K.ready, group) then enter_critical(group, cost) end
end

-- When nothing is ready in the default pool and nothing is leased, past service no longer counts. In a partition, only
-- a claim knows whether others serve (`of_all`): to forget what somebody owes there would be a gift.
local function settle(of_all)
  if fair.shift and not of_all then return end
  if redis.call('ZCARD', K.ready) > 0 or redis.call('ZCARD', K.leases) > 0 then return end
  local top = redis.call('ZRANGE', K.idle, -1, -1, 'WITHSCORES')
  if top[2] then
    fair.clock = math.max(fair.clock, tonumber(top[2]))
    fair_dirty = true
    -- With other rings, claims drop these entries in steps, and what tenants leave in their rings.
    if layout == 1 then redis.call('UNLINK', K.idle, K.averages) end
  end
end

-- The finish tag of a seat that still counts: the clock has not passed it.
local function debt_of(seat)
  local tag = tag_in(K.idle, seat)
  return tag and (layout == 1 or tag > ring_of(seat).clock) and tag or nil
end

-- Add a seat to ready or parked. It must be in neither. Returns true if it may be served.
-- `newcomer`: it is new to the ring. `cost`, `critical`: of its next task; nil: read from its backlog.
local function place(seat, newcomer, cost, critical)
  local owner = owner_in(seat)
  local wait = blocked_until(owner)
  if wait then
    redis.call('ZADD', K.parked, wait, seat)
    return false
  end
  if critical == nil then
    local head = first_waiting(seat, 1)[1]
    critical = head and is_critical(seat, head)
    cost = head and cost_in(head)
  end
  local start, debt = ring_of(seat).clock, debt_of(seat)
  if debt then
    start = math.max(start, debt)
  elseif newcomer then
    -- A newcomer enters one stride after the clock. At the clock, a steady stream of new users would starve
    -- those who have waited.
    start = start + (cost or cost_of(owner)) / settings_of(owner).weight
  end
  if debt or layout > 1 then drop_tag(K.idle, seat) end
  if fair.pools or not in_root(seat) then rings().note_start(seat) end
  if fair.shift and in_root(seat) then level().note_start(K.ready) end
  put_tag(K.ready, seat, start)
  redis.call('HSET', K.served, seat, 'late')
  local is_ready = layout == 1 or rings().place_tenant(seat, newcomer, cost, critical)
  if critical then enter_critical(seat, cost) end
  return is_ready
end

local TOLD = 20  -- tasks of a seat whose names are read when it may be served again

-- Tell workers that take only some names that a seat may be served again.
local function tell_of(seat)
  if not fair.mixed or #kinds().all() == 0 then return end
  local list = {}
  for i, found in ipairs(first_waiting(seat, TOLD)) do
    list[i] = { seat = seat, label = label_in(found) }
  end
  -- A tenant has no tasks of its own: the workers look for themselves.
  kinds().tell(list, (#list == TOLD or #list == 0) and seat)
end

-- Park or unpark a seat whose owner may be served from `wait` on. Returns true if it may be served.
local function review_seat(seat, wait)
  if redis.call('ZSCORE', K.parked, seat) then
    if wait then
      redis.call('ZADD', K.parked, wait, seat)
      return false
    end
    redis.call('ZREM', K.parked, seat)
    local is_ready
    if layout > 1 and rings().is_tenant(seat) then
      is_ready = rings().return_tenant(seat)
    else
      is_ready = place(seat, false)
    end
    tell_of(seat)
    return is_ready
  end
  local tag = tag_in(K.ready, seat)
  if not tag then return false end
  if not wait then return true end
  drop_tag(K.ready, seat)
  drop_tag(K.critical, seat)
  put_tag(K.idle, seat, tag)
  redis.call('ZADD', K.parked, wait, seat)
  if layout > 1 then rings().left(seat) end
  return false
end

-- Park or unpark all seats of an owner or a tenant whose limits or running count may have changed. Returns
-- true if the one in the default pool may be served; workers of other pools are woken.
local function review(owner)
  local wait = blocked_until(owner)
  local is_ready = review_seat(owner, wait)
  for pool in string.gmatch(fair.pools or '', '[^\n]+') do
    if review_seat(owner .. '\3' .. pool, wait) then kinds().wake_pool(pool) end
  end
  return is_ready
end

-- Remove a seat that has no more waiting tasks.
local function leave(seat)
  local tag = tag_in(K.ready, seat)
  if tag then
    drop_tag(K.ready, seat)
    put_tag(K.idle, seat, tag)
    redis.call('HSET', K.served, seat, 'late')
  end
  redis.call('ZREM', K.parked, seat)
  drop_tag(K.critical, seat)
  if layout > 1 then rings().left(seat) end
end

-- Move the tag of a seat by an amount of virtual time, but not below the clock.
local function adjust(seat, by)
  local clock = ring_of(seat).clock
  local tag = tag_in(K.ready, seat)
  if tag then
    put_tag(K.ready, seat, math.max(clock, tag + by))
    return
  end
  -- Also if it is not ahead of the clock: the records of a user are dropped together with the tag.
  tag = tag_in(K.idle, seat) or clock
  put_tag(K.idle, seat, math.max(clock, tag + by))
end

-- Charge more, or less, for a task: the tags of its user and of its tenant.
local function charge_more(record, cost)
  local seat = seat_of(record)
  while seat do
    adjust(seat, cost / settings_of(owner_in(seat)).weight)
    seat = group_of(seat)
  end
end

-- Charge an attempt that has ended what it has cost, instead of what was charged before: `cost` if the worker
-- says so, or else the time of the lease, if the queue counts time and the task declares no cost.
local function settle_cost(record, cost)
  local charge = record.charge or 1
  if cost then
    charge_more(record, cost - charge)
    local owner = owner_of(record)
    while owner do
      local rate = settings_of(owner).rate
      local spent = record.flow and record.flow.cost or 1
      if rate then add_debt(K.throttle, owner, rate, cost - spent, cost, true) end
      owner = group_of(owner)
    end
    return
  end
  if SETTINGS.cost ~= 'time' or (record.flow and record.flow.cost) then return end
  local seconds = math.max(now - (record.claimed or now), 1) / 1000
  charge_more(record, seconds - charge)
  local owner = owner_of(record)
  local own = tonumber(redis.call('HGET', K.averages, owner) or nil) or seconds
  redis.call('HSET', K.averages, owner, own + (seconds - own) / 4)
  fair.average = (fair.average or seconds) + (seconds - (fair.average or seconds)) / 16
  fair_dirty = true
end
