-- Limits of handlers over all workers: how many of a name run at a time, and begin in a second.
--
-- @include backlog
-- KEYS limits     hash  name -> JSON: slots, rate, timeout_ms; only names that have any
-- KEYS slots      zset  <name> NUL <task id>, all scores 0: leased tasks that hold a slot
-- KEYS slot_line  zset  <name> NUL <turn> NUL <user>, all scores 0: whose held task is next; and
--                       \1 <name> NUL <user>: the user has a turn for the name
-- KEYS paced      hash  name -> when its rate is next free of debt, ms
-- KEYS deadlines  zset  leased task id -> when it is ended if it has not answered, ms
--
-- A task whose name has no slot free is set aside, so that it does not block its user's others. A
-- slot is an entry of the task that holds it, which goes with the lease: there is no count to leak.

local LIMIT_NUMBERS = { 'slots', 'rate', 'timeout_ms' }

local limit_cache = {}
local has_limits = false
local function load_limits()
  has_limits = redis.call('HLEN', K.limits) > 0
end

-- The limits that are stored as a text; false: none.
local function parse_limits(text)
  if not text then return false end
  local stored, found = decode(text) or {}, {}
  for _, field in ipairs(LIMIT_NUMBERS) do
    local value = stored[field]
    if type(value) == 'number' and value > 0 then found[field] = value end
  end
  found.is_declared = stored.by == 'worker'
  return found
end

-- The limits of a name, or nil: it has none. Only those of names that are met are read: there may
-- be many thousands.
local function limits_of(name)
  if not has_limits or not name then return nil end
  if limit_cache[name] == nil then
    limit_cache[name] = parse_limits(redis.call('HGET', K.limits, name))
  end
  return limit_cache[name] or nil
end

local SLOTS_CHECKED = 1000  -- leases that are looked at when all slots of a name seem taken
local HELD_NAMES = 100      -- names of tasks that were set aside, looked at in one claim
local TURNS = 100           -- turns of users whose tasks were cancelled meanwhile
local RETURNED = 1000       -- tasks that come back in one claim: unpack() has room for a few thousand
local used_cache = {}

