-- Read what a client has to know of a partition to decide where it claims.
--
-- @include fair
-- @lazy level rings
-- FLAGS no-writes
-- KEYS delayed     zset  task id -> when it becomes ready, ms
-- KEYS leases      zset  task id -> end of lease, ms
-- KEYS parked      zset  seat -> when to look again, ms
-- KEYS gate_times  zset  gate -> when to look at it, ms
-- KEYS expiring   zset  task id -> when it ends as expired, ms
-- KEYS deadlines  zset  task id -> when its run has to end, ms
-- ARGV pools  text  pools, one per line; empty: the default pool
--
-- Returns { ms until a claim has something to do (-1: nothing known, 0: now), time in ms, levels of the pools, as
-- level.text writes them }.

local names = {}
for pool in string.gmatch(A.pools == '' and 'default' or A.pools, '[^\n]+') do
  names[#names + 1] = pool == 'default' and '' or '\3' .. pool
end
local offset, rests, lane_offset, lane_rests = level().shift()
local hint = fair.behind and 0 or -1  -- there are old records to drop
for _, key in ipairs({ K.delayed, K.leases, K.parked, K.gate_times, K.expiring, K.deadlines }) do
  local at = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or nil)
  if at and at < math.huge then
    local ms = math.max(0, math.ceil(at - now))
    if hint < 0 or ms < hint then hint = ms end
  end
end
return { hint, now, level().text(names, offset, rests, lane_offset, lane_rests) }
