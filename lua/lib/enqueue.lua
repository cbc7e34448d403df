-- Store new tasks: documents, statuses, and their place among the waiting or the delayed.
--
-- @include backlog replay stats tenants delays
-- KEYS tasks    hash  task id -> its document, JSON, never changed
-- KEYS open     zset  schedule NUL task id, all scores 0: unfinished tasks of schedules
--
-- A task that was stored before, with the same document, is left as it is: a push can be repeated.

-- The documents that are stored under ids, '' for one that cannot be the one given: its length tells.
-- What is read is no more than what was sent.
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

-- What is known of ids: 'new', 'same' (stored before), 'other' (another document has the id).
local function known(ids, documents)
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
      local _, _, seen = read_grave(ended[i] or ended_before[i])
      answer[i] = seen == digest(documents[i]) and 'same' or 'other'
    else
      answer[i] = 'new'
      here[id] = documents[i]
    end
  end
  return answer
end

-- When a task becomes ready: '' now, '+ms' after so long, 'ms' at that moment.
local function due_at(when)
  if when == '' then return now end
  if string.sub(when, 1, 1) == '+' then return now + tonumber(string.sub(when, 2)) end
  return tonumber(when)
end

local TENANT = ',"tenant":"'

-- The tenant in the head of a status. In JSON a quote inside a value has a backslash before it, so
-- that this is found nowhere else; and nothing in the name of a tenant is ever escaped.
local function tenant_in(head)
  local _, mark = string.find(head, TENANT, 1, true)
  return mark and string.match(head, '^[%w_.-]+', mark + 1)
end

local function add_later(later, due, task)
  for _, value in ipairs({ due, task.id, task.user }) do later[#later + 1] = value end
end

-- Longer documents than this, in bytes, are never read again only to say which they were.
local DIGESTED = 1024

-- The head of a status with the digest of a long document, unless the client has made one, and its
-- length.
local function with_digest(head, document)
  if not string.find(head, ',"digest":"', 1, true) then
    local made = digest(document)
    if made == '' then return head end
    head = head .. ',"digest":"' .. made .. '"'
  end
  return head .. ',"bytes":' .. #document
end

-- Store tasks that are new, each { id, user, name, document, head, level, when, schedule, buffered };
-- `head` is the part of the status that the client knows, JSON without its closing brace. One that
-- is `buffered` waits for the run of its schedule before it to end. At most a few hundred.
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
  -- A worker that is blocked until the next delayed task must hear of an earlier one.
  if add_waiting(ready) or #later > 0 then wake_worker() end
  for name in pairs(later_names) do kinds.wake(name) end
end

-- True if so many more would pass a limit; `extra` counts the user's own, not yet stored.
local function is_full(user, more, extra)
  if SETTINGS.max_waiting > 0 and redis.call('ZCARD', K.backlog) + redis.call('ZCARD', K.held)
    + redis.call('ZCARD', K.delayed) + more > SETTINGS.max_waiting then return 'queue' end
  local limit = settings_of(user).max_waiting
  local from, to = '[' .. user .. '\0', '(' .. user .. '\1'
  if limit and redis.call('ZLEXCOUNT', K.backlog, from, to)
    + redis.call('ZLEXCOUNT', K.held, from, to) + extra > limit then return 'user' end
  return nil
end
