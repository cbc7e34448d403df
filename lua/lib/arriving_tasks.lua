-- Store unfinished tasks that have left another queue or another partition as they were there.
--
-- @include enqueue ending netstrings
-- @lazy delays gates specials uniques rings unique_pushes barrier

-- A task from the text of its parts; see lib/leaving_tasks.
local function task_in(text)
  local parts = parts_in(text)
  return { id = parts[1], place = parts[2], at = parts[3], document = parts[4], status = parts[5], attempts = parts[6],
    unique = parts[7], record = parse_status(parts[5]) }
end

-- Why a task that arrives is not to be stored: 'known' if it is or was here, 'refused' if another task has its id or
-- there is no room for its pool; nil if it is to be stored.
local function verdict_on_arrival(task)
  local id, document = task.id, task.document
  if not task.record then return 'refused' end
  local stored = redis.call('HGET', K.tasks, id)
  if stored then
    local is_same = stored == document or (layout > 1 and unique_pushes().was_document(id, document))
    return is_same and 'known' or 'refused'
  end
  local state, _, seen = read_tombstone(first_answer('t:' .. id) or '')
  if state and state ~= 'moved' then return seen == digest(document) and 'known' or 'refused' end
  if task.record.pool and not rings().has_room_for(task.record.pool) then return 'refused' end
  return nil
end

-- Make the parts that storing a task needs; they check their keys before anything is written.
local function prepare_arrival(task)
  local record = task.record
  prepare_end(record)
  if record.group or record.pool or record.flow or record.expires then specials().prepare(record) end
  if task.place == 'delayed' then delays() end
end

local arrivals = { waiting = {}, later = {}, pooled = {}, buffered = {} }

-- Store a task in its place. `give_key` gives it its unique key, if it has one.
local function put_unfinished(task, give_key)
  local id, record = task.id, task.record
  if record.group or record.pool or record.flow or record.expires then need_layout_2() end
  if record.group then specials().join(record.user, record.group) end
  if record.flow and record.flow.unique then give_key(task) end
  if record.expires then redis.call('ZADD', K.expiring, text_of(record.expires), id) end
  if record.schedule then redis.call('ZADD', K.open, 0, record.schedule .. '\0' .. id) end
  if record.buffered and record.schedule then arrivals.buffered[record.schedule] = true end
  if task.place == 'waiting' then
    redis.call('ZADD', K.waiting, task.at, id)
    arrivals.waiting[#arrivals.waiting + 1] = waiting_task(id, record)
    if record.pool then arrivals.pooled[#arrivals.pooled + 1] = task end
  else
    local later = arrivals.later
    for _, value in ipairs({ tonumber(task.at) or now, id, owner_of(record) }) do later[#later + 1] = value end
    if record.attempts > 0 and record.flow and record.flow.keys and gates().keeps_place(record) then
      gates().arrive(waiting_task(id, record))
    end
  end
end

local function put_records(task)
  redis.call('HSET', K.tasks, task.id, task.document)
  redis.call('HSET', K.status, task.id, task.is_changed and cjson.encode(task.record) or task.status)
  if task.attempts ~= '' then redis.call('HSET', K.attempts, task.id, task.attempts) end
end

-- Let workers find the tasks that were put, once all of them have their records.
local function let_arrivals_begin()
  if #arrivals.later > 0 then delays().add(arrivals.later) end
  add_waiting(arrivals.waiting, true)
  for _, task in ipairs(arrivals.pooled) do
    -- They wait since then, not since now.
    redis.call('ZREM', K.pool_tasks, specials().pool_member(task.record.pool, now, task.id))
    redis.call('ZADD', K.pool_tasks, 0, specials().pool_member(task.record.pool, tonumber(task.at) or now, task.id))
  end
  for schedule in pairs(arrivals.buffered) do let_buffered_begin(schedule) end
  if #arrivals.waiting > 0 or #arrivals.later > 0 then wake_all() end
end
