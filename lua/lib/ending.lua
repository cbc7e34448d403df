-- End tasks, keep the ended ones for as long as the settings say, and free what they held.
--
-- @include limits history replay stats failure_streaks delays
-- KEYS tasks    hash  task id -> its document, JSON
-- KEYS ended    zset  task id -> when it finished or was cancelled, ms
-- KEYS dead     zset  task id -> when it was buried, ms
-- KEYS open     zset  schedule NUL task id, all scores 0: unfinished tasks of schedules

local DROP_GROUP = 10      -- records read together: the bytes of so many may be read in vain
local DROP_COST = 16777216 -- of one call, in bytes that are freed: some 3 ms
local DECODE_COST = 15     -- so much more than to free a byte it costs to decode it,
local HASH_COST = 25       -- and to read and hash it

-- What stays of the first of some ended tasks, as many as one call may drop: ids, records by id, graves.
local function bury_first(ids)
  -- The documents of tasks whose records have no digest, by id.
  local function undigested(group, records)
    local missing, documents = {}, {}
    for _, id in ipairs(group) do
      if not (records[id] and records[id].digest) then missing[#missing + 1] = id end
    end
    if #missing == 0 then return documents end
    for i, document in ipairs(redis.call('HMGET', K.tasks, unpack(missing))) do
      documents[missing[i]] = document or ''
    end
    return documents
  end
  local dropped, kept, graves, budget = {}, {}, {}, DROP_COST
  for from = 1, #ids, DROP_GROUP do
    local group = { unpack(ids, from, math.min(from + DROP_GROUP - 1, #ids)) }
    local records = read_statuses(group)
    local documents = undigested(group, records)
    for _, id in ipairs(group) do
      local record, document = records[id], documents[id]
      budget = budget - DECODE_COST * #(status_texts[id] or '')
        - (document and HASH_COST * #document or tonumber(record.bytes) or 0)
      if budget < 0 and #dropped > 0 then return dropped, kept, graves end
      dropped[#dropped + 1], kept[id] = id, record
      graves[#graves + 1] = 't:' .. id
      graves[#graves + 1] = grave_of(record, document)
    end
  end
  return dropped, kept, graves
end

-- Drop ended tasks, the first of them at least: how many. Each leaves a grave behind for a while,
-- however old it is: the push or finish that is told of it now may be repeated in a moment.
local function drop(key, ids)
  local dropped, records, graves = bury_first(ids)
  turn_generation()
  redis.call('HSET', K.ops, unpack(graves))
  redis.call('ZREM', key, unpack(dropped))
  redis.call('HDEL', K.tasks, unpack(dropped))
  redis.call('HDEL', K.status, unpack(dropped))
  unlist_runs(dropped, records)
  return #dropped
end

-- Drop the oldest records beyond the limits; at most twice as many as were added, so that a call
-- stays short and a lowered limit is reached all the same. What a call leaves over, claims take up.
local function trim_all(added)
  local budget = 2 * added + 10
  -- True if there may be more.
  local function trim(key, keep, keep_ms)
    local over = math.min(redis.call('ZCARD', key) - keep, budget)
    local ids = {}
    if over > 0 then ids = redis.call('ZRANGE', key, 0, over - 1) end
    if #ids == 0 then
      ids = redis.call('ZRANGE', key, '-inf', string.format('%.0f', now - keep_ms), 'BYSCORE',
        'LIMIT', 0, budget)
    end
    if #ids == 0 then return false end
    return drop(key, ids) < #ids or #ids == budget
  end
  local ended = trim(K.ended, SETTINGS.keep_finished, SETTINGS.keep_finished_ms)
  local dead = trim(K.dead, SETTINGS.keep_dead, SETTINGS.keep_dead_ms)
  if (ended or dead) == fair.behind then return end
  fair.behind = ended or dead
  if fair.behind then
    redis.call('HSET', K.fair, 'behind', '1')
  else
    redis.call('HDEL', K.fair, 'behind')
  end
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

local OPEN_READ = 100  -- unfinished tasks of one schedule that are looked at together

-- The next of the unfinished tasks of a schedule, behind a member or from the first: their members.
local function open_members(schedule, after, most)
  return redis.call('ZRANGEBYLEX', K.open, after and '(' .. after or '[' .. schedule .. '\0',
    '(' .. schedule .. '\1', 'LIMIT', 0, most)
end

-- The tasks of such members: ids, and records by id. Entries of tasks that are not there any more,
-- or cannot be read, are dropped.
local function open_runs(schedule, members)
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

local unbuffered = {}  -- schedule -> an unfinished task of it that is not buffered

-- Let a task that waits for the run of its schedule before it begin, if that has ended. True if any
-- task of the schedule is unfinished. The first one mostly tells: others are read only behind those
-- that are buffered or gone.
local function let_buffered_begin(schedule)
  local first, begins, after, looked, most = nil, nil, nil, 0, 1
  while looked < OPEN_READ do
    local members = open_members(schedule, after, most)
    if #members == 0 then break end
    local ids, records = open_runs(schedule, members)
    for _, id in ipairs(ids) do
      if not records[id].buffered then
        unbuffered[schedule] = id
        return true
      end
      if not first then first, begins = id, records[id] end
    end
    after, looked, most = members[#members], looked + #members, OPEN_READ
  end
  if not first then return false end
  delays.move(first, begins.user, now)
  wake_worker()
  kinds.wake(begins.name)
  return true
end

-- A task of a schedule has ended.
local function end_open(id, record)
  if not record.schedule then return end
  redis.call('ZREM', K.open, record.schedule .. '\0' .. id)
  local other = unbuffered[record.schedule]
  if other and other ~= id then return end
  let_buffered_begin(record.schedule)
end

-- Tasks have ended, of schedules and others: each schedule is looked at once.
local function end_open_runs(ids, records)
  local members, schedules = {}, {}
  for _, id in ipairs(ids) do
    local schedule = records[id].schedule
    if schedule then
      members[#members + 1] = schedule .. '\0' .. id
      schedules[schedule] = true
    end
  end
  if #members == 0 then return end
  redis.call('ZREM', K.open, unpack(members))
  for schedule in pairs(schedules) do let_buffered_begin(schedule) end
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
    delays.remove(id, record.user)
  else
    remove_waiting(id, record)
  end
  close(id, record, 'cancelled')
end
