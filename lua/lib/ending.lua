-- End tasks, release what they hold, and drop old records.
--
-- @include backlog history replay stats
-- @lazy rings delays gates uniques failure_streaks
-- KEYS tasks      hash  task id -> its document, JSON
-- KEYS ended      zset  task id -> when it finished, was cancelled or expired, ms
-- KEYS dead       zset  task id -> when it was buried, ms
-- KEYS open       zset  schedule NUL task id, all scores 0: unfinished tasks of schedules
-- KEYS deadlines  zset  leased task id -> when its run is ended if the worker has not answered, ms
-- KEYS expiring   zset  task id -> when it ends as expired if it has not started, ms

local DROP_GROUP = 10      -- records read at a time; this many may be read unnecessarily
local DROP_COST = 16777216 -- budget of one call, in freed bytes: about 3 ms
local DECODE_COST = 15     -- cost of decoding a byte, in freed bytes
local HASH_COST = 25       -- cost of reading and hashing a byte, in freed bytes

-- Choose how many of the ended tasks this call may drop, from the first on. Returns their ids, their records
-- by id, and their tombstones.
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
  local dropped, kept, tombstones, budget = {}, {}, {}, DROP_COST
  for from = 1, #ids, DROP_GROUP do
    local group = { unpack(ids, from, math.min(from + DROP_GROUP - 1, #ids)) }
    local records = read_statuses(group)
    local documents = undigested(group, records)
    for _, id in ipairs(group) do
      local record, document = records[id], documents[id]
      budget = budget - DECODE_COST * #(status_texts[id] or '')
        - (document and HASH_COST * #document or tonumber(record.bytes) or 0)
      if budget < 0 and #dropped > 0 then return dropped, kept, tombstones end
      dropped[#dropped + 1], kept[id] = id, record
      tombstones[#tombstones + 1] = 't:' .. id
      tombstones[#tombstones + 1] = tombstone_of(record, document)
    end
  end
  return dropped, kept, tombstones
end

-- Drop ended tasks, at least the first of them. Returns how many. Each leaves a tombstone for a while,
-- however old it is, because the push or finish that was just answered may be repeated.
local function drop_tasks(key, ids)
  local dropped, records, tombstones = bury_first(ids)
  turn_generation()
  redis.call('HSET', K.ops, unpack(tombstones))
  redis.call('ZREM', key, unpack(dropped))
  redis.call('HDEL', K.tasks, unpack(dropped))
  redis.call('HDEL', K.status, unpack(dropped))
  unlist_runs(dropped, records)
  return #dropped
end

-- Drop the oldest records beyond the limits: at most twice as many as were added, so that a call stays
-- short and a lowered limit is still reached. Claims drop what is left.
local function trim_all(added)
  local budget = 2 * added + 10
  -- Returns true if there may be more.
  local function trim(key, keep, keep_ms)
    local over = math.min(redis.call('ZCARD', key) - keep, budget)
    local ids = {}
    if over > 0 then ids = redis.call('ZRANGE', key, 0, over - 1) end
    if #ids == 0 then
      ids = redis.call('ZRANGE', key, '-inf', string.format('%.0f', now - keep_ms), 'BYSCORE',
        'LIMIT', 0, budget)
    end
    if #ids == 0 then return false end
    return drop_tasks(key, ids) < #ids or #ids == budget
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

-- Release the slots and the deadline of a lease that has ended.
local function end_limits(id, record)
  if record.slot or record.slots then gates().free(id, record) end
  if record.deadline then
    redis.call('ZREM', K.deadlines, id)
    record.deadline, record.ruled = nil, nil
  end
end

-- True if this token holds the lease of the task. An expired lease that was not taken back yet still
-- counts, because nobody else has the task.
local function is_held(record, token)
  return record and record.state == 'running' and record.token == token
end

local function held_record(id, token)
  local record = read_status(id)
  return is_held(record, token) and record or nil
end

-- Make the parts that the end of a task needs: they check their keys before anything is written. `cost`: what the
-- attempt has cost, if the worker says so.
local function prepare_end(record, cost)
  if cost then gates() end
  if record.group or record.pool then rings() end
  if record.slot or record.slots or (record.flow and record.flow.keys) then gates() end
  if record.flow and record.flow.unique then uniques() end
  if record.fail_limit then failure_streaks() end
  if record.state == 'delayed' then delays() end
end

-- Check the lease before ending it. Returns the answer if the operation was done before or the lease is
-- lost; otherwise nil and the record.
local function begin_ending(op, id, token, cost)
  local before = first_answer(op)
  if before then return before end
  local record = held_record(id, token)
  if record then
    prepare_end(record, cost)
    return nil, record
  end
  count('lost_leases', 1)
  return remember(op, 'lost_lease')
end

-- Release what a lease holds, except its entry in leases: running count, cost, caps, slots, deadline. `cost`: what
-- the attempt has cost, if the worker says so.
local function free_lease(id, record, cost)
  local owner = owner_of(record)
  change_running(owner, -1)
  end_limits(id, record)
  settle_cost(record, cost)
  if cost then gates().settle(id, record, cost) end
  while owner do
    local s = settings_of(owner)
    if (s.max_running or (cost and s.rate)) and review(owner) then wake_worker() end
    owner = group_of(owner)
  end
end

local function end_lease(id, record, cost)
  redis.call('ZREM', K.leases, id)
  free_lease(id, record, cost)
end

local OPEN_READ = 100  -- unfinished tasks of one schedule that are read at a time

-- The members of unfinished tasks of a schedule, from the first or after a member.
local function open_members(schedule, after, most)
  return redis.call('ZRANGEBYLEX', K.open, after and '(' .. after or '[' .. schedule .. '\0',
    '(' .. schedule .. '\1', 'LIMIT', 0, most)
end

-- Return the tasks of the given `open` members: ids, and records by id. Drops the entries of tasks that are
-- gone or cannot be read.
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

local unbuffered = {}  -- schedule -> one of its unfinished tasks that is not buffered

-- Let the buffered task of a schedule begin if the previous run has ended. Returns true if any task of the
-- schedule is unfinished. Usually the first task is enough; more are read only if it is buffered or gone.
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
  delays().move(first, owner_of(begins), now)
  wake_for(begins)
  return true
end

-- Note that a task has ended, if it belongs to a schedule.
local function end_open(id, record)
  if not record.schedule then return end
  redis.call('ZREM', K.open, record.schedule .. '\0' .. id)
  local other = unbuffered[record.schedule]
  if other and other ~= id then return end
  let_buffered_begin(record.schedule)
end

-- Note that tasks have ended, and look at each of their schedules once.
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

-- Count a task that has ended as a failure or a success of its schedule in a row, if that has a limit of failures.
local function end_streak(record, state)
  if record.schedule and type(record.fail_limit) == 'number' then failure_streaks().count(record, state) end
end

-- End a task with its last state: finished, cancelled, expired or buried.
local function end_task(id, record, state)
  record.state, record.ended, record.buffered, record.behind = state, now, nil, nil
  write_status(id, record)
  redis.call('ZADD', state == 'buried' and K.dead or K.ended, now, id)
  list_runs({ id }, { [id] = record })
  end_open(id, record)
  end_streak(record, state)
  if record.flow and record.flow.unique then uniques().ended(id, record) end
  count(COUNTER_OF_STATE[state] or state, 1)
  if state == 'buried' and record.timed_out then count('timed_out', 1) end
end

-- End a task that is ready or delayed: as cancelled, or as expired.
local function end_waiting(id, record, state)
  prepare_end(record)
  if record.state == 'delayed' then
    delays().remove(id, owner_of(record))
    if record.flow and record.flow.keys then gates().forget(waiting_task(id, record)) end
  else
    remove_waiting(id, record)
  end
  if record.expires then redis.call('ZREM', K.expiring, id) end
  end_task(id, record, state)
end
