-- Hand the next tasks to a worker, fairly between tenants and users, and start their leases.
--
-- @include serving
-- @lazy kind_claims kinds rings gates level
-- FLAGS allow-oom
-- KEYS served_before  hash  seat -> service / weight in the previous window
-- ARGV op        text  random; also the lease token. A repeated claim returns the tasks that it still holds
-- ARGV worker    text  worker id
-- ARGV limit     int   at most this many tasks
-- ARGV lease_ms  int   length of the leases
-- ARGV place     text  host and process of the worker
-- ARGV names     text  empty: tasks of any name; '+' and names, one per line: only these; '-': all others
-- ARGV pools     text  pools, one per line; empty: the default pool
-- ARGV floor     text  of a queue with partitions: the lowest levels that the client knows of the other partitions, of
--                      ordinary turns and of the CRITICAL lane, as level.floors reads them. Else empty
--
-- The script first does what has become due; see lib/upkeep. Its cost does not depend on how many users
-- wait, are capped or are paused: it reads the first `limit` units (users and tenants) of a ring, the first
-- users of tenants whose turn it is, and more only as WORK allows. Those who may not be served are not in the
-- rings. Units are served in memory, and their new state is written together, because calling commands is what
-- takes a script's time.
-- From several pools, the next task is that of the pool whose clock is lowest.
-- Tasks whose names the worker does not want stay where they are; at most LOOK of each user are passed
-- over. Tasks whose limits are reached are held, and come back in turn when there is room. Tasks that have
-- expired end.
-- A claim for some names looks at the head of `ready`, then continues where the last claim of its kind
-- stopped, then looks at the users that its kind was told about. If a whole round finds nothing, claims of
-- this kind do not look again for a while unless they are told about a task.
--
-- Returns { ms until something becomes claimable (-1: nothing known, 0: now), time in ms, time of the
-- claim in ms, numbers of the wake lists to wait at (0: `wake`), with commas; the levels of the partition after
-- the claim, as level.text writes them, and in a second line what is to be carried to the homes of limits, as
-- gates.answer writes it, empty without partitions; then for each task: id, document, attempt, ms
-- at which it became ready }.

local WINDOW_MS = 10000      -- service is compared between users over windows of this length
local TRIMMED = 200          -- once in a window, twice as many old records are dropped at most
local LONGEST_WAIT_MS = 5000 -- no worker waits longer than this, whatever the hint
local WORK = 1000            -- tasks that one claim looks at without taking them, roughly: a few ms
local MOST_ROUND = 100       -- units read at first, when some may have nothing for the worker
local LOOK_ON_MS = 100       -- wait before the next claim when there are more users to look at
local GATES_READ = 20        -- limits whose times are read to find one that this worker wants
local LATE = 4               -- a claim that comes too late for its turn takes a part of its limit
local GATES_WALKED = 100     -- limits with held tasks that are looked at once in a window

this.op, this.worker, this.place = A.op, A.worker, A.place
this.limit, this.lease_ms = tonumber(A.limit), tonumber(A.lease_ms)
this.share = SETTINGS.critical_share
-- What an ordinary turn adds to the credit of the CRITICAL lane, and the most credit that can be saved up.
-- With less than one refill plus one, a large share could not be reached.
this.refill = this.share < 1 and this.share / (1 - this.share) or 0
this.most_credit = math.max(CRITICAL_CREDIT, this.refill + 1)
-- A task may have a place in an order whose limit was removed.
this.has_limits = redis.call('HLEN', K.limits) > 0 or (layout > 1 and redis.call('EXISTS', K.gate_order) == 1)
this.filtered, this.only_listed, this.listed = A.names ~= '', string.sub(A.names, 1, 1) == '+', {}
for name in string.gmatch(string.sub(A.names, 2), '[^\n]+') do this.listed[name] = true end
this.is_default_only, this.pools = A.pools == '', {}
for pool in string.gmatch(A.pools == '' and 'default' or A.pools, '[^\n]+') do this.pools[pool] = true end

