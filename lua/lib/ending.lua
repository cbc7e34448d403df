-- End tasks, keep the ended ones for as long as the settings say, and free what they held.
--
-- @include limits history replay stats streaks
-- KEYS tasks    hash  task id -> its document, JSON
-- KEYS ended    zset  task id -> when it finished or was cancelled, ms
-- KEYS dead     zset  task id -> when it was buried, ms
-- KEYS open     zset  schedule NUL task id, all scores 0: unfinished tasks of schedules
-- KEYS delayed  zset  task id -> when it becomes ready, ms

-- Drop ended tasks. Each leaves a grave behind for a while, however old it is: the push or finish
-- that is told of it now may be repeated in a moment.
local function drop(key, ids)
  local graves, records = {}, read_statuses(ids)
  local documents = redis.call('HMGET', K.tasks, unpack(ids))
  for i, id in ipairs(ids) do
    graves[2 * i - 1], graves[2 * i] = 't:' .. id, grave_of(records[id], documents[i])
  end
  turn_generation()
  redis.call('HSET', K.ops, unpack(graves))
  redis.call('ZREM', key, unpack(ids))
  redis.call('HDEL', K.tasks, unpack(ids))
  redis.call('HDEL', K.status, unpack(ids))
  unlist_runs(ids, records)
end

-- Drop the oldest records beyond the limits; at most twice as many as were added, so that a call
-- stays short and a lowered limit is reached all the same. How many.
local function trim(key, keep, keep_ms, added)
  local budget = 2 * added + 10
  local over = math.min(redis.call('ZCARD', key) - keep, budget)
  local ids = {}
  if over > 0 then ids = redis.call('ZRANGE', key, 0, over - 1) end
  if #ids == 0 then
    ids = redis.call('ZRANGE', key, '-inf', string.format('%.0f', now - keep_ms), 'BYSCORE',
      'LIMIT', 0, budget)
  end
  if #ids > 0 then drop(key, ids) end
  return #ids
end

local function trim_all(added)
  trim(K.ended, SETTINGS.keep_finished, SETTINGS.keep_finished_ms, added)
  trim(K.dead, SETTINGS.keep_dead, SETTINGS.keep_dead_ms, added)
end

-- True if this token holds the lease of the task that the record is of. A lease that is over but
-- not yet taken back still counts: nobody else has the task.
local function is_held(record, token)
  return record and record.state == 'running' and record.token == token
end

local function held(id, token)
  local record = read_status(id)
  return is_held(record, token) and record or nil
end

-- How the end of one lease begins: the first answer if it was sent before, or the record.
local function begin(op, id, token)
  local before = first_answer(op)
  if before then return before end
  local record = held(id, token)
  if record then return nil, record end
  count('lost_leases', 1)
  return remember(op, 'lost_lease')
end

-- Free what a lease holds, but for its entry in leases: running count, time used, cap, slot.
local function free(id, record)
  change_running(record.user, -1)
  end_limited(id, record)
  pay_for_time(record.user, record.charge or 1, now - (record.claimed or now))
  if settings_of(record.user).max_running and review(record.user) then wake_worker() end
end

local function end_lease(id, record)
  redis.call('ZREM', K.leases, id)
  free(id, record)
end

local OPEN_READ = 100  -- unfinished tasks of one schedule that are looked at

-- The unfinished tasks of a schedule: ids, and records by id. Entries of tasks that are not there
-- any more, or cannot be read, are dropped.
local function open_runs(schedule)
  local members = redis.call('ZRANGEBYLEX', K.open, '[' .. schedule .. '\0', '(' .. schedule .. '\1',
    'LIMIT', 0, OPEN_READ)
  if #members == 0 then return {}, {} end
  local all, ids = {}, {}
  for i, member in ipairs(members) do all[i] = string.sub(member, #schedule + 2) end
  local records = read_statuses(all)
  for i, id in ipairs(all) do
    local record = records[id]
    if record and not record.ended then
      ids[#ids + 1] = id
    else
      redis.call('ZREM', K.open, members[i])
    end
  end
  return ids, records
end

-- Let a task that waits for the run of its schedule before it begin, if that has ended.
local function let_buffered_begin(schedule)
  local ids, records = open_runs(schedule)
  for _, id in ipairs(ids) do
    if not records[id].buffered then return end
  end
  if #ids == 0 then return end
  redis.call('ZADD', K.delayed, 'XX', now, ids[1])
  wake_worker()
end

-- A task of a schedule has ended.
local function end_open(id, record)
  if not record.schedule then return end
  redis.call('ZREM', K.open, record.schedule .. '\0' .. id)
  let_buffered_begin(record.schedule)
end

-- Write the last state of a task: finished, cancelled or buried.
local function close(id, record, state)
  record.state, record.ended, record.buffered = state, now, nil
  write_status(id, record)
  redis.call('ZADD', state == 'buried' and K.dead or K.ended, now, id)
  list_runs({ id }, { [id] = record })
  end_open(id, record)
  end_streak(record, state)
  count(state, 1)
  if state == 'buried' and record.timed_out then count('timed_out', 1) end
end

-- See to it that a task which does not run never will. The record's state is ready or delayed.
local function cancel_waiting(id, record)
  if record.state == 'delayed' then
    redis.call('ZREM', K.delayed, id)
  else
    remove_waiting(id, record)
  end
  close(id, record, 'cancelled')
end
