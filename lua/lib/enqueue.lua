-- Store new tasks: documents, statuses, and entries among waiting or delayed tasks.
--
-- @include backlog replay stats
-- @lazy delays specials unique_pushes rings
-- KEYS tasks  hash  task id -> its document, JSON; only a unique task that is replaced gets another one
-- KEYS open   zset  schedule NUL task id, all scores 0: unfinished tasks of schedules
--
-- A task that is stored with the same document does not change, so a push can be repeated.

-- The documents stored under ids; '' for a document of another length, which is not read. So no more is
-- read than was sent.
local function stored_documents(ids, documents)
  local found, places, alike = {}, {}, {}
  for i, id in ipairs(ids) do
    local length = redis.call('HSTRLEN', K.tasks, id)
    if length == #documents[i] then
      places[#places + 1], alike[#alike + 1] = i, id
    elseif length > 0 then
      found[i] = ''
    end
  end
  if #alike > 0 then
    for i, document in ipairs(redis.call('HMGET', K.tasks, unpack(alike))) do
      found[places[i]] = document
    end
  end
  return found
end

-- For each id: 'new', 'same' (stored with this document) or 'other' (stored with another document). A unique
-- task that was replaced is the same with each of its last documents.
local function known_tasks(ids, documents)
  local answer = {}
  local stored = stored_documents(ids, documents)
  local gone = {}
  for i, id in ipairs(ids) do gone[i] = 't:' .. id end
  local ended = redis.call('HMGET', K.ops, unpack(gone))
  local ended_before = redis.call('HMGET', K.ops_before, unpack(gone))
  local here = {}
  for i, id in ipairs(ids) do
    local before = stored[i] or here[id]
    if before then
      answer[i] = before == documents[i] and 'same' or 'other'
    elseif ended[i] or ended_before[i] then
      local _, _, seen = read_tombstone(ended[i] or ended_before[i])
      answer[i] = seen == digest(documents[i]) and 'same' or 'other'
    else
      answer[i] = 'new'
      here[id] = documents[i]
    end
    if answer[i] == 'other' and layout > 1 and unique_pushes().was_document(id, documents[i]) then
      answer[i] = 'same'
    end
  end
  return answer
end

-- When a task becomes ready, ms. `when`: '' now; '+ms' after a delay; 'ms' at that time.
local function due_at(when)
  if when == '' then return now end
  if string.sub(when, 1, 1) == '+' then return now + tonumber(string.sub(when, 2)) end
  return tonumber(when)
end

-- Read the tenant, the pool and the options of a task from the head of its status into the task. Most tasks
-- have none.
local function read_head(task)
  if string.sub(task.head, -13) ~= ',"attempts":0' then specials().read(task) end
end

local function add_later(later, due, task)
  for _, value in ipairs({ due, task.id, owner_of(task) }) do later[#later + 1] = value end
end

-- Bytes. The digest of a longer document is stored, so that it need not be read again to be recognised.
local DIGESTED = 1024

-- Add the digest of a long document, unless the client did, and its length to the head of a status.
local function with_digest(head, document)
  if not string.find(head, ',"digest":"', 1, true) then
    local made = digest(document)
    if made == '' then return head end
    head = head .. ',"digest":"' .. made .. '"'
  end
  return head .. ',"bytes":' .. #document
end

-- The text of the status of a task that waits or is delayed.
local function new_status(task, state, due)
  local head = task.head
  if task.buffered then head = head .. ',"buffered":true' end
  if task.behind then head = head .. ',"behind":true' end
  if #task.document > DIGESTED then head = with_digest(head, task.document) end
  local tail = task.expires and ',"expires":' .. text_of(task.expires) or ''
  return head .. ',"state":"' .. state .. '","rank":"' .. task.rank .. '","pushed":' .. now_text .. ',"due":'
    .. (due > now and string.format('%.0f', due) or now_text) .. tail .. '}'
end

-- Store new tasks: tables with id, user, name, document, head, level, when, schedule and buffered, after
-- read_head. `head` is the part of the status that the client knows, JSON without the closing brace. A
-- `buffered` task waits for the previous run of its schedule to end, a task that is `behind` for the running
-- task with its unique key. At most a few hundred.
local function store(list)
  if #list == 0 then return end
  local documents, statuses, later, ready, open, delayed = {}, {}, {}, {}, {}, {}
  for _, task in ipairs(list) do
    if task.is_special then specials().prepare(task) end
    if task.when ~= '' or task.due or task.buffered or task.behind then delays() end
  end
  for i, task in ipairs(list) do
    local due = task.due or due_at(task.when)
    task.rank = next_rank(task.level, math.max(due, now))
    local state = 'ready'
    if task.is_special then specials().begin(task) end
    if task.buffered or task.behind then
      state = 'delayed'
      add_later(later, AFTER_THE_LAST, task)
    elseif due > now then
      state = 'delayed'
      add_later(later, due, task)
      delayed[(task.pool or '') .. '\3' .. task.name] = task
    else
      ready[#ready + 1] = task
      task.seat, task.label = task.user, task.name
      if task.is_special then task.seat, task.label = seat_of(task), label_of(task) end
    end
    if task.schedule then
      open[#open + 1] = '0'
      open[#open + 1] = task.schedule .. '\0' .. task.id
    end
    documents[2 * i - 1], documents[2 * i] = task.id, task.document
    statuses[2 * i - 1], statuses[2 * i] = task.id, new_status(task, state, due)
  end
  redis.call('HSET', K.tasks, unpack(documents))
  redis.call('HSET', K.status, unpack(statuses))
  if #open > 0 then redis.call('ZADD', K.open, unpack(open)) end
  if #later > 0 then delays().add(later) end
  -- Wake a worker that waits for the next delayed task: this one may be earlier.
  if add_waiting(ready) or #later > 0 then wake_worker() end
  for _, task in pairs(delayed) do
    if task.pool or fair.mixed then wake_for(task) end
  end
end

-- Whether a limit does not allow `added` more waiting tasks in a range of seats.
local function exceeds(limit, from, to, added)
  return limit and redis.call('ZLEXCOUNT', K.backlog, from, to)
    + redis.call('ZLEXCOUNT', K.held, from, to) + added > limit
end

-- 'queue', 'user' or 'tenant' if a limit does not allow `more` tasks, of which `extra` are of the owner of the
-- task and `of_tenant` of its tenant; else nil.
local function is_full(task, owner, more, extra, of_tenant)
  local most = SETTINGS.waiting_room >= 0 and SETTINGS.waiting_room or SETTINGS.max_waiting
  if SETTINGS.max_waiting > 0 and redis.call('ZCARD', K.backlog) + redis.call('ZCARD', K.held)
    + redis.call('ZCARD', K.delayed) + more > most then return 'queue' end
  local limit = settings_of(owner).max_waiting
  if limit and exceeds(limit, '[' .. owner .. '\0', '(' .. owner .. '\4', extra) then return 'user' end
  local tenant = task.group and group_of(owner)
  limit = tenant and settings_of(tenant).max_waiting
  if limit and exceeds(limit, '[' .. tenant .. '\2', '(' .. tenant .. '\3', of_tenant) then return 'tenant' end
  return nil
end
