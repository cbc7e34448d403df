-- Put waiting tasks where workers find them, and remove them again.
--
-- @include fair
-- KEYS waiting  zset  task id -> when it started waiting, ms
-- KEYS held     zset  user NUL name NUL rank NUL task id, all scores 0: tasks that wait for a slot
-- KEYS slot_line  zset  whose held task is next, for each name; see lib/limits
--
-- The backlog orders the tasks of each user by level digit, then by arrival. With ageing, a higher level
-- counts as an earlier arrival, and only CRITICAL has a digit of its own.

local CRITICAL = 6

local function next_rank(level, arrival_ms)
  fair.seq = fair.seq + 1
  fair_dirty = true
  if level == CRITICAL then return string.format('0%014d', fair.seq) end
  if SETTINGS.ageing_ms > 0 then
    local virtual = math.max(0, arrival_ms - level * SETTINGS.ageing_ms)
    return string.format('1%014d%014d', virtual, fair.seq)
  end
  return string.format('%d%014d', CRITICAL - level, fair.seq)
end

-- The member of a task in the backlog; `task` has its user, rank and name.
local function member_of(id, task)
  return task.user .. '\0' .. task.rank .. '\0' .. id .. '\0' .. (task.name or '')
end

-- The member of a task in `held`.
local function held_member_of(id, task)
  return task.user .. '\0' .. (task.name or '') .. '\0' .. task.rank .. '\0' .. id
end

-- Wake a worker that takes all names. Workers that do not want the task pass the token on; see claim.
-- Workers that take only some names are told by add_waiting, or by kinds.wake if nothing can be claimed yet.
local function wake_worker()
  if leave_token(K.wake) then redis.call('HDEL', K.fair, 'passes') end
end

-- A task as add_waiting takes it.
local function waiting_task(id, record)
  return { id = id, user = record.user, rank = record.rank, name = record.name }
end

-- Add waiting tasks; see waiting_task. Returns true if a worker can claim one now.
-- `returning`: the tasks were claimed before, so their users are not newcomers.
local function add_waiting(list, returning)
  if #list == 0 then return false end
  local members, since, absent = {}, {}, {}
  local seen, findable = {}, {}
  for i, task in ipairs(list) do
    local user = task.user
    if not seen[user] then
      seen[user] = 'known'
      if redis.call('ZSCORE', K.ready, user) then
        seen[user] = 'ready'
      elseif not redis.call('ZSCORE', K.parked, user) then
        absent[#absent + 1] = user
      end
    end
    members[2 * i - 1], members[2 * i] = '0', member_of(task.id, task)
    since[2 * i - 1], since[2 * i] = now_text, task.id
  end
  redis.call('ZADD', K.backlog, unpack(members))
  redis.call('ZADD', K.waiting, 'NX', unpack(since))
  if #absent > 0 then settle() end
  for _, user in ipairs(absent) do
    local newcomer = not returning and running_of(user) == 0
      and not redis.call('ZSCORE', K.idle, user)
    if place(user, newcomer) then seen[user] = 'placed' end
  end
  for _, task in ipairs(list) do
    local is_ready = seen[task.user] == 'ready'
    if is_ready or seen[task.user] == 'placed' then findable[#findable + 1] = task end
    if is_ready and string.byte(task.rank, 1) == 48 then enter_critical(task.user) end
  end
  kinds.tell(findable)
  return #findable > 0
end

-- Remove a waiting task from its user's backlog, or from `held`.
local function remove_waiting(id, record)
  redis.call('ZREM', K.waiting, id)
  if redis.call('ZREM', K.backlog, member_of(id, record)) == 0 then
    redis.call('ZREM', K.held, held_member_of(id, record))
    -- Turns of users without held tasks are skipped later. Without any held task, all turns go.
    if redis.call('ZCARD', K.held) == 0 then redis.call('UNLINK', K.slot_line) end
    return
  end
  local head = first_waiting(record.user, 1)[1]
  if not head then
    leave(record.user)
  elseif not is_critical(record.user, head) then
    redis.call('ZREM', K.critical, record.user)
  end
end
