-- Count the users and the tenants that have waiting tasks.
--
-- KEYS ready   zset  seats in the ring of the default pool that may be served
-- KEYS parked  zset  seats with waiting tasks that may not
-- KEYS rings   zset  kind ring NUL tag NUL seat: fair orders of tenants and of pools; see lib/rings

local LOOKED_AT = 500  -- seats of each kind in which tenants are counted; about half a ms of server time

-- The tenant that a seat stands for; nil for a user.
local function tenant_at(seat)
  if string.byte(seat) ~= 2 or string.find(seat, '\2', 2, true) then return nil end
  return string.match(seat, '^\2([^\3]*)')
end

-- Users are counted in each pool in which they wait, tenants once. A seat that stands for a tenant does not wait
-- itself. Among many seats, tenants are counted in the first ones, and the others are taken to be like those. A
-- queue without tenants and pools has two sorted sets to count.
local function count_active()
  local found = { users = redis.call('ZCARD', K.ready), parked_users = redis.call('ZCARD', K.parked),
    tenants = 0, parked_tenants = 0 }
  if layout == 1 then
    found.users = found.users + found.parked_users
    return found
  end
  local seen = {}
  local parked_seats = redis.call('ZRANGE', K.parked, 0, LOOKED_AT - 1)
  -- The number of tenants among `total` seats, of which the first ones are given; and of those not seen before.
  local function count_tenants(seats, total)
    local count, new = 0, 0
    for _, seat in ipairs(seats) do
      local tenant = tenant_at(seat)
      if tenant then
        count = count + 1
        if not seen[tenant] then seen[tenant], new = true, new + 1 end
      end
    end
    local scale = math.max(1, total / math.max(1, #seats))
    return math.floor(count * scale + 0.5), math.floor(new * scale + 0.5)
  end

  local parked, parked_tenants = count_tenants(parked_seats, found.parked_users)
  local ready, ready_tenants = count_tenants(redis.call('ZRANGE', K.ready, 0, LOOKED_AT - 1), found.users)
  local others = redis.call('ZRANGEBYLEX', K.rings, '[r\3', '(r\4', 'LIMIT', 0, LOOKED_AT)
  for i, member in ipairs(others) do others[i] = string.match(member, '^%Z*%z%Z*%z(.*)$') or '' end
  local in_pools = redis.call('ZLEXCOUNT', K.rings, '[r\3', '(r\4')
  local of_pools, pool_tenants = count_tenants(others, in_pools)
  -- Those of other pools may be among the seats that were not looked at.
  if found.users > LOOKED_AT then pool_tenants = 0 end
  found.tenants, found.parked_tenants = parked_tenants + ready_tenants + pool_tenants, parked_tenants
  -- A tenant all of whose users are parked has no place itself.
  for _, seat in ipairs(parked_seats) do
    local tenant = string.match(seat, '^\2([^\2\3]*)\2')
    if tenant and not seen[tenant] then seen[tenant], found.tenants = true, found.tenants + 1 end
  end
  found.parked_users = found.parked_users - parked
  found.users = found.users - ready + redis.call('ZLEXCOUNT', K.rings, '[r\2', '(r\3') + in_pools - of_pools
    + found.parked_users
  return found
end
