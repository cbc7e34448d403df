-- Fire due schedules: push the task of the fire time and advance the plan, in one step.
--
-- @include fence schedules enqueue ending moments
-- @lazy unique_pushes rings
-- ARGV op       text  random id of this operation
-- ARGV term_ms  int   the leader's term is renewed for this long
-- ARGV ...  due schedules, at most a few hundred
-- ROW id        text  schedule id
-- ROW plan      text  its plan, as it was read
-- ROW moment    int   the fire time, ms; empty: fire nothing, only advance the plan
-- ROW next_ms   int   the next fire time, ms; empty: there is none
-- ROW due_ms    int   when to act on the next fire time, ms
-- ROW missed    int   how many fire times were missed
-- ROW note      text  stretches of fire times to note (see lib/moments), or empty
-- ROW user      text  user id
-- ROW name      text  name of the task
-- ROW document  text  the task, JSON
-- ROW head      text  head of its status; see push
-- ROW level     int   its priority
-- ROW overlap   text  'allow', 'skip', 'buffer_one' or 'cancel_previous'
-- ROW max_runs  int   the schedule is completed after this many runs, or empty
-- ROW reason    text  why planning stops when there is no next fire time
-- ROW completed text  'completed' if that is the regular end of the schedule, or empty
--
-- Fence: a caller that does not lead changes nothing. Compare: a schedule whose plan is not the one that
-- was read (it was fired, saved or removed) does not change. The task id is made of the schedule and the
-- fire time, so firing a time twice pushes one task. A fire time not later than the last one is
-- never fired, even if the clock was set back and the plan was made again.
-- A fire that a limit refuses keeps its plan and is tried again a little later. A fire whose task has a unique
-- key that another task has pushes none, or gives that task its document; of several fires of one call with the
-- same key, one is done and the others stay due for the next call.
-- Overlap: while a task of the schedule is unfinished, 'skip' pushes none; 'buffer_one' pushes one that
-- begins when the previous run has ended, and no second one; 'cancel_previous' cancels unfinished tasks.
-- If one call cannot do all of that, the schedules left over stay due for the next call.
--
-- Returns { 'stale' }; or 'fired' and a word for each schedule: 'fired', 'skipped' (by its overlap policy),
-- 'duplicate', 'passed' (there was nothing to fire), 'past' (not later than the last fire time), 'moved',
-- 'refused' or 'later'.

local REFUSED_MS = 5000
local OPEN_READS = 300  -- unfinished tasks that one call looks at, roughly
local CANCELS = 30      -- unfinished tasks that one call cancels, roughly: 2 ms

