-- Check whether the records of schedules, tenants and workers agree, and repair those that do not.
--
-- @include schedules tenant_schedules
-- KEYS moments      zset  schedule NUL last NUL first NUL how many NUL reason, all scores 0
-- KEYS changes      zset  schedule NUL when NUL operation NUL JSON, all scores 0
-- KEYS users        hash  owner or tenant -> settings, JSON
-- KEYS user_names   zset  owners and tenants with settings, all scores 0
-- KEYS tenants      hash  user -> tenant, of versions with layout 1
-- KEYS limits       hash  \3 and a pattern -> limits; \4 -> the prefixes of patterns, one per line; see lib/gates
-- KEYS workers      hash  worker id -> JSON
-- KEYS worker_ends  zset  worker id -> when it counts as gone, ms
-- ARGV op    text  random id of this operation
-- ARGV kind  text  the structure that the entries belong to
-- ARGV fix   text  '1': repair; empty: change nothing
-- ARGV ...    entries, a few hundred at most
-- ROW entry  text  id, user id, or member of the structure
--
-- The definition and the state of a schedule determine which other keys must list it. As in repair_tasks,
-- each entry is checked as it is now. The scheduler sets aside records that cannot be read.
--
-- Returns for each wrong entry: the entry, the problem, '1' if it can be repaired or ''.

local FIX = A.fix == '1'
local found = {}

