-- Serve users and tenants in their turn, in memory, and write what was decided.
--
-- @include upkeep turns
-- @lazy rings gates uniques specials
--
-- A unit is a user or a tenant: { seat, owner, tag, critical_tag, in_critical, list (members of the backlog), at,
--   complete, last, users (the ring of a tenant), so_far (service in this window), state: 'ready', 'parked', 'gone' or
--   'passed' (nothing can be taken), wait, served }
-- A ring: { name, clocks, units by seat, order (their seats), ready and critical (turns), read and lane_read (how
--   many were read), chunk (how many to read next), passed and lane_passed (how many at the head of ready and
--   of the CRITICAL lane have nothing that this claim can take), has_passed (whether any unit has nothing),
--   tenant (its unit) }

local CRITICAL_CREDIT = 10   -- CRITICAL tasks that may go first in a row before critical_share applies
local CLAIM_BYTES = 1048576  -- of documents in one answer, after which no more tasks are taken
local CLAIM_NAMES = 65536    -- the same for users, ids and names: long ones take more time
local LARGEST = 300000       -- bytes of the largest document, roughly: few tasks need not be measured
local WORK_OF_USER = 4       -- a user of whom nothing can be taken counts as this many tasks
local ROUND = 20             -- units read at a time, after the first time
local SOME_USERS = 1         -- users of a tenant read at a time; each time twice as many, up to ROUND
local USERS_PASSED = 20      -- users of a tenant of whom nothing can be taken, after which it is passed over
local LOOK = 100             -- tasks of a user that are looked at to find a wanted name
local PACE_MS = 30000        -- the pace of a pool is that of the last half minute or so
local ASIDE = 1000           -- tasks that one claim moves to `held`
local OVERDUE = 100          -- expired tasks that one claim ends besides those that upkeep ends

-- This claim: its arguments (op, worker, place, limit, lease_ms), `share` and `refill` of the CRITICAL lane, the
-- names that it wants and its pools; what it has decided so far. One table, because a script has room for only
-- 200 local variables.
local this = {
  for_others = false,  -- there are tasks that this worker does not want
  vain = 0,            -- tasks that were looked at and not taken,
  work = 0,            -- and how many that may be
  asides = 0,          -- tasks that were moved to `held`
  aside = {}, held_aside = {},
  overdue = {},        -- ids of tasks that have expired
  members = {},        -- of the tasks that are taken
  bytes = 0, long = 0, -- of their documents, and of their members
  units = 0,           -- units that were read
  taken = { ids = {}, records = {} },
}

local function is_wanted(name)
  return (this.listed[name] or false) == this.only_listed
end

local function id_of(member) return string.match(member, '^%Z*%z%Z*%z(%Z*)') end

-- Whether a task has limits: it has keys, or its name has some. The part `gates` is not made for others.
this.limited = {}
function this.is_limited(label)
  if not this.has_limits then return false end
  if layout > 1 and string.find(label, '\3', 1, true) then return true end
  local name = name_in_label(label)
  if this.limited[name] == nil then this.limited[name] = redis.call('HSTRLEN', K.limits, name) > 0 end
  return this.limited[name]
end

-- --- units and rings in memory ---

