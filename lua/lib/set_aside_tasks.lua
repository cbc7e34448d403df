-- Set unfinished tasks aside that move to another queue.
--
-- @include ending repartition
-- @lazy delays gates uniques
-- KEYS schedules  hash  schedule id -> definition, JSON

local BYTES_AT_ONCE = 1048576  -- of documents and attempts, roughly

-- `reads`: how many more unfinished tasks of schedules a call reads, roughly; 10 ms.
local tasks_aside = { bytes = 0, reads = 1000, done = {} }

local function is_unfinished(record)
  return record and (record.state == 'ready' or record.state == 'delayed')
end

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

-- Make the parts that a task needs; they check their keys before anything is written.
local function prepare_aside(record)
  prepare_end(record)
  if record.flow and record.flow.unique then delays() end
end

local function set_task_aside(id, record)
  local is_ready = record.state == 'ready'
  local at = redis.call('ZSCORE', is_ready and K.waiting or K.delayed, id) or text_of(tonumber(record.due) or now)
  local document = redis.call('HGET', K.tasks, id)
  local attempts = redis.call('HGET', K.attempts, id) or ''
  local has_key = record.flow and record.flow.unique
  set_aside('t' .. id, { id, is_ready and 'waiting' or 'delayed', at, document, redis.call('HGET', K.status, id), attempts,
    has_key and uniques().take_entry(id, record) or '' })
  if is_ready then
    remove_waiting(id, record)
  else
    delays().remove(id, owner_of(record))
    if record.flow and record.flow.keys then gates().forget(waiting_task(id, record)) end
  end
  if record.expires then redis.call('ZREM', K.expiring, id) end
  if record.schedule then redis.call('ZREM', K.open, record.schedule .. '\0' .. id) end
  redis.call('HDEL', K.tasks, id)
  redis.call('HDEL', K.status, id)
  redis.call('HDEL', K.attempts, id)
  remember('t:' .. id, tombstone_of({ state = 'moved', digest = record.digest }, document))
  tasks_aside.bytes, tasks_aside.done[id] = tasks_aside.bytes + #document + #attempts, true
end

local function is_enough_aside()
  return tasks_aside.bytes > BYTES_AT_ONCE
end
