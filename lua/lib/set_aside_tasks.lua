-- Set unfinished tasks aside that move to another queue.
--
-- @include leaving_tasks repartition
-- @lazy delays gates uniques
-- KEYS schedules  hash  schedule id -> definition, JSON

local BYTES_AT_ONCE = 1048576  -- of documents and attempts, roughly

-- `reads`: how many more unfinished tasks of schedules a call reads, roughly; 10 ms.
local tasks_aside = { bytes = 0, reads = 1000, done = {} }

-- Whether a task can move, if its schedule does not matter: it can be read, and is not buffered behind a run that
-- is unfinished here.
local function can_move(id, record)
  if not is_unfinished(record) or tasks_aside.done[id] then return false end
  if redis.call('HEXISTS', K.tasks, id) == 0 then return false end
  if not record.buffered or not record.schedule then return true end
  if tasks_aside.reads <= 0 then return false end
  local _, others = open_runs(record.schedule, open_members(record.schedule, nil, OPEN_READ))
  tasks_aside.reads = tasks_aside.reads - OPEN_READ
  for _, other in pairs(others) do
    if not other.buffered then return false end
  end
  return true
end

-- The tasks that move together with a task because of its unique key: the one that has the key, and the one that
-- waits behind it. None if the one that has it runs here.
local function with_one_key(id, record)
  if not (record.flow and record.flow.unique) then return { id } end
  local holder = uniques().read(uniques().field_of(record))
  if holder and holder.id == id and holder.following then return { id, holder.following } end
  if not holder or holder.following ~= id then return { id } end
  local first = read_status(holder.id)
  if is_unfinished(first) then return { holder.id, id } end
  return first and first.state == 'running' and {} or { id }
end

local function set_task_aside(id, record)
  local has_key = record.flow and record.flow.unique
  local parts = take_out(id, record, has_key and uniques().take_entry(id, record) or '')
  set_aside('t' .. id, parts)
  tasks_aside.bytes, tasks_aside.done[id] = tasks_aside.bytes + #parts[4] + #parts[6], true
end

local function is_enough_aside()
  return tasks_aside.bytes > BYTES_AT_ONCE
end
