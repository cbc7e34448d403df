-- Hand the next tasks to a worker, fairly between users, and start their leases.
--
-- @include upkeep user_heap
-- FLAGS allow-oom
-- KEYS served_before  hash  user -> service / weight in the previous window
-- ARGV op        text  random; also the lease token. A repeated claim returns the tasks that it still holds
-- ARGV worker    text  worker id
-- ARGV limit     int   at most this many tasks
-- ARGV lease_ms  int   length of the leases
-- ARGV place     text  host and process of the worker
-- ARGV names     text  empty: tasks of any name; '+' and names, one per line: only these; '-': all others
--
-- The script first does what has become due; see lib/upkeep. Its cost does not depend on how many users
-- wait, are capped or are paused: it reads the first `limit` users of `ready`, and more only as WORK
-- allows. Users who may not be served are not in `ready`. Users are served in memory, and their new state
-- is written together, because calling commands is what takes a script's time.
-- Tasks whose names the worker does not want stay where they are; at most LOOK of each user are passed
-- over. Tasks of names whose limits are reached are held, and come back in turn when there is room.
-- A claim for some names looks at the head of `ready`, then continues where the last claim of its kind
-- stopped, then looks at the users that its kind was told about. If a whole round finds nothing, claims of
-- this kind do not look again for a while unless they are told about a task.
--
-- Returns { ms until something becomes claimable (-1: nothing known, 0: now), time in ms, time of the
-- claim in ms, number of the wake list to wait at (0: `wake`); then for each task: id, document, attempt,
-- ms at which it became ready }.

local WINDOW_MS = 10000      -- service is compared between users over windows of this length
local TRIMMED = 200          -- once in a window, twice as many old records are dropped at most
local CRITICAL_CREDIT = 10   -- CRITICAL tasks that may go first in a row before critical_share applies
local CLAIM_BYTES = 1048576  -- of documents in one answer, after which no more tasks are taken
local CLAIM_NAMES = 65536    -- the same for users, ids and names: long ones take more time
local LARGEST = 300000       -- bytes of the largest document, roughly: few tasks need not be measured
local LONGEST_WAIT_MS = 5000 -- no worker waits longer than this, whatever the hint
local WORK = 1000            -- tasks that one claim looks at without taking them, roughly: a few ms
local WORK_OF_USER = 4       -- a user of whom nothing can be taken counts as this many tasks
local ROUND = 20             -- users read at a time, after the first time
local MOST_ROUND = 100       -- the first time, when some may have nothing for the worker
local ROUNDS = 60            -- at most
local LOOK_ON_MS = 100       -- wait before the next claim when there are more users to look at
local LOOK_AGAIN_MS = 250    -- wait when nothing was found anywhere; doubled each time up to LONGEST_WAIT_MS
local LOOK = 100             -- tasks of a user that are looked at to find a wanted name
local ASIDE = 1000           -- tasks that one claim moves to `held`

local limit, lease_end = tonumber(A.limit), now + tonumber(A.lease_ms)
local share = SETTINGS.critical_share
-- What an ordinary turn adds to the credit of the CRITICAL lane, and the most credit that can be saved up.
-- With less than one refill plus one, a large share could not be reached.
local refill = share < 1 and share / (1 - share) or 0
local most_credit = math.max(CRITICAL_CREDIT, refill + 1)
fair.credit = fair.credit and math.min(fair.credit, most_credit)

-- --- a repeated claim ---

