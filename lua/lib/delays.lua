-- Keep delayed tasks: by time, and by owner.
--
-- LAZY
-- @include fair
-- KEYS delayed        zset  task id -> when it becomes ready, ms
-- KEYS delayed_index  zset  owner NUL time in 15 digits NUL task id, all scores 0: the same, by owner
-- KEYS delayed_users  zset  user or tenant -> when to look at its delayed tasks, ms: not after the first is due;
--                           for the users of a tenant, `rings` has these times
--
-- Versions that do not know the index write only `delayed`. So the index never decides what is due, an
-- entry that `delayed` does not confirm has no effect, and index_delayed and the doctor add missing entries.

-- When a task that waits for the previous run of its schedule becomes ready, ms: the end of the year 9999,
-- until that run ends.
local AFTER_THE_LAST = 253402300799000

local delays = {}

function delays.member(owner, due, id)
  return string.format('%s\0%015.0f\0', owner, due) .. id
end

-- Add tasks to the index, given as a flat list of time, id and owner. Returns how many were new. The times in
-- delayed_users only get earlier here; a claim that finds nothing sets the next one.
function delays.enter(list)
  if #list == 0 then return 0 end
  local members, first, moments = {}, {}, {}
  for i = 1, #list, 3 do
    local due, id, owner = list[i], list[i + 1], list[i + 2]
    members[#members + 1] = '0'
    members[#members + 1] = delays.member(owner, due, id)
    first[owner] = math.min(first[owner] or due, due)
  end
  for owner, due in pairs(first) do
    local group = group_of(owner)
    if group then
      local before = tag_in(K.delayed_users, owner)
      if not before or due < before then put_tag(K.delayed_users, owner, due) end
    end
    moments[#moments + 1] = due
    moments[#moments + 1] = group or owner
  end
  redis.call('ZADD', K.delayed_users, 'LT', unpack(moments))
  return redis.call('ZADD', K.delayed_index, unpack(members))
end

-- Delay tasks, given as a flat list of time, id and owner.
function delays.add(list)
  if #list == 0 then return end
  local times = {}
  for i = 1, #list, 3 do
    times[#times + 1] = list[i]
    times[#times + 1] = list[i + 1]
  end
  redis.call('ZADD', K.delayed, unpack(times))
  delays.enter(list)
end

-- Set the time of a tenant to that of the first of its users.
local function look_at_first(tenant)
  local following = rings().range(K.delayed_users, tenant, 0, 1)[2]
  if following then
    put_tag(K.delayed_users, tenant, tonumber(following))
  else
    drop_tag(K.delayed_users, tenant)
  end
end

-- Remove a task.
function delays.remove(id, owner)
  local due = tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  if not due then return end
  redis.call('ZREM', K.delayed, id)
  redis.call('ZREM', K.delayed_index, delays.member(owner, due, id))
  if #redis.call('ZRANGEBYLEX', K.delayed_index, '[' .. owner .. '\0', '(' .. owner .. '\1',
    'LIMIT', 0, 1) > 0 then return end
  drop_tag(K.delayed_users, owner)
  if group_of(owner) then look_at_first(group_of(owner)) end
end

-- Change the time of a delayed task. Other tasks do not change.
function delays.move(id, owner, due)
  if not redis.call('ZSCORE', K.delayed, id) then return end
  delays.remove(id, owner)
  delays.add({ due, id, owner })
end

-- Add the due tasks of an owner to what was found, at most `most`. Sets when to look again at the owner.
local function look_at(owner, most, found)
  local following
  for i, member in ipairs(redis.call('ZRANGEBYLEX', K.delayed_index, '[' .. owner .. '\0',
    '(' .. owner .. '\1', 'LIMIT', 0, most + 1)) do
    -- A member that cannot be parsed counts as due: no task confirms it, and it is dropped.
    local due, id = string.match(member, '%z(%d+)%z(%Z*)$')
    due, id = tonumber(due) or 0, id or ''
    if due > now or i > most then
      following = math.max(due, now)  -- more is due: the owner comes after all others who are due
      break
    end
    found.ids[#found.ids + 1], found.members[#found.members + 1] = id, member
    found.times[#found.times + 1] = due
  end
  if following then
    put_tag(K.delayed_users, owner, following)
  else
    drop_tag(K.delayed_users, owner)
  end
end

-- The same for a tenant: some tasks of each of its users.
local function look_at_tenant(tenant, most, found)
  local owners = {}
  local flat = rings().range(K.delayed_users, tenant, 0, most)
  for i = 1, #flat, 2 do
    if tonumber(flat[i + 1]) <= now then owners[#owners + 1] = flat[i] end
  end
  local each = math.max(1, math.floor(most / math.max(1, #owners)))
  for _, owner in ipairs(owners) do look_at(owner, each, found) end
  look_at_first(tenant)
end

-- Due tasks by the index, some of each user and each tenant: ids, times, and members of the index. Sets when
-- to look again at each user and tenant that was read.
function delays.due_in_turns(most)
  local found = { ids = {}, times = {}, members = {} }
  local owners = redis.call('ZRANGE', K.delayed_users, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
  local each = math.max(1, math.floor(most / math.max(1, #owners)))
  for _, owner in ipairs(owners) do
    if layout > 1 and rings().is_tenant(owner) then
      look_at_tenant(owner, each, found)
    else
      look_at(owner, each, found)
    end
  end
  return found.ids, found.times, found.members
end

return delays
