-- Store what tasks with a tenant, a pool or options need besides their records.
--
-- LAZY
-- @include backlog tenants
-- @lazy rings kinds gates unique_pushes barrier
-- KEYS pool_tasks  zset  pool NUL since NUL task id, all scores 0: waiting tasks of pools but the default one
-- KEYS expiring    zset  task id -> when it ends as expired if it has not started, ms; see also lib/uniques

local specials = {}

local joined = {}  -- users of tenants that this call has listed

-- Read the tenant, the pool and the options of a new task from the head of its status. JSON escapes quotes inside
-- values, so a name of a field matches nothing else.
function specials.read(task)
  local head = task.head
  local has_flow = string.find(head, ',"flow":{', 1, true) or string.find(head, ',"pool":"', 1, true)
  if not has_flow and not string.find(head, ',"group":"', 1, true) then return end
  local record = decode(head .. '}') or {}
  task.group, task.pool, task.is_special = record.group, record.pool, true
  task.flow = record.flow and check_flow(record.flow)
end

-- List a user of a tenant, once in a call.
function specials.join(user, tenant)
  if joined[tenant .. '\0' .. user] then return end
  joined[tenant .. '\0' .. user] = true
  join_tenant(user, tenant)
end

-- Make the parts that storing a task needs: they check their keys before anything is written.
function specials.prepare(task)
  rings()
  if task.pool then kinds() end
  if task.flow and task.flow.keys then gates() end
  if task.flow and task.flow.unique then unique_pushes() end
end

-- Store what a new task needs, before its record.
function specials.begin(task)
  local flow = task.flow
  need_layout_2()
  if task.group then specials.join(task.user, task.group) end
  if flow and flow.expires then specials.expire(task.id, task) end
  if flow and flow.unique then unique_pushes().take(task) end
end

-- Set when a waiting task expires, by its options.
function specials.expire(id, record)
  local expires = record.flow.expires
  if type(expires) ~= 'number' then expires = (record.pushed or now) + tonumber(string.sub(expires, 2)) end
  record.expires = expires
  redis.call('ZADD', K.expiring, text_of(expires), id)
end

function specials.pool_member(pool, since, id)
  return string.format('%s\0%015.0f\0', pool, since) .. id
end

function specials.leave_pools(members)
  if #members > 0 then redis.call('ZREM', K.pool_tasks, unpack(members)) end
end

function specials.leave_pool(id, pool)
  local since = tonumber(redis.call('ZSCORE', K.waiting, id) or nil) or 0
  redis.call('ZREM', K.pool_tasks, specials.pool_member(pool, since, id))
end

-- Note waiting tasks of other pools and with keys, and wake workers of other pools. `findable`: those of the
-- tasks that can be claimed now. Returns true if one of these is in the default pool.
function specials.add(list, findable)
  local by_pool, woken, in_default = {}, {}, false
  for _, task in ipairs(list) do
    local pool = string.match(task.seat, '\3(.*)$')
    if pool and not task.was_held then
      rings().add_pool(pool)
      by_pool[#by_pool + 1] = '0'
      by_pool[#by_pool + 1] = specials.pool_member(pool, now, task.id)
    end
    if string.find(task.label, '\3', 1, true) and not task.was_held then gates().arrive(task) end
  end
  if #by_pool > 0 then redis.call('ZADD', K.pool_tasks, unpack(by_pool)) end
  for _, task in ipairs(findable) do
    local pool = string.match(task.seat, '\3(.*)$')
    if not pool then
      in_default = true
    elseif not woken[pool] then
      woken[pool] = true
      kinds().wake_pool(pool)
    end
  end
  return in_default
end

return specials
