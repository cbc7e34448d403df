-- Count what a partition serves before a task of another partition.
--
-- @include ahead
-- @lazy rings level
-- FLAGS no-writes
-- KEYS leases    zset  task id -> end of lease, ms
-- KEYS critical  zset  seat -> start tag in the CRITICAL lane
-- ARGV pool   text  the pool of the task; empty: the default one
-- ARGV level  text  at which the task is served; see lib/level
--
-- Returns { tasks of the pool that are served before, how many users and tenants they are of, those in the
-- CRITICAL lane, leases that have not ended, pace of the pool or '' }.

local name, pool = A.pool ~= '' and '\3' .. A.pool or '', A.pool ~= '' and A.pool or nil
local offset = level().of_ring(name)
local flat, size
if name == '' then
  flat, size = redis.call('ZRANGE', K.ready, 0, AHEAD - 1, 'WITHSCORES'), redis.call('ZCARD', K.ready)
else
  flat, size = rings().range(K.ready, name, 0, AHEAD), rings().count(K.ready, name)
end
local tasks, units = serves_until(flat, size, tonumber(A.level) - offset, '')
local lane = SETTINGS.critical_share > 0 and not pool and redis.call('ZCARD', K.critical) or 0
local leases = redis.call('ZCOUNT', K.leases, string.format('(%.0f', now), '+inf')
return { tasks, units, lane, leases, pace_of(pool) or '' }
