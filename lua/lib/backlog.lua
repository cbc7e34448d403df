-- Put waiting tasks where workers find them, and remove them again.
--
-- @include fair wake
-- @lazy gates specials
-- KEYS waiting     zset  task id -> when it started waiting, ms
-- KEYS held        zset  seat NUL gate NUL rank NUL task id, all scores 0: tasks that wait for room at a gate;
--                        see lib/gates
--
-- The backlog orders the tasks of each seat by level digit, then by arrival. With ageing, a higher level
-- counts as an earlier arrival, and only CRITICAL has a digit of its own.

local CRITICAL = 6

-- The rank of a task by its arrival number.
local function rank_of(level, arrival_ms, seq)
  if level == CRITICAL then return string.format('0%014d', seq) end
  if SETTINGS.ageing_ms > 0 then
    local virtual = math.max(0, arrival_ms - level * SETTINGS.ageing_ms)
    return string.format('1%014d%014d', virtual, seq)
  end
  return string.format('%d%014d', CRITICAL - level, seq)
end

local function next_rank(level, arrival_ms)
  fair.seq = fair.seq + 1
  fair_dirty = true
  return rank_of(level, arrival_ms, fair.seq)
end

-- The member of a task in the backlog.
local function member_of(id, record)
  return seat_of(record) .. '\0' .. record.rank .. '\0' .. id .. '\0' .. label_of(record)
end

-- Wake a worker of the default pool that takes all names. Workers that do not want the task pass the token on;
-- see claim. Workers that take only some names, and those of other pools, are woken by add_waiting, or by
-- wake_for if nothing can be claimed yet.
local function wake_worker()
  if leave_token(K.wake) then redis.call('HDEL', K.fair, 'passes') end
end

-- Wake a worker of each kind that may claim a task.
local function wake_for(record)
  if record.pool then kinds().wake_pool(record.pool) else wake_worker() end
  if fair.mixed then kinds().wake(record.name or '', record.pool) end
end

-- Wake a worker of each kind.
local function wake_all()
  wake_worker()
  if fair.mixed then kinds().wake() end
  if fair.pools then kinds().wake_pools() end
end

-- A task as add_waiting takes it.
local function waiting_task(id, record)
  return { id = id, seat = seat_of(record), rank = record.rank, label = label_of(record) }
end

-- Add waiting tasks; see waiting_task. Returns true if a worker of the default pool can claim one now.
-- `returning`: the tasks were claimed before, so their users are not newcomers. A task with `was_held` comes
-- from `held`.
local function add_waiting(list, returning)
  if #list == 0 then return false end
  local members, since, absent = {}, {}, {}
  local seen, findable = {}, {}
  for i, task in ipairs(list) do
    local seat = task.seat
    if not seen[seat] then
      seen[seat] = 'known'
      if tag_in(K.ready, seat) then
        seen[seat] = 'ready'
      elseif not redis.call('ZSCORE', K.parked, seat) then
        absent[#absent + 1] = seat
      end
    end
    members[2 * i - 1], members[2 * i] = '0', seat .. '\0' .. task.rank .. '\0' .. task.id .. '\0' .. task.label
    since[2 * i - 1], since[2 * i] = now_text, task.id
  end
  redis.call('ZADD', K.backlog, unpack(members))
  redis.call('ZADD', K.waiting, 'NX', unpack(since))
  if #absent > 0 then settle() end
  for _, seat in ipairs(absent) do
    if layout > 1 then rings().settle_for(seat) end
    local newcomer = not returning and running_of(owner_in(seat)) == 0 and not debt_of(seat)
    if place(seat, newcomer) then seen[seat] = 'placed' end
  end
  for _, task in ipairs(list) do
    local seat = task.seat
    local is_ready = seen[seat] == 'ready'
    if is_ready and string.byte(task.rank, 1) == 48 then enter_critical(seat, cost_in(task.label)) end
    if is_ready and layout > 1 then is_ready = rings().is_served(seat) end
    if is_ready or seen[seat] == 'placed' then findable[#findable + 1] = task end
  end
  if fair.mixed then kinds().tell(findable) end
  if layout > 1 then return specials().add(list, findable) end
  return #findable > 0
end

-- Remove a waiting task from the backlog, or from `held`.
local function remove_waiting(id, record)
  if record.pool then specials().leave_pool(id, record.pool) end
  redis.call('ZREM', K.waiting, id)
  local task = waiting_task(id, record)
  if redis.call('ZREM', K.backlog, member_of(id, record)) == 0 then
    gates().remove_held(task)
  else
    local head = first_waiting(task.seat, 1)[1]
    if not head then
      leave(task.seat)
    elseif not is_critical(task.seat, head) then
      drop_tag(K.critical, task.seat)
      if layout > 1 then rings().left(task.seat) end
    end
  end
  if string.find(task.label, '\3', 1, true) then gates().forget(task) end
end
