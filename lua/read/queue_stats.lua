-- Count what is in the queue and read its counters, for metrics and health. One bounded read.
--
-- @include time active json
-- FLAGS no-writes
-- KEYS stats          hash  counter -> value
-- KEYS fair           hash  seq: number of tasks ever stored; pools: their names; pace: of the default pool
-- KEYS ready          zset  seats in the ring of the default pool that may be served
-- KEYS clocks         hash  the clocks of rings, and the pace of a pool; see lib/rings
-- KEYS pool_tasks     zset  pool NUL since NUL task id: waiting tasks of pools but the default one
-- KEYS backlog        zset  waiting tasks
-- KEYS held           zset  tasks that wait for room in the limits of their name or of a key
-- KEYS slots          zset  slots of names and keys that running tasks hold
-- KEYS uniques        hash  unique keys in use
-- KEYS status         hash  task id -> record
-- KEYS waiting        zset  task id -> since when it waits, ms
-- KEYS delayed        zset  delayed tasks
-- KEYS leases         zset  running tasks
-- KEYS dead           zset  dead letters
-- KEYS served         hash  user -> service / weight in this window
-- KEYS served_before  hash  user -> service / weight in the previous window
-- KEYS schedules      hash  definitions
-- KEYS due            zset  schedule id -> when to act, ms
-- KEYS broken         hash  schedules that were set aside
-- KEYS leader         string  the leader
-- KEYS epoch          string  number of terms so far
-- ARGV sample  int  compare the service of at most this many users with a backlog
--
-- Returns { time in ms, counters (flat), ready, delayed, running, dead, oldest wait in ms, active users,
-- parked users, schedules, active schedules, overdue in ms, set aside, leader, epoch, service of users with
-- a backlog (flat list of numbers), pools (flat list of name, waiting tasks, oldest wait in ms or -1, time of the
-- last claim; the default pool comes first, with 0 waiting tasks), active tenants, parked tenants, held, slots in
-- use, unique keys in use }. Users of tenants count each, their tenants do not, except as those whose service is
-- compared.

local function age(key)
  local head = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  return head and math.max(0, math.ceil(now - tonumber(head))) or 0
end

local OLDEST = 20  -- waiting tasks that are looked at to find the oldest one of the default pool

-- The service of each user who had a backlog during all of the previous window.
local function service()
  local amounts = {}
  local users = redis.call('ZRANDMEMBER', K.ready, tonumber(A.sample))
  if #users == 0 or redis.call('EXISTS', K.served_before) == 0 then return amounts end
  local before = redis.call('HMGET', K.served_before, unpack(users))
  local since = redis.call('HMGET', K.served, unpack(users))
  for i = 1, #users do
    local amount = before[i]
    if not amount and since[i] ~= 'late' then amount = 0 end
    if amount and amount ~= 'late' then amounts[#amounts + 1] = tostring(amount) end
  end
  return amounts
end

-- When a task of a pool was last claimed, from its pace; 0 if not known.
local function last_claim(pace)
  return string.match(pace or '', '(%d+) [01]$') or '0'
end

-- How long the oldest waiting task of the default pool has waited, in ms; -1 if the oldest tasks are all of
-- other pools.
local function oldest_in_default(pools)
  if pools == '' then return age(K.waiting) end
  local flat = redis.call('ZRANGE', K.waiting, 0, OLDEST - 1, 'WITHSCORES')
  for i = 1, #flat, 2 do
    local record = decode(redis.call('HGET', K.status, flat[i])) or {}
    if not record.pool then return math.max(0, math.ceil(now - tonumber(flat[i + 1]))) end
  end
  return #flat < 2 * OLDEST and 0 or -1
end

local function pools()
  local names = redis.call('HGET', K.fair, 'pools') or ''
  local found = { '', 0, oldest_in_default(names), last_claim(redis.call('HGET', K.fair, 'pace')) }
  for pool in string.gmatch(names, '[^\n]+') do
    local from, to = '[' .. pool .. '\0', '(' .. pool .. '\1'
    local first = redis.call('ZRANGEBYLEX', K.pool_tasks, from, to, 'LIMIT', 0, 1)[1]
    local since = first and tonumber(string.match(first, '^%Z*%z(%d+)'))
    for _, value in ipairs({ pool, redis.call('ZLEXCOUNT', K.pool_tasks, from, to),
      since and math.max(0, math.ceil(now - since)) or 0,
      last_claim(redis.call('HGET', K.clocks, '\3' .. pool)) }) do found[#found + 1] = value end
  end
  return found
end

local active = count_active()
local counters = redis.call('HGETALL', K.stats)
counters[#counters + 1] = 'pushed'
counters[#counters + 1] = redis.call('HGET', K.fair, 'seq') or '0'
return { now, counters,
  redis.call('ZCARD', K.backlog) + redis.call('ZCARD', K.held),
  redis.call('ZCARD', K.delayed), redis.call('ZCARD', K.leases),
  redis.call('ZCARD', K.dead), age(K.waiting), active.users, active.parked_users,
  redis.call('HLEN', K.schedules), redis.call('ZCARD', K.due), age(K.due),
  redis.call('HLEN', K.broken), redis.call('GET', K.leader) or '',
  redis.call('GET', K.epoch) or '0', service(), pools(), active.tenants, active.parked_tenants,
  redis.call('ZCARD', K.held), redis.call('ZCARD', K.slots), redis.call('HLEN', K.uniques) }
