-- Hand the next tasks to a worker, fairly between users, and start their leases.
--
-- @include upkeep line
-- FLAGS allow-oom
-- KEYS served_before  hash  user -> service / weight in the window before
-- ARGV op        text  random; the lease token. Repeated: the tasks that it still holds, if any
-- ARGV worker    text  who claims
-- ARGV limit     int   how many tasks at most
-- ARGV lease_ms  int   how long the leases are
--
-- First does what time has made due. The cost does not depend on how many users wait, are capped or
-- are paused: only the first `limit` users of ready are looked at, and those who may not be served
-- are not in it. They are served in memory, and what has become of them is written together: calls
-- of commands are what a script spends its time on.
--
-- Returns { ms until something becomes claimable (-1: nothing known, 0: now), ms of the clock, ms at
-- which the tasks were claimed, then for each task: id, document, attempt, ms at which it became
-- ready }.

local WINDOW_MS = 10000      -- service is compared between users over windows of this length
local TRIMMED = 200          -- so often, twice as many old records are dropped at most
local CRITICAL_CREDIT = 10   -- so many CRITICAL tasks may go first in a row before the share binds
local LONGEST_WAIT_MS = 5000 -- nobody waits longer than this, whatever the hint
local ROUNDS = 5             -- readings of ready, more than one only past records that are broken

local limit, lease_end = tonumber(A.limit), now + tonumber(A.lease_ms)
local share = SETTINGS.critical_share

-- --- a repeated claim ---