-- The tasks that a repeated claim still holds: ids, and records by id.
local function still_held()
  local ids, records = {}, {}
  local before = first_answer(A.op)
  if not before then return ids, records end
  for id in string.gmatch(before, '[^\n]+') do
    records[id] = held_record(id, A.op)
    if records[id] then ids[#ids + 1] = id end
  end
  return ids, records
end

-- --- users in memory ---

-- { name, tag, critical_tag, in_critical, list (members of the backlog), at, complete, last,
--   state: 'ready', 'parked', 'gone' or 'passed' (nothing can be taken), wait, served }

local function new_user(name, tag)
  return { name = name, tag = tag, list = {}, at = 1, state = 'ready', served = 0 }
end

-- --- names ---

local listed = {}
for name in string.gmatch(string.sub(A.names, 2), '[^\n]+') do listed[name] = true end
local only_listed, filtered = string.sub(A.names, 1, 1) == '+', A.names ~= ''
-- How many users at the head of ready and of the CRITICAL lane have nothing that this claim can take.
local passed, lane_passed = 0, 0
local for_others = false  -- there are tasks that this worker does not want
local vain = 0            -- tasks that were looked at and not taken
local in_lane = true      -- read the CRITICAL lane, too
local asides, aside, held_aside = 0, {}, {}

local function is_wanted(name)
  return (listed[name] or false) == only_listed
end

local function id_of(member) return string.match(member, '^%Z*%z%Z*%z(%Z*)') end
local function name_of(member) return string.match(member, '%z(%Z*)$') end

-- A member of the user's backlog by its offset from the first that is not served yet; nil past the end.
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

-- Remove the member at this offset from the list.
local function take_off(user, offset)
  if offset == 0 then
    user.at = user.at + 1
  else
    table.remove(user.list, user.at + offset)
  end
end

-- Move a task whose name is at its limit to `held`, so that it does not block its user's other tasks.
local function set_aside(user, member, name)
  local id, rank = id_of(member), string.match(member, '^%Z*%z(%Z*)')
  aside[#aside + 1] = member
  held_aside[#held_aside + 1] = '0'
  held_aside[#held_aside + 1] = held_member_of(id, { user = user.name, rank = rank, name = name })
  join_slot_line(name, user.name)
  asides = asides + 1
end

-- The user's first task that may run: its offset and member; nil if none is found.
local function first_runnable(user, chunk)
  if not filtered and not has_limits then return 0, member(user, 0, chunk) end
  local offset = user.from or 0  -- earlier ones were looked at when the user was last served
  while offset < LOOK do
    -- Read few at first: mostly the first one fits, and for some workers none does.
    local found = member(user, offset, math.max(chunk, math.min(LOOK / 2, 2 * offset + 4)))
    if not found then return offset, nil end
    local name, is_other = name_of(found), false
    if filtered then is_other = not is_wanted(name) end
    if not is_other and not is_limited(name) then
      user.from = offset
      return offset, found
    end
    vain = vain + 1 + math.floor(#found / 300)  -- long names take more time
    if is_other then
      offset = offset + 1
    elseif asides < ASIDE then
      user.in_critical = user.in_critical or is_critical(user.name, found)
      set_aside(user, found, name)
      take_off(user, offset)
    else
      offset = offset + 1
    end
  end
  return offset, nil
end

-- Read the next users of both lanes: by name, in order, and as heaps by tag.
local function read_users(want)
  local users, names, ready, critical = {}, {}, heap.new(), heap.new()
  local flat = redis.call('ZRANGE', K.ready, passed, passed + want - 1, 'WITHSCORES')
  for i = 1, #flat, 2 do
    local user = new_user(flat[i], tonumber(flat[i + 1]))
    user.in_ready = true
    users[user.name] = user
    names[#names + 1] = user.name
    ready.sorted[#ready.sorted + 1] = { tag = user.tag, user = user }
  end
  if in_lane and share > 0 and redis.call('ZCARD', K.critical) > 0 then
    flat = redis.call('ZRANGE', K.critical, lane_passed, lane_passed + want - 1, 'WITHSCORES')
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
  heap.cut(ready, want)
  heap.cut(critical, want)
  return users, names, ready, critical
end

-- --- serving ---

local function may_jump()
  return share >= 1 or (fair.credit or CRITICAL_CREDIT) >= 1
end

-- The user whose turn it is, and whether by the CRITICAL lane. Returns nil if the next user may be one who
-- was not read; that happens only when users were passed over.
local function next_user(ready, critical)
  if may_jump() then
    local top = heap.pop(critical)
    while top do
      if heap.is_beyond(critical, top) then return nil end
      -- A user whose last CRITICAL task was taken by an ordinary turn has left this lane.
      if top.user.state == 'ready' and top.user.critical_tag == top.tag
        and top.user.is_critical ~= false and not top.user.left_lane then
        return top.user, true
      end
      top = heap.pop(critical)
    end
    if critical.cut then return nil end
  end
  local top = heap.pop(ready)
  while top do
    if heap.is_beyond(ready, top) then return nil end
    if top.user.state == 'ready' and top.user.tag == top.tag then return top.user, false end
    top = heap.pop(ready)
  end
  return nil
end

-- Advance the clocks and the user's tags by one task.
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
      fair.credit = math.min(most_credit, fair.credit + refill)
    end
  end
  user.tag = user.tag + stride
  user.served = user.served + stride
end

-- Return the user's next task, and note whether it is CRITICAL.
local function look_ahead(user, chunk)
  local following = member(user, 0, chunk)
  user.is_critical = following ~= nil and is_critical(user.name, following)
  return following
end

-- This claim can take nothing from the user.
local function pass_over(user, chunk)
  vain = vain + WORK_OF_USER
  if not look_ahead(user, chunk) then
    user.state = 'gone'
    return
  end
  user.state, for_others = 'passed', true
  if user.in_ready then passed = passed + 1 end
  if user.critical_tag and user.is_critical then lane_passed = lane_passed + 1 end
end

-- This claim cannot take the user's CRITICAL tasks; others are taken by an ordinary turn.
local function leave_lane(user, chunk)
  look_ahead(user, chunk)
  if user.is_critical then lane_passed = lane_passed + 1 end
  user.left_lane = true
end

-- Count the bytes of a task that is taken. A few tasks cannot exceed the limit and are not measured.
local bytes, long = 0, 0
local function weigh(member)
  long = long + #member
  if long > CLAIM_NAMES then bytes = CLAIM_BYTES end
  if limit * LARGEST > CLAIM_BYTES then
    bytes = bytes + redis.call('HSTRLEN', K.tasks, id_of(member))
  end
end

-- Take the user's first task that may run. Returns its member, or nil.
local function serve(user, jumps, chunk)
  user.touched = true
  local offset, first = first_runnable(user, chunk)
  if not first then
    pass_over(user, chunk)
    return nil
  end
  if jumps and not is_critical(user.name, first) then
    leave_lane(user, chunk)
    return nil
  end
  user.in_critical = user.in_critical or is_critical(user.name, first)
  charge(user, jumps, cost_of(user.name))
  change_running(user.name, 1)
  spend_rate(user.name)
  if has_limits then begin_limited(name_of(first)) end
  weigh(first)
  take_off(user, offset)
  local following = look_ahead(user, chunk)
  if not following then
    user.state = 'gone'
  else
    user.wait = blocked_until(user.name)
    if user.wait then user.state = 'parked' end
  end
  return first
end

-- Serve users in memory, up to `want` times. Returns the members taken.
local function serve_in_turn(want, ready, critical, chunk, work)
  local members = {}
  while #members < want and bytes < CLAIM_BYTES and vain < work do
    local user, jumps = next_user(ready, critical)
    if not user then break end
    members[#members + 1] = serve(user, jumps, chunk)
    if user.state == 'ready' then
      heap.push(ready, user.tag, user)
      if user.critical_tag and user.is_critical and not user.left_lane then
        heap.push(critical, user.critical_tag, user)
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

-- The service of a user in this window, if the user had a backlog during all of it.
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
    local stays = user.state ~= 'gone' and user.state ~= 'parked'
    if stays then
      add(ready, text_of(user.tag), name)
    else
      left[#left + 1] = name
      add(idle, text_of(user.tag), name)
      if user.wait then add(parked, user.wait, name) end
    end
    if user.in_critical or user.is_critical then
      if not user.is_critical or not stays then
        uncritical[#uncritical + 1] = name
      elseif user.critical_tag then
        add(critical, text_of(user.critical_tag), name)
      end
    end
    local amount = new_service(user, so_far[i])
    if amount then add(service, name, amount == 'late' and amount or text_of(amount)) end
  end
  call_with('ZADD', K.ready, ready)
  call_with('ZREM', K.ready, left)
  call_with('ZADD', K.idle, idle)
  call_with('ZADD', K.parked, parked)
  call_with('ZREM', K.critical, uncritical)
  call_with('ZADD', K.critical, critical)
  call_with('HSET', K.served, service)
end

local function write_aside()
  call_with('ZREM', K.backlog, aside)
  call_with('ZADD', K.held, held_aside)
  aside, held_aside = {}, {}
end

local claimed_by  -- end of the text of a record at its first claim

-- Read the record of a task that was never claimed from the end of its text, as `store` writes it. Almost
-- all records are such, and decoding JSON takes longer. Returns nil for others.
local function untouched(text, member)
  local from, to = string.find(text, ',"state":"ready","rank":"', 1, true)
  if not from or not string.find(text, '"attempts":0,', 1, true)
    or string.find(text, ',"timeout_ms":', 1, true) then return nil end
  local rank, due = string.match(text, '^(%d+)","pushed":%d+,"due":(%d+)}$', to + 1)
  if not rank then return nil end
  return { user = string.match(member, '^%Z*'), name = name_of(member), rank = rank,
    due = tonumber(due), attempts = 0 }
end

-- The text of such a record once it is claimed; nil if its name has limits, which have to be entered.
local function first_claim_text(text, record)
  if limits_of(record.name) then return nil end
  text = replace_text(text, '"state":"ready"', '"state":"running"')
  text = replace_text(text, '"attempts":0', '"attempts":1')
  claimed_by = claimed_by or ',"token":' .. cjson.encode(A.op) .. ',"worker":'
    .. cjson.encode(A.worker) .. ',"place":' .. cjson.encode(A.place) .. ',"claimed":' .. now_text .. ',"charge":'
  -- The format of cjson, so that the charge is the same however the record is written.
  return string.sub(text, 1, -2) .. claimed_by .. string.format('%.14g', cost_of(record.user)) .. '}'
end

-- Remove members from the backlog. Returns the ids and records of those that can be read, and new texts.
local function take_out(members)
  local all, ids, texts = {}, {}, {}
  for i, found in ipairs(members) do all[i] = id_of(found) end
  redis.call('ZREM', K.backlog, unpack(members))
  redis.call('ZREM', K.waiting, unpack(all))
  local stored, records = redis.call('HMGET', K.status, unpack(all)), {}
  for i, id in ipairs(all) do
    local fresh = stored[i] and untouched(stored[i], members[i])
    if fresh then texts[id] = first_claim_text(stored[i], fresh) end
    local record = texts[id] and fresh or parse_status(stored[i])
    records[id] = record
    if record then
      record.state, record.token, record.worker = 'running', A.op, A.worker
      record.place, record.stale = A.place, nil
      record.attempts = record.attempts + 1
      record.charge, record.claimed = cost_of(record.user), now
      ids[#ids + 1] = id
    else
      local user = string.match(members[i], '^%Z*')
      not_begun(name_of(members[i]))
      change_running(user, -1)
      review(user)
      count('broken_tasks', 1)
    end
  end
  return ids, records, texts
end

-- Enter the slots that the tasks take, and their deadlines.
local function enter_limits(ids, records)
  local slots, deadlines = {}, {}
  for _, id in ipairs(ids) do
    local record = records[id]
    local limits = limits_of(record.name) or {}
    record.slot = limits.slots and true
    if limits.slots then add(slots, '0', record.name .. '\0' .. id) end
    -- The worker ends the run at its time-out; if it still runs one lease later, the worker does not
    -- answer. Until the worker gives its time-out (see extend), the one declared last counts.
    local timeout_ms = record.timeout_ms or limits.timeout_ms
    record.ruled = not record.timeout_ms and limits.timeout_ms and not limits.is_declared or nil
    record.deadline = timeout_ms and now + timeout_ms + tonumber(A.lease_ms)
    if record.deadline then add(deadlines, record.deadline, id) end
  end
  call_with('ZADD', K.slots, slots)
  call_with('ZADD', K.deadlines, deadlines)
end

local function lease(ids, records, texts)
  local ends, at, has_timeouts = {}, text_of(lease_end), false
  for _, id in ipairs(ids) do
    add(ends, at, id)
    has_timeouts = has_timeouts or records[id].timeout_ms
  end
  redis.call('ZADD', K.leases, unpack(ends))
  if has_limits or has_timeouts then enter_limits(ids, records) end
  write_statuses(ids, records, texts)
end

-- --- whom to look at ---

local taken = { ids = {}, records = {} }

local function has_room()
  return #taken.ids < limit and bytes < CLAIM_BYTES
end

-- Serve the users that were read, and write their new state.
local function serve_round(users, names, ready, critical, work)
  local want = limit - #taken.ids
  prefetch_users(names)
  local members = serve_in_turn(want, ready, critical, math.ceil(want / #names) + 1, work)
  write_users(users, names)
  write_aside()
  if #members == 0 then return end
  local got, records, texts = take_out(members)
  if #got > 0 then lease(got, records, texts) end
  for _, id in ipairs(got) do
    taken.ids[#taken.ids + 1] = id
    taken.records[id] = records[id]
  end
end

-- Serve the users in ready after those passed over, `round` of them at first. True: all were looked at.
local function serve_on(round, work)
  for _ = 1, ROUNDS do
    if not has_room() or vain >= work then return false end
    local want = math.max(limit - #taken.ids, round)
    local users, names, ready, critical = read_users(filtered and math.min(want, MOST_ROUND) or want)
    if #names == 0 then return true end
    serve_round(users, names, ready, critical, work)
    round = ROUND
  end
  return false
end

-- Serve the users that this kind of worker was told about, and remember those who may have more.
local function serve_told(kind)
  local users, names, ready, left = {}, {}, heap.new(), ''
  for name in string.gmatch(kind.news, '[^\n]+') do
    local tag = tonumber(redis.call('ZSCORE', K.ready, name) or nil)
    if tag then
      users[name] = new_user(name, tag)
      names[#names + 1] = name
      ready.sorted[#ready.sorted + 1] = { tag = tag, user = users[name] }
    end
  end
  table.sort(ready.sorted, heap.before)
  if #names > 0 then serve_round(users, names, ready, heap.new(), WORK) end
  for _, name in ipairs(names) do
    if users[name].state == 'ready' then left = left .. name .. '\n' end
  end
  kinds.set_news(kind, left == '' and '' or '\n' .. left)
end

-- Decide what the next claim of this kind does: continue, or, if nothing was found since the head of
-- ready, wait for a while.
local function rest(kind, is_over, was_clean)
  kind.till = 0
  if #taken.ids > 0 then
    kind.pause, kind.clean = 0, false
    return
  end
  kind.clean = was_clean or is_over
  if redis.call('ZCARD', K.ready) == 0 then
    kind.pause = 0
  elseif is_over and was_clean then
    kind.pause = math.min(math.max(LOOK_AGAIN_MS, 2 * kind.pause), LONGEST_WAIT_MS)
    kind.till = now + kind.pause
  end
end

-- Serve a worker that takes only some names. Returns true if all users were looked at.
local function serve_kind(kind)
  local told = kind.news
  -- The kind was told about more users than it has room for; some are not in the list.
  local was_clean = kind.clean and not string.find(told, '\n*\n', 1, true)
  if told ~= '' then kind.pause = 0 end
  if told == '' and kind.till > now and kind.till <= now + LONGEST_WAIT_MS then
    for_others = true
    return false
  end
  local is_all = serve_on(limit, WORK / 4)
  local is_over = is_all
  if is_all then
    kind.from, was_clean = 0, true
    kinds.set_news(kind, '')
  elseif has_room() then
    passed, in_lane = math.max(passed, kind.from), false
    is_over = serve_on(ROUND, 3 * WORK / 4)
    kind.from = is_over and 0 or passed
    if told ~= '' and has_room() then serve_told(kind) end
  end
  if kind.news ~= told then redis.call('HSET', K.kinds, kind.place .. '.news', kind.news) end
  rest(kind, is_over, was_clean)
  return is_all
end

-- --- housekeeping ---

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

-- Ms until something becomes claimable for this worker.
local function wait_hint(kind, is_all)
  if asides >= ASIDE then return 0 end
  local soonest = redis.call('ZCARD', K.held) > 0 and room_after(is_wanted) or -1
  local moments = { kind and kind.till > now and kind.till }
  if redis.call('ZCARD', K.ready) > (is_all and passed or 0) then
    if #taken.ids > 0 or asides > 0 or not filtered then return 0 end
    moments[1] = moments[1] or now + (kind.place > 0 and LOOK_ON_MS or LOOK_AGAIN_MS)
  end
  for _, key in ipairs({ K.delayed, K.leases, K.parked }) do
    moments[#moments + 1] = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or nil)
  end
  for _, at in ipairs(moments) do
    if at and at < math.huge then
      local ms = math.max(0, math.ceil(at - now))
      if soonest < 0 or ms < soonest then soonest = ms end
    end
  end
  return soonest
end

-- The token that woke this worker may have been meant for another: pass it on, at most PASSES times.
local function pass_on(kind)
  if kind then kinds.pass_on(kind) end
  if not for_others or (kind and kind.place > 0) then return end
  local passes = tonumber(redis.call('HGET', K.fair, 'passes') or nil) or 0
  if passes >= PASSES then return end
  redis.call('HSET', K.fair, 'passes', passes + 1)
  leave_token(K.wake)
end

-- A function of its own, because a script has room for only 200 local variables.
local function claim()
  load_limits()
  local kind = filtered and kinds.enter(A.names)
  local is_all = false
  taken.ids, taken.records = still_held()
  if #taken.ids == 0 then
    upkeep()
    -- What has become ready may be for workers that take all names; this one looks only for its own.
    if kind and lost.found then wake_worker() end
    turn_window()
    if redis.call('ZCARD', K.held) > 0 then for_others = return_held(limit, is_wanted) end
    if kind then
      is_all = serve_kind(kind)
    else
      is_all = serve_on(limit, WORK)
    end
    if #taken.ids > 0 then
      count('claimed', #taken.ids)
      remember(A.op, table.concat(taken.ids, '\n'))
    else
      settle()
    end
    reap_idle(#taken.ids)
    save_fair()
    if kind then kinds.save(kind) end
  end

  local ids, records = taken.ids, taken.records
  local hint = wait_hint(kind, is_all)
  local list = kind and kinds.list_of(kind) or 0
  -- One token wakes one worker, and a worker that leaves work for others wakes the next. A claim after
  -- which something happens sooner (a lease may expire, a rate allows a task) wakes a worker of each kind.
  local alarm = tonumber(redis.call('HGET', K.fair, 'alarm') or nil) or 0
  if #ids > 0 then
    if hint == 0 then
      if list == 0 then wake_worker() else kinds.call(kind) end
    elseif hint > 0 and hint < LONGEST_WAIT_MS and (alarm < now or alarm > now + hint) then
      wake_worker()
      kinds.wake()
    end
  else
    pass_on(kind)
    if hint > 0 and (alarm < now or alarm > now + hint) then
      redis.call('HSET', K.fair, 'alarm', now + hint)
    end
  end
  local answer = { hint, now, ids[1] and records[ids[1]].claimed or now, list }
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
end

return claim()
