-- Do what has become due: promote delayed tasks, take back expired leases, look at parked users.
--
-- @include ending notices
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
  local ids, times, members = delays.due_in_turns(UPKEEP - IN_ORDER)
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

local function promote()
  local ids, times = due_tasks()
  if #ids == 0 then return end
  local list, good, indexed, records = {}, {}, {}, read_statuses(ids)
  for _, id in ipairs(ids) do
    local record = records[id]
    if record then indexed[#indexed + 1] = delays.member(record.user, times[id], id) end
    if record and record.state == 'delayed' then
      record.state, record.buffered = 'ready', nil
      good[#good + 1] = id
      list[#list + 1] = waiting_task(id, record)
    else
      count('broken_tasks', 1)
    end
  end
  if #good > 0 then write_statuses(good, records) end
  redis.call('ZREM', K.delayed, unpack(ids))
  if #indexed > 0 then redis.call('ZREM', K.delayed_index, unpack(indexed)) end
  lost.found = add_waiting(list) or lost.found
end

-- Correct the running count after a lease whose record cannot be read. The document names the user.
function lost.forget_run(id)
  local document = decode(redis.call('HGET', K.tasks, id))
  local user = document and document.user
  if type(user) ~= 'string' or running_of(user) == 0 then return end
  change_running(user, -1)
  review(user)
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
    write_status(id, record)
    return false
  end
  if record.state == 'buried' or fate.is_stale then notices.leave(id, record, fate.outcome) end
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

function lost.take_back()
  lost.end_all(due_in(K.leases), function(id)
    redis.call('ZREM', K.leases, id)
    count('broken_tasks', 1)
    lost.forget_run(id)
  end)
end

-- End runs that are past their deadline, even if an older client has extended their leases.
function lost.end_overdue()
  lost.end_all(due_in(K.deadlines), function(id) redis.call('ZREM', K.deadlines, id) end)
end

-- After the clock was set back, the times at which parked users are looked at may be too late by as much.
-- Look at all of them, from the latest on, some in each claim.
local function look_at_parked()
  local skip = fair.recheck
  if fair.seen and now < fair.seen then skip = 0 end
  fair.seen = now
  if not skip then return end
  fair_dirty = true
  local users = redis.call('ZRANGE', K.parked, '(inf', '-inf', 'BYSCORE', 'REV', 'LIMIT', skip, UPKEEP)
  for _, user in ipairs(users) do
    local before = redis.call('ZSCORE', K.parked, user)
    lost.found = review(user) or lost.found
    -- Users whose time does not change stay before the others.
    if redis.call('ZSCORE', K.parked, user) == before then skip = skip + 1 end
  end
  if #users < UPKEEP then
    redis.call('HDEL', K.fair, 'recheck')
  else
    redis.call('HSET', K.fair, 'recheck', skip)
  end
end

local function upkeep()
  promote()
  lost.take_back()
  if fair.behind then trim_all(CATCH_UP) end
  look_at_parked()
  for _, user in ipairs(due_in(K.parked)) do lost.found = review(user) or lost.found end
end