local function wrong(entry, text, mend)
  for _, value in ipairs({ entry, text, mend and '1' or '' }) do found[#found + 1] = value end
  if FIX and mend then mend() end
end

-- A schedule whose definition is gone is known while it is listed as broken.
local function is_known(id)
  return redis.call('HEXISTS', K.schedules, id) == 1 or redis.call('HEXISTS', K.broken, id) == 1
end

local function has(key, member)
  return redis.call('ZSCORE', key, member)
end

local function check_entry(id, key, member, text)
  if not has(key, member) then wrong(id, text, function() redis.call('ZADD', key, 0, member) end) end
end

-- Add a missing `due` entry for an active schedule: at its fire time, or now.
local function plan_again(id)
  redis.call('ZADD', K.due, planned_ms(id) or now, id)
  wake_scheduler()
end

local function check_schedule(id)
  local definition = decode(redis.call('HGET', K.schedules, id))
  if not definition or type(definition.user_id) ~= 'string' then return end
  if redis.call('HEXISTS', K.schedule_state, id) == 0 then
    wrong(id, 'has no state')
    return
  end
  local state = state_of(id)
  local user = state.user or definition.user_id
  check_entry(id, K.schedule_index, user .. '\0' .. id, 'is not in schedule_index')
  if type(definition.name) == 'string' then
    check_entry(id, K.schedule_names, definition.name .. '\0' .. id, 'is not in schedule_names')
  end
  if state.tenant then
    check_entry(id, K.tenant_schedules, state.tenant .. '\0' .. user .. '\0' .. id,
      'is not in tenant_schedules')
  end
  local is_due = has(K.due, id)
  if (state.active or state['until']) and not is_due then
    wrong(id, 'is active but not in due', function() plan_again(id) end)
  elseif is_due and not state.active and not state['until'] then
    wrong(id, 'is not active but in due', function() redis.call('ZREM', K.due, id) end)
  end
end

local function check_due(id)
  if not has(K.due, id) or is_known(id) then return end
  wrong(id, 'is in due without a definition', function() redis.call('ZREM', K.due, id) end)
end

local function check_plan(id)
  if redis.call('HEXISTS', K.plan, id) == 0 or is_known(id) then return end
  wrong(id, 'has a plan but no definition', function() redis.call('HDEL', K.plan, id) end)
end

local function check_state(id)
  if redis.call('HEXISTS', K.schedule_state, id) == 0 or is_known(id) then return end
  wrong(id, 'has a state but no definition',
    function() redis.call('HDEL', K.schedule_state, id) end)
end

local function check_index(member)
  local user, id = string.match(member, '^(%Z*)%z(%Z*)$')
  if not has(K.schedule_index, member) then return end
  if id and is_known(id) and state_of(id).user == user then return end
  wrong(member, 'is in schedule_index but does not match its schedule',
    function() redis.call('ZREM', K.schedule_index, member) end)
end

local function check_name(member)
  local name, id = string.match(member, '^(%Z*)%z(%Z*)$')
  if not has(K.schedule_names, member) then return end
  if id and is_known(id) then
    local right = name_in(redis.call('HGET', K.schedules, id))
    if not right or right == name then return end
  end
  wrong(member, 'is in schedule_names but does not match its schedule',
    function() redis.call('ZREM', K.schedule_names, member) end)
end

local function check_tenant_schedule(member)
  local tenant, user, id = string.match(member, '^(%Z*)%z(%Z*)%z(%Z*)$')
  if not has(K.tenant_schedules, member) then return end
  if id and is_known(id) then
    local state = state_of(id)
    if state.tenant == tenant and state.user == user then return end
  end
  wrong(member, 'is in tenant_schedules but does not match its schedule',
    function() redis.call('ZREM', K.tenant_schedules, member) end)
end

local function check_notes(key, what)
  return function(id)
    local from, to = '[' .. id .. '\0', '(' .. id .. '\1'
    if is_known(id) or redis.call('ZLEXCOUNT', key, from, to) == 0 then return end
    wrong(id, 'has ' .. what .. ' but no definition',
      function() redis.call('ZREMRANGEBYLEX', key, from, to) end)
  end
end

local function check_settings(user)
  if redis.call('HEXISTS', K.users, user) == 0 then return end
  check_entry(user, K.user_names, user, 'has settings but is not in user_names')
end

local function check_listed(user)
  if not has(K.user_names, user) or redis.call('HEXISTS', K.users, user) == 1 then return end
  wrong(user, 'is in user_names without settings', function() redis.call('ZREM', K.user_names, user) end)
end

-- The two lists of tenants and their users agree. Versions with layout 1 wrote tenant_users and tenants.
local function check_user_tenant(member)
  local user, tenant = string.match(member, '^(%Z*)%z(%Z*)$')
  if not has(K.user_tenants, member) then return end
  if user then
    check_entry(member, K.tenant_users, tenant .. '\0' .. user, 'is in user_tenants but not in tenant_users')
  else
    wrong(member, 'is no user of a tenant', function() redis.call('ZREM', K.user_tenants, member) end)
  end
end

local function check_tenant_user(member)
  if not has(K.tenant_users, member) then return end
  local tenant, user = string.match(member, '^(%Z+)%z(%Z+)$')
  if not user then
    wrong(member, 'is no user of a tenant', function() redis.call('ZREM', K.tenant_users, member) end)
  elseif redis.call('HGET', K.tenants, user) ~= tenant then
    check_entry(member, K.user_tenants, user .. '\0' .. tenant, 'is in tenant_users but not in user_tenants')
  end
end

-- The prefixes of patterns are those of the patterns that have limits.
local function check_limits(field)
  if string.byte(field) == 4 then
    local list, right = redis.call('HGET', K.limits, field) or '', ''
    for prefix in string.gmatch(list, '([^\n]*)\n') do
      if redis.call('HEXISTS', K.limits, '\3' .. prefix .. '*') == 1 then right = right .. prefix .. '\n' end
    end
    if right ~= list then
      wrong(field, 'has a prefix without limits', function() redis.call('HSET', K.limits, field, right) end)
    end
    return
  end
  local prefix = string.match(field, '^\3(.*)%*$')
  if not prefix or redis.call('HEXISTS', K.limits, field) == 0 then return end
  local list = redis.call('HGET', K.limits, '\4') or ''
  if string.find('\n' .. list, '\n' .. prefix .. '\n', 1, true) then return end
  wrong(field, 'is a pattern whose prefix is not listed',
    function() redis.call('HSET', K.limits, '\4', list .. prefix .. '\n') end)
end

local function check_worker(id)
  if id == '' or id == '\0' or redis.call('HEXISTS', K.workers, id) == 0 or has(K.worker_ends, id) then return end
  wrong(id, 'is in workers but not in worker_ends',
    function() redis.call('HDEL', K.workers, id) end)
end

local function check_worker_end(id)
  if not has(K.worker_ends, id) or redis.call('HEXISTS', K.workers, id) == 1 then return end
  wrong(id, 'is in worker_ends but not in workers',
    function() redis.call('ZREM', K.worker_ends, id) end)
end

local CHECKS = { schedules = check_schedule, due = check_due, plan = check_plan,
  schedule_state = check_state, schedule_index = check_index, schedule_names = check_name,
  tenant_schedules = check_tenant_schedule, moments = check_notes(K.moments, 'moments'),
  changes = check_notes(K.changes, 'changes'), users = check_settings, user_names = check_listed,
  user_tenants = check_user_tenant, tenant_users = check_tenant_user, workers = check_worker, limits = check_limits,
  worker_ends = check_worker_end }

local before = FIX and first_answer(A.op)
if before then return decode(before) or {} end
for i = FIRST, #ARGV do CHECKS[A.kind](R.entry[i]) end
if FIX then remember(A.op, #found > 0 and cjson.encode(found) or '[]') end
return found
