-- Count the users and the tenants that have waiting tasks.
--
-- KEYS ready   zset  seats in the ring of the default pool that may be served
-- KEYS parked  zset  seats with waiting tasks that may not
-- KEYS rings   zset  kind ring NUL tag NUL seat: fair orders of tenants and of pools; see lib/rings

local TENANTS = 1000  -- seats of each kind that are looked at to find tenants among them

-- Users are counted in each pool in which they wait, tenants once. A queue without tenants and pools has two
-- sorted sets to count.
local function count_active()
  local found = { users = redis.call('ZCARD', K.ready), parked_users = redis.call('ZCARD', K.parked),
    tenants = 0, parked_tenants = 0 }
  if layout > 1 then
    local seen = {}
    -- Count a seat that stands for a tenant: it does not wait itself.
    local function is_tenant(seat, parked)
      local tenant = string.match(seat, '^\2([^\2\3]*)\3?[^\2]*$')
      if not tenant then return false end
      if not seen[tenant] then found.tenants = found.tenants + 1 end
      if parked and seen[tenant] ~= 'parked' then found.parked_tenants = found.parked_tenants + 1 end
      seen[tenant] = parked and 'parked' or seen[tenant] or 'ready'
      return true
    end
    local others = redis.call('ZRANGEBYLEX', K.rings, '[r\3', '(r\4', 'LIMIT', 0, TENANTS)
    found.users = found.users + redis.call('ZLEXCOUNT', K.rings, '[r', '(s')
    for _, seat in ipairs(redis.call('ZRANGE', K.parked, 0, TENANTS - 1)) do
      if is_tenant(seat, true) then found.parked_users = found.parked_users - 1 end
    end
    for _, seat in ipairs(redis.call('ZRANGE', K.ready, 0, TENANTS - 1)) do
      if is_tenant(seat) then found.users = found.users - 1 end
    end
    for _, member in ipairs(others) do
      if is_tenant(string.match(member, '^%Z*%z%Z*%z(.*)$') or '') then found.users = found.users - 1 end
    end
  end
  found.users = found.users + found.parked_users
  return found
end