local before = first_answer(A.op)
if before then
  local words = {}
  for word in string.gmatch(before, '[^\n]+') do words[#words + 1] = word end
  return words
end
local leader = leads()
if not leader then return { remember(A.op, 'stale') } end

-- How many unfinished tasks this call may still look at, and cancel.
local reads_left, cancels_left = OPEN_READS, CANCELS

-- The texts of the records of a schedule's tasks. Usually the raw text is enough: decoding takes ten
-- times as long.
local function open_texts(schedule, members)
  local ids = {}
  for i, member in ipairs(members) do ids[i] = string.sub(member, #schedule + 2) end
  reads_left = reads_left - #ids
  return redis.call('HMGET', K.status, unpack(ids))
end

local function runs(text)
  return text and string.find(text, '"state":"running"', 1, true)
end

-- Which unfinished tasks of a schedule are running: 'all', 'some', or 'none' if there are no unfinished
-- tasks; nil if this call has looked at too many.
local function running_state(schedule)
  local found, after, looked, most = 'none', nil, 0, 2  -- usually there is a run and a buffered task
  while looked < OPEN_READ do
    if reads_left <= 0 then return nil end
    local members = open_members(schedule, after, most)
    if #members == 0 then break end
    for i, text in ipairs(open_texts(schedule, members)) do
      -- The first records are decoded: one that cannot be read does not belong to a running task.
      if looked > 0 and runs(text) then
        found = 'all'
      else
        local ids, records = open_runs(schedule, { members[i] })
        if ids[1] and records[ids[1]].state ~= 'running' then return 'some' end
        if ids[1] then found = 'all' end
      end
    end
    after, looked, most = members[#members], looked + #members, OPEN_READ
  end
  return found
end

-- What the unfinished tasks of the schedule mean for a new one: 'fire', 'buffer', 'skip', or 'later' if this
-- call has looked at too many.
local function overlap_of(fire)
  if fire.overlap == 'allow' or fire.overlap == 'cancel_previous' then return 'fire' end
  if fire.overlap ~= 'skip' then
    local running = running_state(fire.id)
    if not running then return 'later' end
    if running == 'none' then return 'fire' end
    if running == 'all' then return 'buffer' end
  end
  -- The run before a buffered task may have vanished without ending.
  return let_buffered_begin(fire.id) and 'skip' or 'fire'
end

-- Cancel some unfinished tasks of a schedule, and request the cancellation of those that run.
local function cancel_open(schedule, members)
  local unasked = {}
  for i, text in ipairs(open_texts(schedule, members)) do
    local is_asked = runs(text) and string.find(text, '"cancel":true', 1, true)
    if not is_asked then unasked[#unasked + 1] = members[i] end
  end
  if #unasked == 0 then return end
  local ids, records = open_runs(schedule, unasked)
  for _, id in ipairs(ids) do
    local record = records[id]
    if record.state ~= 'running' then
      end_waiting(id, record, 'cancelled')
    else
      record.cancel = true
      write_status(id, record)
    end
    cancels_left = cancels_left - 1
  end
end

-- Cancel all unfinished tasks of a schedule. Returns false if one call cannot cancel all; then the state
-- says where the next call continues, and the schedule fires when all are cancelled.
local function cancel_previous(fire, state)
  local after = state.cancelled_to
  while reads_left > 0 and cancels_left > 0 do
    local members = open_members(fire.id, after, math.min(OPEN_READ, cancels_left))
    if #members == 0 then
      state.cancelled_to = nil
      return true
    end
    cancel_open(fire.id, members)
    after = members[#members]
  end
  state.cancelled_to = after
  return false
end

-- The schedule has reached max_runs.
local function complete(fire)
  fire.next_ms, fire.completed = '', true
  fire.reason = 'completed: max_runs of ' .. text_of(fire.max_runs) .. ' reached'
end

local fires, ids, task_ids, documents = {}, {}, {}, {}
for i = FIRST, #ARGV, ROW do
  local fire = { id = R.id[i], plan = R.plan[i], moment = tonumber(R.moment[i]),
    next_ms = R.next_ms[i], due_ms = R.due_ms[i], missed = tonumber(R.missed[i]), note = R.note[i],
    user = R.user[i], name = R.name[i], document = R.document[i], head = R.head[i],
    level = tonumber(R.level[i]), overlap = R.overlap[i], max_runs = tonumber(R.max_runs[i]),
    reason = R.reason[i], completed = R.completed[i] ~= '' }
  fire.task_id = fire.id .. ':' .. R.moment[i]  -- no task has the id without a fire time
  fires[#fires + 1] = fire
  ids[#ids + 1] = fire.id
  task_ids[#task_ids + 1] = fire.task_id
  documents[#documents + 1] = fire.document
end
local plans = redis.call('HMGET', K.plan, unpack(ids))
local states = redis.call('HMGET', K.schedule_state, unpack(ids))
local tasks = known_tasks(task_ids, documents)

-- Whether a new task has the unique key of another one of this call.
local function waits_for_key(task)
  return task.flow and task.flow.unique and unique_pushes().is_taken_here(task)
end

-- Whether another task has the unique key of a new one. If it is to be replaced, that is noted.
local replacing = {}
local function is_duplicate(task)
  if not task.flow or not task.flow.unique then return false end
  local word, holder = unique_pushes().decide(task)
  if word == 'replaces' then replacing[#replacing + 1] = { holder, task } end
  return word ~= 'new'
end

local words, new, of_owner, of_tenant = {}, {}, {}, {}
local new_plans, new_states, new_due, done = {}, {}, {}, {}
local noted, alone = {}, {}
local fired, missed, refused, stopped, skipped, duplicates = 0, 0, 0, 0, 0, 0
for i, fire in ipairs(fires) do
  local state = read_state(states[i])
  -- A due schedule is active, whatever its record says.
  state.user, state.active = state.user or fire.user, true
  if fire.moment and fire.moment <= (tonumber(state.last_run) or -1) then
    -- The clock was set back and the plan made again: this time has been fired.
    fire.moment, fire.missed, fire.note, fire.is_past = nil, 0, '', true
  end
  if fire.moment and fire.max_runs and (state.runs or 0) >= fire.max_runs then
    -- The limit was lowered.
    fire.spent, fire.moment = fire.moment, nil
    complete(fire)
  end
  local is_new = fire.moment and tasks[i] == 'new'
  local task = is_new and { id = fire.task_id, user = fire.user, name = fire.name, document = fire.document,
    head = fire.head, level = fire.level, when = '', schedule = fire.id }
  local owner, of_group, has_room = fire.user, 0, true
  if task then
    read_head(task)
    if task.is_special then
      owner, of_group = owner_of(task), (of_tenant[task.group or ''] or 0) + 1
      has_room = not task.pool or rings().has_room_for(task.pool)
    end
  end
  local own = (of_owner[owner] or 0) + 1
  local overlap = 'fire'
  if plans[i] ~= fire.plan or done[fire.id] then
    overlap = 'moved'
  elseif is_new then
    overlap = waits_for_key(task) and 'later' or overlap_of(fire)
  elseif not fire.moment then
    overlap = 'skip'
  end
  if overlap == 'moved' or overlap == 'later' then
    words[i] = overlap
  elseif is_new and overlap ~= 'skip' and (not has_room or is_full(task, owner, #new + 1, own, of_group)) then
    words[i] = 'refused'
    refused = refused + 1
    state.refused = (state.refused or 0) + 1
    new_due[#new_due + 1] = now + REFUSED_MS
    new_due[#new_due + 1] = fire.id
  elseif is_new and fire.overlap == 'cancel_previous' and not cancel_previous(fire, state) then
    words[i] = 'later'
  else
    if is_new and overlap ~= 'skip' and is_duplicate(task) then overlap = 'duplicate' end
    words[i] = overlap == 'skip' and 'skipped' or overlap == 'duplicate' and overlap or 'fired'
    done[fire.id] = true
    if not fire.moment then
      words[i] = fire.is_past and 'past' or 'passed'
      if fire.spent then alone[#alone + 1] = { fire.id, fire.spent, 'completed' } end
    elseif words[i] ~= 'fired' then
      alone[#alone + 1] = { fire.id, fire.moment, overlap == 'skip' and 'overlap' or 'duplicate' }
      if overlap == 'skip' then skipped = skipped + 1 else duplicates = duplicates + 1 end
      state.skipped = (state.skipped or 0) + 1
    else
      if is_new then
        fired = fired + 1
        of_owner[owner], of_tenant[task.group or ''] = own, of_group
        task.buffered = overlap == 'buffer'
        new[#new + 1] = task
      end
      state.last_run = fire.moment
      state.runs = (state.runs or 0) + 1
      if fire.max_runs and state.runs >= fire.max_runs then
        complete(fire)
      end
    end
    if fire.note ~= '' then noted[#noted + 1] = fire end
    if fire.missed > 0 then state.missed = (state.missed or 0) + fire.missed end
    missed = missed + fire.missed
    if fire.next_ms ~= '' then
      new_due[#new_due + 1] = fire.due_ms
      new_due[#new_due + 1] = fire.id
    end
    new_plans[#new_plans + 1] = fire.id
    new_plans[#new_plans + 1] = make_plan((read_plan(fire.plan)), fire.next_ms)
  end
  if words[i] ~= 'moved' then
    new_states[#new_states + 1] = fire.id
    new_states[#new_states + 1] = cjson.encode(state)
  end
end

write_leader(leader, tonumber(A.term_ms))
for _, pair in ipairs(replacing) do unique_pushes().replace(unpack(pair)) end
store(new)
if #new_plans > 0 then redis.call('HSET', K.plan, unpack(new_plans)) end
if #new_due > 0 then redis.call('ZADD', K.due, unpack(new_due)) end
if #new_states > 0 then redis.call('HSET', K.schedule_state, unpack(new_states)) end
for i, fire in ipairs(fires) do
  if done[fire.id] and words[i] ~= 'moved' and fire.next_ms == '' then
    stop_planning(fire.id, fire.reason, fire.completed)
    if not fire.completed then stopped = stopped + 1 end
  end
end
for _, fire in ipairs(noted) do note_moments(fire.id, fire.note) end
for _, moment in ipairs(alone) do note_moment(unpack(moment)) end
if fired > 0 then count('fired', fired) end
if missed > 0 then count('missed', missed) end
if refused > 0 then count('refused', refused) end
if skipped > 0 then count('skipped', skipped) end
if duplicates > 0 then count('not_unique', duplicates) end
if stopped > 0 then count('set_aside_cron', stopped) end
save_fair()
remember(A.op, 'fired\n' .. table.concat(words, '\n'))
table.insert(words, 1, 'fired')
return words
