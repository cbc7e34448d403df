-- Keep delayed tasks: by time, and by user.
--
-- @include time
-- KEYS delayed        zset  task id -> when it becomes ready, ms
-- KEYS delayed_index  zset  user NUL time in 15 digits NUL task id, all scores 0: the same, by user
-- KEYS delayed_users  zset  user -> when to look at the user's delayed tasks, ms: not after the first is due
--
-- Versions that do not know the index write only `delayed`. So the index never decides what is due, an
-- entry that `delayed` does not confirm has no effect, and index_delayed and the doctor add missing entries.

-- When a task that waits for the previous run of its schedule becomes ready, ms: the end of the year 9999,
-- until that run ends.
local AFTER_THE_LAST = 253402300799000

-- A table, because a script has room for only 200 local variables.
local delays = {}

function delays.member(user, due, id)
  return string.format('%s\0%015.0f\0', user, due) .. id
end

-- Add tasks to the index, given as a flat list of time, id and user. Returns how many were new. The times in
-- delayed_users only get earlier here; a claim that finds nothing sets the next one.
function delays.enter(list)
  if #list == 0 then return 0 end
  local members, first, moments = {}, {}, {}
  for i = 1, #list, 3 do
    local due, id, user = list[i], list[i + 1], list[i + 2]
    members[#members + 1] = '0'
    members[#members + 1] = delays.member(user, due, id)
    first[user] = math.min(first[user] or due, due)
  end
  for user, due in pairs(first) do
    moments[#moments + 1] = due
    moments[#moments + 1] = user
  end
  redis.call('ZADD', K.delayed_users, 'LT', unpack(moments))
  return redis.call('ZADD', K.delayed_index, unpack(members))
end

-- Delay tasks, given as a flat list of time, id and user.
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

-- Remove a task.
function delays.remove(id, user)
  local due = tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  if not due then return end
  redis.call('ZREM', K.delayed, id)
  redis.call('ZREM', K.delayed_index, delays.member(user, due, id))
end

-- Change the time of a delayed task. Other tasks do not change.
function delays.move(id, user, due)
  if not redis.call('ZSCORE', K.delayed, id) then return end
  delays.remove(id, user)
  delays.add({ due, id, user })
end

-- Set when to look at a user's delayed tasks; nil: there are none.
function delays.look_at(user, moment)
  if moment then
    redis.call('ZADD', K.delayed_users, text_of(moment), user)
  else
    redis.call('ZREM', K.delayed_users, user)
  end
end

-- Due tasks by the index, some of each user: ids, times, and members of the index. Sets when to look again
-- at each user that was read.
function delays.due_in_turns(most)
  local ids, times, members = {}, {}, {}
  local users = redis.call('ZRANGE', K.delayed_users, '-inf', now, 'BYSCORE', 'LIMIT', 0, most)
  local each = math.max(1, math.floor(most / math.max(1, #users)))
  for _, user in ipairs(users) do
    local following
    for i, member in ipairs(redis.call('ZRANGEBYLEX', K.delayed_index, '[' .. user .. '\0',
      '(' .. user .. '\1', 'LIMIT', 0, each + 1)) do
      -- A member that cannot be parsed counts as due: no task confirms it, and it is dropped.
      local due, id = string.match(member, '%z(%d+)%z(%Z*)$')
      due, id = tonumber(due) or 0, id or ''
      if due > now or i > each then
        following = math.max(due, now)  -- more is due: the user comes after all others who are due
        break
      end
      ids[#ids + 1], times[#times + 1], members[#members + 1] = id, due, member
    end
    delays.look_at(user, following)
  end
  return ids, times, members
end
