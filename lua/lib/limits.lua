-- Limits of handlers over all workers: how many tasks of a name run at once, and begin in a second.
--
-- @include backlog
-- KEYS limits     hash  name -> JSON: slots, rate, timeout_ms; only names that have limits
-- KEYS slots      zset  <name> NUL <task id>, all scores 0: leased tasks that hold a slot
-- KEYS slot_line  zset  <name> NUL <turn> NUL <user>, all scores 0: whose held task is next; and
--                       \1 <name> NUL <user>: a mark that the user has a turn for the name
-- KEYS paced      hash  name -> when its rate is free of debt, ms
-- KEYS deadlines  zset  leased task id -> when its run is ended if the worker has not answered, ms
--
-- A task whose name is at its limit is moved to `held`, so that it does not block its user's other tasks. A
-- slot is an entry of the task that holds it, and is removed with the lease: there is no count to get wrong.

local LIMIT_NUMBERS = { 'slots', 'rate', 'timeout_ms' }

local limit_cache = {}
local has_limits = false
local function load_limits()
  has_limits = redis.call('HLEN', K.limits) > 0
end

-- Parse the text of limits; false if there are none.
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

-- The limits of a name, or nil. Reads only those of names that are needed: there may be many thousands.
local function limits_of(name)
  if not has_limits or not name then return nil end
  if limit_cache[name] == nil then
    limit_cache[name] = parse_limits(redis.call('HGET', K.limits, name))
  end
  return limit_cache[name] or nil
end

local SLOTS_CHECKED = 1000  -- leases that are checked when all slots of a name seem to be in use
local HELD_NAMES = 100      -- names with held tasks that one claim looks at
local TURNS = 100           -- turns of users whose tasks were cancelled that are skipped at once
local RETURNED = 1000       -- held tasks that one claim returns: unpack() is limited to a few thousand values
local used_cache = {}

-- The number of slots of a name in use. An entry whose lease is gone (its record was damaged) is dropped when
-- all slots seem to be in use.
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

-- Count a task of this name that begins.
local function begin_limited(name)
  local limits = limits_of(name)
  if not limits then return end
  if limits.slots then used_cache[name] = used_slots(name, limits.slots) + 1 end
  if limits.rate then
    local debt = math.max(now, tonumber(redis.call('HGET', K.paced, name) or nil) or 0)
    redis.call('HSET', K.paced, name, debt + 1000 / limits.rate)
  end
end

-- Undo that for a task that cannot be leased because its record is damaged.
local function not_begun(name)
  if used_cache[name] then used_cache[name] = used_cache[name] - 1 end
end

-- Release the slot and the deadline of a lease that has ended.
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

local TURN = 1000  -- distance between two turns of a user with weight 1

-- The first turn for a name: its member, or nil.
local function first_turn(name)
  return redis.call('ZRANGEBYLEX', K.slot_line, '[' .. name .. '\0', '(' .. name .. '\1',
    'LIMIT', 0, 1)[1]
end

-- The tag of a turn, by which the turns for a name are ordered.
local function tag_of_turn(turn)
  return tonumber(string.match(turn, '%z(%d+)%z%Z*$'))
end

-- Give the user a turn for a name, one stride after a tag or after the first turn. As in ready, a user with
-- twice the weight has turns twice as often. `turn` in fair is the last turn of all names: a name without
-- turns begins there, and so do clients that do not know weights.
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

-- Give the user a turn for a name unless the user has one. A user whose held tasks were cancelled keeps the
-- turn and gets no second one.
local function join_slot_line(name, user)
  if redis.call('ZADD', K.slot_line, 0, turn_mark(name, user)) == 1 then take_turn(name, user) end
end

-- How many more tasks of a name may begin now, at most `most`.
local function room_for(name, most)
  local limits = limits_of(name)
  if not limits then return most end  -- its limits were removed since the tasks were held
  if limits.slots then most = math.min(most, limits.slots - used_slots(name, limits.slots)) end
  if limits.rate then
    local free, burst = free_at(K.paced, name, limits.rate)
    local ahead = now - free
    most = math.min(most, burst, ahead < 0 and 0 or math.floor(ahead * limits.rate / 1000) + 1)
  end
  return most
end

-- Use up the first turn for a name. Returns the member of that user's first held task, or nil.
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

local LINE_BEGIN = '[\2'  -- after the marks

-- Call a function with each name that has held tasks, for at most HELD_NAMES names. Returns where the next
-- claim continues.
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

-- Return held tasks of wanted names to the backlog, as many as their limits allow and at most `most` of each
-- name. Returns true if there are held tasks of other names.
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
      -- A task whose user may not be served waits with the user, and takes no slot.
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

-- Ms until a held task may begin; 0: now; -1: not known.
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
