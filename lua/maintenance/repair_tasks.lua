-- Check whether the records of tasks and users agree, and repair those that do not.
--
-- @include ending
-- @lazy delays gates uniques rings kinds specials
-- KEYS pool_tasks  zset  waiting tasks of pools; see lib/specials
-- ARGV op    text  random id of this operation
-- ARGV kind  text  the structure that the entries belong to; 'task' and 'user' (a seat) check all structures
-- ARGV fix   text  '1': repair; empty: change nothing
-- ARGV ...    entries, a few hundred at most
-- ROW entry  text  task id, seat, or member of the structure
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
  cancelled = 'ended', expired = 'ended', buried = 'dead' }
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
  elseif (record.buffered and record.schedule) or record.behind then
    at = AFTER_THE_LAST
  elseif record.state == 'delayed' and type(record.due) == 'number' then
    at = record.due
  end
  if record.state == 'delayed' then
    delays().add({ at, id, owner_of(record) })
  else
    redis.call('ZADD', key, at, id)
  end
  if at == AFTER_THE_LAST and record.schedule and record.buffered then
    redis.call('ZADD', K.open, 0, record.schedule .. '\0' .. id)
    let_buffered_begin(record.schedule)  -- if no other run is unfinished
  end
  wake_all()
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
          if name == 'delayed' then delays().remove(id, owner_of(record)) else redis.call('ZREM', key, id) end
        end)
    end
  end
end

-- A delayed task is also in the index by owner. With two levels, a claim must look at its owner and its tenant
-- in time.
local function check_delay(id, record)
  local owner, due = owner_of(record), tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  if not due then return end
  local function enter() delays().enter({ due, id, owner }) end
  if not redis.call('ZSCORE', K.delayed_index, delays().member(owner, due, id)) then
    wrong(id, 'is delayed but not in delayed_index', enter)
  end
  local level = layout > 1 and owner
  while level do
    local at = tag_in(K.delayed_users, level)
    if not at or at > math.max(due, now) then
      wrong(id, 'is delayed but nobody will look at its user in time', enter)
      return
    end
    level = group_of(level)
  end
end

local function drop_from_backlog(seat, member)
  redis.call('ZREM', K.backlog, member)
  local head = first_waiting(seat, 1)[1]
  if not head then
    leave(seat)
  elseif not is_critical(seat, head) then
    drop_tag(K.critical, seat)
    if layout > 1 then rings().left(seat) end
  end
end

local function drop_from_held(member)
  redis.call('ZREM', K.held, member)
  if redis.call('ZCARD', K.held) == 0 then redis.call('UNLINK', K.slot_line) end
end

-- A waiting task is in either backlog or held. Other tasks are in neither.
local function check_line(id, record)
  local member, task = member_of(id, record), waiting_task(id, record)
  local in_backlog, gate = redis.call('ZSCORE', K.backlog, member), gates().held_at(task)
  local in_held, held = gate ~= nil, gate and gates().held_member(gate, task)
  if record.state == 'ready' then
    if not in_backlog and not in_held then
      wrong(id, 'is ready but in neither backlog nor held', function()
        add_waiting({ waiting_task(id, record) }, true)
        wake_for(record)
      end)
    elseif in_backlog and in_held then
      wrong(id, 'is in both backlog and held', function() drop_from_held(held) end)
    end
    return
  end
  if in_backlog then
    wrong(id, 'is ' .. record.state .. ' but in backlog',
      function() drop_from_backlog(seat_of(record), member) end)
  end
  if in_held then
    wrong(id, 'is ' .. record.state .. ' but in held', function() drop_from_held(held) end)
  end
end

