-- Move the waiting tasks of a user to another tenant, some at a time, and the user's settings.
--
-- @include enqueue ending user_tasks
-- @lazy delays gates specials uniques rings unique_pushes barrier
-- ARGV op      text  random id of this operation
-- ARGV user    text  user id
-- ARGV tenant  text  the tenant; empty: none
-- ARGV to      text  the other tenant; empty: none
-- ARGV limit   int   at most this many tasks
-- KEYS user_names  zset  owners and tenants with settings, all scores 0
--
-- Tasks keep their ids, places and times; running ones stay until they end. A moved task whose unique key
-- another task has there gives up the key. If there are no settings there, the first call moves those of the
-- user. The caller repeats the call until it returns 0; each task is always in one place.
--
-- Returns the number of tasks moved.

local before = first_answer(A.op)
if before then return tonumber(before) end
local from, to = owner_at(A.user, A.tenant), owner_at(A.user, A.to)

local ids = unfinished_of(from, 0, tonumber(A.limit))
local records = #ids > 0 and read_statuses(ids) or {}
for _, record in pairs(records) do prepare_end(record) end
specials().prepare({ flow = { unique = '', keys = {} } })

need_layout_2()
local stored = redis.call('HGET', K.users, from) or (A.tenant ~= '' and rings().inherited(from)) or nil
local has_settings = stored and not redis.call('HGET', K.users, to)
if has_settings then
  redis.call('HSET', K.users, to, stored)
  redis.call('ZADD', K.user_names, 0, to)
  redis.call('HDEL', K.users, from)
  redis.call('ZREM', K.user_names, from)
  user_cache[from], user_cache[to] = nil, nil
end
if A.to ~= '' then specials().join(A.user, A.to) end

local documents = #ids > 0 and redis.call('HMGET', K.tasks, unpack(ids)) or {}
local moved, waiting, later = 0, {}, {}
for i, id in ipairs(ids) do
  local record, document = records[id], documents[i]
  local is_ready = record and record.state == 'ready'
  if record and document and (is_ready or record.state == 'delayed') and owner_of(record) == from then
    local due = not is_ready and tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
    local keeps_place = not is_ready and record.attempts > 0 and record.flow and record.flow.keys
      and gates().keeps_place(record)
    if is_ready then remove_waiting(id, record) else delays().remove(id, from) end
    if keeps_place then gates().forget(waiting_task(id, record)) end
    if record.flow and record.flow.unique then uniques().give_up(id, record) end
    local new = with_tenant(document, record.tenant, A.to)
    record.group = A.to ~= '' and A.to or nil
    record.tenant = record.group
    if record.flow and record.flow.unique then uniques().hold(id, record) end
    if record.behind then record.behind, due = nil, tonumber(record.due) end
    unique_pushes().replaced(id, document)
    redis.call('HSET', K.tasks, id, new)
    if record.digest then record.digest, record.bytes = digest(new), #new end
    write_status(id, record)
    if is_ready then
      waiting[#waiting + 1] = waiting_task(id, record)
    else
      for _, value in ipairs({ due or now, id, to }) do later[#later + 1] = value end
      if keeps_place then gates().arrive(waiting_task(id, record)) end
    end
    moved = moved + 1
  end
end
if #later > 0 then delays().add(later) end
if add_waiting(waiting, true) or #later > 0 then wake_worker() end
-- The settings hold for tasks that waited there before, and no longer for those of the user that are left.
for _, owner in ipairs(has_settings and { from, to } or {}) do
  if review(owner) then wake_worker() end
end
count('moved', moved)
save_fair()
return tonumber(remember(A.op, moved))
