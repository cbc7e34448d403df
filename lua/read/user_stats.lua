-- Read the figures of some users, and how many runs ended in all. One bounded read.
--
-- @include users retention ended_runs
-- FLAGS no-writes
-- KEYS users           hash  user -> settings, JSON
-- KEYS tenants         hash  user -> tenant
-- KEYS waiting         zset  task id -> since when it waits, ms
-- KEYS schedule_index  zset  user NUL schedule id
-- KEYS delayed_index   zset  user NUL when NUL task id: tasks that become ready later
-- ARGV since_ms  int  start of the window in which runs are counted
-- ARGV ...  users, some dozens
-- ROW user  text  user id
--
-- The window starts later if runs that ended in it have been dropped.
--
-- Returns { time in ms, start of the window, runs that ended in it; then a list for each user: settings or
-- '', tenant or '', waiting tasks, how many of them are held, running tasks, users before it or -1, parked
-- until or '', schedules, longest wait in ms of its first tasks or -1, runs that ended in the window, median
-- of their last waits or -1, 95th percentile or -1, delayed tasks, when the first of these becomes ready in
-- ms or -1, 1 if the user is known or 0 }.

local FIRST_TASKS = 10  -- first tasks of a user whose waits are read
local LAST_RUNS = 20    -- last runs of a user whose waits are read

local window = cut_window(tonumber(A.since_ms))

-- Add the ids of a user's first tasks in an index.
local function add_first(ids, key, user, pattern)
  for _, member in ipairs(redis.call('ZRANGEBYLEX', key, '[' .. user .. '\0', '(' .. user .. '\1',
    'LIMIT', 0, FIRST_TASKS)) do
    ids[#ids + 1] = string.match(member, pattern)
  end
end

-- How long the oldest of a user's first tasks has waited, ms; -1 if there is none.
local function oldest_wait(user, waiting, held)
  local ids = {}
  if waiting > held then add_first(ids, K.backlog, user, '^%Z*%z%Z*%z(%Z*)') end
  if held > 0 then add_first(ids, K.held, user, '%z(%Z*)$') end
  if #ids == 0 then return -1 end
  local oldest = now
  for _, since in ipairs(redis.call('ZMSCORE', K.waiting, unpack(ids))) do
    oldest = math.min(oldest, tonumber(since or nil) or now)
  end
  return now - oldest
end

-- The number of delayed tasks of a user, and when the first becomes ready, ms, or -1.
local function delayed_of(user)
  local from, to = '[' .. user .. '\0', '(' .. user .. '\1'
  local first = redis.call('ZRANGEBYLEX', K.delayed_index, from, to, 'LIMIT', 0, 1)[1]
  if not first then return 0, -1 end
  return redis.call('ZLEXCOUNT', K.delayed_index, from, to), tonumber(string.match(first, '%z(%d+)')) or -1
end

local page = {}
for i = FIRST, #ARGV do page[#page + 1] = R.user[i] end

local rows = {}
local settings, running = fields_of(K.users, page), fields_of(K.running, page)
for i, tenant in ipairs(fields_of(K.tenants, page)) do
  local user = page[i]
  local waiting, held = waiting_of(user)
  local runs = math.max(0, tonumber(running[i] or nil) or 0)
  local schedules = redis.call('ZLEXCOUNT', K.schedule_index, '[' .. user .. '\0', '(' .. user .. '\1')
  local ended = count_runs('u' .. user, window)
  local waits = ended > 0 and waits_of(newest_runs('u' .. user, window, LAST_RUNS)) or {}
  local later, next_due = delayed_of(user)
  local is_known = settings[i] or tenant or waiting + runs + schedules + later > 0
    or count_runs('u' .. user, 0) > 0 or count_runs('d' .. user, 0) > 0
  local before, parked = false, false
  if waiting > 0 then
    before, parked = redis.call('ZRANK', K.ready, user), redis.call('ZSCORE', K.parked, user)
  end
  rows[i] = { settings[i] or '', tenant or '', waiting, held, runs, before or -1, parked or '', schedules,
    oldest_wait(user, waiting, held), ended, percentile(waits, 0.5) or -1, percentile(waits, 0.95) or -1,
    later, next_due, is_known and 1 or 0 }
end

local total = 0
for _, outcome in ipairs(OUTCOMES) do total = total + count_runs('o' .. LETTERS[outcome], window) end
return { now, window, total, unpack(rows) }
