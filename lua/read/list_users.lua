-- List the users of a queue in order. One bounded read.
--
-- @include user_index owners byte_order
-- FLAGS no-writes
-- KEYS backlog         zset  seat NUL rank NUL task id NUL label: waiting tasks
-- KEYS held            zset  seat NUL gate NUL rank NUL task id: tasks that wait for room at a limit
-- KEYS delayed_index   zset  owner NUL when NUL task id: delayed tasks
-- KEYS running         hash  owner or tenant -> number of leased tasks
-- KEYS schedule_index  zset  user NUL schedule id
-- KEYS tenant_schedules  zset  tenant NUL user NUL schedule id
-- KEYS runs            zset  <kind> <value> NUL ...: ended runs; kind u is the owner
-- KEYS user_names      zset  owners and tenants with settings
-- KEYS tenant_users    zset  tenant NUL user
-- KEYS user_tenants    zset  user NUL tenant
-- ARGV after   text  start after this user NUL tenant (or user NUL), or empty
-- ARGV prefix  text  only users whose names begin with this, or empty
-- ARGV tenant  text  only users of this tenant, or empty
-- ARGV limit   int   at most this many
--
-- In the order of user ids, then of tenants; first the user without one.
--
-- Returns { 1 if there may be more or 0, then the place of each: user NUL tenant }.

local RUNNING = 1000  -- with more running users than this, those who have nothing else are left out
local TENANTS = 100   -- tenants of a user whose schedules are counted

local function with_prefix(user)
  return user and string.sub(user, 1, #A.prefix) == A.prefix and user or nil
end

local function count_under(key, prefix)
  return redis.call('ZLEXCOUNT', key, '[' .. prefix .. '\0', '(' .. prefix .. '\1')
end

-- Whether a user has a schedule without a tenant.
local function has_own_schedule(user)
  local count = count_under(K.schedule_index, user)
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.user_tenants, '[' .. user .. '\0', '(' .. user .. '\1',
    'LIMIT', 0, TENANTS)) do
    count = count - count_under(K.tenant_schedules, string.match(member, '%z(.*)$') .. '\0' .. user)
  end
  return count > 0
end

-- Users without a tenant, in order: those of seats and owners come after those of tenants.
local SOURCES = { { K.backlog, '' }, { K.held, '' }, { K.delayed_index, '' }, { K.runs, 'u' },
  { K.user_names, '' } }

local function plain_from(source, from)
  local user = user_from(source[1], source[2], from)
  return user and string.match(user, '^[^\3]*')
end

local function schedule_user_from(from)
  local user = user_from(K.schedule_index, '', from)
  while user and not has_own_schedule(user) do user = user_after(K.schedule_index, '', user) end
  return user
end

-- Users with running tasks from a name on, sorted: a hash has no order.
local function running_from(name)
  local users = {}
  if redis.call('HLEN', K.running) > RUNNING then return users end
  for _, user in ipairs(redis.call('HRANDFIELD', K.running, RUNNING)) do
    if string.byte(user) ~= 2 and with_prefix(user) and not is_before(user, name) then users[#users + 1] = user end
  end
  table.sort(users, is_before)
  return users
end

local limit = tonumber(A.limit)
local places = {}

if A.tenant ~= '' then
  local lead = A.tenant .. '\0'
  local from = A.after ~= '' and string.match(A.after, '^%Z*') .. '\1' or A.prefix
  local user = with_prefix(user_from(K.tenant_users, lead, from))
  while user and #places < limit do
    places[#places + 1] = user .. '\0' .. A.tenant
    user = with_prefix(user_after(K.tenant_users, lead, user))
  end
  return { user and 1 or 0, unpack(places) }
end

local after_user, after_tenant = string.match(A.after, '^(%Z*)%z(.*)$')
-- Members of seats and owners with a tenant begin with \2.
local from = after_user and after_user .. '\4' or A.prefix ~= '' and A.prefix or '\4'
local heads = {}
for i, source in ipairs(SOURCES) do heads[i] = with_prefix(plain_from(source, from)) end
local SCHEDULES, RUNS = #SOURCES + 1, #SOURCES + 2
heads[SCHEDULES] = with_prefix(schedule_user_from(from))
local running = running_from(from)
heads[RUNS] = running[1]
local pair_from = after_user and after_user .. '\0' .. after_tenant .. '\1' or A.prefix
local function pair_at(start)
  local member = redis.call('ZRANGEBYLEX', K.user_tenants, '[' .. start, '+', 'LIMIT', 0, 1)[1]
  return member and with_prefix(member) and member or nil
end
local pair = pair_at(pair_from)

local function least_head()
  local least
  for i = 1, RUNS do
    local head = heads[i]
    if head and head ~= least and (not least or is_before(head, least)) then least = head end
  end
  return least
end

local user = least_head()
while (user or pair) and #places < limit do
  if user and not (pair and is_before(pair, user .. '\0')) then
    places[#places + 1] = user .. '\0'
    for i, source in ipairs(SOURCES) do
      if heads[i] == user then heads[i] = with_prefix(plain_from(source, user .. '\4')) end
    end
    if heads[SCHEDULES] == user then heads[SCHEDULES] = with_prefix(schedule_user_from(user .. '\4')) end
    if heads[RUNS] == user then
      table.remove(running, 1)
      heads[RUNS] = running[1]
    end
    user = least_head()
  else
    places[#places + 1] = pair
    pair = pair_at(pair .. '\1')
  end
end
return { (user or pair) and 1 or 0, unpack(places) }
