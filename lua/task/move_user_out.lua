-- Take waiting tasks of a user out of their partition: the first of three steps to another one.
--
-- @include leaving_tasks enqueue netstrings user_tasks
-- @lazy delays gates uniques rings
-- FLAGS allow-oom
-- KEYS moving  hash  \1 number of another partition -> tasks that have left for it and the settings of their user, as
--                    netstrings: number of the batch, user, tenant, other tenant, '1' if it is the first batch,
--                    settings, and the parts of each task; until they are stored there: see move_user_in
-- ARGV op         text  random id of this operation
-- ARGV user       text  user id
-- ARGV tenant     text  the tenant; empty: none
-- ARGV to         text  the other tenant; empty: none
-- ARGV partition  int   the number of the other partition
-- ARGV after      int   the number of the last batch that it had from here
-- ARGV first      text  '1': with the settings of the user, and even if nothing waits
-- ARGV skip       int   how many tasks to pass over, from the first on
-- ARGV limit      int   look at so many after them, a hundred or so
--
-- From this step on the tasks are in `moving`, whole, and nowhere else: none runs or is lost if the caller dies.
-- Whoever finds them there goes on with move_user_in and end_user_move. Until then nothing more leaves for that
-- partition. Batches have rising numbers: arrival numbers of this partition, so that tasks pushed there later come
-- after these. Tasks stay that cannot be read, and those buffered behind a run that stays.
--
-- Returns { the batch or '', its number, 1 if it is of this user, how many tasks stay, 1 if there may be more }.

local BYTES_AT_ONCE = 1048576  -- of documents and attempts, roughly
local reads = 1000             -- unfinished tasks of schedules that are read, roughly; 10 ms

local field = '\1' .. A.partition

-- A batch as it is answered. It may be of another user, whose move was not ended.
local function answer(batch, stay, more)
  local parts = batch and parts_in(batch) or {}
  local is_ours = parts[2] == A.user and parts[3] == A.tenant and parts[4] == A.to
  return { batch or '', parts[1] or '0', is_ours and 1 or 0, stay, more }
end

local before = redis.call('HGET', K.moving, field)
if before then return answer(before, 0, 1) end
if first_answer(A.op) then return answer(nil, 0, 1) end

local owner, limit = owner_at(A.user, A.tenant), tonumber(A.limit)
local ids = unfinished_of(owner, tonumber(A.skip), limit)
local records = #ids > 0 and read_statuses(ids) or {}

local chosen, list, bytes, runs = {}, {}, 0, {}

local function choose(id, size)
  chosen[id], list[#list + 1], bytes = true, id, bytes + size
end

-- The size of a task of this owner that waits, or nil.
local function size_of(id)
  local record, size = records[id], redis.call('HSTRLEN', K.tasks, id)
  if size == 0 or not is_unfinished(record) or owner_of(record) ~= owner then return nil end
  return size + redis.call('HSTRLEN', K.attempts, id)
end

-- Choose the buffered tasks of a schedule as well, unless another run of it stays.
local function choose_buffered(schedule)
  if not runs[schedule] then
    runs[schedule] = open_runs(schedule, open_members(schedule, nil, OPEN_READ))
    reads = reads - #runs[schedule]
    for id, record in pairs(#runs[schedule] > 0 and read_statuses(runs[schedule]) or {}) do records[id] = record end
  end
  for _, id in ipairs(runs[schedule]) do
    if not records[id].buffered and not chosen[id] then return end
  end
  for _, id in ipairs(runs[schedule]) do
    local size = not chosen[id] and size_of(id)
    if size then choose(id, size) end
  end
end

local stay, looked_at = 0, 0
for _, id in ipairs(ids) do
  if bytes > BYTES_AT_ONCE or reads <= 0 then break end
  looked_at = looked_at + 1
  local size, record = not chosen[id] and size_of(id), records[id]
  if size and not record.buffered then choose(id, size) end
  if size and record.schedule then choose_buffered(record.schedule) end
  if not chosen[id] then stay = stay + 1 end
end
local more = (looked_at < #ids or #ids == limit) and 1 or 0
if #list == 0 and A.first ~= '1' then return answer(nil, stay, more) end

for _, id in ipairs(list) do prepare_aside(records[id]) end
fair.seq, fair_dirty = math.max(fair.seq, tonumber(A.after)) + 1, true
local settings = A.first == '1' and
  (redis.call('HGET', K.users, owner) or (A.tenant ~= '' and rings().inherited(owner))) or ''
local parts = { string.format('%.0f', fair.seq), A.user, A.tenant, A.to, A.first, settings }
for _, id in ipairs(list) do
  if records[id].flow and records[id].flow.unique then uniques().give_up(id, records[id]) end
end
for _, id in ipairs(list) do parts[#parts + 1] = netstrings(take_out(id, records[id], '')) end
local batch = netstrings(parts)
redis.call('HSET', K.moving, field, batch)
remember(A.op, 'out')
save_fair()
return answer(batch, stay, more)
