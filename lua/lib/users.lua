-- Find the users who want service now: those with waiting or running tasks.
--
-- @include user_index
-- KEYS ready    zset  users who may be served
-- KEYS parked   zset  users with waiting tasks who may not
-- KEYS running  hash  user -> how many of the user's tasks are leased
-- KEYS backlog  zset  user NUL rank NUL task id NUL name: waiting tasks
-- KEYS held     zset  user NUL name NUL rank NUL task id: tasks that wait for a slot

local function new_crowd()
  return { list = {}, has = {} }
end

-- Add users to a crowd, each once.
local function admit(crowd, users)
  for _, user in ipairs(users) do
    if not crowd.has[user] then
      crowd.has[user] = true
      crowd.list[#crowd.list + 1] = user
    end
  end
end

-- Add users with waiting or running tasks, at most so many of each sort.
local function admit_active(crowd, most)
  admit(crowd, redis.call('ZRANGE', K.ready, 0, most - 1))
  admit(crowd, redis.call('ZRANGE', K.parked, 0, most - 1))
  admit(crowd, redis.call('HRANDFIELD', K.running, most))
  local user = user_from(K.held, '', '')
  for _ = 1, most do
    if not user then return end
    admit(crowd, { user })
    user = user_after(K.held, '', user)
  end
end

local SOME_HELD = redis.call('EXISTS', K.held) == 1

-- How many tasks of a user wait, and how many of them for a slot of their name.
local function waiting_of(user)
  local from, to = '[' .. user .. '\0', '(' .. user .. '\1'
  local held = SOME_HELD and redis.call('ZLEXCOUNT', K.held, from, to) or 0
  return redis.call('ZLEXCOUNT', K.backlog, from, to) + held, held
end

-- A field of each user in a hash, false where there is none. In parts: unpack() has room for a few
-- thousand values.
local function fields_of(key, users)
  local values = {}
  for first = 1, #users, 1000 do
    local part = { unpack(users, first, math.min(first + 999, #users)) }
    for i, value in ipairs(redis.call('HMGET', key, unpack(part))) do values[first + i - 1] = value end
  end
  return values
end
