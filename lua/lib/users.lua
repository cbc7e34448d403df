-- Find users and tenants that have waiting or running tasks.
--
-- @include owners user_index
-- KEYS ready    zset  seats in the ring of the default pool that may be served
-- KEYS parked   zset  seats with waiting tasks that may not
-- KEYS running  hash  owner or tenant -> number of leased tasks
-- KEYS backlog  zset  seat NUL rank NUL task id NUL label: waiting tasks
-- KEYS held     zset  seat NUL gate NUL rank NUL task id NUL label: tasks that wait for room at a limit
-- KEYS rings    zset  kind ring NUL tag NUL seat: fair orders of tenants and of pools; see lib/rings

local function new_user_set()
  return { list = {}, has = {} }
end

-- Add the owners of seats to a set, each once.
local function add_users(found, seats)
  for _, seat in ipairs(seats) do
    local owner = string.match(seat, '^[^\3]*')
    if not found.has[owner] then
      found.has[owner] = true
      found.list[#found.list + 1] = owner
    end
  end
end

local function is_tenant(owner)
  return string.byte(owner) == 2 and not group_of(owner)
end

-- The range of the members of an owner, or of all users of a tenant, in all pools.
local function range_of_owner(owner)
  if is_tenant(owner) then return '[' .. owner .. '\2', '(' .. owner .. '\3' end
  return '[' .. owner .. '\0', '(' .. owner .. '\4'
end

-- Add owners and tenants with waiting or running tasks: at most `most` from each key.
local function add_active_users(found, most)
  add_users(found, redis.call('ZRANGE', K.ready, 0, most - 1))
  add_users(found, redis.call('ZRANGE', K.parked, 0, most - 1))
  add_users(found, redis.call('HRANDFIELD', K.running, most))
  if layout > 1 then
    for _, member in ipairs(redis.call('ZRANGEBYLEX', K.rings, '[r', '(s', 'LIMIT', 0, most)) do
      add_users(found, { string.match(member, '([^%z]*)$') })
    end
  end
  local seat = user_from(K.held, '', '')
  for _ = 1, most do
    if not seat then return end
    add_users(found, { seat })
    seat = user_after(K.held, '', seat)
  end
end

local SOME_HELD = redis.call('EXISTS', K.held) == 1

-- The number of waiting tasks of an owner or a tenant, and how many of them are held.
local function waiting_of(owner)
  local from, to = range_of_owner(owner)
  local held = SOME_HELD and redis.call('ZLEXCOUNT', K.held, from, to) or 0
  return redis.call('ZLEXCOUNT', K.backlog, from, to) + held, held
end

-- The value of each owner in a hash, or false. Reads in groups: unpack() is limited to a few thousand values.
local function fields_of(key, owners)
  local values = {}
  for first = 1, #owners, 1000 do
    local part = { unpack(owners, first, math.min(first + 999, #owners)) }
    for i, value in ipairs(redis.call('HMGET', key, unpack(part))) do values[first + i - 1] = value end
  end
  return values
end

-- The kind and value under which the runs of an owner or a tenant are counted that were service to it.
local function service_of(owner)
  return is_tenant(owner) and 'g' .. string.sub(owner, 2) or 'u' .. owner
end
