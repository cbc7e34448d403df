-- Set waiting or delayed tasks aside, to be moved to another queue.
--
-- @include set_aside_tasks
-- @lazy delays gates uniques rings
-- FLAGS allow-oom
-- ARGV source  text  'waiting' or 'delayed': where to look
-- ARGV skip    int   how many to pass over, from the first on
-- ARGV limit   int   look at so many after them, a few hundred at most
--
-- Tasks stay that run, and those that belong with something that stays: tasks of a schedule that is still here, a
-- buffered one whose previous run is unfinished, one that waits behind a running task with its unique key. Records that
-- cannot be read stay as well. A repeated call returns what is set aside already, and sets nothing more aside.
--
-- Returns { 'taken', how many of those it looked at stay, 1 if there may be more, name, record, name, record, ... }; or
-- { 'taken over' } with nothing changed, if another process moves the queue.

if not is_mover('from') then return { 'taken over' } end
local before = moving_away()
if #before > 0 then return { 'taken', 0, 1, unpack(before) } end

local key, limit = A.source == 'waiting' and K.waiting or K.delayed, tonumber(A.limit)
local ids = redis.call('ZRANGE', key, A.skip, A.skip + limit - 1)
if #ids == 0 then return { 'taken', 0, 0 } end
local records = read_statuses(ids)
for _, record in pairs(records) do prepare_aside(record) end

local function moves(id, record)
  if record and record.schedule and redis.call('HEXISTS', K.schedules, record.schedule) == 1 then return false end
  return can_move(id, record)
end

local stay, looked_at = 0, 0
for _, id in ipairs(ids) do
  if is_enough_aside() then break end
  looked_at = looked_at + 1
  local record = records[id]
  local together = not tasks_aside.done[id] and record and moves(id, record) and with_one_key(id, record) or {}
  for _, each in ipairs(together) do
    records[each] = records[each] or read_status(each)
    if not moves(each, records[each]) then together = {} end
  end
  for _, each in ipairs(together) do set_task_aside(each, records[each]) end
  if not tasks_aside.done[id] then stay = stay + 1 end
end
save_fair()
return { 'taken', stay, (looked_at < #ids or #ids == limit) and 1 or 0, unpack(moving_away()) }
