-- Store tasks that come from another queue as they were there, unfinished ones and ended ones.
--
-- @include enqueue ending repartition
-- @lazy delays gates specials uniques rings unique_pushes barrier
-- ARGV back  text  '1': they come back to the queue that they were to leave, because the other one refused them
-- ARGV ...   tasks, a few hundred at most
-- ROW moved   text  the name under which it was set aside
-- ROW record  text  what was set aside
--
-- They keep ids, ranks, times, attempts, keys and what is known of their runs. A task that has arrived is stored only
-- once, even if the call is repeated after it has ended and its record is gone. A task gives up its unique key if another
-- task here has it. Limits of waiting tasks do not apply. One of an earlier version that names a tenant without waiting
-- as one of its users does so from now on.
--
-- Returns { 'put', a word for each }: 'stored', 'known' (this queue had it before) or 'refused' (the id belongs to
-- another task here, or there is no room for its pool), the same word if it is repeated; or { 'taken over' } with
-- nothing changed, if another process moves the queue.

local is_back = A.back == '1'
if not is_mover(is_back and 'from' or 'to') then return { 'taken over' } end

local MEMBERS = 1000  -- unpack() has room for a few thousand values

-- The task of a row: its records, and what was set aside with it.
local function task_in(moved, text)
  local parts = parts_in(text)
  local record = parse_status(parts[5])
  local task = { moved = moved, id = parts[1], place = parts[2], at = parts[3], document = parts[4], status = parts[5],
    attempts = parts[6], unique = parts[7], record = record }
  if record and record.tenant and not record.group then
    record.group, task.is_changed = record.tenant, true
  end
  return task
end

-- The word for a task, if it is not to be stored; else nil.
local function verdict_on(task)
  local id, document = task.id, task.document
  if is_back then return redis.call('HEXISTS', K.repartition, MOVES_AWAY .. task.moved) == 0 and 'known' or nil end
  local before = redis.call('HGET', K.repartition, HAS_ARRIVED .. task.moved)
  if before then return before end
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

local function prepare(task)
  local record = task.record
  prepare_end(record)
  if record.group or record.pool or record.flow or record.expires then specials().prepare(record) end
  if task.place == 'delayed' then delays() end
end

local waiting, later, pooled, places, buffered = {}, {}, {}, {}, {}

-- Give an unfinished task its unique key, or the place behind the one that has it.
local function give_key(task)
  local record = task.record
  if uniques().put_entry(task.id, record, task.unique) then return end
  task.is_changed = true
  if task.place == 'delayed' and tonumber(task.at) >= AFTER_THE_LAST and not record.buffered then
    task.at = text_of(math.max(now, tonumber(record.due) or now))
  end
end

local function put_unfinished(task)
  local id, record = task.id, task.record
  if record.group or record.pool or record.flow or record.expires then need_layout_2() end
  if record.group then specials().join(record.user, record.group) end
  if record.flow and record.flow.unique then give_key(task) end
  if record.expires then redis.call('ZADD', K.expiring, text_of(record.expires), id) end
  if record.schedule then redis.call('ZADD', K.open, 0, record.schedule .. '\0' .. id) end
  if record.buffered and record.schedule then buffered[record.schedule] = true end
  if task.place == 'waiting' then
    redis.call('ZADD', K.waiting, task.at, id)
    waiting[#waiting + 1] = waiting_task(id, record)
    if record.pool then pooled[#pooled + 1] = task end
  else
    for _, value in ipairs({ tonumber(task.at) or now, id, owner_of(record) }) do later[#later + 1] = value end
    if record.attempts > 0 and record.flow and record.flow.keys and gates().keeps_place(record) then
      gates().arrive(waiting_task(id, record))
    end
  end
end

local function put_ended(task)
  local id, record = task.id, task.record
  if record.group then
    need_layout_2()
    specials().join(record.user, record.group)
  end
  redis.call('ZADD', task.place == 'dead' and K.dead or K.ended, task.at, id)
  add_places(places, id, record)
  if record.fingerprint then redis.call('ZADD', K.failures, 'GT', record.ended, record.fingerprint) end
end

local rows, words, is_new = {}, {}, {}
for i = FIRST, #ARGV, ROW do
  local task = task_in(R.moved[i], R.record[i])
  rows[#rows + 1] = task
  local word = verdict_on(task)
  words[#rows], is_new[#rows] = word or 'stored', not word
  if not word then prepare(task) end
end
for i, task in ipairs(rows) do
  if is_new[i] then
    if task.place == 'waiting' or task.place == 'delayed' then put_unfinished(task) else put_ended(task) end
    redis.call('HSET', K.tasks, task.id, task.document)
    redis.call('HSET', K.status, task.id, task.is_changed and cjson.encode(task.record) or task.status)
    if task.attempts ~= '' then redis.call('HSET', K.attempts, task.id, task.attempts) end
  end
  if is_back then
    redis.call('HDEL', K.repartition, MOVES_AWAY .. task.moved)
  elseif words[i] ~= 'refused' then
    redis.call('HSET', K.repartition, HAS_ARRIVED .. task.moved, words[i])
  end
end
for from = 1, #places, MEMBERS do
  local flat = {}
  for i = from, math.min(from + MEMBERS - 1, #places) do flat[#flat + 1], flat[#flat + 2] = '0', places[i] end
  redis.call('ZADD', K.runs, unpack(flat))
end
if #later > 0 then delays().add(later) end
add_waiting(waiting, true)
for _, task in ipairs(pooled) do
  -- They wait since then, not since now.
  redis.call('ZREM', K.pool_tasks, specials().pool_member(task.record.pool, now, task.id))
  redis.call('ZADD', K.pool_tasks, 0, specials().pool_member(task.record.pool, tonumber(task.at) or now, task.id))
end
for schedule in pairs(buffered) do let_buffered_begin(schedule) end
if #waiting > 0 or #later > 0 then wake_all() end
save_fair()
mark_layout()
return { 'put', unpack(words) }