-- What a repeated claim still holds: ids, and records by id.
local function still_held()
  local ids, records = {}, {}
  local before = first_answer(A.op)
  if not before then return ids, records end
  for id in string.gmatch(before, '[^\n]+') do
    records[id] = held(id, A.op)
    if records[id] then ids[#ids + 1] = id end
  end
  return ids, records
end

-- --- users in memory ---

-- { name, tag, critical_tag, in_critical, list (members of the backlog), at, complete, last,
--   state: 'ready', 'parked' or 'gone', wait, service }

local function new_user(name, tag)
  return { name = name, tag = tag, list = {}, at = 1, state = 'ready', served = 0 }
end

-- A member of the user's backlog, counted from the first that is not served yet; nil: no more.
local function member(user, offset, chunk)
  while user.at + offset > #user.list and not user.complete do
    local from = user.last and '(' .. user.last or '[' .. user.name .. '\0'
    local more = redis.call('ZRANGEBYLEX', K.backlog, from, '(' .. user.name .. '\1',
      'LIMIT', 0, chunk)
    user.complete = #more < chunk
    user.last = more[#more] or user.last
    for _, found in ipairs(more) do user.list[#user.list + 1] = found end
  end
  return user.list[user.at + offset]
end

-- Read the first users of both lanes: by name, in order, and as lines by tag.
local function read_users(want)
  local users, names, ready, critical = {}, {}, new_line(), new_line()
  local flat = redis.call('ZRANGE', K.ready, 0, want - 1, 'WITHSCORES')
  for i = 1, #flat, 2 do
    local user = new_user(flat[i], tonumber(flat[i + 1]))
    users[user.name] = user
    names[#names + 1] = user.name
    ready.sorted[#ready.sorted + 1] = { tag = user.tag, user = user }
  end
  if share > 0 and redis.call('ZCARD', K.critical) > 0 then
    flat = redis.call('ZRANGE', K.critical, 0, want - 1, 'WITHSCORES')
    for i = 1, #flat, 2 do
      local user = users[flat[i]]
      if not user then
        user = new_user(flat[i], tonumber(redis.call('ZSCORE', K.ready, flat[i]) or nil)
          or fair.clock)
        users[user.name] = user
        names[#names + 1] = user.name
      end
      user.critical_tag = tonumber(flat[i + 1])
      critical.sorted[#critical.sorted + 1] = { tag = user.critical_tag, user = user }
    end
  end
  return users, names, ready, critical
end

-- --- serving ---

local function may_jump()
  return share >= 1 or (fair.credit or CRITICAL_CREDIT) >= 1
end

-- The user whose turn it is, and whether by the CRITICAL lane; nil: nobody.
local function next_user(ready, critical)
  if may_jump() then
    local top = next_in_line(critical)
    while top do
      if top.user.state == 'ready' and top.user.critical_tag == top.tag then
        return top.user, true
      end
      top = next_in_line(critical)
    end
  end
  local top = next_in_line(ready)
  while top do
    if top.user.state == 'ready' and top.user.tag == top.tag then return top.user, false end
    top = next_in_line(ready)
  end
  return nil
end

-- Move the clocks and the user's tags by a serve.
local function charge(user, jumps, cost)
  local stride = cost / settings_of(user.name).weight
  fair_dirty = true
  if jumps then
    fair.critical_clock = math.max(fair.critical_clock, user.critical_tag)
    user.critical_tag = user.critical_tag + stride
    if share < 1 then fair.credit = (fair.credit or CRITICAL_CREDIT) - 1 end
  else
    fair.clock = math.max(fair.clock, user.tag)
    if share < 1 and fair.credit then
      fair.credit = math.min(CRITICAL_CREDIT, fair.credit + share / (1 - share))
    end
  end
  user.tag = user.tag + stride
  user.served = user.served + stride
end

-- Take the user's first task; its member, or nil if there is none.
local function serve(user, jumps, chunk)
  user.touched = true
  local first = member(user, 0, chunk)
  if not first then
    user.state = 'gone'
    return nil
  end
  user.in_critical = user.in_critical or is_critical(user.name, first)
  charge(user, jumps, cost_of(user.name))
  change_running(user.name, 1)
  spend_rate(user.name)
  local following = member(user, 1, chunk)
  user.at = user.at + 1
  user.is_critical = following and is_critical(user.name, following)
  -- No place in that lane any more: what is next goes by the ordinary one.
  if not user.is_critical then user.critical_tag = nil end
  if not following then
    user.state = 'gone'
  else
    user.wait = blocked_until(user.name)
    if user.wait then user.state = 'parked' end
  end
  return first
end

-- Serve users in memory, up to `want` times; the members taken.
local function serve_in_turn(want, ready, critical, chunk)
  local members = {}
  for _ = 1, want do
    local user, jumps = next_user(ready, critical)
    if not user then break end
    members[#members + 1] = serve(user, jumps, chunk)
    if user.state == 'ready' then
      join_line(ready, user.tag, user)
      if user.critical_tag and user.is_critical then
        join_line(critical, user.critical_tag, user)
      end
    end
  end
  return members
end

-- --- writing ---

local function add(list, a, b)
  list[#list + 1] = a
  list[#list + 1] = b
end

local function call_with(command, key, list)
  if #list > 0 then redis.call(command, key, unpack(list)) end
end

-- What a user got in this window, if the user was backlogged all through it.
local function new_service(user, so_far)
  if user.state ~= 'ready' then return 'late' end
  if so_far == 'late' then return nil end
  return (tonumber(so_far or nil) or 0) + user.served
end

local function write_users(users, names)
  local touched = {}
  for _, name in ipairs(names) do
    if users[name].touched then touched[#touched + 1] = name end
  end
  if #touched == 0 then return end
  local ready, idle, parked, left = {}, {}, {}, {}
  local critical, uncritical, service = {}, {}, {}
  local so_far = redis.call('HMGET', K.served, unpack(touched))
  for i, name in ipairs(touched) do
    local user = users[name]
    if user.state == 'ready' then
      add(ready, user.tag, name)
    else
      left[#left + 1] = name
      add(idle, user.tag, name)
      if user.wait then add(parked, user.wait, name) end
    end
    if user.in_critical then
      if user.state ~= 'ready' or not user.is_critical then
        uncritical[#uncritical + 1] = name
      elseif user.critical_tag then
        add(critical, user.critical_tag, name)
      end
    end
    local amount = new_service(user, so_far[i])
    if amount then add(service, name, amount) end
  end
  call_with('ZADD', K.ready, ready)
  call_with('ZREM', K.ready, left)
  call_with('ZADD', K.idle, idle)
  call_with('ZADD', K.parked, parked)
  call_with('ZREM', K.critical, uncritical)
  call_with('ZADD', K.critical, critical)
  call_with('HSET', K.served, service)
end

-- Take the members out of the backlog; ids and records of those whose records can be read.
local function take_out(members)
  local all, ids = {}, {}
  for i, found in ipairs(members) do all[i] = string.match(found, '^%Z*%z%Z*%z(.*)$') end
  redis.call('ZREM', K.backlog, unpack(members))
  redis.call('ZREM', K.waiting, unpack(all))
  local records = read_statuses(all)
  for i, id in ipairs(all) do
    local record = records[id]
    if record then
      record.state, record.token, record.worker = 'running', A.op, A.worker
      record.attempts = record.attempts + 1
      record.charge, record.claimed = cost_of(record.user), now
      ids[#ids + 1] = id
    else
      local user = string.match(members[i], '^%Z*')
      change_running(user, -1)
      review(user)
      count('broken_tasks', 1)
    end
  end
  return ids, records
end

local function lease(ids, records)
  local ends = {}
  for _, id in ipairs(ids) do add(ends, lease_end, id) end
  redis.call('ZADD', K.leases, unpack(ends))
  write_statuses(ids, records)
end

-- Serve until the limit is reached or nobody is left.
local function serve_all()
  local ids, records = {}, {}
  for _ = 1, ROUNDS do
    local want = limit - #ids
    if want == 0 then break end
    local users, names, ready, critical = read_users(want)
    if #names == 0 then break end
    prefetch_users(names)
    local members = serve_in_turn(want, ready, critical, math.ceil(want / #names) + 1)
    write_users(users, names)
    if #members > 0 then
      local got, got_records = take_out(members)
      if #got > 0 then lease(got, got_records) end
      for _, id in ipairs(got) do
        ids[#ids + 1] = id
        records[id] = got_records[id]
      end
    end
  end
  return ids, records
end

-- --- keeping house ---

local function turn_window()
  local since = tonumber(redis.call('HGET', K.fair, 'window') or nil)
  if since and math.abs(now - since) < WINDOW_MS then return end
  redis.call('UNLINK', K.served_before)
  if redis.call('EXISTS', K.served) == 1 then
    redis.call('RENAME', K.served, K.served_before)
  end
  redis.call('HSET', K.fair, 'window', now)
  trim_all(TRIMMED)
end

local function reap_idle(served)
  local passed = redis.call('ZRANGE', K.idle, '-inf', fair.clock, 'BYSCORE',
    'LIMIT', 0, 2 * served + 10)
  if #passed == 0 then return end
  redis.call('ZREM', K.idle, unpack(passed))
  if SETTINGS.cost == 'time' then redis.call('HDEL', K.usage, unpack(passed)) end
end

local function wait_hint()
  if redis.call('ZCARD', K.ready) > 0 then return 0 end
  local soonest = -1
  for _, key in ipairs({ K.delayed, K.leases, K.parked }) do
    local at = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or nil)
    if at and at < math.huge then
      local ms = math.max(0, math.ceil(at - now))
      if soonest < 0 or ms < soonest then soonest = ms end
    end
  end
  return soonest
end

local ids, records = still_held()
if #ids == 0 then
  upkeep()
  turn_window()
  ids, records = serve_all()
  if #ids > 0 then
    count('claimed', #ids)
    remember(A.op, table.concat(ids, '\n'))
  else
    settle()
  end
  reap_idle(#ids)
  save_fair()
end

local hint = wait_hint()
-- One token wakes one worker: whoever finds more work than it took passes it on. A claim that has
-- brought the next moment nearer (a lease that may expire, a rate limit) lets one worker hear of it.
local alarm = tonumber(redis.call('HGET', K.fair, 'alarm') or nil) or 0
if #ids > 0 then
  if hint == 0 or (hint > 0 and hint < LONGEST_WAIT_MS and (alarm < now or alarm > now + hint)) then
    wake_worker()
  end
elseif hint > 0 and (alarm < now or alarm > now + hint) then
  redis.call('HSET', K.fair, 'alarm', now + hint)
end
local answer = { hint, now, ids[1] and records[ids[1]].claimed or now }
if #ids > 0 then
  local documents = redis.call('HMGET', K.tasks, unpack(ids))
  for i, id in ipairs(ids) do
    answer[#answer + 1] = id
    answer[#answer + 1] = documents[i] or ''
    answer[#answer + 1] = records[id].attempts
    answer[#answer + 1] = tonumber(records[id].due) or now
  end
end
return answer
