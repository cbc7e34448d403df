-- Limit how many tasks run at once, and start in a second, over all workers: by name and by key.
--
-- LAZY
-- @include status owners backlog
-- @lazy permits starts
-- KEYS limits       hash  name -> JSON: slots, rate, timeout_ms, by; \3 key -> slots, rate, ordered,
--                         through_retries, scope; \3 prefix * -> the same for all keys that begin so; \4 -> the
--                         prefixes, one per line
-- KEYS slots        zset  gate NUL task id, all scores 0: leased tasks that hold a slot
-- KEYS slot_line    zset  line NUL turn NUL seat, all scores 0: whose held task is next; and \1 line NUL seat: a
--                         mark that the seat has a turn in the line. A line is a gate, with a turn for each
--                         tenant and each user without one, or gate \6 and a tenant's seat, with its users
-- KEYS paced        hash  gate -> when its rate is free of debt, ms; then the last cost if it was declared
-- KEYS gate_times   zset  gate -> when to look at it, ms: held tasks may start, or its debt is over
-- KEYS gate_order   zset  o gate NUL arrival NUL task id, all scores 0: waiting tasks of ordered gates; h gate NUL
--                         arrival NUL task id: held tasks of several gates; r gate NUL arrival NUL task id NUL
--                         seat NUL since: tasks that reserve the gate
-- KEYS gate_passes  hash  task id -> how often the task was passed on from one gate to another
--
-- A gate is a limit that tasks pass: a name, \3 key, or \3 key \2 and a tenant (or a user without one) where each
-- tenant has slots of its own. A task whose gate is closed is moved to `held`, so that it does not block the
-- other tasks of its user; it holds nothing meanwhile. A slot is an entry of the task that holds it, and is
-- removed with the lease: there is no count to get wrong.
--
-- A gate with held tasks has no room, or is in gate_times. Whoever frees a slot brings the next held task back
-- to the backlog; when a rate allows it, a claim does. At an ordered gate, only the oldest waiting task may
-- start. A task of several gates that was passed on PASSED_ON times reserves them: younger tasks leave it
-- room. Older ones win, so tasks cannot wait for each other in a circle; and while a gate is reserved, the
-- oldest task of several gates that is held at it comes back first.

local gates = {}

local LIMIT_NUMBERS = { 'slots', 'rate', 'timeout_ms' }
local SLOTS_CHECKED = 1000   -- leases that are checked when all slots of a gate seem to be in use
local TURNS = 100            -- turns of seats whose tasks were cancelled that are skipped at once
local RETURNED = 1000        -- held tasks that one call returns: unpack() is limited to a few thousand values
local GATES_LOOKED_AT = 100  -- gates in gate_times that one claim looks at
local PASSED_ON = 3          -- times after which a task of several gates reserves them; then again, as often
local RESERVED_MS = 600000   -- a reservation lapses so long after its task came back, if nobody takes the task
local RESERVING = 100        -- reservations of one gate that are looked at
local PLACED_AT_ONCE = 100  -- held tasks of a user that get their places at once
local LOOK_AGAIN = 1000      -- ms until a gate with room and held tasks is looked at again
local TURN = 1000            -- distance between two turns of a seat with weight 1

-- Names of queues have no colon: behind one is the number of a partition.
local IS_PARTITION = string.find(K.limits, '^{[^:}]*:[^:}]*:') ~= nil

-- --- limits ---

local names, keys, prefixes = {}, {}, nil

-- Parse the text of limits; false if there are none.
function gates.parse(text)
  if not text then return false end
  local stored, found = decode(text) or {}, {}
  for _, field in ipairs(LIMIT_NUMBERS) do
    local value = stored[field]
    if type(value) == 'number' and value > 0 then found[field] = value end
  end
  found.is_declared = stored.by == 'worker'
  found.ordered, found.through_retries = stored.ordered == true, stored.through_retries == true
  found.by_tenant = stored.scope == 'tenant'
  found.is_shared = IS_PARTITION and found.slots ~= nil and not found.by_tenant
  found.shares_rate = IS_PARTITION and found.rate ~= nil and not found.by_tenant
  found.set_by = type(stored.op) == 'string' and stored.op or ''
  return found
end

-- The limits of a name, or nil. Reads only those of names that are needed: there may be many thousands.
function gates.of_name(name)
  if names[name] == nil then names[name] = gates.parse(redis.call('HGET', K.limits, name)) end
  return names[name] or nil
end

