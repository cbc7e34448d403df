-- Check whether the records of tasks and users agree, and repair those that do not.
--
-- @include ending
-- ARGV op    text  random id of this operation
-- ARGV kind  text  the structure that the entries belong to; 'task' and 'user' check all structures
-- ARGV fix   text  '1': repair; empty: change nothing
-- ARGV ...    entries, a few hundred at most
-- ROW entry  text  task id, user id, or member of the structure
--
-- The status of a task decides where else it has to be. Each entry is checked as it is now, because others
-- may have changed it since the caller read it.
--
-- Returns for each wrong entry: the entry, the problem, '1' if it can be repaired or ''.

local FIX = A.fix == '1'
local MOST_LEASES = 10000  -- that one call counts, in less than 10 ms
local MOST_TURNS = 1000

local found = {}

local function wrong(entry, text, mend)
  for _, value in ipairs({ entry, text, mend and '1' or '' }) do found[#found + 1] = value end
  if FIX and mend then mend() end
end

-- State -> the structure that has the task, besides those of its user, its name and its schedule.
local HOMES = { ready = 'waiting', delayed = 'delayed', running = 'leases', finished = 'ended',
  cancelled = 'ended', buried = 'dead' }
local PLACES = { { 'waiting', K.waiting }, { 'delayed', K.delayed }, { 'leases', K.leases },
  { 'ended', K.ended }, { 'dead', K.dead } }
local KEY_OF = {}
for _, place in ipairs(PLACES) do KEY_OF[place[1]] = place[2] end

local function is_ended(record)
  return outcome_of(record) ~= nil
end

-- Add a task to the structure of its state. A missing lease ends now, and is taken back.
local function bring_home(id, record, key)
  local at = now
  if is_ended(record) then
    at = record.ended or now
    if not record.ended then
      record.ended = now
      write_status(id, record)
    end
  elseif record.buffered and record.schedule then
    at = AFTER_THE_LAST
  elseif record.state == 'delayed' and type(record.due) == 'number' then
    at = record.due
  end
  if record.state == 'delayed' then
    delays.add({ at, id, record.user })
  else
    redis.call('ZADD', key, at, id)
  end
  if at == AFTER_THE_LAST then
    redis.call('ZADD', K.open, 0, record.schedule .. '\0' .. id)
    let_buffered_begin(record.schedule)  -- if no other run is unfinished
  end
  wake_worker()
  kinds.wake()
end

local function check_homes(id, record)
  local home = HOMES[record.state]
  for _, place in ipairs(PLACES) do
    local name, key = place[1], place[2]
    local is_there = redis.call('ZSCORE', key, id)
    if name == home and not is_there then
      wrong(id, 'is ' .. record.state .. ' but not in ' .. name,
        function() bring_home(id, record, key) end)
    elseif name ~= home and is_there then
      wrong(id, 'is ' .. record.state .. ' but in ' .. name,
        function()
          if name == 'delayed' then delays.remove(id, record.user) else redis.call('ZREM', key, id) end
        end)
    end
  end
end

-- A delayed task is also in the index by user.
local function check_delay(id, record)
  local due = tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  local member = due and delays.member(record.user, due, id)
  if not due or redis.call('ZSCORE', K.delayed_index, member) then return end
  wrong(id, 'is delayed but not in delayed_index',
    function() delays.enter({ due, id, record.user }) end)
end

local function drop_from_backlog(user, member)
  redis.call('ZREM', K.backlog, member)
  local head = first_waiting(user, 1)[1]
  if not head then
    leave(user)
  elseif not is_critical(user, head) then
    redis.call('ZREM', K.critical, user)
  end
end

local function drop_from_held(member)
  redis.call('ZREM', K.held, member)
  if redis.call('ZCARD', K.held) == 0 then redis.call('UNLINK', K.slot_line) end
end

-- A waiting task is in either backlog or held. Other tasks are in neither.
local function check_line(id, record)
  local member, held = member_of(id, record), held_member_of(id, record)
  local in_backlog, in_held = redis.call('ZSCORE', K.backlog, member), redis.call('ZSCORE', K.held, held)
  if record.state == 'ready' then
    if not in_backlog and not in_held then
      wrong(id, 'is ready but in neither backlog nor held', function()
        add_waiting({ waiting_task(id, record) }, true)
        wake_worker()
      end)
    elseif in_backlog and in_held then
      wrong(id, 'is in both backlog and held', function() drop_from_held(held) end)
    end
    return
  end
  if in_backlog then
    wrong(id, 'is ' .. record.state .. ' but in backlog',
      function() drop_from_backlog(record.user, member) end)
  end
  if in_held then
    wrong(id, 'is ' .. record.state .. ' but in held', function() drop_from_held(held) end)
  end
end

local function check_running(id, record)
  local slot = (record.name or '') .. '\0' .. id
  if record.slot and not redis.call('ZSCORE', K.slots, slot) then
    wrong(id, 'is running without its slot', function() redis.call('ZADD', K.slots, 0, slot) end)
  end
  if type(record.deadline) == 'number' and not record.stale
    and not redis.call('ZSCORE', K.deadlines, id) then
    wrong(id, 'is running but not in deadlines',
      function() redis.call('ZADD', K.deadlines, record.deadline, id) end)
  end
end

local function check_history(id, record)
  local places = {}
  add_places(places, id, record)
  for _, place in ipairs(places) do
    if not redis.call('ZSCORE', K.runs, place) then
      wrong(id, 'has ended but is not in runs', function() list_runs({ id }, { [id] = record }) end)
      return
    end
  end
  if record.fingerprint and not redis.call('ZSCORE', K.failures, record.fingerprint) then
    wrong(id, 'has failed but its fingerprint is not in failures',
      function() refresh_failure(record.fingerprint) end)
  end
end

-- A task without a document cannot run: end it and delete what is left of it.
local function forget(id, record)
  if record.state == 'ready' or record.state == 'delayed' then cancel_waiting(id, record) end
  drop_tasks(KEY_OF[HOMES[record.state]], { id })
end

local function check_task(id)
  local text = redis.call('HGET', K.status, id)
  if not text then return end  -- it is gone by now
  local record = parse_status(text)
  if not record or not HOMES[record.state] then
    wrong(id, 'has a status that cannot be read')
    return
  end
  check_homes(id, record)
  check_line(id, record)
  if record.state == 'delayed' then check_delay(id, record) end
  if record.state == 'running' then check_running(id, record) end
  if is_ended(record) then check_history(id, record) end
  if record.schedule and not is_ended(record)
    and not redis.call('ZSCORE', K.open, record.schedule .. '\0' .. id) then
    wrong(id, 'is unfinished but not in open',
      function() redis.call('ZADD', K.open, 0, record.schedule .. '\0' .. id) end)
  end
  if redis.call('HEXISTS', K.tasks, id) == 0 then
    local mend = record.state ~= 'running' and function() forget(id, record) end or nil
    wrong(id, 'has no document', mend)
  end
end

-- --- members of structures: does the status of the task agree? ---

-- The status of a task: nil if there is none, false if it cannot be read (check_task reports that).
local function known(id)
  local text = redis.call('HGET', K.status, id)
  if not text then return nil end
  return parse_status(text) or false
end

local function check_home(name)
  return function(id)
    local record = known(id)
    if record == false or (record and HOMES[record.state] == name) then return end
    if not redis.call('ZSCORE', KEY_OF[name], id) then return end
    wrong(id, 'is in ' .. name .. (record and ' but is ' .. record.state or ' without a status'),
      function() redis.call('ZREM', KEY_OF[name], id) end)
  end
end

local function check_delayed_index(member)
  local user, due, id = string.match(member, '^(%Z*)%z(%d+)%z(%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.delayed_index, member) then return end
  local score = id and tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  if score and record and record.user == user and score == tonumber(due) then return end
  wrong(member, 'is in delayed_index but does not match its task',
    function() redis.call('ZREM', K.delayed_index, member) end)
end

local function is_of(record, user, rank, name)
  return record and record.state == 'ready' and record.user == user and record.rank == rank
    and (record.name or '') == name
end

local function check_backlog(member)
  local user, rank, id, name = string.match(member, '^(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)$')
  local record = id and known(id)
  if record == false or is_of(record, user, rank, name) then return end
  if not redis.call('ZSCORE', K.backlog, member) then return end
  wrong(member, 'is in backlog but does not match its task',
    function() drop_from_backlog(user or '', member) end)
end

local function check_held(member)
  local user, name, rank, id = string.match(member, '^(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.held, member) then return end
  if not is_of(record, user, rank, name) then
    wrong(member, 'is in held but does not match its task', function() drop_from_held(member) end)
  elseif not redis.call('ZSCORE', K.slot_line, turn_mark(name, user)) then
    wrong(member, 'is held without a turn', function() join_slot_line(name, user) end)
  end
end

-- Every turn has a mark, and every mark has one turn.
local function check_slot_line(member)
  if not redis.call('ZSCORE', K.slot_line, member) then return end
  if redis.call('ZCARD', K.held) == 0 then
    wrong(member, 'is a turn although no task is held', function() redis.call('UNLINK', K.slot_line) end)
    return
  end
  if string.byte(member, 1) ~= 1 then
    local name, user = string.match(member, '^(%Z*)%z%Z*%z(%Z*)$')
    if not name or not redis.call('ZSCORE', K.slot_line, turn_mark(name, user)) then
      wrong(member, 'is a turn without a mark', function() redis.call('ZREM', K.slot_line, member) end)
    end
    return
  end
  local name, user = string.match(member, '^\1(%Z*)%z(%Z*)$')
  local turns = name and redis.call('ZRANGEBYLEX', K.slot_line, '[' .. name .. '\0',
    '(' .. name .. '\1', 'LIMIT', 0, MOST_TURNS) or {}
  if #turns == MOST_TURNS then return end
  for _, turn in ipairs(turns) do
    if string.match(turn, '%z(%Z*)$') == user then return end
  end
  wrong(member, 'is a mark without a turn', function()
    if name then take_turn(name, user) else redis.call('ZREM', K.slot_line, member) end
  end)
end

local function check_slots(member)
  local name, id = string.match(member, '^(%Z*)%z(%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.slots, member) then return end
  if record and record.state == 'running' and record.slot and (record.name or '') == name then return end
  wrong(member, 'holds a slot but is not running', function()
    redis.call('ZREM', K.slots, member)
    wake_worker()
    kinds.wake(name)
  end)
end

local function check_deadlines(id)
  local record = known(id)
  if record == false or not redis.call('ZSCORE', K.deadlines, id) then return end
  if record and record.state == 'running' and record.deadline and not record.stale then return end
  wrong(id, 'has a deadline but is not running', function() redis.call('ZREM', K.deadlines, id) end)
end

local function check_open(member)
  local schedule, id = string.match(member, '^(%Z*)%z(%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.open, member) then return end
  if record and record.schedule == schedule and not is_ended(record) then return end
  wrong(member, 'is in open but has ended', function()
    redis.call('ZREM', K.open, member)
    if schedule then let_buffered_begin(schedule) end
  end)
end

local function check_runs(member)
  local id = string.match(member, '%z%d%d%d%d%d%d%d%d%d%d%d%d%d[sftc](%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.runs, member) then return end
  if record and is_ended(record) then
    local places = {}
    add_places(places, id, record)
    for _, place in ipairs(places) do
      if place == member then return end
    end
  end
  wrong(member, 'is in runs but does not match its task', function()
    redis.call('ZREM', K.runs, member)
    local fingerprint = string.match(member, '^f(%Z*)%z')
    if fingerprint then refresh_failure(fingerprint) end
  end)
end

local function check_failures(fingerprint)
  if not redis.call('ZSCORE', K.failures, fingerprint) then return end
  local range = 'f' .. fingerprint
  if redis.call('ZLEXCOUNT', K.runs, '[' .. range .. '\0', '(' .. range .. '\1') > 0 then return end
  wrong(fingerprint, 'is a fingerprint without a failed run',
    function() redis.call('ZREM', K.failures, fingerprint) end)
end

local function check_document(id)
  if redis.call('HEXISTS', K.tasks, id) == 0 or redis.call('HEXISTS', K.status, id) == 1 then return end
  wrong(id, 'is a document without a status', function() redis.call('HDEL', K.tasks, id) end)
end

local function check_attempts(id)
  if redis.call('HEXISTS', K.attempts, id) == 0 or redis.call('HEXISTS', K.status, id) == 1 then return end
  wrong(id, 'has attempts but no status', function() redis.call('HDEL', K.attempts, id) end)
end

-- --- users ---

local function unpark(user)
  if review(user) then wake_worker() end
end

local function check_waiting_user(user, head, in_ready, parked)
  if in_ready and parked then
    wrong(user, 'is both ready and parked', function()
      redis.call('ZREM', K.parked, user)
      review(user)
    end)
  elseif not in_ready and not parked then
    wrong(user, 'has waiting tasks but is neither ready nor parked', function()
      place(user, false)
      tell_of(user)
      wake_worker()
    end)
  elseif parked and not blocked_until(user) and tonumber(parked) > now then
    wrong(user, 'is parked without a reason', function() unpark(user) end)
  end
  local in_lane = redis.call('ZSCORE', K.critical, user)
  if in_ready and is_critical(user, head) and not in_lane then
    wrong(user, 'has a CRITICAL task but is not in the CRITICAL lane', function()
      if redis.call('ZSCORE', K.ready, user) then enter_critical(user) end
    end)
  elseif in_lane and not (in_ready and is_critical(user, head)) then
    wrong(user, 'is in the CRITICAL lane without a CRITICAL task',
      function() redis.call('ZREM', K.critical, user) end)
  end
end

local function check_user(user)
  local head = first_waiting(user, 1)[1]
  local in_ready, parked = redis.call('ZSCORE', K.ready, user), redis.call('ZSCORE', K.parked, user)
  if head then
    check_waiting_user(user, head, in_ready, parked)
  elseif in_ready or parked or redis.call('ZSCORE', K.critical, user) then
    wrong(user, 'is ready or parked without a waiting task', function() leave(user) end)
  end
  if redis.call('ZSCORE', K.ready, user) and redis.call('ZSCORE', K.idle, user) then
    wrong(user, 'is both ready and idle', function() redis.call('ZREM', K.idle, user) end)
  end
end

-- The user of a lease. If its record cannot be read, the document names the user. Most users are found
-- without decoding the record: JSON escapes quotes inside values, so this matches nothing else.
local function user_of(id, text)
  local _, before = string.find(text or '', '"user":"', 1, true)
  local user = before and string.match(text, '^([^"\\]+)"', before + 1)
  if user then return user end
  local record = parse_status(text)
  if record then return record.user end
  local document = decode(redis.call('HGET', K.tasks, id))
  return document and type(document.user) == 'string' and document.user or nil
end

local counts  -- number of leased tasks, by user
local function count_leases()
  counts = {}
  local ids = redis.call('ZRANGE', K.leases, 0, MOST_LEASES - 1)
  for from = 1, #ids, 500 do
    local group = { unpack(ids, from, math.min(from + 499, #ids)) }
    for i, text in ipairs(redis.call('HMGET', K.status, unpack(group))) do
      local user = user_of(group[i], text)
      if user then counts[user] = (counts[user] or 0) + 1 end
    end
  end
end

local function check_count(user)
  if not counts then count_leases() end
  local stored, right = redis.call('HGET', K.running, user), counts[user] or 0
  if tonumber(stored or '0') == right and not (stored and right == 0) then return end
  wrong(user, 'has ' .. right .. ' running tasks but the count is ' .. (stored or '0'), function()
    running_cache[user] = right
    running_dirty[user] = true
    unpark(user)
  end)
end

local CHECKS = { task = check_task, tasks = check_document, attempts = check_attempts,
  waiting = check_home('waiting'), delayed = check_home('delayed'),
  delayed_index = check_delayed_index, leases = check_home('leases'),
  ended = check_home('ended'), dead = check_home('dead'), backlog = check_backlog,
  held = check_held, slot_line = check_slot_line, slots = check_slots,
  deadlines = check_deadlines, open = check_open, runs = check_runs, failures = check_failures,
  running = check_count, user = check_user }

local before = FIX and first_answer(A.op)
if before then return decode(before) or {} end
if A.kind == 'running' and redis.call('ZCARD', K.leases) > MOST_LEASES then return {} end
load_limits()
for i = FIRST, #ARGV do CHECKS[A.kind](R.entry[i]) end
if FIX then
  save_fair()
  remember(A.op, #found > 0 and cjson.encode(found) or '[]')
end
return found