-- The tasks that a repeated claim still holds: ids, and records by id.
local function still_held()
  local ids, records = {}, {}
  local before = first_answer(A.op)
  if not before then return ids, records end
  for id in string.gmatch(before, '[^\n]+') do
    records[id] = held_record(id, A.op)
    if records[id] then ids[#ids + 1] = id end
  end
  return ids, records
end

-- The lowest of a floor and of the rings in which something waited before; nil if there is none.
function this.floor_of(open, floor)
  for _, ring in ipairs(open) do
    local entry = turns.peek(ring.ready, is_turn)
    ring.first = entry and entry.tag
    if ring.first and not ring.clocks.rested then
      floor = math.min(floor or math.huge, ring.first + ring.clocks.offset)
    end
  end
  return floor
end

-- A pool that had nothing to serve starts where the lowest of the other pools is: it has no service stored up.
function this.align(open)
  local floor = this.floor_of(open)
  for _, ring in ipairs(open) do
    if ring.first and ring.clocks.rested then
      floor = floor or ring.first + ring.clocks.offset
      ring.clocks.offset, ring.clocks.rested = floor - ring.first, false
      rings().touch(ring.name)
    end
  end
end

-- Move the rings in which nothing waited before up to the floor: that of the other partitions, or else of the other
-- pools. The first tag and not the clock: who owes something since the last time does not owe more for it.
function this.align_partition(open)
  local floor, lane_floor, mark = level().floors(A.floor)
  fair.offset, fair.rested, this.lane_offset, this.lane_rests = level().shift()
  local own = this.floor_of(open)
  this.floor = floor
  if own and not (mark == '!' and floor) then floor = mark == '~' and own or math.min(floor or own, own) end
  for _, ring in ipairs(open) do
    local clocks = ring.clocks
    if ring.first and (clocks.rested or mark == '!') then
      local at = math.max(ring.first, clocks.clock) + clocks.offset
      if floor and at < floor then clocks.offset = clocks.offset + floor - at end
      clocks.rested = false
      if ring.name ~= '' then rings().touch(ring.name) end
    end
  end
  -- Others have claimed here since this client has heard of it: it takes less here, and the rest where the level is
  -- lower. Else all who have heard the same would come here with all that they want.
  local first = this.is_default_only and mark == '' and this.floor and open[1].first
  local at = first and math.max(first, fair.clock) + fair.offset
  if at and this.limit > 1 and at > this.floor + this.limit / redis.call('ZCARD', K.ready) then
    this.limit = math.ceil(this.limit / LATE)
  end
  if this.lane_rests then
    local first = level().first(K.critical, '')
    if first and lane_floor then this.lane_offset = math.max(this.lane_offset, lane_floor - first) end
    this.lane_rests = not first
  end
end

-- Note which rings rest after the claim, and return the levels for the client. The clock of a ring that rests, or that
-- has nothing for this worker, goes with the floor: newcomers do not get what nobody wanted.
function this.leave_level(open)
  local floor = level().floors(A.floor)
  local names = {}
  for i, ring in ipairs(open) do
    local clocks = ring.clocks
    names[i] = ring.name
    local is_empty = ring.name == '' and redis.call('EXISTS', K.ready) == 0
      or ring.name ~= '' and rings().is_empty(K.ready, ring.name)
    if is_empty and not clocks.rested then
      clocks.rested = true
      if ring.name ~= '' then rings().touch(ring.name) end
    end
    if floor and (is_empty or #this.taken.ids == 0) and floor - clocks.offset > clocks.clock then
      clocks.clock = floor - clocks.offset
      if ring.name == '' then fair_dirty = true else rings().touch(ring.name) end
    end
  end
  this.lane_rests = this.lane_rests or redis.call('EXISTS', K.critical) == 0
  level().save(fair.offset, fair.rested, this.lane_offset, this.lane_rests)
  return level().text(names, fair.offset, fair.rested, this.lane_offset, this.lane_rests)
end

-- The rings of the pools, opened.
local function open_rings()
  local most = this.filtered and math.min(this.limit, MOST_ROUND) or this.limit
  if this.is_default_only then
    fair.credit = fair.credit and math.min(fair.credit, this.most_credit)
    local open = { open_ring('', fair, most, this.share > 0 and redis.call('ZCARD', K.critical) > 0) }
    if A.floor ~= '' then this.align_partition(open) end
    return open
  end
  local open = {}
  for pool in string.gmatch(A.pools, '[^\n]+') do
    local name = pool == 'default' and '' or '\3' .. pool
    if name ~= '' and rings().has_room_for(pool) then rings().add_pool(pool) end
    local clocks = rings().named(name)
    clocks.credit = clocks.credit and math.min(clocks.credit, this.most_credit)
    open[#open + 1] = open_ring(name, clocks, most, this.share > 0 and not rings().is_empty(K.critical, name))
  end
  if A.floor ~= '' then this.align_partition(open) elseif #open > 1 then this.align(open) end
  return open
end

-- --- housekeeping ---

local function turn_window()
  local since = tonumber(redis.call('HGET', K.fair, 'window') or nil)
  if since and math.abs(now - since) < WINDOW_MS then return end
  redis.call('UNLINK', K.served_before)
  if redis.call('EXISTS', K.served) == 1 then
    redis.call('RENAME', K.served, K.served_before)
  end
  redis.call('HSET', K.fair, 'window', now)
  trim_all(TRIMMED)
  -- Clients of layout 1 hold tasks without setting a time, and damage may have removed one.
  if redis.call('ZCARD', K.held) == 0 then return end
  local last = gates().look_at(redis.call('HGET', K.fair, 'gates_from') or '\2', '\255', GATES_WALKED)
  if last then
    redis.call('HSET', K.fair, 'gates_from', last .. '\7')
  else
    redis.call('HDEL', K.fair, 'gates_from')
  end
end

local function reap_idle(open, served)
  local most = 2 * served + 10
  if layout > 1 then
    for _, ring in ipairs(open) do rings().reap(ring.name, most) end
    return
  end
  local passed = redis.call('ZRANGE', K.idle, '-inf', fair.clock, 'BYSCORE', 'LIMIT', 0, most)
  if #passed == 0 then return end
  redis.call('ZREM', K.idle, unpack(passed))
  if SETTINGS.cost == 'time' then redis.call('HDEL', K.averages, unpack(passed)) end
end

-- When nothing is served, past service of these pools no longer counts.
local function settle_all(open)
  for _, ring in ipairs(open) do
    if ring.name == '' then settle(true) else rings().settle_for(ring.name, true) end
  end
end

-- When held tasks that this worker may want come back, ms; nil if it is not known.
function this.next_gate()
  local most = this.filtered and GATES_READ or 1
  local flat = redis.call('ZRANGE', K.gate_times, 0, most - 1, 'WITHSCORES')
  for i = 1, #flat, 2 do
    if not this.filtered or string.byte(flat[i]) == 3 or is_wanted(flat[i]) then return tonumber(flat[i + 1]) end
  end
  return nil
end

-- Ms until something becomes claimable for this worker.
local function wait_hint(kind, is_more)
  if this.asides >= ASIDE or #this.overdue >= OVERDUE then return 0 end
  local moments = { kind and kind.till > now and kind.till }
  if is_more then
    if #this.taken.ids > 0 or this.asides > 0 or not this.filtered then return 0 end
    moments[1] = moments[1] or now + (kind.place > 0 and LOOK_ON_MS or LOOK_AGAIN_MS)
  end
  for _, key in ipairs({ K.delayed, K.leases, K.parked }) do
    moments[#moments + 1] = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or nil)
  end
  moments[#moments + 1] = this.next_gate()
  local soonest = -1
  for _, at in pairs(moments) do
    if at and at < math.huge then
      local ms = math.max(0, math.ceil(at - now))
      if soonest < 0 or ms < soonest then soonest = ms end
    end
  end
  return soonest
end

-- The wake lists of this worker, by number.
function this.lists_of(kind)
  if kind then return { kinds().list_of(kind) } end
  if this.is_default_only then return { 0 } end
  local numbers = {}
  for pool in pairs(this.pools) do
    numbers[#numbers + 1] = pool == 'default' and 0 or kinds().list_of_pool(pool)
  end
  table.sort(numbers)
  return numbers
end

-- The token that woke this worker may have been meant for another: pass it on, at most PASSES times.
local function pass_on(kind, lists)
  for _, number in ipairs(lists) do
    if number > 0 then kinds().pass_on(number, kind, this.pools) end
  end
  -- A worker whose pool has no list waits at that of the default pool.
  local is_for_default = this.for_others or (not this.pools.default and redis.call('ZCARD', K.ready) > 0)
  if lists[1] > 0 or not is_for_default then return end
  local passes = tonumber(redis.call('HGET', K.fair, 'passes') or nil) or 0
  if passes >= PASSES then return end
  redis.call('HSET', K.fair, 'passes', passes + 1)
  leave_token(K.wake)
end

-- Wake the next worker of the same kind, or of the same pools.
local function wake_next(kind)
  if kind and kind.place > 0 then
    kinds().call(kind)
    return
  end
  for pool in pairs(this.pools) do
    if pool == 'default' then wake_worker() else kinds().wake_pool(pool) end
  end
end

-- A function of its own, because a script has room for only 200 local variables.
local function claim()
  local kind = this.filtered and kinds().enter(A.names, A.pools)
  local open, is_all, is_more = {}, false, nil
  this.taken.ids, this.taken.records = still_held()
  if #this.taken.ids == 0 then
    turn_window()
    upkeep(this.limit)
    -- What has become ready may be for workers that take all names, or of the default pool.
    if (kind or not this.pools.default) and lost.found then wake_worker() end
    open = open_rings()
    if kind then
      is_all = kind_claims().serve(kind, open)
    else
      is_all = serve_rings(open, WORK)
      write_claim(open)
    end
    is_more = has_more(open, is_all)
    if #this.taken.ids > 0 then
      for _, ring in ipairs(open) do note_pace(ring, ring.taken) end
      count('claimed', #this.taken.ids)
      remember(A.op, table.concat(this.taken.ids, '\n'))
    elseif A.floor == '' or string.byte(A.floor) == 126 then
      settle_all(open)
    end
    if A.floor ~= '' then this.level = this.leave_level(open) end
    reap_idle(open, #this.taken.ids)
    save_fair()
    if fair.flush_gates and A.floor ~= '' then this.level = this.level .. gates().answer() end
    if fair.flush_gates then is_more = nil end  -- held tasks may have come back
    if kind then kinds().save(kind) end
  end

  local ids, records = this.taken.ids, this.taken.records
  if is_more == nil then is_more = has_more(open, is_all) end
  local hint, lists = wait_hint(kind, is_more), this.lists_of(kind)
  -- One token wakes one worker, and a worker that leaves work for others wakes the next. A claim after
  -- which something happens sooner (a lease may expire, a rate allows a task) wakes a worker of each kind.
  local alarm = tonumber(redis.call('HGET', K.fair, 'alarm') or nil) or 0
  if #ids > 0 then
    if hint == 0 then
      wake_next(kind)
    elseif hint > 0 and hint < LONGEST_WAIT_MS and (alarm < now or alarm > now + hint) then
      wake_all()
    end
  else
    pass_on(kind, lists)
    if hint > 0 and (alarm < now or alarm > now + hint) then
      redis.call('HSET', K.fair, 'alarm', now + hint)
    end
  end
  local answer = { hint, now, ids[1] and records[ids[1]].claimed or now, table.concat(lists, ','), this.level or '' }
  if #ids > 0 then
    local documents = redis.call('HMGET', K.tasks, unpack(ids))
    for i, id in ipairs(ids) do
      answer[#answer + 1] = id
      answer[#answer + 1] = documents[i] or ''
      answer[#answer + 1] = records[id].attempts
      answer[#answer + 1] = tonumber(records[id].due) or now
    end
  end
  return answer
end

return claim()
