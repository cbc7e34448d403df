-- List the users of a queue in order. One bounded read.
--
-- @include user_index byte_order
-- FLAGS no-writes
-- KEYS backlog         zset  user NUL rank NUL task id NUL name: waiting tasks
-- KEYS held            zset  user NUL name NUL rank NUL task id: tasks that wait for a slot
-- KEYS delayed_index   zset  user NUL when NUL task id: delayed tasks
-- KEYS running         hash  user -> number of leased tasks
-- KEYS schedule_index  zset  user NUL schedule id
-- KEYS runs            zset  <kind> <value> NUL ...: ended runs; kind u is the user
-- KEYS user_names      zset  users with settings
-- KEYS tenant_users    zset  tenant NUL user
-- ARGV after   text  start after this user, or empty
-- ARGV prefix  text  only users whose names begin with this, or empty
-- ARGV tenant  text  only users of this tenant, or empty
-- ARGV limit   int   at most this many
--
-- Returns { 1 if there may be more or 0, user ids }.

local RUNNING = 1000  -- with more running users than this, those who have nothing else are left out

local SOURCES = { { K.backlog, '' }, { K.held, '' }, { K.delayed_index, '' }, { K.schedule_index, '' },
  { K.runs, 'u' }, { K.user_names, '' } }
if A.tenant ~= '' then SOURCES = { { K.tenant_users, A.tenant .. '\0' } } end

local function with_prefix(user)
  return user and string.sub(user, 1, #A.prefix) == A.prefix and user or nil
end

local from = A.after .. '\1'
if A.after == '' and A.prefix ~= '' then from = A.prefix end

-- Users with running tasks from a name on, sorted: a hash has no order.
local function running_from(name)
  local users = {}
  if A.tenant ~= '' or redis.call('HLEN', K.running) > RUNNING then return users end
  for _, user in ipairs(redis.call('HRANDFIELD', K.running, RUNNING)) do
    if with_prefix(user) and not is_before(user, name) then users[#users + 1] = user end
  end
  table.sort(users, is_before)
  return users
end

local heads = {}  -- the next user of each source
for i, source in ipairs(SOURCES) do heads[i] = with_prefix(user_from(source[1], source[2], from)) end
local running = running_from(from)
local RUNS = #SOURCES + 1
heads[RUNS] = running[1]

local function least_head()
  local least
  for i = 1, RUNS do
    local head = heads[i]
    if head and head ~= least and (not least or is_before(head, least)) then least = head end
  end
  return least
end

local users = {}
local user = least_head()
while user and #users < tonumber(A.limit) do
  users[#users + 1] = user
  for i, source in ipairs(SOURCES) do
    if heads[i] == user then heads[i] = with_prefix(user_after(source[1], source[2], user)) end
  end
  if heads[RUNS] == user then
    table.remove(running, 1)
    heads[RUNS] = running[1]
  end
  user = least_head()
end
return { user and 1 or 0, users }
