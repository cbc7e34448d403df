-- Hand the next tasks to a worker, fairly between users, and start their leases.
--
-- @include upkeep user_heap
-- FLAGS allow-oom
-- KEYS served_before  hash  user -> service / weight in the window before
-- ARGV op        text  random; the lease token. Repeated: the tasks that it still holds, if any
-- ARGV worker    text  who claims
-- ARGV limit     int   how many tasks at most
-- ARGV lease_ms  int   how long the leases are
-- ARGV place     text  host and process of the worker
-- ARGV names     text  empty: tasks of any name; '+' and names in lines: only these; '-': not these
--
-- First does what time has made due. The cost does not depend on how many users wait, are capped or
-- are paused: the first `limit` users of ready are looked at, and of others only as many as WORK
-- allows; those who may not be served are not in it. They are served in memory, and what has become
-- of them is written together: calls of commands are what a script spends its time on.
-- Tasks of names that are not wanted are passed over where they are, LOOK of a user at most. Tasks
-- of names whose limits are reached are set aside, and come back in turn when there is room.
-- A claim of some names looks at the head of ready, then goes on where the last claim of its kind
-- stopped, then at users of whom its kind was told. When that has found nothing anywhere, claims of
-- the kind do not look again for a while, unless they are told of something.
--
-- Returns { ms until something becomes claimable (-1: nothing known, 0: now), ms of the clock, ms at
-- which the tasks were claimed, the number of the wake list at which to wait (0: `wake`), then for
-- each task: id, document, attempt, ms at which it became ready }.

local WINDOW_MS = 10000      -- service is compared between users over windows of this length
local TRIMMED = 200          -- so often, twice as many old records are dropped at most
local CRITICAL_CREDIT = 10   -- so many CRITICAL tasks may go first in a row before the share binds
local CLAIM_BYTES = 1048576  -- documents of one answer: no more are taken when they come to that
local CLAIM_NAMES = 65536    -- and none when their users, ids and names do: long ones take longer
local LARGEST = 300000       -- bytes of a document, roughly: so many tasks need not be measured
local LONGEST_WAIT_MS = 5000 -- nobody waits longer than this, whatever the hint
local WORK = 1000            -- tasks looked at in vain in one claim, roughly: some ms
local WORK_OF_USER = 4       -- a user of whom nothing can be taken counts for so many
local ROUND = 20             -- users in one reading, after the first
local MOST_ROUND = 100       -- and in the first, where some may have nothing for the worker
local ROUNDS = 60            -- readings at most
local LOOK_ON_MS = 100       -- when there are more users than were looked at
local LOOK_AGAIN_MS = 250    -- when nothing was found anywhere; doubled each time up to the longest wait
local LOOK = 100             -- so many tasks of a user are looked at for one of a name that is wanted
local ASIDE = 1000           -- so many tasks are set aside in one claim

local limit, lease_end = tonumber(A.limit), now + tonumber(A.lease_ms)
local share = SETTINGS.critical_share
-- What an ordinary serve adds to the credit of the CRITICAL lane, and the most that can be saved up:
-- with less than one refill and what was left over, a large share could not be reached.
local refill = share < 1 and share / (1 - share) or 0
local most_credit = math.max(CRITICAL_CREDIT, refill + 1)
fair.credit = fair.credit and math.min(fair.credit, most_credit)

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
--   state: 'ready', 'parked', 'gone' or 'passed' (nothing to take here), wait, service }

local function new_user(name, tag)
  return { name = name, tag = tag, list = {}, at = 1, state = 'ready', served = 0 }
end

-- --- names ---

local listed = {}
for name in string.gmatch(string.sub(A.names, 2), '[^\n]+') do listed[name] = true end
local only_listed, filtered = string.sub(A.names, 1, 1) == '+', A.names ~= ''
-- Users at the head of ready and of the CRITICAL lane of whom nothing can be taken in this claim.
local passed, lane_passed = 0, 0
local for_others = false  -- something is there that this worker does not want
local vain = 0            -- what was looked at and not taken, in tasks
local in_lane = true      -- the CRITICAL lane is looked at, too
local asides, aside, held_aside = 0, {}, {}

local function is_wanted(name)
  return (listed[name] or false) == only_listed
end

local function id_of(member) return string.match(member, '^%Z*%z%Z*%z(%Z*)') end
local function name_of(member) return string.match(member, '%z(%Z*)$') end

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

-- Take the member at this offset off the list.
local function take_off(user, offset)
  if offset == 0 then
    user.at = user.at + 1
  else
    table.remove(user.list, user.at + offset)
  end
end