-- The slots that a running task holds.
local function slots_of(id, record)
  local found = {}
  if record.slot then found[1] = (record.name or '') .. '\0' .. id end
  for _, gate in ipairs(type(record.slots) == 'table' and record.slots or {}) do
    if type(gate) == 'string' then found[#found + 1] = gate .. '\0' .. id end
  end
  return found
end

local function check_running(id, record)
  for _, slot in ipairs(slots_of(id, record)) do
    if not redis.call('ZSCORE', K.slots, slot) then
      wrong(id, 'is running without its slot', function() redis.call('ZADD', K.slots, 0, slot) end)
    end
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

-- A task of another pool that waits is listed in its pool, one that expires among those.
local function check_waiting(id, record)
  local since = record.pool and tonumber(redis.call('ZSCORE', K.waiting, id) or nil)
  local place = since and specials().pool_member(record.pool, since, id)
  if place and not redis.call('ZSCORE', K.pool_tasks, place) then
    wrong(id, 'waits but is not in pool_tasks', function() redis.call('ZADD', K.pool_tasks, 0, place) end)
  end
  if record.expires and tonumber(redis.call('ZSCORE', K.expiring, id) or nil) ~= record.expires then
    wrong(id, 'expires but is not in expiring', function() redis.call('ZADD', K.expiring, record.expires, id) end)
  end
  if record.state ~= 'ready' or not record.flow or not record.flow.keys then return end
  local task = waiting_task(id, record)
  if gates().has_place(task) then return end
  wrong(id, 'waits but has no place in the order of its key', function() gates().arrive(task) end)
end

local function has_key(record, field)
  return record.flow and record.flow.unique and uniques().field_of(record) == field
end

-- Whether a unique key is that of an unfinished task.
local function has_holder(field, id)
  local record = parse_status(redis.call('HGET', K.status, id))
  return record and not is_ended(record) and has_key(record, field)
end

-- A task that waits for the end of the one that has its unique key. It is checked after all others have got back
-- the keys that they have.
local function check_behind(id)
  local record = parse_status(redis.call('HGET', K.status, id))
  if not record or record.state ~= 'delayed' or not record.behind or not record.flow or not record.flow.unique then
    return
  end
  local field = uniques().field_of(record)
  local holder = uniques().read(field)
  if holder and holder.following == id then return end
  wrong(id, 'waits behind a task that does not know of it', function()
    local is_kept = holder and holder.id ~= id and has_holder(field, holder.id)
    if is_kept and not holder.following then
      holder.following, holder.since = id, tonumber(record.pushed) or now
      uniques().write(field, holder)
      return
    end
    record.behind = nil
    if is_kept then
      record.flow.unique = nil  -- another task has the key, and a third one waits behind it
    else
      uniques().drop(field)
      uniques().hold(id, record)
    end
    write_status(id, record)
    delays().move(id, owner_of(record), math.max(now, tonumber(record.due) or now))
    wake_all()
  end)
end

-- An unfinished task with a unique key has it, unless its time is over.
local function check_unique(id, record)
  if record.behind and record.state == 'delayed' then return end  -- see check_behind
  local scope, window = uniques().scope_of(record.flow)
  local since = tonumber(record.pushed) or now
  -- One that was claimed once has given up a key for the time that it waits.
  local is_over = (scope == 'waiting' and record.claimed) or (window and since + window <= now)
    or (record.expires and record.expires <= now)
  if is_over or uniques().read(uniques().field_of(record)) then return end
  wrong(id, 'has a unique key that is not in uniques', function()
    uniques().write(uniques().field_of(record), { id = id, scope = scope, first = since,
      ends = window and since + window })
  end)
end

-- A task without a document cannot run: end it and delete what is left of it.
local function forget(id, record)
  if record.state == 'ready' or record.state == 'delayed' then end_waiting(id, record, 'cancelled') end
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
  if record.state == 'ready' or record.state == 'delayed' then check_waiting(id, record) end
  if record.flow and record.flow.unique and not is_ended(record) then check_unique(id, record) end
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
  local owner, due, id = string.match(member, '^(%Z*)%z(%d+)%z(%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.delayed_index, member) then return end
  local score = id and tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  if score and record and owner_of(record) == owner and score == tonumber(due) then return end
  wrong(member, 'is in delayed_index but does not match its task',
    function() redis.call('ZREM', K.delayed_index, member) end)
end

local function check_backlog(member)
  local seat, id = string.match(member, '^(%Z*)%z%Z*%z(%Z*)%z%Z*$')
  local record = id and known(id)
  if record == false or (record and record.state == 'ready' and member_of(id, record) == member) then return end
  if not redis.call('ZSCORE', K.backlog, member) then return end
  wrong(member, 'is in backlog but does not match its task',
    function() drop_from_backlog(seat or '', member) end)
end

-- Whether a seat has a turn at a gate, and its tenant too.
local function has_turn(gate, seat)
  local line = gates().line_of(gate, seat)
  return redis.call('ZSCORE', K.slot_line, gates().turn_mark(line, seat))
    and (line == gate or has_turn(gate, group_of(seat)))
end

local function check_held(member)
  local seat, gate, id = string.match(member, '^(%Z*)%z(%Z*)%z%Z*%z(%Z*)')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.held, member) then return end
  local task = record and record.state == 'ready' and waiting_task(id, record)
  if not task or gates().held_member(gate, task) ~= member then
    wrong(member, 'is in held but does not match its task', function() drop_from_held(member) end)
  elseif not has_turn(gate, seat) then
    wrong(member, 'is held without a turn', function() gates().join_line(gate, seat) end)
  elseif gates().is_forgotten(gate) then
    wrong(member, 'is held although its limit has room',
      function() redis.call('ZADD', K.gate_times, now, gate) end)
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
    local line, seat = string.match(member, '^(%Z*)%z%Z*%z(%Z*)$')
    if not line or not redis.call('ZSCORE', K.slot_line, gates().turn_mark(line, seat)) then
      wrong(member, 'is a turn without a mark', function() redis.call('ZREM', K.slot_line, member) end)
    end
    return
  end
  local line, seat = string.match(member, '^\1(%Z*)%z(%Z*)$')
  local turns = line and redis.call('ZRANGEBYLEX', K.slot_line, '[' .. line .. '\0',
    '(' .. line .. '\1', 'LIMIT', 0, MOST_TURNS) or {}
  if #turns == MOST_TURNS then return end
  for _, turn in ipairs(turns) do
    if string.match(turn, '%z(%Z*)$') == seat then return end
  end
  wrong(member, 'is a mark without a turn', function()
    if line then gates().take_turn(line, seat) else redis.call('ZREM', K.slot_line, member) end
  end)
end

local function check_slots(member)
  local gate, id = string.match(member, '^(%Z*)%z(%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.slots, member) then return end
  for _, slot in ipairs(record and record.state == 'running' and slots_of(id, record) or {}) do
    if slot == member then return end
  end
  wrong(member, 'holds a slot but is not running', function()
    redis.call('ZREM', K.slots, member)
    if gate then redis.call('ZADD', K.gate_times, now, gate) end
    wake_all()
  end)
end

local function check_pool_tasks(member)
  local pool, since, id = string.match(member, '^(%Z*)%z(%d+)%z(%Z*)$')
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.pool_tasks, member) then return end
  if record and record.state == 'ready' and record.pool == pool
    and tonumber(redis.call('ZSCORE', K.waiting, id) or nil) == tonumber(since) then return end
  wrong(member, 'is in pool_tasks but does not match its task',
    function() redis.call('ZREM', K.pool_tasks, member) end)
end

-- Places at ordered limits and reservations are of tasks that wait, or keep their place until they are retried.
-- Places of tasks of several limits are of those that are held there.
local function check_gate_order(member)
  local kind, gate, id = string.match(member, '^([oh])(%Z*)%z%Z*%z(%Z*)$')
  if not id then id = string.match(member, '^r%Z*%z%Z*%z(%Z*)%z%Z*%z%d+$') end
  local record = id and known(id)
  if record == false or not redis.call('ZSCORE', K.gate_order, member) then return end
  if record and record.flow and record.flow.keys and (record.state == 'ready' or record.state == 'delayed') then
    if kind ~= 'h' or redis.call('ZSCORE', K.held, gates().held_member(gate, waiting_task(id, record))) then return end
  end
  wrong(member, 'is in gate_order but its task does not wait', function()
    redis.call('ZREM', K.gate_order, member)
    gate = string.match(member, '^.(%Z*)')
    if gate ~= '' then redis.call('ZADD', K.gate_times, now, gate) end
    wake_all()
  end)
end

local function check_gate_passes(id)
  local record = known(id)
  if record == false or redis.call('HEXISTS', K.gate_passes, id) == 0 then return end
  if record and record.state == 'ready' then return end
  wrong(id, 'was passed on but does not wait', function() redis.call('HDEL', K.gate_passes, id) end)
end

-- The debt of a key is dropped when it is over: somebody has to look at it then.
local function check_paced(gate)
  if string.byte(gate) ~= 3 or redis.call('HEXISTS', K.paced, gate) == 0 then return end
  if redis.call('ZSCORE', K.gate_times, gate) or gates().has_turns(gate) then return end
  wrong(gate, 'has a debt that nobody will drop', function() redis.call('ZADD', K.gate_times, now, gate) end)
end

local function check_uniques(field)
  if redis.call('HEXISTS', K.uniques, field) == 0 then return end
  local holder = uniques().read(field)
  local record = holder and known(holder.id)
  if record == false then return end
  local following = holder and holder.following and known(holder.following)
  if holder and holder.following and following ~= false
    and not (following and following.state == 'delayed' and following.behind and has_key(following, field)) then
    wrong(field, 'has a task behind it that does not wait for it', function()
      holder.following, holder.since = nil, nil
      uniques().write(field, holder)
    end)
  end
  if holder and holder.ends then  -- a claim drops it some time after its end
    if redis.call('ZSCORE', K.expiring, '\1' .. field) then return end
    wrong(field, 'has a window that never ends', function() uniques().write(field, holder) end)
    return
  end
  if holder and record and not is_ended(record) and has_key(record, field) then return end
  wrong(field, 'is a unique key that no task has', function()
    uniques().drop(field)
  end)
end

local function check_expiring(entry)
  if not redis.call('ZSCORE', K.expiring, entry) then return end
  if string.byte(entry) == 1 then
    if redis.call('HEXISTS', K.uniques, string.sub(entry, 2)) == 1 then return end
  else
    local record = known(entry)
    if record == false or (record and record.expires and (record.state == 'ready' or record.state == 'delayed'))
      then return end
  end
  wrong(entry, 'is in expiring but nothing of it expires', function() redis.call('ZREM', K.expiring, entry) end)
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
  local id = string.match(member, '%z%d%d%d%d%d%d%d%d%d%d%d%d%d[sftce](%Z*)$')
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

-- --- seats ---

local function wake_seat(seat)
  local pool = string.match(seat, '\3(.*)$')
  if pool then kinds().wake_pool(pool) else wake_worker() end
end

local function unpark(seat)
  if review_seat(seat, blocked_until(owner_in(seat))) then wake_seat(seat) end
end

-- `has_critical`: whether the seat has to be in the CRITICAL lane while it may be served.
local function check_waiting_seat(seat, has_critical, in_ready, parked)
  if in_ready and parked then
    wrong(seat, 'is both ready and parked', function()
      redis.call('ZREM', K.parked, seat)
      unpark(seat)
    end)
  elseif not in_ready and not parked then
    wrong(seat, 'has waiting tasks but is neither ready nor parked', function()
      place(seat, false, nil, has_critical)
      tell_of(seat)
      wake_seat(seat)
    end)
  elseif parked and not blocked_until(owner_in(seat)) and tonumber(parked) > now then
    wrong(seat, 'is parked without a reason', function() unpark(seat) end)
  end
  local in_lane = tag_in(K.critical, seat)
  if in_ready and has_critical and not in_lane then
    wrong(seat, 'has a CRITICAL task but is not in the CRITICAL lane', function()
      if tag_in(K.ready, seat) then enter_critical(seat) end
    end)
  elseif in_lane and not (in_ready and has_critical) then
    wrong(seat, 'is in the CRITICAL lane without a CRITICAL task', function()
      drop_tag(K.critical, seat)
      if layout > 1 then rings().left(seat) end
    end)
  end
end

local function check_seat(seat)
  local head, has_critical = first_waiting(seat, 1)[1], nil
  if layout > 1 and rings().is_tenant(seat) then
    head, has_critical = not rings().is_empty(K.ready, seat), not rings().is_empty(K.critical, seat)
  elseif head then
    has_critical = is_critical(seat, head)
  end
  local in_ready, parked = tag_in(K.ready, seat), redis.call('ZSCORE', K.parked, seat)
  if head then
    check_waiting_seat(seat, has_critical, in_ready, parked)
  elseif in_ready or parked or tag_in(K.critical, seat) then
    wrong(seat, 'is ready or parked without a waiting task', function() leave(seat) end)
  end
  if tag_in(K.ready, seat) and tag_in(K.idle, seat) then
    wrong(seat, 'is both ready and idle', function() drop_tag(K.idle, seat) end)
  end
  local group = group_of(seat)
  if group and in_ready then check_seat(group) end
end

-- What is left in the ring of a tenant is dropped with the tag of the tenant.
local function check_ring_of(tenant)
  if tag_in(K.ready, tenant) or tag_in(K.idle, tenant) or redis.call('ZSCORE', K.parked, tenant) then return end
  if not rings().is_empty(K.ready, tenant) then
    check_seat(tenant)
  else
    wrong(tenant, 'has a ring that nobody will drop', function() put_tag(K.idle, tenant, ring_of(tenant).clock) end)
  end
end

-- A seat in a ring and its tag agree.
local function check_rings(member)
  local kind, ring, tag, seat = string.match(member, '^(.)(%Z*)%z(%Z*)%z(%Z*)$')
  if not redis.call('ZSCORE', K.rings, member) then return end
  if kind and redis.call('HGET', K.tags, kind .. seat) == tag and rings().name_of(seat) == ring then return end
  wrong(member, 'is in rings but has another tag', function()
    redis.call('ZREM', K.rings, member)
    if kind == 'r' and seat then check_seat(seat) end
  end)
end

local function check_tags(field)
  local kind, seat = string.match(field, '^(.)(.*)$')
  local tag = redis.call('HGET', K.tags, field)
  if not tag then return end
  local member = (kind or '') .. rings().name_of(seat or '') .. '\0' .. tag .. '\0' .. (seat or '')
  if not redis.call('ZSCORE', K.rings, member) then
    wrong(field, 'has a tag but is not in rings', function() redis.call('HDEL', K.tags, field) end)
  end
  if kind == 'r' or kind == 'c' then check_seat(seat) end
  if kind == 'i' and seat and group_of(seat) then check_ring_of(group_of(seat)) end
end

local function check_clocks(ring)
  if ring == '' or redis.call('HEXISTS', K.clocks, ring) == 0 then return end
  if string.byte(ring) == 3 then
    local pools = '\n' .. (fair.pools or '') .. '\n'
    if string.find(pools, '\n' .. string.sub(ring, 2) .. '\n', 1, true) then return end
  elseif not (rings().is_empty(K.ready, ring) and rings().is_empty(K.idle, ring)) then
    return check_ring_of(ring)
  elseif tag_in(K.ready, ring) or tag_in(K.idle, ring) or redis.call('ZSCORE', K.parked, ring) then
    return
  end
  wrong(ring, 'has clocks but no seats', function() redis.call('HDEL', K.clocks, ring) end)
end

-- The owner of a lease. If its record cannot be read, the document names user and tenant. Most owners are found
-- without decoding the record: JSON escapes quotes inside values, so this matches nothing else.
local function leased_to(id, text)
  local _, before = string.find(text or '', '"user":"', 1, true)
  local user = before and string.match(text, '^([^"\\]+)"', before + 1)
  if user and not string.find(text, '"group":"', 1, true) then return user end
  local record = parse_status(text)
  if record then return owner_of(record) end
  local document = decode(redis.call('HGET', K.tasks, id))
  if not document or type(document.user) ~= 'string' then return nil end
  local tenant = type(document.tenant) == 'string' and document.tenant or nil
  local owner = owner_of({ user = document.user, group = tenant })
  -- A task of a version with layout 1 counts for its user alone.
  return redis.call('HEXISTS', K.running, owner) == 1 and owner or document.user
end

local counts  -- number of leased tasks, by owner and by tenant
local function count_leases()
  counts = {}
  local ids = redis.call('ZRANGE', K.leases, 0, MOST_LEASES - 1)
  for from = 1, #ids, 500 do
    local group = { unpack(ids, from, math.min(from + 499, #ids)) }
    for i, text in ipairs(redis.call('HMGET', K.status, unpack(group))) do
      local owner = leased_to(group[i], text)
      while owner do
        counts[owner] = (counts[owner] or 0) + 1
        owner = group_of(owner)
      end
    end
  end
end

local function check_count(owner)
  if not counts then count_leases() end
  local stored, right = redis.call('HGET', K.running, owner), counts[owner] or 0
  if tonumber(stored or '0') == right and not (stored and right == 0) then return end
  wrong(owner, 'has ' .. right .. ' running tasks but the count is ' .. (stored or '0'), function()
    running_cache[owner] = right
    running_dirty[owner] = true
    if review(owner) then wake_worker() end
  end)
end

local CHECKS = { task = check_task, behind = check_behind, tasks = check_document, attempts = check_attempts,
  waiting = check_home('waiting'), delayed = check_home('delayed'),
  delayed_index = check_delayed_index, leases = check_home('leases'),
  ended = check_home('ended'), dead = check_home('dead'), backlog = check_backlog,
  held = check_held, slot_line = check_slot_line, slots = check_slots,
  deadlines = check_deadlines, open = check_open, runs = check_runs, failures = check_failures,
  pool_tasks = check_pool_tasks, gate_order = check_gate_order, gate_passes = check_gate_passes,
  paced = check_paced,
  uniques = check_uniques, expiring = check_expiring, rings = check_rings, tags = check_tags,
  clocks = check_clocks, running = check_count, user = check_seat }

local before = FIX and first_answer(A.op)
if before then return decode(before) or {} end
if A.kind == 'running' and redis.call('ZCARD', K.leases) > MOST_LEASES then return {} end
for i = FIRST, #ARGV do CHECKS[A.kind](R.entry[i]) end
if FIX then
  save_fair()
  remember(A.op, #found > 0 and cjson.encode(found) or '[]')
end
return found