-- The longest prefix of patterns that a key begins with, or nil.
local function prefix_of(key)
  if not prefixes then
    prefixes = {}
    for prefix in string.gmatch(redis.call('HGET', K.limits, '\4') or '', '[^\n]*\n') do
      prefixes[#prefixes + 1] = string.sub(prefix, 1, -2)
    end
  end
  local best
  for _, prefix in ipairs(prefixes) do
    if string.sub(key, 1, #prefix) == prefix and (not best or #prefix > #best) then best = prefix end
  end
  return best
end

-- The limits of a key, or nil: its own, or those of the longest pattern that fits.
function gates.of_key(key)
  if keys[key] == nil then
    local text = redis.call('HGET', K.limits, '\3' .. key)
    local prefix = not text and prefix_of(key)
    if prefix then text = redis.call('HGET', K.limits, '\3' .. prefix .. '*') end
    keys[key] = gates.parse(text)
  end
  return keys[key] or nil
end

-- The two gates that a key can have for a seat: of the queue, and of its tenant or its user.
local function key_gates(key, seat)
  local owner = owner_in(seat)
  return '\3' .. key, '\3' .. key .. '\2' .. (group_of(owner) or owner)
end

local function keys_in(label)
  local found = {}
  for key in string.gmatch(label, '\3([^\3-\5]*)') do found[#found + 1] = key end
  return found
end

-- The gates of a task (see waiting_task) that have limits: pairs of a gate and its limits.
local function gates_of(task)
  if task.gates then return task.gates end
  local found, name = {}, name_in_label(task.label)
  local limits = gates.of_name(name)
  if limits and (limits.slots or limits.rate) then found[1] = { name, limits } end
  for _, key in ipairs(layout > 1 and keys_in(task.label) or {}) do
    limits = gates.of_key(key)
    if limits then
      local of_queue, of_tenant = key_gates(key, task.seat)
      found[#found + 1] = { limits.by_tenant and of_tenant or of_queue, limits }
    end
  end
  -- In the order in which permits are kept; see gates.reserving.
  if IS_PARTITION then table.sort(found, function(a, b) return a[1] < b[1] end) end
  task.gates, task.cost = found, cost_in(task.label)
  return found
end

gates.of_task = gates_of

-- The limits of a gate, or nil if they were removed.
local function limits_of(gate)
  if string.byte(gate) ~= 3 then return gates.of_name(gate) end
  local key, tenant = string.match(gate, '^\3([^\2]*)(.*)$')
  local limits = gates.of_key(key)
  return limits and limits.by_tenant == (tenant ~= '') and limits or nil
end

gates.limits_of = limits_of

-- --- room ---

local used_cache = {}

-- The slots of a gate that this partition may use.
local function slots_of(gate, limits)
  return limits.is_shared and permits().slots(gate, limits) or limits.slots
end

-- The number of slots of a gate in use. An entry whose lease is gone (its record was damaged) is dropped when
-- all slots seem to be in use.
local function used_slots(gate, slots)
  if used_cache[gate] then return used_cache[gate] end
  local from, to = '[' .. gate .. '\0', '(' .. gate .. '\1'
  local used = redis.call('ZLEXCOUNT', K.slots, from, to)
  if used >= slots then
    for _, member in ipairs(redis.call('ZRANGEBYLEX', K.slots, from, to, 'LIMIT', 0, SLOTS_CHECKED)) do
      if not redis.call('ZSCORE', K.leases, string.sub(member, #gate + 2)) then
        redis.call('ZREM', K.slots, member)
        used = used - 1
      end
    end
  end
  used_cache[gate] = used
  return used
end

local function seq_of(task)
  return string.sub(task.rank, -14)
end

local function order_member(kind, gate, task)
  return kind .. gate .. '\0' .. seq_of(task) .. '\0' .. task.id
end

-- The id of the oldest waiting task of an ordered gate, and its place.
local function oldest_of(gate)
  local member = redis.call('ZRANGEBYLEX', K.gate_order, '[o' .. gate .. '\0', '(o' .. gate .. '\1',
    'LIMIT', 0, 1)[1]
  return member and string.match(member, '%z(%Z*)$'), member
end

-- Whether any gate is reserved.
local any_reserved
local function has_reservations()
  if any_reserved == nil then
    any_reserved = #redis.call('ZRANGEBYLEX', K.gate_order, '[r', '(s', 'LIMIT', 0, 1) > 0
  end
  return any_reserved
end

-- Drop a reservation that was made long ago, unless its task still waits for a slot. Returns true if it is
-- dropped.
local function lapse(member)
  local id = string.match(member, '^%Z*%z%Z*%z(%Z*)')
  local record = read_status(id)
  redis.call('ZREM', K.gate_order, member)
  if not record or not gates.held_at(waiting_task(id, record)) then return true end
  redis.call('ZADD', K.gate_order, 0, string.gsub(member, '%d+$', now_text) .. '')
  return false
end

-- The number of tasks that reserve a gate and are older than a task: those that could run but for the gate.
local function reserved_before(gate, task)
  if not has_reservations() then return 0 end
  local count = 0
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.gate_order, '[r' .. gate .. '\0',
    '(r' .. gate .. '\0' .. (task and seq_of(task) or '\1'), 'LIMIT', 0, RESERVING)) do
    local seat, since = string.match(member, '%z(%Z*)%z(%d+)$')
    local owner = seat and owner_in(seat)
    local tenant = owner and group_of(owner)
    if not owner then
      redis.call('ZREM', K.gate_order, member)
    elseif math.abs(now - tonumber(since)) > RESERVED_MS and lapse(member) then
      any_reserved = nil
    elseif not blocked_until(owner) and not (tenant and blocked_until(tenant)) then
      count = count + 1
    end
  end
  return count
end

-- The arrivals of tasks that reserve a shared gate and could pass their shared gates with smaller names. Others
-- reserve nothing: a task of two partitions each would wait for a permit that the other one keeps. `found`: what is
-- known of other gates.
function gates.reserving(gate, found)
  if found[gate] then return found[gate] end
  local list = {}
  found[gate] = list
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.gate_order, '[r' .. gate .. '\0', '(r' .. gate .. '\1',
    'LIMIT', 0, RESERVING)) do
    local id, seat, since = string.match(member, '^%Z*%z%Z*%z(%Z*)%z(%Z*)%z(%d+)$')
    local has_lapsed = since and math.abs(now - tonumber(since)) > RESERVED_MS and lapse(member)
    local record = since and not has_lapsed and read_status(id)
    local tenant = record and group_of(owner_in(seat))
    if record and record.state == 'ready' and not blocked_until(owner_in(seat))
      and not (tenant and blocked_until(tenant)) then
      local task, passes = waiting_task(id, record), true
      for _, pair in ipairs(gates_of(task)) do
        local other, limits = pair[1], pair[2]
        if passes and other < gate and limits.is_shared then
          local slots, older = slots_of(other, limits), 0
          for _, seq in ipairs(gates.reserving(other, found)) do
            if seq < seq_of(task) then older = older + 1 end
          end
          passes = used_slots(other, slots) + older < slots
        end
      end
      if passes then list[#list + 1] = seq_of(task) end
    end
  end
  return list
end

-- The same as reserved_before, for a shared gate.
function gates.reserved_shared(gate, task)
  if not has_reservations() then return 0 end
  local count = 0
  for _, seq in ipairs(gates.reserving(gate, {})) do
    if seq < seq_of(task) then count = count + 1 end
  end
  return count
end

-- The first gate that a task cannot pass now, and why: 'slots', 'rate', 'order' or 'reserved'; nil if it can
-- start. For a rate, also when it can pass.
function gates.closed_for(task)
  gates.arrive(task)  -- one that was pushed before a limit was set takes its places now
  for _, pair in ipairs(gates_of(task)) do
    local gate, limits = pair[1], pair[2]
    local slots = slots_of(gate, limits)
    if slots and used_slots(gate, slots) >= slots then return gate, 'slots' end
    if limits.shares_rate then
      if not starts().allow(gate, task.cost or 1) then return gate, 'rate' end
    elseif limits.rate then
      local free = free_at(K.paced, gate, limits.rate, task.cost)
      if free > now then return gate, 'rate', free end
    end
    if limits.ordered and oldest_of(gate) ~= task.id then return gate, 'order' end
    local reserved = slots and (limits.is_shared and gates.reserved_shared or reserved_before)(gate, task) or 0
    if slots and used_slots(gate, slots) + reserved >= slots then return gate, 'reserved' end
  end
  return nil
end

-- How many more tasks of a gate may start now, at most `most`.
local function room_at(gate, most)
  local limits = limits_of(gate)
  if not limits then return most end  -- its limits were removed since the tasks were held
  local slots = slots_of(gate, limits)
  if slots then most = math.min(most, slots - used_slots(gate, slots)) end
  if limits.shares_rate then
    most = math.min(most, starts().room(gate))
  elseif limits.rate then
    local free, burst = free_at(K.paced, gate, limits.rate)
    local ahead = now - free
    most = math.min(most, burst, ahead < 0 and 0 or math.floor(ahead * limits.rate / 1000) + 1)
  end
  return limits.ordered and math.min(most, 1) or most
end

-- --- whose turn it is ---

-- The first turn at a gate: its member, or nil.
local function first_turn(gate)
  return redis.call('ZRANGEBYLEX', K.slot_line, '[' .. gate .. '\0', '(' .. gate .. '\1',
    'LIMIT', 0, 1)[1]
end

-- The tag of a turn, by which the turns at a gate are ordered.
function gates.tag_of_turn(turn)
  return tonumber(string.match(turn, '%z(%d+)%z%Z*$'))
end

-- Give the seat a turn in a line, one stride after a tag or after the first turn. As in ready, a user with
-- twice the weight has turns twice as often. `turn` in fair is the last turn of all lines: a line without turns
-- begins there, and so do clients that do not know weights.
function gates.take_turn(line, seat, tag)
  local last = tonumber(redis.call('HGET', K.fair, 'turn') or nil) or 0
  if not tag then
    local first = first_turn(line)
    tag = first and gates.tag_of_turn(first) or last
  end
  local owner = owner_in(seat)
  local turn = tag + math.max(1, math.floor(TURN * cost_of(owner) / settings_of(owner).weight))
  if turn > last then redis.call('HSET', K.fair, 'turn', string.format('%.0f', turn)) end
  redis.call('ZADD', K.slot_line, 0, string.format('%s\0%014.0f\0%s', line, turn, seat))
end

function gates.turn_mark(line, seat)
  return '\1' .. line .. '\0' .. seat
end

-- The line in which a seat waits at a gate.
function gates.line_of(gate, seat)
  local group = layout > 1 and group_of(seat)
  return group and gate .. '\6' .. group or gate
end

-- Give the seat, and its tenant, a turn at a gate unless it has one. A seat whose held tasks were cancelled keeps
-- the turn and gets no second one.
function gates.join_line(gate, seat)
  local line = gates.line_of(gate, seat)
  if redis.call('ZADD', K.slot_line, 0, gates.turn_mark(line, seat)) == 1 then gates.take_turn(line, seat) end
  if line ~= gate then gates.join_line(gate, group_of(seat)) end
end

-- The member of a task in `held`. Its label is left out if it is the gate, as it is without keys.
function gates.held_member(gate, task)
  return task.seat .. '\0' .. gate .. '\0' .. task.rank .. '\0' .. task.id
    .. (task.label == gate and '' or '\0' .. task.label)
end

local function read_held(member)
  local seat, gate, rank, id, label = string.match(member, '^(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)(.*)$')
  return { id = id, seat = seat, rank = rank, label = label == '' and gate or string.sub(label, 2),
    was_held = true }
end

-- Use up the first turn in a line of a gate. Returns the member of that seat's first held task, or nil.
local function next_in_line(gate, line)
  for _ = 1, TURNS do
    local turn = first_turn(line)
    if not turn then return nil end
    redis.call('ZREM', K.slot_line, turn)
    local seat = string.match(turn, '%z(%Z*)$')
    local member, has_more
    if string.byte(seat) == 2 and not group_of(seat) then
      member = next_in_line(gate, line .. '\6' .. seat)
      has_more = first_turn(line .. '\6' .. seat)
    else
      local range = seat .. '\0' .. gate
      member, has_more = unpack(redis.call('ZRANGEBYLEX', K.held, '[' .. range .. '\0',
        '(' .. range .. '\1', 'LIMIT', 0, 2))
    end
    if has_more then
      gates.take_turn(line, seat, gates.tag_of_turn(turn))
    else
      redis.call('ZREM', K.slot_line, gates.turn_mark(line, seat))
    end
    if member then return member end
  end
  return nil
end

-- The member of the oldest task of an ordered gate if it is held at this gate, or nil.
local function next_in_order(gate)
  local id = oldest_of(gate)
  local record = id and read_status(id)
  if not record then return nil end
  local member = gates.held_member(gate, waiting_task(id, record))
  return redis.call('ZSCORE', K.held, member) and member or nil
end

-- The same, though damage may have left places of tasks that do not wait, or held tasks without places.
local function take_in_order(gate)
  for _ = 1, TURNS do
    local id, place = oldest_of(gate)
    if not id then return next_in_line(gate, gate) end
    local record = read_status(id)
    if record and (record.state == 'ready' or record.state == 'delayed') then break end
    redis.call('ZREM', K.gate_order, place)
  end
  return next_in_order(gate)
end

-- --- held tasks ---

local freed = {}  -- gates whose held tasks may start

-- Reserve the gates of a task, or those that it has reserved before, from now on.
local function reserve(task, again)
  for _, pair in ipairs(gates_of(task)) do
    local had = gates.unreserve(pair[1], task) > 0
    if pair[2].slots and (had or not again) then
      redis.call('ZADD', K.gate_order, 0, 'r' .. pair[1] .. '\0' .. seq_of(task) .. '\0' .. task.id .. '\0'
        .. task.seat .. '\0' .. now_text)
      any_reserved = true
    end
  end
end

-- Drop the reservation of a gate by a task. Returns how many there were.
function gates.unreserve(gate, task)
  local mine = 'r' .. gate .. '\0' .. seq_of(task) .. '\0' .. task.id .. '\0'
  local member = redis.call('ZRANGEBYLEX', K.gate_order, '[' .. mine, '(' .. mine .. '\255', 'LIMIT', 0, 1)[1]
  return member and redis.call('ZREM', K.gate_order, member) or 0
end

-- A task that waits at one gate leaves the permits that came for it at others to those who want them.
function gates.pass(task, gate)
  for _, pair in ipairs(gates_of(task)) do
    if pair[1] ~= gate and pair[2].is_shared and permits().use(pair[1]) then freed[pair[1]] = true end
  end
end

-- Note why a task is held, so that it comes back.
function gates.hold(task, gate, why, free)
  gates.join_line(gate, task.seat)
  if why == 'rate' and limits_of(gate).shares_rate then
    starts().want(gate, limits_of(gate), task.cost or 1)
  elseif why == 'rate' then
    redis.call('ZADD', K.gate_times, 'LT', math.ceil(free), gate)
  elseif why == 'reserved' then
    redis.call('ZADD', K.gate_times, 'NX', now + LOOK_AGAIN, gate)
  elseif why == 'slots' and limits_of(gate).is_shared then
    permits().want(gate, limits_of(gate))
  end
  if #gates_of(task) < 2 then return end
  gates.pass(task, gate)
  redis.call('ZADD', K.gate_order, 0, order_member('h', gate, task))
  if redis.call('HINCRBY', K.gate_passes, task.id, 1) % PASSED_ON == 0 then reserve(task) end
end

-- A task that waits at ordered gates takes its place there.
function gates.arrive(task)
  for _, pair in ipairs(gates_of(task)) do
    if pair[2].ordered then redis.call('ZADD', K.gate_order, 0, order_member('o', pair[1], task)) end
  end
end

-- Give held tasks their places at gates that have become ordered: of all gates that begin with a text, some in each
-- call. Returns where to continue, or '' at the end.
function gates.place_held(first, last, after, most)
  local from, held_from = '[' .. first, nil
  if after ~= '' then
    local turn, held = string.match(after, '^(.-)\1(.*)$')
    from, held_from = '[' .. turn, '(' .. held
  end
  for _ = 1, most / PLACED_AT_ONCE do
    local turn = redis.call('ZRANGEBYLEX', K.slot_line, from, '(' .. last, 'LIMIT', 0, 1)[1]
    if not turn then return '' end
    local gate, seat = string.match(turn, '^([^%z\6]*)%Z*%z%Z*%z(%Z*)$')
    local range = seat .. '\0' .. gate
    local members = redis.call('ZRANGEBYLEX', K.held, held_from or '[' .. range .. '\0', '(' .. range .. '\1',
      'LIMIT', 0, PLACED_AT_ONCE)
    for _, member in ipairs(members) do gates.arrive(read_held(member)) end
    if #members < PLACED_AT_ONCE then
      from, held_from, after = '(' .. turn, nil, turn .. '\1' .. range .. '\1'
    else
      from, held_from = '[' .. turn, '(' .. members[#members]
      after = turn .. '\1' .. members[#members]
    end
  end
  return after
end

-- Whether a waiting task has its place at the ordered gate where it is held. At other gates, and from the backlog, it
-- takes its place when a claim looks at it. Changes nothing.
function gates.has_place(task)
  local gate = gates.held_at(task)
  local limits = gate and limits_of(gate)
  return not limits or not limits.ordered
    or redis.call('ZSCORE', K.gate_order, order_member('o', gate, task)) ~= false
end

-- Whether seats have turns at a gate.
function gates.has_turns(gate)
  return first_turn(gate) ~= nil
end

-- A task does not wait any more, or starts: it gives up its places and reservations.
function gates.forget(task)
  local all = { name_in_label(task.label) }
  for _, key in ipairs(keys_in(task.label)) do all[#all + 1], all[#all + 2] = key_gates(key, task.seat) end
  local places = {}
  for _, gate in ipairs(all) do
    places[#places + 1], places[#places + 2] = order_member('o', gate, task), order_member('h', gate, task)
  end
  local gone = redis.call('ZREM', K.gate_order, unpack(places))
  if redis.call('HDEL', K.gate_passes, task.id) == 1 then
    for _, gate in ipairs(all) do gone = gone + gates.unreserve(gate, task) end
  end
  if gone == 0 then return end
  for _, gate in ipairs(all) do freed[gate] = true end
end

-- Remove a waiting task that is not in the backlog from `held`.
function gates.remove_held(task)
  local members = { gates.held_member(name_in_label(task.label), task) }
  for _, key in ipairs(layout > 1 and keys_in(task.label) or {}) do
    local of_queue, of_tenant = key_gates(key, task.seat)
    members[#members + 1] = gates.held_member(of_queue, task)
    members[#members + 1] = gates.held_member(of_tenant, task)
  end
  redis.call('ZREM', K.held, unpack(members))
  -- Turns of seats without held tasks are skipped later. Without any held task, all turns go.
  if redis.call('ZCARD', K.held) == 0 then redis.call('UNLINK', K.slot_line) end
end

-- The member of the oldest task of several gates that is held at a gate, if it is not younger than the oldest one
-- that reserves the gate; nil if there is none, and whether the gate is reserved.
local function next_reserved(gate)
  local function first(kind)
    local member = redis.call('ZRANGEBYLEX', K.gate_order, '[' .. kind .. gate .. '\0',
      '(' .. kind .. gate .. '\1', 'LIMIT', 0, 1)[1]
    local seq, id = string.match(member or '', '^%Z*%z(%Z*)%z(%Z*)')
    return seq, id
  end
  local reserved = first('r')
  if not reserved then return nil end
  local seq, id = first('h')
  local record = seq and seq <= reserved and read_status(id)
  local held = record and gates.held_member(gate, waiting_task(id, record))
  return held and redis.call('ZSCORE', K.held, held) and held or nil
end

-- Return held tasks of a gate to the backlog, as many as its limits allow and at most `most`.
local function return_held(gate, most)
  local list, room = {}, room_at(gate, most)
  local limits = limits_of(gate)
  while room > 0 and #list < RETURNED do
    local member
    if limits and limits.ordered then
      member = take_in_order(gate)
    else
      member = next_reserved(gate) or next_in_line(gate, gate)
    end
    if not member then break end
    redis.call('ZREM', K.held, member)
    local task = read_held(member)
    if task.label ~= gate then
      redis.call('ZREM', K.gate_order, order_member('h', gate, task))
      if has_reservations() then reserve(task, true) end
    end
    list[#list + 1] = task
    -- A task whose user or tenant may not be served waits with it, and takes no slot.
    local owner = owner_in(task.seat)
    local tenant = group_of(owner)
    if not blocked_until(owner) and not (tenant and blocked_until(tenant)) then room = room - 1 end
  end
  if redis.call('ZCARD', K.held) == 0 then redis.call('UNLINK', K.slot_line) end
  return list
end

-- Set when to look at a gate again, after some tasks have come back: at once if there is room for more, when its
-- rate allows a task, or soon, because those that came back may not start. Nothing is set for a gate without
-- held tasks or without a slot: whoever frees a slot looks at it. The debt of a key goes when it is over.
local function look_later(gate, returned)
  local limits, is_key, at = limits_of(gate), string.byte(gate) == 3, nil
  local debt = limits and limits.rate and redis.call('HGET', K.paced, gate)
  local debt_until = debt and tonumber(string.match(debt, '^%S+')) or 0
  local slots = limits and slots_of(gate, limits)
  local is_full = slots and used_slots(gate, slots) >= slots
  if limits and limits.is_shared and (is_full or not first_turn(gate)) then
    at = permits().look(gate, limits, used_slots(gate, slots), first_turn(gate) ~= nil)
    if is_key and debt_until > now then at = math.min(at or math.huge, math.ceil(debt_until)) end
  elseif limits and limits.shares_rate and first_turn(gate) and not is_full and room_at(gate, 1) < 1 then
    at = starts().look(gate, limits, true)
  elseif first_turn(gate) and not is_full then
    debt = limits and not limits.shares_rate and debt
    local free = debt and free_at(K.paced, gate, limits.rate) or 0
    local soon = room_at(gate, returned + 1) > returned and now or now + LOOK_AGAIN
    at = free > now and math.ceil(free) or soon
  elseif is_key and debt_until > now then
    at = math.ceil(debt_until)
  end
  if limits and limits.shares_rate then
    if starts().of(gate).more ~= 0 then at = starts().look(gate, limits, false) end
    if not at and is_key then starts().drop_idle(gate) end
  end
  if is_key and debt_until <= now then redis.call('HDEL', K.paced, gate) end
  if at then redis.call('ZADD', K.gate_times, at, gate) else redis.call('ZREM', K.gate_times, gate) end
end

-- Return the held tasks of some gates. Returns true if a worker of the default pool can claim one.
local function return_all(list, most)
  local back, returned = {}, {}
  for _, gate in ipairs(list) do
    local held = return_held(gate, most)
    returned[gate] = #held
    for i = 1, #held do back[#back + 1] = held[i] end
  end
  local is_found = add_waiting(back, true)
  for _, gate in ipairs(list) do look_later(gate, returned[gate]) end
  return is_found
end

-- Return the held tasks of gates that were freed. Part of save_fair; a claim does it before it serves, too.
function gates.flush(is_claiming)
  local list = {}
  local shared, has_given = {}, false
  for gate in pairs(freed) do
    list[#list + 1] = gate
    local limits = limits_of(gate)
    if limits and limits.is_shared then
      shared[#shared + 1] = gate
      has_given = permits().give_up(gate, limits, used_slots(gate, limits.slots), gates.kept(gate))
        or has_given
    end
  end
  freed = {}
  if #list == 0 then return end
  if redis.call('ZCARD', K.held) == 0 then list = shared end
  -- Somebody has to claim here to hear of permits that were given up.
  if (return_all(list, RETURNED) or has_given) and not is_claiming then wake_worker() end
end
table.insert(fair.unsaved, 1, gates.flush)
fair.flush_gates = gates.flush

-- Return the held tasks of gates whose time has come. Returns true if a worker of the default pool can claim one.
function gates.due(most)
  local list = redis.call('ZRANGE', K.gate_times, '-inf', now, 'BYSCORE', 'LIMIT', 0, GATES_LOOKED_AT)
  return #list > 0 and return_all(list, most)
end

-- Whether nobody will look at a gate with held tasks: it has room, and no time is set. Changes nothing: slots
-- whose leases are gone count.
function gates.is_forgotten(gate)
  if redis.call('ZSCORE', K.gate_times, gate) then return false end
  used_cache[gate] = redis.call('ZLEXCOUNT', K.slots, '[' .. gate .. '\0', '(' .. gate .. '\1')
  local room = room_at(gate, 1)
  used_cache[gate] = nil
  local limits = limits_of(gate)
  -- An ordered gate waits for its oldest task, which may be elsewhere.
  return room > 0 and (not limits or not limits.ordered or next_in_order(gate) ~= nil)
end

-- Let the next claims look at gates with held tasks: one gate, or all that begin with a text, at most `most`.
-- Returns the last gate that was found if there may be more.
function gates.look_at(first, last, most)
  local from, gate = '[' .. first, nil
  for _ = 1, most do
    local turn = redis.call('ZRANGEBYLEX', K.slot_line, from, '(' .. last, 'LIMIT', 0, 1)[1]
    if not turn then return nil end
    gate = string.match(turn, '^[^%z\6]*')
    redis.call('ZADD', K.gate_times, now, gate)
    from = '[' .. gate .. '\7'
  end
  return gate
end

-- --- permits ---

-- How many permits of a shared gate are kept for tasks that reserve the gate.
function gates.kept(gate)
  return has_reservations() and #gates.reserving(gate, {}) or 0
end

-- What clients have to carry to the homes of gates, as text for the answer of a claim; see lib/permits
-- and lib/starts.
function gates.answer()
  local slots, rates = {}, {}
  permits().answer(slots, function(gate)
    local limits = limits_of(gate)
    if not limits or not limits.is_shared then return nil end
    return limits, used_slots(gate, limits.slots), gates.kept(gate), first_turn(gate) ~= nil
  end, function(gate) look_later(gate, 0) end)
  starts().answer(rates, function(gate)
    local limits = limits_of(gate)
    return limits and limits.shares_rate and limits
  end)
  return #slots + #rates > 0 and '\n' .. cjson.encode({ slots = slots, rates = rates }) or ''
end

-- Take permits that the home has given, or give some up for others; see permits.accept. Returns the version, how many
-- are kept, how many more are wanted, and the operation that has set the limits.
function gates.exchange(gate, given, word)
  local limits = limits_of(gate)
  limits = limits and limits.is_shared and limits or { slots = 0, set_by = '' }
  permits().accept(gate, given, word ~= '')
  if word == 'lend' then permits().lend(gate, limits, used_slots(gate, limits.slots), gates.kept(gate)) end
  redis.call('ZREM', K.gate_times, gate)
  freed[gate] = true
  gates.flush()
  local kept, wants = permits().of(gate), permits().wants(gate, limits.slots, first_turn(gate) ~= nil)
  permits().settle(gate, limits, wants > 0)
  return { kept.version, kept.count, wants, limits.set_by }
end

-- Give starts of a shared rate, in its home. Returns units of cost, and ms until there are more, as text.
function gates.give_starts(gate, first, most, more)
  local limits = limits_of(gate)
  if not limits or not limits.shares_rate then return { text_of(first), '0' } end
  local rate, given = limits.rate, 0
  if more ~= 0 then add_debt(K.paced, gate, rate, more, math.max(1, more), true) end
  local free, burst = free_at(K.paced, gate, rate, first)
  if first > 0 and free <= now then
    given = math.max(first, math.min(most, burst, math.floor((now - free) * rate / 1000) + 1))
    add_debt(K.paced, gate, rate, given, given > 1 and given or nil)
    free = free_at(K.paced, gate, rate, first)
  end
  if string.byte(gate) == 3 and redis.call('HEXISTS', K.paced, gate) == 1 then
    redis.call('ZADD', K.gate_times, 'NX', math.max(now + LOOK_AGAIN, math.ceil(free)), gate)
  end
  return { text_of(given), text_of(math.max(0, math.ceil(free - now))) }
end

-- When a shared rate may allow a task, ms; nil for a rate that is not shared. Changes nothing.
function gates.starts_at(gate, limits, cost)
  if not limits.shares_rate then return nil end
  return starts().allow(gate, cost or 1) and now or math.max(now, starts().of(gate).later)
end

-- Take starts in a partition; see starts.take.
function gates.take_starts(gate, given)
  starts().take(gate, given)
  redis.call('ZREM', K.gate_times, gate)
  freed[gate] = true
  gates.flush()
  if redis.call('ZSCORE', K.gate_times, gate) or not first_turn(gate) then return end
  redis.call('ZADD', K.gate_times, math.max(now, starts().of(gate).later), gate)
end

-- --- leases ---

-- Count a task that starts at its gates.
function gates.begin(task)
  for _, pair in ipairs(gates_of(task)) do
    local gate, limits = pair[1], pair[2]
    local is_full = false
    if limits.slots then
      local slots = slots_of(gate, limits)
      used_cache[gate] = used_slots(gate, slots) + 1
      -- A partition that waits for more permits looks again at its time.
      is_full = used_cache[gate] >= slots and not limits.is_shared
      if limits.is_shared then permits().use(gate) end
      -- The debt of a key is dropped at its time, whatever its limits are by then.
      if is_full and (string.byte(gate) ~= 3 or redis.call('HEXISTS', K.paced, gate) == 0) then
        redis.call('ZREM', K.gate_times, gate)
      end
    end
    if limits.shares_rate then
      starts().spend(gate, task.cost or 1)
      redis.call('ZADD', K.gate_times, 'LT', math.max(now, starts().of(gate).later), gate)
    elseif limits.rate then
      local debt = add_debt(K.paced, gate, limits.rate, task.cost or 1, task.cost)
      if not is_full and first_turn(gate) then
        redis.call('ZADD', K.gate_times, math.ceil(math.max(now, (free_at(K.paced, gate, limits.rate)))), gate)
      elseif string.byte(gate) == 3 then
        redis.call('ZADD', K.gate_times, math.ceil(debt), gate)
      end
    end
    if limits.ordered then freed[gate] = true end
  end
  if string.find(task.label, '\3', 1, true) then gates.forget(task) end
end

-- Undo the count of slots for a task that cannot be leased because its record is damaged.
function gates.undo(task)
  for _, pair in ipairs(gates_of(task)) do
    if used_cache[pair[1]] then used_cache[pair[1]] = used_cache[pair[1]] - 1 end
    freed[pair[1]] = true
  end
end

-- The members of `slots` for a task that starts. Notes in its record that it holds them.
function gates.enter(id, record, members)
  for _, pair in ipairs(gates_of(waiting_task(id, record))) do
    local gate, limits = pair[1], pair[2]
    if limits.slots then
      members[#members + 1] = '0'
      members[#members + 1] = gate .. '\0' .. id
      if string.byte(gate) == 3 then
        record.slots = record.slots or {}
        record.slots[#record.slots + 1] = gate
      else
        record.slot = true
      end
    end
  end
end

-- Release the slots of a lease that has ended.
function gates.free(id, record)
  local list = {}
  if record.slot then list[1] = record.name or '' end
  for _, gate in ipairs(type(record.slots) == 'table' and record.slots or {}) do
    if type(gate) == 'string' then list[#list + 1] = gate end
  end
  for _, gate in ipairs(list) do
    redis.call('ZREM', K.slots, gate .. '\0' .. id)
    used_cache[gate], freed[gate] = nil, true
  end
  record.slot, record.slots = nil, nil
end

-- Count at the rates of its gates what an attempt has cost, instead of what was counted when it started.
function gates.settle(id, record, cost)
  for _, pair in ipairs(gates_of(waiting_task(id, record))) do
    local gate, limits = pair[1], pair[2]
    if limits.rate then
      local spent = record.flow and record.flow.cost or 1
      if limits.shares_rate then
        starts().charge(gate, cost - spent)
      else
        add_debt(K.paced, gate, limits.rate, cost - spent, cost, true)
      end
      look_later(gate, 0)
    end
  end
end

-- The gate at which a task is held, or nil.
function gates.held_at(task)
  local all = { name_in_label(task.label) }
  for _, key in ipairs(layout > 1 and keys_in(task.label) or {}) do
    all[#all + 1], all[#all + 2] = key_gates(key, task.seat)
  end
  for _, gate in ipairs(all) do
    if redis.call('ZSCORE', K.held, gates.held_member(gate, task)) then return gate end
  end
  return nil
end

-- Whether a task could not start now because of its limits. Changes nothing.
function gates.is_full(task)
  for _, pair in ipairs(gates_of(task)) do
    local gate, limits = pair[1], pair[2]
    local used = redis.call('ZLEXCOUNT', K.slots, '[' .. gate .. '\0', '(' .. gate .. '\1')
    local slots = slots_of(gate, limits)
    if (slots and used >= slots) or redis.call('ZSCORE', K.gate_times, gate) then return true end
  end
  return false
end

-- How many tasks come before one in the order of a gate, and how many older ones reserve it. Changes nothing.
function gates.before(gate, limits, task)
  local function older(kind)
    return redis.call('ZLEXCOUNT', K.gate_order, '[' .. kind .. gate .. '\0',
      '(' .. kind .. gate .. '\0' .. seq_of(task))
  end
  return limits.ordered and older('o') or 0, older('r')
end

-- Whether a task keeps its place at an ordered gate while it is delayed for its next attempt.
function gates.keeps_place(record)
  for _, key in ipairs(record.flow and record.flow.keys or {}) do
    local limits = gates.of_key(key)
    if limits and limits.ordered and limits.through_retries then return true end
  end
  return false
end

return gates
