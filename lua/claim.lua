-- Hand the next tasks to a worker, fairly between users, and start their leases.
--
-- @include upkeep
-- FLAGS allow-oom
-- KEYS served         hash  user -> service / weight in this window, or 'late'
-- KEYS served_before  hash  the same, of the window before
-- ARGV op        text  random; the lease token. Repeated: the tasks that it still holds, if any
-- ARGV worker    text  who claims
-- ARGV limit     int   how many tasks at most
-- ARGV lease_ms  int   how long the leases are
--
-- First does what time has made due. A user's cost does not depend on how many others wait, are
-- capped or are paused: those who may not be served are not in ready.
--
-- Returns { ms until something becomes claimable (-1: nothing known, 0: now), ms of the clock,
-- then for each task: id, document, status }.

local WINDOW_MS = 10000      -- service is compared between users over windows of this length
local CRITICAL_CREDIT = 10   -- so many CRITICAL tasks may go first in a row before the share binds

local limit, lease_end = tonumber(A.limit), now + tonumber(A.lease_ms)

-- What a repeated claim still holds: ids and records.
local function still_held()
  local ids, records = {}, {}
  local before = first_answer(A.op)
  if not before then return ids, records end
  for id in string.gmatch(before, '[^\n]+') do
    local record = held(id, A.op)
    if record then
      ids[#ids + 1] = id
      records[#records + 1] = record
    end
  end
  return ids, records
end

local service = {}
local function count_service(user, amount)
  local seen = service[user]
  if not seen then seen = redis.call('HGET', K.served, user) or 0 end
  if seen ~= 'late' then seen = tonumber(seen) + amount end
  service[user] = seen
end

local function turn_window()
  local since = tonumber(redis.call('HGET', K.fair, 'window') or nil)
  if since and math.abs(now - since) < WINDOW_MS then return end
  redis.call('UNLINK', K.served_before)
  if redis.call('EXISTS', K.served) == 1 then
    redis.call('RENAME', K.served, K.served_before)
  end
  redis.call('HSET', K.fair, 'window', now)
end

local function save_service()
  local flat = {}
  for user, amount in pairs(service) do
    flat[#flat + 1] = user
    flat[#flat + 1] = amount
  end
  if #flat > 0 then redis.call('HSET', K.served, unpack(flat)) end
end

-- The lane that may be served next and its first user: 'critical', 'ready', or nil.
local function next_lane()
  local share = SETTINGS.critical_share
  if share > 0 and (share >= 1 or (fair.credit or CRITICAL_CREDIT) >= 1) then
    local first = redis.call('ZRANGE', K.critical, 0, 0, 'WITHSCORES')
    if first[1] then return 'critical', first[1], tonumber(first[2]) end
  end
  local first = redis.call('ZRANGE', K.ready, 0, 0, 'WITHSCORES')
  if first[1] then return 'ready', first[1], tonumber(first[2]) end
  return nil
end

-- Charge a serve to the user; the new tag of the ordinary lane.
local function charge(lane, user, tag, cost)
  local stride, share = cost / settings_of(user).weight, SETTINGS.critical_share
  fair_dirty = true
  if lane == 'critical' then
    fair.critical_clock = math.max(fair.critical_clock, tag)
    redis.call('ZADD', K.critical, 'XX', tag + stride, user)
    if share < 1 then fair.credit = (fair.credit or CRITICAL_CREDIT) - 1 end
    tag = tonumber(redis.call('ZSCORE', K.ready, user) or nil) or fair.clock
  else
    fair.clock = math.max(fair.clock, tag)
    if share < 1 and fair.credit then
      fair.credit = math.min(CRITICAL_CREDIT, fair.credit + share / (1 - share))
    end
  end
  return tag + stride, stride
end

-- Where the user goes after a serve, knowing what is next in the user's backlog.
local function move_on(user, tag, stride, was_critical, following)
  if was_critical and not (following and is_critical(user, following)) then
    redis.call('ZREM', K.critical, user)
  end
  local wait = following and blocked_until(user)
  if following and not wait then
    redis.call('ZADD', K.ready, tag, user)
    count_service(user, stride)
    return
  end
  redis.call('ZREM', K.ready, user)
  redis.call('ZADD', K.idle, tag, user)
  service[user] = 'late'
  if wait then
    redis.call('ZREM', K.critical, user)
    redis.call('ZADD', K.parked, wait, user)
  end
end

-- Serve the first task of a user; its id and record, or nil if it could not be read.
local function serve(lane, user, tag)
  local two = first_waiting(user, 2)
  if not two[1] then
    leave(user)
    return nil
  end
  local id = string.match(two[1], '^%Z*%z%Z*%z(.*)$')
  redis.call('ZREM', K.backlog, two[1])
  redis.call('ZREM', K.waiting, id)
  local record = read_status(id)
  if not record then
    redis.call('HINCRBY', K.stats, 'broken_tasks', 1)
    if not two[2] then leave(user) end
    return nil
  end
  local cost = cost_of(user)
  local finish_tag, stride = charge(lane, user, tag, cost)
  change_running(user, 1)
  spend_rate(user)
  move_on(user, finish_tag, stride, is_critical(user, two[1]), two[2])
  record.state, record.token, record.worker = 'running', A.op, A.worker
  record.attempts = record.attempts + 1
  record.charge, record.claimed = cost, now
  return id, record
end

local function serve_many()
  local ids, records = {}, {}
  -- Each round serves a task or takes a broken entry away, so that this ends.
  for _ = 1, limit + UPKEEP do
    if #ids >= limit then break end
    local lane, user, tag = next_lane()
    if not lane then break end
    local id, record = serve(lane, user, tag)
    if id then
      ids[#ids + 1] = id
      records[#records + 1] = record
    end
  end
  return ids, records
end

local function reap_idle(served)
  local passed = redis.call('ZRANGE', K.idle, '-inf', fair.clock, 'BYSCORE',
    'LIMIT', 0, 2 * served + 10)
  if #passed == 0 then return end
  redis.call('ZREM', K.idle, unpack(passed))
  if SETTINGS.cost == 'time' then redis.call('HDEL', K.usage, unpack(passed)) end
end

local function wait_hint()
  if redis.call('ZCARD', K.ready) > 0 then return 0 end
  local soonest = -1
  for _, key in ipairs({ K.delayed, K.leases, K.parked }) do
    local head = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
    local at = tonumber(head or nil)
    if at and at < math.huge then
      local ms = math.max(0, math.ceil(at - now))
      if soonest < 0 or ms < soonest then soonest = ms end
    end
  end
  return soonest
end

local ids, records = still_held()
if #ids == 0 then
  upkeep()
  turn_window()
  ids, records = serve_many()
  if #ids == 0 and redis.call('HLEN', K.running) == 0 then settle() end
  if #ids > 0 then
    local leases, statuses = {}, {}
    for i, id in ipairs(ids) do
      leases[2 * i - 1], leases[2 * i] = lease_end, id
      statuses[2 * i - 1], statuses[2 * i] = id, cjson.encode(records[i])
    end
    redis.call('ZADD', K.leases, unpack(leases))
    redis.call('HSET', K.status, unpack(statuses))
    redis.call('HINCRBY', K.stats, 'claimed', #ids)
    remember(A.op, table.concat(ids, '\n'))
    save_service()
  end
  reap_idle(#ids)
  save_fair()
end

local hint = wait_hint()
-- One token wakes one worker: whoever finds more work than it took passes it on.
if hint == 0 and #ids > 0 then wake_worker() end
local answer = { hint, now }
if #ids > 0 then
  local documents = redis.call('HMGET', K.tasks, unpack(ids))
  for i, id in ipairs(ids) do
    answer[#answer + 1] = id
    answer[#answer + 1] = documents[i] or ''
    answer[#answer + 1] = cjson.encode(records[i])
  end
end
return answer
