-- Store tasks that come from another queue as they were there, unfinished ones and ended ones.
--
-- @include arriving_tasks repartition
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
local function task_of_row(moved, text)
  local task = task_in(text)
  local record = task.record
  task.moved = moved
  if record and record.tenant and not record.group then
    record.group, task.is_changed = record.tenant, true
  end
  return task
end

-- The word for a task, if it is not to be stored; else nil.
local function verdict_on(task)
  if is_back then return redis.call('HEXISTS', K.repartition, MOVES_AWAY .. task.moved) == 0 and 'known' or nil end
  return redis.call('HGET', K.repartition, HAS_ARRIVED .. task.moved) or verdict_on_arrival(task)
end

local places = {}

-- Give an unfinished task its unique key, or the place behind the one that has it.
local function give_key(task)
  local record = task.record
  if uniques().put_entry(task.id, record, task.unique) then return end
  task.is_changed = true
  if task.place == 'delayed' and tonumber(task.at) >= AFTER_THE_LAST and not record.buffered then
    task.at = text_of(math.max(now, tonumber(record.due) or now))
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
  local task = task_of_row(R.moved[i], R.record[i])
  rows[#rows + 1] = task
  local word = verdict_on(task)
  words[#rows], is_new[#rows] = word or 'stored', not word
  if not word then prepare_arrival(task) end
end
for i, task in ipairs(rows) do
  if is_new[i] then
    if task.place == 'waiting' or task.place == 'delayed' then put_unfinished(task, give_key) else put_ended(task) end
    put_records(task)
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
let_arrivals_begin()
save_fair()
mark_layout()
return { 'put', unpack(words) }
