-- Count what is in the queue and read its counters, for metrics and health. One bounded read.
--
-- @include time
-- FLAGS no-writes
-- KEYS stats          hash  counter -> value
-- KEYS fair           hash  seq: number of tasks ever stored
-- KEYS ready          zset  users who may be served
-- KEYS parked         zset  users with waiting tasks who may not
-- KEYS backlog        zset  waiting tasks
-- KEYS held           zset  tasks that wait for a slot of their name
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
-- a backlog (flat list of numbers) }.

local function age(key)
  local head = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]
  return head and math.max(0, math.ceil(now - tonumber(head))) or 0
end

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

local active = redis.call('ZCARD', K.ready) + redis.call('ZCARD', K.parked)
local counters = redis.call('HGETALL', K.stats)
counters[#counters + 1] = 'pushed'
counters[#counters + 1] = redis.call('HGET', K.fair, 'seq') or '0'
return { now, counters,
  redis.call('ZCARD', K.backlog) + redis.call('ZCARD', K.held),
  redis.call('ZCARD', K.delayed), redis.call('ZCARD', K.leases),
  redis.call('ZCARD', K.dead), age(K.waiting), active, redis.call('ZCARD', K.parked),
  redis.call('HLEN', K.schedules), redis.call('ZCARD', K.due), age(K.due),
  redis.call('HLEN', K.broken), redis.call('GET', K.leader) or '',
  redis.call('GET', K.epoch) or '0', service() }