-- How many slots of a name are taken. An entry whose lease is gone (its record was spoilt) is
-- dropped when it matters.
local function used_slots(name, slots)
  if used_cache[name] then return used_cache[name] end
  local members = redis.call('ZRANGEBYLEX', K.slots, '[' .. name .. '\0', '(' .. name .. '\1',
    'LIMIT', 0, SLOTS_CHECKED)
  local used = #members
  if used >= slots then
    for _, member in ipairs(members) do
      if not redis.call('ZSCORE', K.leases, string.sub(member, #name + 2)) then
        redis.call('ZREM', K.slots, member)
        used = used - 1
      end
    end
  end
  used_cache[name] = used
  return used
end

local function is_limited(name)
  local limits = limits_of(name)
  if not limits then return false end
  if limits.slots and used_slots(name, limits.slots) >= limits.slots then return true end
  return limits.rate and (free_at(K.paced, name, limits.rate)) > now
end

-- A task of this name begins.
local function begin_limited(name)
  local limits = limits_of(name)
  if not limits then return end
  if limits.slots then used_cache[name] = used_slots(name, limits.slots) + 1 end
  if limits.rate then
    local debt = math.max(now, tonumber(redis.call('HGET', K.paced, name) or nil) or 0)
    redis.call('HSET', K.paced, name, debt + 1000 / limits.rate)
  end
end

-- It does not begin after all: there is nothing that could be leased.
local function not_begun(name)
  if used_cache[name] then used_cache[name] = used_cache[name] - 1 end
end

-- A lease has ended: what it took of the limits is free again.
local function end_limited(id, record)
  if record.slot then
    redis.call('ZREM', K.slots, (record.name or '') .. '\0' .. id)
    record.slot = nil
    if redis.call('ZCARD', K.held) > 0 then
      wake_worker()
      kinds.wake(record.name)
    end
  end
  if record.deadline then
    redis.call('ZREM', K.deadlines, id)
    record.deadline, record.ruled = nil, nil
  end
end

local TURN = 1000  -- how far a turn of a user with weight 1 is from the one before

-- Who is next in the line of a name: the member, or nil.
local function first_turn(name)
  return redis.call('ZRANGEBYLEX', K.slot_line, '[' .. name .. '\0', '(' .. name .. '\1',
    'LIMIT', 0, 1)[1]
end

-- Where a turn stands in the line of its name.
local function tag_of_turn(turn)
  return tonumber(string.match(turn, '%z(%d+)%z%Z*$'))
end

-- The user's next turn comes one stride after a tag, or after whose turn it is: as in ready, whoever
-- has twice the weight is there twice as often. `turn` in fair is the last of all lines, where
-- an empty one begins, and where clients that know no weights go on.
local function take_turn(name, user, tag)
  local last = tonumber(redis.call('HGET', K.fair, 'turn') or nil) or 0
  if not tag then
    local first = first_turn(name)
    tag = first and tag_of_turn(first) or last
  end
  local turn = tag + math.max(1, math.floor(TURN * cost_of(user) / settings_of(user).weight))
  if turn > last then redis.call('HSET', K.fair, 'turn', string.format('%.0f', turn)) end
  redis.call('ZADD', K.slot_line, 0, string.format('%s\0%014.0f\0%s', name, turn, user))
end

local function turn_mark(name, user)
  return '\1' .. name .. '\0' .. user
end

-- The user's held tasks of a name have a turn among those of all who wait for it now. One at a
-- time: a user whose held tasks were cancelled keeps the turn, and gets no second one.
local function join_slot_line(name, user)
  if redis.call('ZADD', K.slot_line, 0, turn_mark(name, user)) == 1 then take_turn(name, user) end
end

-- How many more tasks of a name may begin now, out of so many.
local function room_for(name, most)
  local limits = limits_of(name)
  if not limits then return most end  -- it had some when they were set aside
  if limits.slots then most = math.min(most, limits.slots - used_slots(name, limits.slots)) end
  if limits.rate then
    local free, burst = free_at(K.paced, name, limits.rate)
    local ahead = now - free
    most = math.min(most, burst, ahead < 0 and 0 or math.floor(ahead * limits.rate / 1000) + 1)
  end
  return most
end

-- Whose turn it is for a name: the member of their first held task, or nil; their turn is used up.
local function next_held(name)
  for _ = 1, TURNS do
    local turn = first_turn(name)
    if not turn then return nil end
    redis.call('ZREM', K.slot_line, turn)
    local user = string.match(turn, '%z(%Z*)$')
    local range = user .. '\0' .. name
    local held = redis.call('ZRANGEBYLEX', K.held, '[' .. range .. '\0', '(' .. range .. '\1',
      'LIMIT', 0, 2)
    if held[2] then
      take_turn(name, user, tag_of_turn(turn))
    else
      redis.call('ZREM', K.slot_line, turn_mark(name, user))
    end
    if held[1] then return held[1] end
  end
  return nil
end

local LINE_BEGIN = '[\2'  -- behind the marks

-- Call a function with each name that tasks wait for; at most so many names, then the next claim
-- goes on from there. Where that is.
local function each_held_name(visit)
  local from = redis.call('HGET', K.fair, 'held_from') or LINE_BEGIN
  for _ = 1, HELD_NAMES do
    local turn = redis.call('ZRANGEBYLEX', K.slot_line, from, '+', 'LIMIT', 0, 1)[1]
    if not turn then return LINE_BEGIN end
    local name = string.match(turn, '^%Z*')
    visit(name)
    from = '[' .. name .. '\1'
  end
  return from
end

-- Bring back tasks that waited for room in the limits of their names, as many as there is room for:
-- at most so many of a name that is wanted. True if there are some of names that are not.
local function return_held(most, is_wanted)
  local list, for_others = {}, false
  local from = each_held_name(function(name)
    if not is_wanted(name) then
      for_others = true
      return
    end
    local room = room_for(name, most)
    while room > 0 and #list < RETURNED do
      local member = next_held(name)
      if not member then return end
      redis.call('ZREM', K.held, member)
      local user, rank, id = string.match(member, '^(%Z*)%z%Z*%z(%Z*)%z(%Z*)$')
      list[#list + 1] = { id = id, user = user, rank = rank, name = name }
      -- One whose user may not be served now waits with the user, and takes no room.
      if not blocked_until(user) then room = room - 1 end
    end
  end)
  if from ~= LINE_BEGIN then
    redis.call('HSET', K.fair, 'held_from', from)
  else
    redis.call('HDEL', K.fair, 'held_from')
  end
  add_waiting(list, true)
  return for_others
end

-- How long until a task that was set aside may begin, ms: 0 now, -1 when that is not known.
local function room_after(is_wanted)
  local soonest = -1
  each_held_name(function(name)
    local limits = limits_of(name) or {}
    if not is_wanted(name)
      or (limits.slots and used_slots(name, limits.slots) >= limits.slots) then return end
    local free = limits.rate and (free_at(K.paced, name, limits.rate)) or now
    local ms = math.max(0, math.ceil(free - now))
    if soonest < 0 or ms < soonest then soonest = ms end
  end)
  return soonest
end
