-- Find users who have waiting or running tasks.
--
-- @include user_index
-- KEYS ready    zset  users who may be served
-- KEYS parked   zset  users with waiting tasks who may not
-- KEYS running  hash  user -> number of leased tasks
-- KEYS backlog  zset  user NUL rank NUL task id NUL name: waiting tasks
-- KEYS held     zset  user NUL name NUL rank NUL task id: tasks that wait for a slot

local function new_user_set()
  return { list = {}, has = {} }
end

-- Add users to a set, each once.
local function add_users(found, users)
  for _, user in ipairs(users) do
    if not found.has[user] then
      found.has[user] = true
      found.list[#found.list + 1] = user
    end
  end
end

-- Add users with waiting or running tasks: at most `most` from each key.
local function add_active_users(found, most)
  add_users(found, redis.call('ZRANGE', K.ready, 0, most - 1))
  add_users(found, redis.call('ZRANGE', K.parked, 0, most - 1))
  add_users(found, redis.call('HRANDFIELD', K.running, most))
  local user = user_from(K.held, '', '')
  for _ = 1, most do
    if not user then return end
    add_users(found, { user })
    user = user_after(K.held, '', user)
  end
end

local SOME_HELD = redis.call('EXISTS', K.held) == 1

-- The number of waiting tasks of a user, and how many of them are held.
local function waiting_of(user)
  local from, to = '[' .. user .. '\0', '(' .. user .. '\1'
  local held = SOME_HELD and redis.call('ZLEXCOUNT', K.held, from, to) or 0
  return redis.call('ZLEXCOUNT', K.backlog, from, to) + held, held
end

-- The value of each user in a hash, or false. Reads in groups: unpack() is limited to a few thousand values.
local function fields_of(key, users)
  local values = {}
  for first = 1, #users, 1000 do
    local part = { unpack(users, first, math.min(first + 999, #users)) }
    for i, value in ipairs(redis.call('HMGET', key, unpack(part))) do values[first + i - 1] = value end
  end
  return values
end
