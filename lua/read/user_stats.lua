-- Read the figures of some users or tenants, and how many runs ended in all. One bounded read.
--
-- @include users retention ended_runs ahead
-- @lazy level
-- FLAGS no-writes
-- KEYS users           hash  owner or tenant -> settings, JSON
-- KEYS waiting         zset  task id -> since when it waits, ms
-- KEYS schedule_index  zset  user NUL schedule id
-- KEYS tenant_schedules  zset  tenant NUL user NUL schedule id
-- KEYS user_tenants    zset  user NUL tenant
-- KEYS tenant_users    zset  tenant NUL user
-- KEYS delayed_index   zset  owner NUL when NUL task id: tasks that become ready later
-- ARGV since_ms  int   start of the window in which runs are counted
-- ARGV tenant    text  count all runs of this tenant; empty: all runs of the queue
-- ARGV ...  owners or tenants, some dozens; see lib/owners
-- ROW user  text  an owner or a tenant
--
-- The window starts later if runs that ended in it have been dropped.
--
-- Returns { time in ms, start of the window, runs that ended in it; then a list for each: settings or
-- '', waiting tasks, how many of them are held, running tasks, seats before it in its ring of the default pool or
-- -1, parked until or '', schedules, longest wait in ms of its first tasks or -1, runs that ended in the window,
-- median of their last waits or -1, 95th percentile or -1, delayed tasks, when the first of these becomes
-- ready in ms or -1, 1 if it is known or 0, users (of a tenant), the level at which it is served if it waits for a
-- place in the queue or '' (see lib/level), and that of the clock if nothing waited before or '' }.

local FIRST_TASKS = 10  -- first tasks of a user whose waits are read
local LAST_RUNS = 20    -- last runs of a user whose waits are read
local TENANTS = 100     -- tenants of a user whose schedules are counted
local COUNTED = 10000   -- users of a tenant that are counted

local window = cut_window(tonumber(A.since_ms))

-- Add the ids of the first tasks in an index.
local function add_first(ids, key, owner, pattern)
  local from, to = range_of_owner(owner)
  for _, member in ipairs(redis.call('ZRANGEBYLEX', key, from, to, 'LIMIT', 0, FIRST_TASKS)) do
    ids[#ids + 1] = string.match(member, pattern)
  end
end

-- How long the oldest of the first tasks has waited, ms; -1 if there is none.
local function oldest_wait(owner, waiting, held)
  local ids = {}
  if waiting > held then add_first(ids, K.backlog, owner, '^%Z*%z%Z*%z(%Z*)') end
  if held > 0 then add_first(ids, K.held, owner, '^%Z*%z%Z*%z%Z*%z(%Z*)') end
  if #ids == 0 then return -1 end
  local oldest = now
  for _, since in ipairs(redis.call('ZMSCORE', K.waiting, unpack(ids))) do
    oldest = math.min(oldest, tonumber(since or nil) or now)
  end
  return now - oldest
end

-- The number of delayed tasks of an owner or a tenant, and when the first becomes ready, ms, or -1.
local function delayed_of(owner)
  local from, to = range_of_owner(owner)
  local first = redis.call('ZRANGEBYLEX', K.delayed_index, from, to, 'LIMIT', 0, 1)[1]
  if not first then return 0, -1 end
  return redis.call('ZLEXCOUNT', K.delayed_index, from, to), tonumber(string.match(first, '%z(%d+)')) or -1
end

local function count_under(key, prefix)
  return redis.call('ZLEXCOUNT', key, '[' .. prefix .. '\0', '(' .. prefix .. '\1')
end

-- The number of schedules. The index by user has those of all tenants of a user.
local function schedules_of(owner)
  local tenant, user = string.match(owner, '^\2([^\2]*)\2?(.*)$')
  if tenant then return count_under(K.tenant_schedules, user == '' and tenant or tenant .. '\0' .. user) end
  local count = count_under(K.schedule_index, owner)
  if count == 0 then return 0 end
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.user_tenants, '[' .. owner .. '\0', '(' .. owner .. '\1',
    'LIMIT', 0, TENANTS)) do
    count = count - count_under(K.tenant_schedules, string.match(member, '%z(.*)$') .. '\0' .. owner)
  end
  return math.max(0, count)
end

-- Whether a user of a tenant, or a tenant, is listed.
local function is_listed(owner)
  local tenant, user = string.match(owner, '^\2([^\2]*)\2?(.*)$')
  if not tenant then return false end
  if user == '' then return user_from(K.tenant_users, tenant .. '\0', '') ~= nil end
  return redis.call('ZSCORE', K.tenant_users, tenant .. '\0' .. user) ~= false
end

local function rank_of_seat(seat)
  if in_root(seat) then return redis.call('ZRANK', K.ready, seat) end
  return rings().rank(seat)
end

-- The level of a seat among all who share the queue, and that of the clock if nothing waited before.
local function level_of(seat)
  local tag = in_root(seat) and redis.call('ZSCORE', K.ready, seat)
  if not tag then return '', '' end
  local offset, rests = level().of_ring('')
  return text_of(offset + tonumber(tag)), rests and text_of(offset + ring_of(seat).clock) or ''
end

local page = {}
for i = FIRST, #ARGV do page[#page + 1] = R.user[i] end

local rows = {}
local running = fields_of(K.running, page)
for i, settings in ipairs(fields_of(K.users, page)) do
  local owner = page[i]
  settings = settings or string.byte(owner) == 2 and rings().inherited(owner)
  local waiting, held = waiting_of(owner)
  local runs = math.max(0, tonumber(running[i] or nil) or 0)
  local schedules = schedules_of(owner)
  local ended = count_runs(service_of(owner), window)
  local waits = ended > 0 and waits_of(newest_runs(service_of(owner), window, LAST_RUNS)) or {}
  local later, next_due = delayed_of(owner)
  local is_known = settings or waiting + runs + schedules + later > 0 or is_listed(owner)
    or count_runs(service_of(owner), 0) > 0 or count_runs('d' .. owner, 0) > 0
  local before, parked, at_level, clock_level = false, false, '', ''
  if waiting > 0 then
    before, parked = rank_of_seat(owner), redis.call('ZSCORE', K.parked, owner)
    at_level, clock_level = level_of(owner)
  end
  rows[i] = { settings or '', waiting, held, runs, before or -1, parked or '', schedules,
    oldest_wait(owner, waiting, held), ended, percentile(waits, 0.5) or -1, percentile(waits, 0.95) or -1,
    later, next_due, is_known and 1 or 0,
    is_tenant(owner) and math.min(COUNTED, count_under(K.tenant_users, string.sub(owner, 2))) or 0,
    at_level, clock_level }
end

local total = 0
if A.tenant ~= '' then
  total = count_runs('g' .. A.tenant, window)
else
  for _, outcome in ipairs(OUTCOMES) do total = total + count_runs('o' .. LETTERS[outcome], window) end
end
return { now, window, total, unpack(rows) }