-- Let a task wait for room in the limits of its name, out of the way of its user's others.
local function set_aside(user, member, name)
  local id, rank = id_of(member), string.match(member, '^%Z*%z(%Z*)')
  aside[#aside + 1] = member
  held_aside[#held_aside + 1] = '0'
  held_aside[#held_aside + 1] = held_member_of(id, { user = user.name, rank = rank, name = name })
  join_slot_line(name, user.name)
  asides = asides + 1
end

-- The user's first task that may run: its offset and member; nil if there is none in sight.
local function first_runnable(user, chunk)
  if not filtered and not has_limits then return 0, member(user, 0, chunk) end
  local offset = user.from or 0  -- those before it were looked at when the user was served before
  while offset < LOOK do
    -- Few at first: mostly it is the first one, and for some workers none of all.
    local found = member(user, offset, math.max(chunk, math.min(LOOK / 2, 2 * offset + 4)))
    if not found then return offset, nil end
    local name, is_other = name_of(found), false
    if filtered then is_other = not is_wanted(name) end
    if not is_other and not is_limited(name) then
      user.from = offset
      return offset, found
    end
    vain = vain + 1 + math.floor(#found / 300)  -- long names take longer
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

-- Read the next users of both lanes: by name, in order, and as lines by tag.
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

-- The user whose turn it is, and whether by the CRITICAL lane; nil: nobody who has been read. So
-- many are read that this comes to pass only when some were passed over.
local function next_user(ready, critical)
  if may_jump() then
    local top = heap.pop(critical)
    while top do
      if heap.is_beyond(critical, top) then return nil end
      -- One whose last CRITICAL task went by an ordinary turn has no place in this lane any more.
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
      fair.credit = math.min(most_credit, fair.credit + refill)
    end
  end
  user.tag = user.tag + stride
  user.served = user.served + stride
end

-- What the user's next task is now: whether the user has any, and goes by the CRITICAL lane.
local function look_ahead(user, chunk)
  local following = member(user, 0, chunk)
  user.is_critical = following ~= nil and is_critical(user.name, following)
  return following
end

-- Nothing of the user's can be taken in this claim.
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

-- The user's CRITICAL tasks cannot be taken in this claim; what can be is for the ordinary turn.
local function leave_lane(user, chunk)
  look_ahead(user, chunk)
  if user.is_critical then lane_passed = lane_passed + 1 end
  user.left_lane = true
end

-- Count the bytes of a task that is taken. A few tasks cannot be too large together.
local bytes, long = 0, 0
local function weigh(member)
  long = long + #member
  if long > CLAIM_NAMES then bytes = CLAIM_BYTES end
  if limit * LARGEST > CLAIM_BYTES then
    bytes = bytes + redis.call('HSTRLEN', K.tasks, id_of(member))
  end
end

-- Take the user's first task that may run; its member, or nil if there is none.
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

-- Serve users in memory, up to `want` times; the members taken.
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

local claimed_by  -- the end of the text of a record that is claimed for the first time

-- The record of a task that nobody has claimed before, told from the end of its text, as `store`
-- writes it: almost all are, and to read JSON takes longer. Nil for others.
local function untouched(text, member)
  local from, to = string.find(text, ',"state":"ready","rank":"', 1, true)
  if not from or not string.find(text, '"attempts":0,', 1, true)
    or string.find(text, ',"timeout_ms":', 1, true) then return nil end
  local rank, due = string.match(text, '^(%d+)","pushed":%d+,"due":(%d+)}$', to + 1)
  if not rank then return nil end
  return { user = string.match(member, '^%Z*'), name = name_of(member), rank = rank,
    due = tonumber(due), attempts = 0 }
end

-- The text of such a record when it is claimed; nil if a limit of its name has to be entered too.
local function first_claim_text(text, record)
  if limits_of(record.name) then return nil end
  text = exchange(text, '"state":"ready"', '"state":"running"')
  text = exchange(text, '"attempts":0', '"attempts":1')
  claimed_by = claimed_by or ',"token":' .. cjson.encode(A.op) .. ',"worker":'
    .. cjson.encode(A.worker) .. ',"place":' .. cjson.encode(A.place) .. ',"claimed":' .. now_text .. ',"charge":'
  -- As cjson writes numbers: the same charge, however the record is written.
  return string.sub(text, 1, -2) .. claimed_by .. string.format('%.14g', cost_of(record.user)) .. '}'
end

-- Take the members out of the backlog; ids and records of those whose records can be read.
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

-- Enter what the tasks take of the limits of their names, and how long they may run.
local function enter_limits(ids, records)
  local slots, deadlines = {}, {}
  for _, id in ipairs(ids) do
    local record = records[id]
    local limits = limits_of(record.name) or {}
    record.slot = limits.slots and true
    if limits.slots then add(slots, '0', record.name .. '\0' .. id) end
    -- The worker ends it at its time-out: one that still runs a lease later does not answer. Until
    -- the worker says how long its handler may run (see extend), what was declared last counts.
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

-- Serve users who were read, and write what has become of them.
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

-- Serve those in ready behind the ones who were passed over, first so many of them. True: all.
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

-- Serve users of whom the kind of this worker was told. Those who may have more are kept in mind.
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

-- What claims of this kind do next: look on, or, when nothing was found since they began at the head,
-- not for a while.
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

-- Serve a worker that takes only some names. True: all users were looked at.
local function serve_kind(kind)
  local told = kind.news
  -- Told of more users than there is room for: they are somewhere.
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

-- How long until something becomes claimable; what was passed over is for others.
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

-- The token that woke this worker may have been for another: pass it on, to so many in a row.
local function pass_on(kind)
  if kind then kinds.pass_on(kind) end
  if not for_others or (kind and kind.place > 0) then return end
  local passes = tonumber(redis.call('HGET', K.fair, 'passes') or nil) or 0
  if passes >= PASSES then return end
  redis.call('HSET', K.fair, 'passes', passes + 1)
  leave_token(K.wake)
end

-- A function: its local variables would be too many for the script.
local function claim()
  load_limits()
  local kind = filtered and kinds.enter(A.names)
  local is_all = false
  taken.ids, taken.records = still_held()
  if #taken.ids == 0 then
    upkeep()
    -- What has become ready may be for workers that take all names: this one only looks for its own.
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
  -- One token wakes one worker: whoever finds more work than it took passes it on. A claim that has
  -- brought the next moment nearer (a lease that may expire, a rate limit) lets one worker of each kind
  -- hear of it.
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
