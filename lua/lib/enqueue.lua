-- Store new tasks: documents, statuses, and entries among waiting or delayed tasks.
--
-- @include backlog replay stats tenants delays
-- KEYS tasks    hash  task id -> its document, JSON, never changed
-- KEYS open     zset  schedule NUL task id, all scores 0: unfinished tasks of schedules
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

-- For each id: 'new', 'same' (stored with this document) or 'other' (stored with another document).
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
  end
  return answer
end

-- When a task becomes ready, ms. `when`: '' now; '+ms' after a delay; 'ms' at that time.
local function due_at(when)
  if when == '' then return now end
  if string.sub(when, 1, 1) == '+' then return now + tonumber(string.sub(when, 2)) end
  return tonumber(when)
end

local TENANT = ',"tenant":"'

-- The tenant in the head of a status. JSON escapes quotes inside values, so this matches nothing else, and
-- names of tenants have no characters that are escaped.
local function tenant_in(head)
  local _, mark = string.find(head, TENANT, 1, true)
  return mark and string.match(head, '^[%w_.-]+', mark + 1)
end

local function add_later(later, due, task)
  for _, value in ipairs({ due, task.id, task.user }) do later[#later + 1] = value end
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

-- Store new tasks: tables with id, user, name, document, head, level, when, schedule and buffered.
-- `head` is the part of the status that the client knows, JSON without the closing brace. A `buffered` task
-- waits for the previous run of its schedule to end. At most a few hundred.
local function store(list)
  if #list == 0 then return end
  local documents, statuses, later, ready, open, joined = {}, {}, {}, {}, {}, {}
  local later_names = {}
  for i, task in ipairs(list) do
    local due = due_at(task.when)
    local rank = next_rank(task.level, math.max(due, now))
    local state, head = 'ready', task.head
    if task.buffered then
      head = head .. ',"buffered":true'
      state = 'delayed'
      add_later(later, AFTER_THE_LAST, task)
    elseif due > now then
      state = 'delayed'
      add_later(later, due, task)
      later_names[task.name] = true
    else
      ready[#ready + 1] = { id = task.id, user = task.user, rank = rank, name = task.name }
    end
    if #task.document > DIGESTED then head = with_digest(head, task.document) end
    local tenant = tenant_in(head)
    if tenant and not joined[task.user] then
      joined[task.user] = true
      join_tenant(task.user, tenant)
    end
    if task.schedule then
      open[#open + 1] = '0'
      open[#open + 1] = task.schedule .. '\0' .. task.id
    end
    documents[2 * i - 1], documents[2 * i] = task.id, task.document
    statuses[2 * i - 1] = task.id
    statuses[2 * i] = head .. ',"state":"' .. state .. '","rank":"' .. rank .. '","pushed":'
      .. now_text .. ',"due":' .. (due > now and string.format('%.0f', due) or now_text) .. '}'
  end
  redis.call('HSET', K.tasks, unpack(documents))
  redis.call('HSET', K.status, unpack(statuses))
  delays.add(later)
  if #open > 0 then redis.call('ZADD', K.open, unpack(open)) end
  -- Wake a worker that waits for the next delayed task: this one may be earlier.
  if add_waiting(ready) or #later > 0 then wake_worker() end
  for name in pairs(later_names) do kinds.wake(name) end
end

-- 'queue' or 'user' if a limit does not allow `more` tasks, of which `extra` are of the user; else nil.
local function is_full(user, more, extra)
  if SETTINGS.max_waiting > 0 and redis.call('ZCARD', K.backlog) + redis.call('ZCARD', K.held)
    + redis.call('ZCARD', K.delayed) + more > SETTINGS.max_waiting then return 'queue' end
  local limit = settings_of(user).max_waiting
  local from, to = '[' .. user .. '\0', '(' .. user .. '\1'
  if limit and redis.call('ZLEXCOUNT', K.backlog, from, to)
    + redis.call('ZLEXCOUNT', K.held, from, to) + extra > limit then return 'user' end
  return nil
end
