-- Keep which task has a unique key, and give the key up when its time is over.
--
-- LAZY
-- @include status owners backlog
-- @lazy delays
-- KEYS uniques   hash  tenant or user NUL key -> id, scope (unfinished, waiting or window), end of its window in
--                      ms or '', first push in ms, id of the task that waits behind it or '', first push of
--                      that one or '', separated by NUL
-- KEYS expiring  zset  \1 and a field of uniques -> end of its window, ms; see also lib/enqueue
--
-- A key belongs to a tenant, or to a user without one. A task that has ended does not have its key any more,
-- whatever is stored here, unless the scope of the key is a window of time.

local uniques = {}

function uniques.field_of(record)
  local owner = owner_of(record)
  return (group_of(owner) or owner) .. '\0' .. record.flow.unique
end

function uniques.read(field)
  local text = redis.call('HGET', K.uniques, field)
  local id, scope, ends, first, following, since = string.match(text or '',
    '^(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)$')
  if not id then return nil end
  return { id = id, scope = scope, ends = tonumber(ends), first = tonumber(first) or now,
    following = following ~= '' and following or nil, since = tonumber(since) }
end

function uniques.write(field, holder)
  redis.call('HSET', K.uniques, field, table.concat({ holder.id, holder.scope,
    holder.ends and text_of(holder.ends) or '', text_of(holder.first), holder.following or '',
    holder.since and text_of(holder.since) or '' }, '\0'))
  if holder.ends then
    redis.call('ZADD', K.expiring, text_of(holder.ends), '\1' .. field)
  else
    redis.call('ZREM', K.expiring, '\1' .. field)
  end
end

function uniques.drop(field)
  redis.call('HDEL', K.uniques, field)
  redis.call('ZREM', K.expiring, '\1' .. field)
end

-- The scope of a key, and how long a window it has, ms.
function uniques.scope_of(flow)
  if type(flow.unique_for) == 'number' then return 'window', flow.unique_for end
  return flow.unique_for == 'waiting' and 'waiting' or 'unfinished', nil
end

-- Give the key to the task that waits behind its holder, which has ended.
local function pass_on(field, holder)
  local id = holder.following
  local record = read_status(id)
  if not record or record.state ~= 'delayed' or not record.behind or not record.flow then
    uniques.drop(field)
    return
  end
  local scope, window = uniques.scope_of(record.flow)
  local since = holder.since or now
  uniques.write(field, { id = id, scope = scope, first = since, ends = window and since + window })
  record.behind = nil
  write_status(id, record)
  delays().move(id, owner_of(record), math.max(now, tonumber(record.due) or now))
  wake_for(record)
end

-- A task with a key has ended, or gives it up before; in the first case a window goes on.
local function lose(id, record, keeps_window)
  local field = uniques.field_of(record)
  local holder = uniques.read(field)
  if not holder then return end
  if holder.following == id then
    holder.following, holder.since = nil, nil
    uniques.write(field, holder)
  elseif holder.id == id then
    if holder.following then
      pass_on(field, holder)
    elseif not keeps_window or not holder.ends or holder.ends <= now then
      uniques.drop(field)
    end
  end
end

-- A task with a key has ended.
function uniques.ended(id, record)
  lose(id, record, true)
end

-- A waiting task gives its key up.
function uniques.give_up(id, record)
  lose(id, record, false)
end

-- A task with a key was claimed.
function uniques.claimed(id, record)
  if record.flow.unique_for == 'waiting' then lose(id, record, false) end
end

-- Give the key of a waiting task to it, unless another task has it. Its window begins anew.
function uniques.hold(id, record)
  local field = uniques.field_of(record)
  if uniques.read(field) then
    record.flow.unique = nil
    return
  end
  local scope, window = uniques.scope_of(record.flow)
  uniques.write(field, { id = id, scope = scope, first = now, ends = window and now + window })
end

-- A task with a key waits again: it has the key unless another task has it now.
function uniques.released(id, record)
  local field = uniques.field_of(record)
  if record.flow.unique_for == 'waiting' and not uniques.read(field) then
    uniques.write(field, { id = id, scope = 'waiting', first = tonumber(record.pushed) or now })
  end
end

-- Remove the entry of a key if a task has it; the text of the entry, or ''. For tasks that move to another queue.
function uniques.take_entry(id, record)
  local field = uniques.field_of(record)
  local holder = uniques.read(field)
  if not holder or holder.id ~= id then return '' end
  local text = redis.call('HGET', K.uniques, field)
  uniques.drop(field)
  return text
end

-- Enter what `take_entry` has returned. If another task has the key, the task gives it up, and so does one that is no
-- longer behind the task that has it. Returns whether the record has not changed.
function uniques.put_entry(id, record, text)
  local field = uniques.field_of(record)
  local holder = uniques.read(field)
  if text ~= '' and not holder then
    redis.call('HSET', K.uniques, field, text)
    local entry = uniques.read(field)
    if entry and entry.ends then redis.call('ZADD', K.expiring, text_of(entry.ends), '\1' .. field) end
    return true
  end
  if text == '' and (not record.behind or (holder and holder.following == id)) then return true end
  record.flow.unique, record.behind = nil, nil
  return false
end

-- The window of a key is over.
function uniques.window_over(field)
  local holder = uniques.read(field)
  if not holder or not holder.following then
    uniques.drop(field)
  else
    holder.ends = nil  -- the task that waits behind it gets the key when it ends
    uniques.write(field, holder)
  end
end

return uniques
