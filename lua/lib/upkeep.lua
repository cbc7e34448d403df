-- Do what has become due: delayed tasks, expired leases and tasks, limits and parked seats.
--
-- @include ending
-- @lazy delays notices gates uniques rings
-- KEYS expiring  zset  task id -> when it ends as expired if it has not started, ms; see also lib/uniques
-- KEYS gate_times  zset  when to look at a gate; see lib/gates
-- KEYS delayed   zset  task id -> when it becomes ready, ms
--
-- Part of every claim, so that no other process has to be alive for a retry to happen. Each step is bounded.
-- The next claim does what is left, and is told not to wait.

local CATCH_UP = 10  -- twice as many old records are dropped if other calls have left some
local UPKEEP = 100

local function due_in(key)
  return redis.call('ZRANGE', key, '-inf', now, 'BYSCORE', 'LIMIT', 0, UPKEEP)
end

local IN_ORDER = 20  -- at least this many due tasks are promoted by time alone

-- Ids of due delayed tasks, and their times by id. First some of each user, so that nobody waits for ten
-- thousand tasks of another; then the oldest, which versions without the index may have stored.
local function due_tasks()
  local ids, times, members = delays().due_in_turns(UPKEEP - IN_ORDER)
  local good, due = {}, {}
  local stored = #ids > 0 and redis.call('ZMSCORE', K.delayed, unpack(ids)) or {}
  for i, id in ipairs(ids) do
    if tonumber(stored[i] or nil) == times[i] then
      good[#good + 1] = id
      due[id] = times[i]
    else
      redis.call('ZREM', K.delayed_index, members[i])
    end
  end
  local oldest = redis.call('ZRANGE', K.delayed, '-inf', now, 'BYSCORE', 'LIMIT', 0,
    math.max(IN_ORDER, UPKEEP - #good), 'WITHSCORES')
  for i = 1, #oldest, 2 do
    local id = oldest[i]
    if not due[id] then
      good[#good + 1] = id
      due[id] = tonumber(oldest[i + 1])
    end
  end
  return good, due
end

-- Leases that end without an answer from their worker. A table, because a script has room for only 200 local
-- variables. found: something has become ready, and other workers may be waiting for it.
local lost = { found = false }

-- A task that is due in a pool for which the queue has no room stays delayed, and is looked at again every second.
local function promote()
  local ids, times = due_tasks()
  if #ids == 0 then return end
  local list, good, indexed, later, records = {}, {}, {}, {}, read_statuses(ids)
  for _, id in ipairs(ids) do
    local record = records[id]
    if record then indexed[#indexed + 1] = delays().member(owner_of(record), times[id], id) end
    local fits = not (record and record.pool) or rings().has_room_for(record.pool)
    if record and record.state == 'delayed' and not fits then
      for _, value in ipairs({ now + 1000, id, owner_of(record) }) do later[#later + 1] = value end
    elseif record and record.state == 'delayed' then
      record.state, record.buffered, record.behind = 'ready', nil, nil
      good[#good + 1] = id
      list[#list + 1] = waiting_task(id, record)
    else
      count('broken_tasks', 1)
    end
  end
  if #good > 0 then write_statuses(good, records) end
  redis.call('ZREM', K.delayed, unpack(ids))
  if #indexed > 0 then redis.call('ZREM', K.delayed_index, unpack(indexed)) end
  if #later > 0 then delays().add(later) end
  lost.found = add_waiting(list) or lost.found
end

-- Correct the running count after a lease whose record cannot be read. The document names the owner.
function lost.forget_run(id)
  local document = decode(redis.call('HGET', K.tasks, id))
  if type(document) ~= 'table' or type(document.user) ~= 'string' then return end
  for _, tenant in ipairs({ document.tenant or '', '' }) do
    local owner = owner_of({ user = document.user, group = tenant ~= '' and tenant or nil })
    if running_of(owner) > 0 then
      change_running(owner, -1)
      review(owner)
      return
    end
  end
end

-- How a run ends whose worker does not answer. If its lease was extended up to its deadline, the run goes on
-- and ignores its end. If the lease ended before the deadline, the worker is gone.
function lost.fate_of(id, record)
  local ends = tonumber(redis.call('ZSCORE', K.leases, id) or nil) or now
  if not record.deadline or record.deadline > now or ends < record.deadline then
    return { outcome = 'expired', fingerprint = 'lease-expired', counter = 'expired',
      error = 'the lease of worker %s expired' }
  elseif record.cancel then
    return { outcome = 'cancelled', is_stale = true, counter = 'stale_runs',
      error = 'cancelled: still running on worker %s one lease after the worker was told to cancel it' }
  end
  return { outcome = 'timed_out', is_stale = true, fingerprint = 'timed-out',
    counter = 'stale_runs', error = 'timed out: still running on worker %s one lease after its time-out' }
end

-- End a lease whose worker does not answer. Returns true if the task ends with it. A run that goes on is not
-- offered again: the next attempts might go on as well, each in a slot of its own.
function lost.end_one(id, record)
  local fate = lost.fate_of(id, record)
  end_lease(id, record)
  count(fate.counter, 1)
  record.error = string.format(fate.error, record.worker or '?')
  record.timed_out, record.token = fate.outcome == 'timed_out' or nil, nil
  if fate.is_stale then record.stale = now end
  keep_attempt(id, record, fate.outcome, '')
  if record.cancel then
    end_task(id, record, 'cancelled')
  elseif fate.is_stale or record.attempts >= (record.max_attempts or SETTINGS.max_attempts) then
    record.fingerprint = fate.fingerprint
    end_task(id, record, 'buried')
  else
    record.state = 'ready'
    if record.flow and record.flow.unique then uniques().released(id, record) end
    write_status(id, record)
    return false
  end
  if record.state == 'buried' or fate.is_stale then notices().leave(id, record, fate.outcome) end
  return true
end

-- End the leases of tasks. Calls `pass_over` with each that is not running or whose record cannot be read.
function lost.end_all(ids, pass_over)
  if #ids == 0 then return end
  local list, closed, records = {}, 0, read_statuses(ids)
  for _, id in ipairs(ids) do
    local record = records[id]
    if not record or record.state ~= 'running' then
      pass_over(id)
    elseif lost.end_one(id, record) then
      closed = closed + 1
    else
      list[#list + 1] = waiting_task(id, record)
    end
  end
  lost.found = add_waiting(list, true) or lost.found
  if closed > 0 then trim_all(closed) end
end

function lost.take_back(ids)
  lost.end_all(ids, function(id)
    redis.call('ZREM', K.leases, id)
    count('broken_tasks', 1)
    lost.forget_run(id)
    -- It may have held slots.
    if redis.call('ZCARD', K.held) > 0 then gates().look_at('\2', '\255', UPKEEP) end
  end)
end

-- End runs that are past their deadline, even if an older client has extended their leases.
function lost.end_overdue()
  lost.end_all(due_in(K.deadlines), function(id) redis.call('ZREM', K.deadlines, id) end)
end

-- End tasks that have not started in time. Entries of tasks that have started, or have ended, go.
function lost.expire(ids)
  local tasks = {}
  for _, id in ipairs(ids) do
    if string.byte(id) == 1 then
      uniques().window_over(string.sub(id, 2))
    else
      tasks[#tasks + 1] = id
    end
  end
  if #tasks == 0 then return end
  local records, ended = read_statuses(tasks), 0
  for _, id in ipairs(tasks) do
    local record = records[id]
    redis.call('ZREM', K.expiring, id)
    if record and (record.state == 'ready' or record.state == 'delayed') then
      end_waiting(id, record, 'expired')
      ended = ended + 1
    end
  end
  if ended > 0 then trim_all(ended) end
end

-- Review a parked seat, or what the clock has changed for it. Returns true if a worker of the default pool can
-- claim a task of it; workers of its pool are woken.
local function review_parked(seat)
  local is_ready = review_seat(seat, blocked_until(owner_in(seat)))
  local pool = layout > 1 and string.match(seat, '\3(.*)$')
  if is_ready and pool then kinds().wake_pool(pool) end
  return is_ready and not pool
end

-- After the clock was set back, the times at which parked seats and limits are looked at may be too late by as
-- much. Look at all of these seats, from the latest on, some in each claim.
local function look_at_parked()
  local skip = fair.recheck
  if fair.seen and now < fair.seen then
    skip = 0
    if redis.call('ZCARD', K.held) > 0 then gates().look_at('\2', '\255', UPKEEP) end
  end
  fair.seen = now
  if not skip then return end
  fair_dirty = true
  local seats = redis.call('ZRANGE', K.parked, '(inf', '-inf', 'BYSCORE', 'REV', 'LIMIT', skip, UPKEEP)
  for _, seat in ipairs(seats) do
    local before = redis.call('ZSCORE', K.parked, seat)
    lost.found = review_parked(seat) or lost.found
    -- Seats whose time does not change stay before the others.
    if redis.call('ZSCORE', K.parked, seat) == before then skip = skip + 1 end
  end
  if #seats < UPKEEP then
    redis.call('HDEL', K.fair, 'recheck')
  else
    redis.call('HSET', K.fair, 'recheck', skip)
  end
end

local function is_due(key)
  return #redis.call('ZRANGE', key, '-inf', now, 'BYSCORE', 'LIMIT', 0, 1) > 0
end

-- Make the parts that the end of these leases and tasks needs, before anything is written.
function lost.prepare_ends(leases, expired)
  if #leases > 0 then notices() end
  for _, ids in ipairs({ leases, expired }) do
    if #ids > 0 then
      for _, record in pairs(read_statuses(ids)) do prepare_end(record) end
    end
  end
  if #expired > 0 then uniques() end
end

-- `most`: how many held tasks of each limit may come back.
local function upkeep(most)
  local leases, expired = due_in(K.leases), layout > 1 and due_in(K.expiring) or {}
  -- Without a due task there may be a time to look at a user that has none any more.
  local has_delayed = is_due(K.delayed) or (layout > 1 and is_due(K.delayed_users))
  if has_delayed then delays() end
  lost.prepare_ends(leases, expired)
  if has_delayed then promote() end
  lost.take_back(leases)
  if #expired > 0 then lost.expire(expired) end
  look_at_parked()
  if fair.flush_gates then fair.flush_gates(true) end
  if is_due(K.gate_times) then lost.found = gates().due(most) or lost.found end
  if fair.behind then trim_all(CATCH_UP) end
  for _, seat in ipairs(due_in(K.parked)) do lost.found = review_parked(seat) or lost.found end
end
