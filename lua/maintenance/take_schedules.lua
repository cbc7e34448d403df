-- Set schedules aside, to be moved to another queue: they do not fire here any more.
--
-- @include set_aside_tasks erase
-- @lazy delays gates uniques rings
-- FLAGS allow-oom
-- ARGV after  text  a member of `schedule_index`: begin after it; empty: begin
-- ARGV limit  int   look at so many, a few hundred at most
--
-- Each takes its plan and its state along. A schedule whose runs may not overlap moves when none of them runs, and takes
-- the others along, so that its next run knows of them. A repeated call returns what is set aside already, and sets
-- nothing more aside.
--
-- Returns { 'taken', how many of those it looked at stay, where to continue or '', name, record, name, record, ... }; or
-- { 'taken over' } with nothing changed, if another process moves the queue.

if not is_mover('from') then return { 'taken over' } end
local before = moving_away()
if #before > 0 then return { 'taken', 0, A.after, unpack(before) } end

local OPEN_MOVED = 100  -- unfinished tasks that go with their schedule
local OVERLAPS = { skip = true, buffer_one = true, cancel_previous = true }

-- The unfinished tasks that go with a schedule: ids, and records by id; nil if it has to stay.
local function runs_with(id, definition)
  if not OVERLAPS[(decode(definition) or {}).overlap or ''] then return {}, {} end
  local members = open_members(id, nil, OPEN_MOVED + 1)
  if #members > OPEN_MOVED then return nil end
  if #members == 0 then return {}, {} end
  tasks_aside.reads = tasks_aside.reads - #members
  local ids, records = open_runs(id, members)
  for _, each in ipairs(ids) do
    if not is_unfinished(records[each]) or records[each].behind then return nil end
  end
  return ids, records
end

local function set_schedule_aside(id, member, definition)
  local parts = { id, definition, redis.call('HGET', K.plan, id) or '', redis.call('ZSCORE', K.due, id) or '',
    redis.call('HGET', K.schedule_state, id) or '', redis.call('HGET', K.broken, id) or '',
    string.match(member, '^%Z*') }
  for _, key in ipairs({ K.moments, K.changes }) do
    local first, last = '[' .. id .. '\0', '(' .. id .. '\1'
    parts[#parts + 1] = netstrings(redis.call('ZRANGEBYLEX', key, first, last))
  end
  set_aside('s' .. id, parts)
  redis.call('ZREM', K.schedule_index, member)
  erase_schedule(id)
end

local members = redis.call('ZRANGEBYLEX', K.schedule_index, A.after == '' and '-' or '(' .. A.after, '+',
  'LIMIT', 0, A.limit)
local found, stay, aside, last = {}, 0, 0, ''
for _, member in ipairs(members) do
  if aside >= tonumber(A.limit) or tasks_aside.reads <= 0 then break end
  local id = string.match(member, '%z(%Z*)$') or ''
  local definition = redis.call('HGET', K.schedules, id)
  local ids, records = nil, nil
  if definition then ids, records = runs_with(id, definition) end
  if ids then
    for _, record in pairs(records) do prepare_aside(record) end
    found[#found + 1] = { id, member, definition, ids, records }
    aside = aside + 1 + #ids
  else
    stay = stay + 1
  end
  last = member
end
for _, each in ipairs(found) do
  local id, member, definition, ids, records = unpack(each)
  for _, task in ipairs(ids) do set_task_aside(task, records[task]) end
  set_schedule_aside(id, member, definition)
end
if #members < tonumber(A.limit) and last == (members[#members] or '') then last = '' end
save_fair()
return { 'taken', stay, last, unpack(moving_away()) }
