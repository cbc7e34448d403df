-- Decide what a push of a task with a unique key does, and replace the task that has it.
--
-- LAZY
-- @include enqueue
-- @lazy uniques delays gates specials
-- KEYS ops         hash  'u:' task id -> the task that the push of this one was answered with, and the digest of
--                        its document; 'd:' task id -> digest of its first document, which was replaced
-- KEYS ops_before  hash  the same, of the time before
-- KEYS tasks       hash  task id -> its document
-- KEYS expiring    zset  task id -> when it ends as expired if it has not started, ms

local unique_pushes = {}

local in_batch = {}  -- field of uniques -> task of this call that gets the key

-- The answer that an earlier push of a task got because another task had its key: the id of that task, or
-- 'other' if the id belonged to a task with another document; nil if there was none.
function unique_pushes.answered(task)
  local before, document = string.match(first_answer('u:' .. task.id) or '', '^(.*) (%S*)$')
  if not before then return nil end
  return document == digest(task.document) and before or 'other'
end

function unique_pushes.remember(task, answer)
  remember('u:' .. task.id, answer .. ' ' .. digest(task.document))
end

-- Whether a task was pushed with this document, which was replaced since.
function unique_pushes.was_document(id, document)
  return first_answer('d:' .. id) == digest(document)
end

-- Remember the document with which a task was pushed, so that the same push is recognised. Later documents
-- came with other ids.
function unique_pushes.replaced(id, document)
  remember('d:' .. id, first_answer('d:' .. id) or digest(document))
end

-- When a debounced task becomes ready, if the first push with its key was at `first`.
local function debounced(flow, first)
  local due = now + flow.debounce
  return flow.max_wait and math.max(now, math.min(due, first + flow.max_wait)) or due
end

local function is_waiting(record)
  return record and (record.state == 'ready' or record.state == 'delayed')
end

-- The record of the task that may have a key. One that has expired has ended, though no claim has ended it yet.
local function record_of_holder(id)
  local record = read_status(id)
  if is_waiting(record) and record.expires and record.expires <= now then
    record.state, record.ended = 'expired', now
  end
  return record
end

-- The task that has the key now: its entry in `uniques` and its record; nil if no task has it.
local function holder_of(field)
  local holder = uniques().read(field)
  if not holder then return nil end
  local record = record_of_holder(holder.id)
  if holder.following and is_waiting(read_status(holder.following)) then return holder, record end
  holder.following, holder.since = nil, nil
  local has_key = is_waiting(record)
  if holder.scope == 'window' then has_key = holder.ends and holder.ends > now end
  if holder.scope == 'unfinished' then has_key = record and not record.ended end
  if has_key then return holder, record end
  return nil
end

-- Take over the document of another task of this call, which has the same key.
local function replace_in_batch(first, task)
  first.pushed_as = first.pushed_as or first.document
  for _, name in ipairs({ 'user', 'name', 'document', 'head', 'level', 'when', 'pool', 'flow', 'due' }) do
    first[name] = task[name]
  end
  if first.window_from then first.due = math.max(first.due or due_at(first.when), first.window_from) end
end

-- Whether a new task of this call has got the key of another one.
function unique_pushes.is_taken_here(task)
  return in_batch[uniques().field_of(task)] ~= nil
end

-- Decide what becomes of a new task with a key. Returns a word and the id of the task that has the key:
--   'new'      it is stored; with `behind`, after the running task with the key
--   'ignored'  the other task is the answer
--   'replaces' the other task gets its document and time
--   'refused'  the push is an error
function unique_pushes.decide(task)
  local flow, field = task.flow, uniques().field_of(task)
  local reaction = flow.on_duplicate or 'ignore'
  local first = in_batch[field]
  if first then
    if reaction == 'error' then return 'refused', first.id end
    if reaction == 'replace' then
      if flow.debounce then task.due = debounced(flow, now) end
      replace_in_batch(first, task)
    end
    return 'ignored', first.id
  end
  local holder, record = holder_of(field)
  if holder and reaction == 'error' then return 'refused', holder.id end
  if holder and reaction ~= 'replace' then return 'ignored', holder.id end
  if holder and (is_waiting(record) or holder.following) then
    local is_first = is_waiting(record)
    if flow.debounce then task.due = debounced(flow, is_first and holder.first or holder.since or now) end
    return 'replaces', is_first and holder.id or holder.following
  end
  if flow.debounce then task.due = debounced(flow, now) end
  if holder and record and not record.ended then
    task.behind = true
  elseif holder then
    -- Its window goes on: the next task with the key runs after it.
    task.due, task.window_from = math.max(task.due or due_at(task.when), holder.ends), holder.ends
  end
  in_batch[field] = task
  return 'new'
end

-- Enter a task that is stored as the one that has its key, or as the next one.
function unique_pushes.take(task)
  if task.pushed_as then unique_pushes.replaced(task.id, task.pushed_as) end
  local field = uniques().field_of(task)
  local holder = task.behind and uniques().read(field)
  if holder then
    holder.following, holder.since = task.id, now
  else
    local scope, window = uniques().scope_of(task.flow)
    local from = task.window_from or now
    holder = { id = task.id, scope = scope, first = now, ends = window and from + window }
  end
  uniques().write(field, holder)
end

-- Give a waiting task the document, the options and the time of another one. It keeps its id and its place.
function unique_pushes.replace(id, task)
  local old = read_status(id)
  if old.flow and old.flow.keys then gates() end
  delays()
  unique_pushes.replaced(id, redis.call('HGET', K.tasks, id) or '')
  if old.state == 'delayed' then
    delays().remove(id, owner_of(old))
    if old.flow and old.flow.keys then gates().forget(waiting_task(id, old)) end
  else
    remove_waiting(id, old)
  end
  redis.call('ZREM', K.expiring, id)
  local record = decode(task.head .. '}')
  record.flow, record.behind = task.flow, old.behind
  record.schedule, record.type = old.schedule, old.type
  record.rank = rank_of(task.level, now, tonumber(string.sub(old.rank, -14)))
  record.due = math.max(now, task.due or due_at(task.when))
  if task.flow.expires then
    specials().expire(id, record)
    record.flow.expires = record.expires  -- counted from this push, also if the task is given back
  end
  record.pushed = old.pushed
  if #task.document > DIGESTED then record.digest, record.bytes = digest(task.document), #task.document end
  record.state = (record.behind or record.due > now) and 'delayed' or 'ready'
  redis.call('HSET', K.tasks, id, task.document)
  write_status(id, record)
  if record.group then specials().join(record.user, record.group) end
  -- The key is held for as long as the last push says.
  local field = uniques().field_of(record)
  local holder = uniques().read(field)
  if holder and holder.id == id then
    local scope, window = uniques().scope_of(task.flow)
    holder.scope, holder.ends = scope, window and holder.first + window
    uniques().write(field, holder)
  end
  if record.state == 'delayed' then
    delays().add({ record.behind and AFTER_THE_LAST or record.due, id, owner_of(record) })
    wake_for(record)
  elseif add_waiting({ waiting_task(id, record) }) then
    wake_worker()
  end
  count('replaced', 1)
end

return unique_pushes