-- The unit of a seat; units of a ring are made once.
local function unit_of(ring, seat, tag)
  local unit = ring.units[seat]
  if not unit then
    unit = { seat = seat, owner = owner_in(seat), tag = tag, list = {}, at = 1, state = 'ready', served = 0,
      is_tenant = layout > 1 and not ring.tenant and rings().is_tenant(seat) }
    ring.units[seat] = unit
    ring.order[#ring.order + 1] = seat
    this.units = this.units + 1
  end
  return unit
end

local function range_of_ring(ring, key, skip, most)
  if ring.name == '' then
    local flat = redis.call('ZRANGE', key, skip, skip + most - 1, 'WITHSCORES')
    return flat, #flat / 2
  end
  return rings().range(key, ring.name, skip, most)
end

-- Read more units of a ring; see turns.new.
local function reader(ring)
  return function(list)
    local most = ring.chunk
    local flat, read = range_of_ring(ring, K.ready, ring.read, most)
    ring.read = ring.read + read
    ring.chunk = ring.tenant and math.min(2 * most, ROUND) or ROUND
    local owners, seats = {}, {}
    for i = 1, #flat, 2 do
      local unit = unit_of(ring, flat[i], tonumber(flat[i + 1]))
      unit.in_ready = true
      owners[#owners + 1], seats[#seats + 1] = unit.owner, unit.seat
      -- With the tag that was stored: the unit may have been served by the CRITICAL lane since.
      list.sorted[#list.sorted + 1] = { tag = tonumber(flat[i + 1]), unit = unit }
    end
    if read < most then list.read = nil end
    prefetch_users(owners, ring.tenant)
    if layout > 1 and not ring.tenant then rings().prefetch(seats) end
    return read > 0
  end
end

-- The same for the CRITICAL lane.
local function lane_reader(ring)
  return function(list)
    local most = math.max(ring.chunk, SOME_USERS)
    local flat, read = range_of_ring(ring, K.critical, ring.lane_read, most)
    ring.lane_read = ring.lane_read + read
    for i = 1, #flat, 2 do
      local unit = ring.units[flat[i]]
        or unit_of(ring, flat[i], tag_in(K.ready, flat[i]) or ring.clocks.clock)
      unit.critical_tag = unit.critical_tag or tonumber(flat[i + 1])
      list.sorted[#list.sorted + 1] = { tag = tonumber(flat[i + 1]), unit = unit }
    end
    if read < most then list.read = nil end
    return read > 0
  end
end

local function open_ring(name, clocks, chunk, has_lane)
  local ring = { name = name, clocks = clocks, units = {}, order = {}, read = 0, lane_read = 0, chunk = chunk,
    passed = 0, lane_passed = 0, has_passed = false, has_lane = has_lane, taken = 0, reader = nil, ready = nil, critical = nil,
    tenant = nil }
  ring.reader = reader(ring)
  ring.ready = turns.new(ring.reader)
  ring.critical = has_lane and turns.new(lane_reader(ring)) or turns.NONE
  return ring
end

-- The ring of a tenant of a ring. If no seat is in the CRITICAL lane of that, none is in this one's.
local function users_of(ring, unit)
  if not unit.users then
    unit.users = open_ring(unit.seat, rings().named(unit.seat), SOME_USERS, ring.has_lane)
    unit.users.tenant = unit
  end
  return unit.users
end

local function may_jump(ring)
  return this.share >= 1 or (ring.clocks.credit or CRITICAL_CREDIT) >= 1
end

local function is_turn(entry)
  return entry.unit.state == 'ready' and entry.unit.tag == entry.tag
end

-- A unit whose last CRITICAL task was taken by an ordinary turn has left the CRITICAL lane.
local function is_lane_turn(entry)
  local unit = entry.unit
  return unit.state == 'ready' and unit.critical_tag == entry.tag and unit.is_critical ~= false
    and not unit.left_lane
end

-- The next unit of a ring, which has waiting tasks: by its CRITICAL lane, or in its ordinary turn.
local function pop_unit(ring, jumps)
  local list, is_valid = jumps and ring.critical or ring.ready, jumps and is_lane_turn or is_turn
  local entry = turns.pop(list)
  while entry and not is_valid(entry) do entry = turns.pop(list) end
  return entry and entry.unit
end

-- --- the tasks of a user ---

-- A member of the user's backlog by its offset from the first that is not served yet; nil past the end. Reads as
-- many at a time as each unit may be served on average, and at least `least`.
local function member(user, offset, least)
  while user.at + offset > #user.list and not user.complete do
    local chunk = math.max(least, math.ceil((this.limit - #this.members) / this.units) + 1)
    local from = user.last and '(' .. user.last or '[' .. user.seat .. '\0'
    local more = redis.call('ZRANGEBYLEX', K.backlog, from, '(' .. user.seat .. '\1',
      'LIMIT', 0, chunk)
    user.complete = #more < chunk
    user.last = more[#more] or user.last
    for _, found in ipairs(more) do user.list[#user.list + 1] = found end
  end
  return user.list[user.at + offset]
end

-- Remove the member at this offset from the list.
local function take_off(user, offset)
  if offset == 0 then
    user.at = user.at + 1
  else
    table.remove(user.list, user.at + offset)
  end
end

-- Move a task whose limit is reached to `held`, so that it does not block its user's other tasks.
local function set_aside(member, task, gate, why, free)
  this.aside[#this.aside + 1] = member
  this.held_aside[#this.held_aside + 1] = '0'
  this.held_aside[#this.held_aside + 1] = gates().held_member(gate, task)
  gates().hold(task, gate, why, free)
  this.asides = this.asides + 1
end

-- What a claim has to know of a task.
local function about(user, found)
  local rank, id, label = string.match(found, '^%Z*%z(%Z*)%z(%Z*)%z(%Z*)$')
  return { id = id, seat = user.seat, rank = rank, label = label }
end

local function has_expired(task)
  if not string.find(task.label, '\5', 1, true) then return false end
  local expires = tonumber(string.match(task.label, '\5(%d+)') or nil)
  return expires and expires <= now
end

-- The user's first task that may run: its offset, its member, and what is known of it; nil if none is found.
local function first_runnable(user)
  if not this.filtered and not this.has_limits and layout == 1 then return 0, member(user, 0, 1), nil end
  local offset = user.from or 0  -- earlier ones were looked at when the user was last served
  local is_slow = this.filtered or this.has_limits
  while offset < LOOK do
    -- Read few at first: mostly the first one fits, and for some workers none does.
    local least = (this.filtered or (is_slow and offset > 0)) and math.min(LOOK / 2, 2 * offset + 4) or 1
    local found = member(user, offset, least)
    if not found then return offset, nil end
    local task = about(user, found)
    if this.filtered and not is_wanted(name_in_label(task.label)) then
      this.vain = this.vain + 1 + math.floor(#found / 300)  -- long names take more time
      offset = offset + 1
    elseif layout > 1 and has_expired(task) then
      this.vain = this.vain + 1
      if #this.overdue < OVERDUE then
        this.overdue[#this.overdue + 1] = task.id
        user.in_critical = user.in_critical or is_critical(user.seat, found)
        take_off(user, offset)
      else
        offset = offset + 1
      end
    else
      local gate, why, free
      if this.is_limited(task.label) then gate, why, free = gates().closed_for(task) end
      if not gate then
        user.from = offset
        return offset, found, task
      end
      this.vain = this.vain + 1 + math.floor(#found / 300)
      if this.asides < ASIDE then
        user.in_critical = user.in_critical or is_critical(user.seat, found)
        set_aside(found, task, gate, why, free)
        take_off(user, offset)
      else
        offset = offset + 1
      end
    end
  end
  return offset, nil
end

-- --- serving ---

-- Advance the clocks and the tags of a unit by one task.
local function charge(ring, unit, jumps, cost)
  local stride, clocks = cost / settings_of(unit.owner).weight, ring.clocks
  if ring.name == '' then fair_dirty = true else rings().touch(ring.name) end
  if jumps then
    clocks.critical_clock = math.max(clocks.critical_clock, unit.critical_tag)
    unit.critical_tag = unit.critical_tag + stride
    if this.share < 1 and not ring.tenant then clocks.credit = (clocks.credit or CRITICAL_CREDIT) - 1 end
  else
    clocks.clock = math.max(clocks.clock, unit.tag)
    if this.share < 1 and clocks.credit then
      clocks.credit = math.min(this.most_credit, clocks.credit + this.refill)
    end
  end
  unit.tag = unit.tag + stride
  unit.served = unit.served + stride
end

-- Return the user's next task, and note whether it is CRITICAL.
local function look_ahead(user)
  local following = member(user, 0, 1)
  user.is_critical = following ~= nil and is_critical(user.seat, following)
  return following
end

-- This claim can take nothing from the unit.
local function pass_over(ring, unit)
  unit.state, this.for_others, ring.has_passed = 'passed', true, true
  if unit.in_ready then ring.passed = ring.passed + 1 end
  if unit.critical_tag and unit.is_critical then ring.lane_passed = ring.lane_passed + 1 end
end

-- This claim cannot take the unit's CRITICAL tasks; others are taken by an ordinary turn.
local function leave_lane(ring, unit)
  if unit.is_critical then ring.lane_passed = ring.lane_passed + 1 end
  unit.left_lane = true
end

-- Park a unit in memory if it may not be served until a time. `cost`: what its next task declares.
local function park(unit, cost)
  unit.wait = blocked_until(unit.owner, cost)
  if unit.wait then unit.state = 'parked' end
  return unit.wait ~= nil
end

-- Count the bytes of a task that is taken. A few tasks cannot exceed the limit and are not measured.
local function weigh(member)
  this.long = this.long + #member
  if this.long > CLAIM_NAMES then this.bytes = CLAIM_BYTES end
  if this.limit * LARGEST > CLAIM_BYTES then
    this.bytes = this.bytes + redis.call('HSTRLEN', K.tasks, id_of(member))
  end
end

-- Take the user's first task that may run. Returns its member and what it costs, or nil. `tenant`: the unit of
-- the user's tenant.
local function serve_user(ring, user, jumps, tenant)
  user.touched = true
  local offset, first, task = first_runnable(user)
  if not first then
    this.vain = this.vain + WORK_OF_USER
    if look_ahead(user) then pass_over(ring, user) else user.state = 'gone' end
    return nil
  end
  if jumps and not is_critical(user.seat, first) then
    look_ahead(user)
    leave_lane(ring, user)
    return nil
  end
  local declared = task and cost_in(task.label)
  -- A declared cost may exceed what a rate has left. Whoever has reached a limit by tasks of another pool is
  -- parked here when its turn comes.
  if (declared or fair.pools) and (park(user, declared) or (tenant and park(tenant, declared))) then
    this.vain = this.vain + WORK_OF_USER
    user.in_critical = user.in_critical or is_critical(user.seat, first)
    look_ahead(user)
    return nil
  end
  user.in_critical = user.in_critical or is_critical(user.seat, first)
  local cost = declared or cost_of(user.owner)
  charge(ring, user, jumps, cost)
  change_running(user.owner, 1)
  spend_rate(user.owner, declared)
  if tenant then spend_rate(tenant.owner, declared) end
  if task and this.is_limited(task.label) then gates().begin(task) end
  weigh(first)
  take_off(user, offset)
  if look_ahead(user) then park(user) else user.state = 'gone' end
  return first, cost
end

-- Put a unit back in its order after it was served or looked at.
local function put_back(ring, unit)
  if unit.state ~= 'ready' then return end
  turns.push(ring.ready, unit.tag, unit)
  if unit.critical_tag and unit.is_critical and not unit.left_lane then
    turns.push(ring.critical, unit.critical_tag, unit)
  end
end

-- Take the first task that may run of the tenant's users, in their turn. Returns its member, or nil.
local function serve_tenant(ring, unit, jumps)
  unit.touched = true
  if fair.pools and park(unit) then
    this.vain = this.vain + WORK_OF_USER
    return nil
  end
  local users, first, cost, user = users_of(ring, unit), nil, nil, nil
  while not first and this.vain < this.work and unit.state == 'ready' and users.passed < USERS_PASSED do
    user = pop_unit(users, jumps)
    if not user then break end
    first, cost = serve_user(users, user, jumps, unit)
    put_back(users, user)
  end
  if first then charge(ring, unit, jumps, cost) end
  if unit.state ~= 'ready' then return first end
  unit.is_critical = turns.peek(users.critical, is_lane_turn) ~= nil
  local has_users = (first and user.state == 'ready') or turns.peek(users.ready, is_turn)
  if users.passed >= USERS_PASSED or not has_users then
    if users.has_passed then pass_over(ring, unit) else unit.state = 'gone' end
  elseif first then
    park(unit)
  elseif jumps then
    leave_lane(ring, unit)
  end
  return first
end

-- The unit whose turn it is, its ring, and whether by the CRITICAL lane; nil if there is none.
local function next_unit(open)
  if #open == 1 then
    local ring = open[1]
    local unit = ring.has_lane and may_jump(ring) and pop_unit(ring, true)
    if unit then
      this.has_jumped = true
      return unit, ring, true
    end
    -- In a partition that was only chosen for its lane, ordinary turns are for when it is the lowest.
    if this.has_jumped and this.floor then
      local entry = turns.peek(ring.ready, is_turn)
      if entry and entry.tag + ring.clocks.offset > this.floor then return nil end
    end
    return pop_unit(ring, false), ring, false
  end
  local best, best_at
  for _, ring in ipairs(open) do
    local entry = may_jump(ring) and turns.peek(ring.critical, is_lane_turn)
    if entry and not (best and best_at <= entry.tag) then best, best_at = ring, entry.tag end
  end
  if best then return turns.pop(best.critical).unit, best, true end
  for _, ring in ipairs(open) do
    local entry = turns.peek(ring.ready, is_turn)
    local at = entry and entry.tag + (ring.clocks.offset or 0)
    if at and not (best and best_at <= at) then best, best_at = ring, at end
  end
  if best then return turns.pop(best.ready).unit, best, false end
  return nil
end

local function has_room()
  return #this.members < this.limit and this.bytes < CLAIM_BYTES
end

-- Serve the units of some rings in turn. Returns true if nothing is left that this claim could take.
local function serve_rings(open, most_work)
  this.work = this.vain + most_work
  local members = this.members
  while #members < this.limit and this.bytes < CLAIM_BYTES and this.vain < this.work do
    local unit, ring, jumps = next_unit(open)
    if not unit then return true end
    local found
    if unit.is_tenant then found = serve_tenant(ring, unit, jumps) else found = serve_user(ring, unit, jumps) end
    if found then
      members[#members + 1] = found
      ring.taken = ring.taken + 1
    end
    put_back(ring, unit)
  end
  return false
end

-- --- writing ---

local function add(list, a, b)
  list[#list + 1] = a
  list[#list + 1] = b
end

local function call_with(command, key, list)
  if #list > 0 then redis.call(command, key, unpack(list)) end
end

-- The service of a unit in this window, if it had a backlog during all of it.
local function new_service(unit, so_far)
  if unit.state ~= 'ready' then return 'late' end
  if so_far == 'late' then return nil end
  return (tonumber(so_far or nil) or 0) + unit.served
end

-- Write the new state of the units of some rings: all of tenants, or one of a pool. Adds what changes of their
-- service in this window to `service`.
local function write_units(written, service)
  local touched = written[1].touched
  for i = 2, #written do
    for _, unit in ipairs(written[i].touched) do touched[#touched + 1] = unit end
  end
  if #touched == 0 then return end
  local ready, idle, parked, left = {}, {}, {}, {}
  local critical, uncritical = {}, {}
  for _, unit in ipairs(touched) do
    local seat = unit.seat
    -- Of a tenant of which only some users were looked at, others may be left.
    if unit.is_told and unit.state ~= 'parked' then
      unit.state = rings().is_empty(K.ready, seat) and 'gone' or 'ready'
    end
    local stays, is_critical = unit.state ~= 'gone' and unit.state ~= 'parked', unit.is_critical
    if unit.is_tenant then
      unit.in_critical = unit.critical_tag ~= nil
      for _, user in pairs(unit.users and unit.users.units or {}) do
        unit.in_critical = unit.in_critical or user.in_critical
      end
      -- Users with CRITICAL tasks may have been passed over.
      is_critical = unit.in_critical and not rings().is_empty(K.critical, seat)
    end
    if stays then
      add(ready, text_of(unit.tag), seat)
    else
      left[#left + 1] = seat
      add(idle, text_of(unit.tag), seat)
      if unit.wait then add(parked, unit.wait, seat) end
    end
    if unit.in_critical or is_critical or (unit.is_tenant and not stays) then
      if not is_critical or not stays then
        uncritical[#uncritical + 1] = seat
      elseif unit.critical_tag then
        add(critical, text_of(unit.critical_tag), seat)
      end
    end
    local amount = new_service(unit, unit.so_far)
    if amount then add(service, seat, amount == 'late' and amount or text_of(amount)) end
  end
  call_with('ZADD', K.parked, parked)
  if written[1].name == '' then
    call_with('ZADD', K.ready, ready)
    call_with('ZREM', K.ready, left)
    call_with('ZADD', K.idle, idle)
    call_with('ZREM', K.critical, uncritical)
    call_with('ZADD', K.critical, critical)
  else
    rings().put_all(K.ready, ready)
    rings().drop_all(K.ready, left)
    rings().put_all(K.idle, idle)
    rings().drop_all(K.critical, uncritical)
    rings().put_all(K.critical, critical)
  end
end

-- Write the new state of all units: those of tenants before the tenants.
local function write_rings(open)
  local all, used = {}, {}
  for _, ring in ipairs(open) do
    all[#all + 1] = ring
    for _, seat in ipairs(ring.order) do
      local users = ring.units[seat].users
      if users then used[#used + 1], all[#all + 1] = users, users end
    end
  end
  local seats = {}
  for _, ring in ipairs(all) do
    ring.touched = {}
    for _, seat in ipairs(ring.order) do
      local unit = ring.units[seat]
      if unit.touched then ring.touched[#ring.touched + 1], seats[#seats + 1] = unit, seat end
    end
  end
  if #seats == 0 then return end
  local so_far, service, at = redis.call('HMGET', K.served, unpack(seats)), {}, 0
  for _, ring in ipairs(all) do
    for _, unit in ipairs(ring.touched) do
      at = at + 1
      unit.so_far = so_far[at]
    end
  end
  if #used > 0 then
    write_units(used, service)
    rings().reap_some(used, 2 * this.units)
  end
  for _, ring in ipairs(open) do write_units({ ring }, service) end
  call_with('HSET', K.served, service)
end

local function write_aside()
  call_with('ZREM', K.backlog, this.aside)
  call_with('ZADD', K.held, this.held_aside)
  this.aside, this.held_aside = {}, {}
end

-- Read the record of a task that was never claimed from the end of its text, as `store` writes it. Almost
-- all records are such, and decoding JSON takes longer. Returns nil for others.
local function untouched(text, member)
  local from, to = string.find(text, ',"state":"ready","rank":"', 1, true)
  if not from or not string.find(text, '"attempts":0,', 1, true)
    or string.find(text, ',"timeout_ms":', 1, true) then return nil end
  local rank, due = string.match(text, '^(%d+)","pushed":%d+,"due":(%d+)}$', to + 1)
  if not rank then return nil end
  local record = { user = string.match(member, '^%Z*'), name = label_in(member), rank = rank,
    due = tonumber(due), attempts = 0 }
  if layout == 1 then return record end
  if string.find(record.name, '[\3-\5]') or string.find(text, '"flow":{', 1, true) then return nil end
  local seat = record.user
  record.user, record.pool = owner_in(seat), string.match(seat, '\3(.*)$')
  if string.byte(seat) == 2 then record.group, record.user = string.match(record.user, '^\2([^\2]*)\2(.*)$') end
  return record
end

-- The text of such a record once it is claimed; nil if its name has limits, which have to be entered.
local function first_claim_text(text, record, charge)
  if this.has_limits and this.is_limited(record.name) and gates().of_name(record.name) then return nil end
  text = replace_text(text, '"state":"ready"', '"state":"running"')
  text = replace_text(text, '"attempts":0', '"attempts":1')
  this.claimed_by = this.claimed_by or ',"token":' .. cjson.encode(this.op) .. ',"worker":'
    .. cjson.encode(this.worker) .. ',"place":' .. cjson.encode(this.place) .. ',"claimed":' .. now_text .. ',"charge":'
  -- The format of cjson, so that the charge is the same however the record is written.
  return string.sub(text, 1, -2) .. this.claimed_by .. string.format('%.14g', charge) .. '}'
end

-- A record that was claimed: what its flow means for that.
local function begin_flow(id, record)
  if record.expires then
    redis.call('ZREM', K.expiring, id)
    record.expires = nil
  end
  if record.flow and record.flow.unique then uniques().claimed(id, record) end
end

-- Remove tasks of pools from the index of their pools.
local function leave_pools(ids, found)
  if this.is_default_only then return end
  local members_of_pools, since = {}, redis.call('ZMSCORE', K.waiting, unpack(ids))
  for i, each in ipairs(found) do
    local pool = string.match(each, '^[^%z\3]*\3(%Z*)')
    if pool then add(members_of_pools, specials().pool_member(pool, tonumber(since[i] or nil) or 0, ids[i])) end
  end
  specials().leave_pools(members_of_pools)
end

-- Remove members from the backlog. Returns the ids and records of those that can be read, and new texts.
local function take_out(found)
  local all, ids, texts = {}, {}, {}
  for i, each in ipairs(found) do all[i] = id_of(each) end
  leave_pools(all, found)
  redis.call('ZREM', K.backlog, unpack(found))
  redis.call('ZREM', K.waiting, unpack(all))
  local stored, records = redis.call('HMGET', K.status, unpack(all)), {}
  for i, id in ipairs(all) do
    local record = stored[i] and untouched(stored[i], found[i])
    local charge = record and cost_of(owner_of(record))
    local text = record and first_claim_text(stored[i], record, charge)
    if not text then
      record = parse_status(stored[i])
      charge = record and (record.flow and record.flow.cost or cost_of(owner_of(record)))
    end
    texts[id], records[id] = text, record
    if record then
      record.state, record.token, record.worker = 'running', this.op, this.worker
      record.place, record.stale = this.place, nil
      record.attempts = record.attempts + 1
      record.charge, record.claimed = charge, now
      ids[#ids + 1] = id
    else
      local seat = string.match(found[i], '^%Z*')
      if this.has_limits then gates().undo(about({ seat = seat }, found[i])) end
      change_running(owner_in(seat), -1)
      review(owner_in(seat))
      count('broken_tasks', 1)
    end
  end
  return ids, records, texts
end

-- Enter the slots that the tasks take, and their deadlines.
local function enter_limits(ids, records)
  local slots, deadlines = {}, {}
  for _, id in ipairs(ids) do
    local record = records[id]
    local limits = {}
    if (record.flow and record.flow.keys) or this.is_limited(record.name or '') then
      gates().enter(id, record, slots)
      limits = gates().of_name(record.name or '') or {}
    end
    -- The worker ends the run at its time-out; if it still runs one lease later, the worker does not
    -- answer. Until the worker gives its time-out (see extend), the one declared last counts.
    local timeout_ms = record.timeout_ms or limits.timeout_ms
    record.ruled = not record.timeout_ms and limits.timeout_ms and not limits.is_declared or nil
    record.deadline = timeout_ms and now + timeout_ms + this.lease_ms
    if record.deadline then add(deadlines, record.deadline, id) end
  end
  call_with('ZADD', K.slots, slots)
  call_with('ZADD', K.deadlines, deadlines)
end

local function lease(ids, records, texts)
  local ends, at, has_timeouts = {}, text_of(now + this.lease_ms), false
  for _, id in ipairs(ids) do
    add(ends, at, id)
    has_timeouts = has_timeouts or records[id].timeout_ms
  end
  redis.call('ZADD', K.leases, unpack(ends))
  if this.has_limits or has_timeouts then enter_limits(ids, records) end
  for _, id in ipairs(layout > 1 and ids or {}) do begin_flow(id, records[id]) end
  write_statuses(ids, records, texts)
end

-- Write what was decided in memory, and lease the tasks.
local function write_claim(open)
  write_rings(open)
  write_aside()
  if #this.members > 0 then
    local ids, records, texts = take_out(this.members)
    if #ids > 0 then lease(ids, records, texts) end
    this.taken.ids, this.taken.records = ids, records
  end
  if #this.overdue > 0 then lost.expire(this.overdue) end
end

-- Whether the rings have units that were not passed over. `is_all`: all units were looked at.
local function has_more(open, is_all)
  local is_more = false
  for pool in pairs(this.pools) do
    local name = pool == 'default' and '' or '\3' .. pool
    local left = name == '' and redis.call('ZCARD', K.ready) or rings().count(K.ready, name)
    local passed = 0
    for _, ring in ipairs(open) do
      if ring.name == name then
        ring.has_more = left > 0
        if is_all then passed = ring.passed end
      end
    end
    is_more = is_more or left > passed
  end
  return is_more
end

-- Measure how fast the tasks of a pool are served while tasks wait: their number, and the time in which they
-- were claimed, both weighted so that PACE_MS ago counts as 37 %. Idle time does not count. The pace of a ring is
-- tasks, ms, time of the last claim, and 1 if tasks waited after it.
local function note_pace(ring, number)
  local clocks = ring.clocks
  local tasks, ms, last, was_busy = string.match(clocks.pace or '', '^(%S+) (%S+) (%S+) (%S+)$')
  tasks, ms, last = tonumber(tasks) or 0, tonumber(ms) or 0, tonumber(last) or now
  if was_busy == '1' and now >= last then
    local weight = math.exp((last - now) / PACE_MS)
    tasks, ms = tasks * weight + number, ms * weight + now - last
  end
  clocks.pace = string.format('%.4g %.6g %.0f %d', tasks, ms, now, ring.has_more and 1 or 0)
  if ring.name == '' then fair_dirty = true else rings().touch(ring.name) end
end
