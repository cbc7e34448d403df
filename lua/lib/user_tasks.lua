-- Find the unfinished tasks of a user, and give them to another tenant.
--
-- @include backlog
-- @lazy delays uniques

local function owner_at(user, tenant)
  return owner_of({ user = user, group = tenant ~= '' and tenant or nil })
end

-- The ids of waiting, held and delayed tasks of an owner, at most `limit` of them after the first `skip`.
local function unfinished_of(owner, skip, limit)
  delays()
  local ids = {}
  local function add(key, pattern, last)
    local from, to = '[' .. owner .. '\0', '(' .. owner .. last
    if #ids >= limit then return end
    local members = redis.call('ZRANGEBYLEX', key, from, to, 'LIMIT', skip, limit - #ids)
    for _, member in ipairs(members) do ids[#ids + 1] = string.match(member, pattern) end
    if skip > 0 then skip = #members > 0 and 0 or math.max(0, skip - redis.call('ZLEXCOUNT', key, from, to)) end
  end
  add(K.backlog, '^%Z*%z%Z*%z(%Z*)', '\4')
  add(K.held, '^%Z*%z%Z*%z%Z*%z(%Z*)', '\4')
  add(K.delayed_index, '%z(%Z*)$', '\1')
  return ids
end

-- Replace the tenant in a document, which has it before its payload. JSON escapes quotes inside values. Tasks of
-- versions with layout 1 wait for a user without a tenant, but may name one.
local function with_tenant(document, tenant, to)
  local name = to ~= '' and ',"tenant":"' .. to .. '"' or ''
  if tenant then return replace_text(document, ',"tenant":"' .. tenant .. '"', name) or document end
  for _, field in ipairs({ ',"policy":', ',"pool":', ',"flow":', ',"payload":' }) do
    local moved = replace_text(document, field, name .. field)
    if moved then return moved end
  end
  return document
end

-- Let a task that arrives become ready at its own time, if it was behind a running task with its unique key.
local function leave_behind(task)
  local record = task.record
  if not (record and record.behind) then return end
  record.behind, task.at, task.is_changed = nil, text_of(math.max(now, tonumber(record.due) or now)), true
end

-- Give a task that arrives its unique key, unless another task has it.
local function hold_key(task)
  uniques().hold(task.id, task.record)
  task.is_changed = true
end
