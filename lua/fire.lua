-- Fire due schedules: enqueue the task of the moment and advance the plan, in one step.
--
-- @include fence plans enqueue ending moments
-- ARGV op       text  random id of this operation
-- ARGV term_ms  int   the leader's term is renewed by this
-- ARGV ...  fires, sixteen each: schedule id, plan as it was read, moment in ms (empty: nothing is to
--           be fired), next moment in ms or empty, when to act then, how many moments were missed,
--           what is to be noted of them (see lib/moments) or empty, user, name, document, head of the
--           status, level, overlap ('allow', 'skip', 'buffer_one' or 'cancel_previous'), the number
--           of runs after which it is completed or empty, reason to stop planning when there is no
--           next moment, 'completed' if that is as it should be
--
-- Fence: an actor who does not lead changes nothing. Compare: a schedule whose plan is not the one
-- that was read (fired, saved, removed by others) is left alone. The task's id is made of the
-- schedule and the moment, so that a second fire of a moment is the same task; and no moment is fired
-- that is not later than the last one, however the clock was set and the plan made anew.
-- A fire that a limit refuses keeps its plan and is looked at again a little later.
-- Overlap: while a task of the schedule is unfinished, 'skip' makes none; 'buffer_one' makes one
-- that begins when the run before it has ended, and no second such; 'cancel_previous' cancels what
-- is unfinished.
--
-- Returns { 'stale' }, or 'fired' and a word for each: 'fired', 'skipped', 'passed' (nothing was to be
-- fired), 'past' (it is not later than the last one), 'moved' or 'refused'.

local REFUSED_MS = 5000

local before = first_answer(A.op)
if before then
  local words = {}
  for word in string.gmatch(before, '[^\n]+') do words[#words + 1] = word end
  return words
end
local leader = leads()
if not leader then return { remember(A.op, 'stale') } end

-- What the schedule's unfinished tasks mean for a new one: 'fire', 'buffer' or 'skip'.
local function overlap_of(fire)
  if fire.overlap == 'allow' or fire.overlap == 'cancel_previous' then return 'fire' end
  local open, records = open_runs(fire.id)
  if #open == 0 then return 'fire' end
  local waits = fire.overlap == 'skip'
  for _, id in ipairs(open) do
    if records[id].state ~= 'running' then waits = true end
  end
  if not waits then return 'buffer' end
  let_buffered_begin(fire.id)  -- the run before it may have vanished without an end
  return 'skip'
end

local function cancel_previous(schedule)
  local open, records = open_runs(schedule)
  for _, id in ipairs(open) do
    local record = records[id]
    if record.state == 'running' then
      record.cancel = true
      write_status(id, record)
    else
      cancel_waiting(id, record)
    end
  end
end

-- It has had all the runs that it may have.
local function complete(fire)
  fire.next_ms, fire.completed = '', true
  fire.reason = 'completed: it has had its ' .. text_of(fire.max_runs) .. ' runs'
end

local fires, ids, task_ids, documents = {}, {}, {}, {}
for i = FIRST, #ARGV, 16 do
  local fire = { id = ARGV[i], plan = ARGV[i + 1], moment = tonumber(ARGV[i + 2]),
    next_ms = ARGV[i + 3], due_ms = ARGV[i + 4], missed = tonumber(ARGV[i + 5]), note = ARGV[i + 6],
    user = ARGV[i + 7], name = ARGV[i + 8], document = ARGV[i + 9], head = ARGV[i + 10],
    level = tonumber(ARGV[i + 11]), overlap = ARGV[i + 12], max_runs = tonumber(ARGV[i + 13]),
    reason = ARGV[i + 14], completed = ARGV[i + 15] ~= '' }
  fire.task_id = fire.id .. ':' .. ARGV[i + 2]  -- without a moment: no task has this id
  fires[#fires + 1] = fire
  ids[#ids + 1] = fire.id
  task_ids[#task_ids + 1] = fire.task_id
  documents[#documents + 1] = fire.document
end
local plans = redis.call('HMGET', K.plan, unpack(ids))
local states = redis.call('HMGET', K.schedule_state, unpack(ids))
local tasks = known(task_ids, documents)

local words, new, of_user = {}, {}, {}
local new_plans, new_states, new_due, done = {}, {}, {}, {}
local noted, alone = {}, {}
local fired, missed, refused, stopped, skipped = 0, 0, 0, 0, 0
for i, fire in ipairs(fires) do
  local state = read_state(states[i])
  -- It is due, so it is active, whatever has become of its record.
  state.user, state.active = state.user or fire.user, true
  if fire.moment and fire.moment <= (tonumber(state.last_run) or -1) then
    -- The clock was set back and the plan made anew since: this moment has had its fire.
    fire.moment, fire.missed, fire.note, fire.is_past = nil, 0, '', true
  end
  if fire.moment and fire.max_runs and (state.runs or 0) >= fire.max_runs then
    -- The limit is lower than it was.
    fire.spent, fire.moment = fire.moment, nil
    complete(fire)
  end
  local is_new = fire.moment and tasks[i] == 'new'
  local own = (of_user[fire.user] or 0) + 1
  local overlap = 'fire'
  if plans[i] ~= fire.plan or done[fire.id] then
    overlap = 'moved'
  elseif is_new then
    overlap = overlap_of(fire)
  elseif not fire.moment then
    overlap = 'skip'
  end
  if overlap == 'moved' then
    words[i] = 'moved'
  elseif is_new and overlap ~= 'skip' and is_full(fire.user, #new + 1, own) then
    words[i] = 'refused'
    refused = refused + 1
    state.refused = (state.refused or 0) + 1
    new_due[#new_due + 1] = now + REFUSED_MS
    new_due[#new_due + 1] = fire.id
  else
    words[i] = overlap == 'skip' and 'skipped' or 'fired'
    done[fire.id] = true
    if not fire.moment then
      words[i] = fire.is_past and 'past' or 'passed'
      if fire.spent then alone[#alone + 1] = { fire.id, fire.spent, 'completed' } end
    elseif overlap == 'skip' then
      alone[#alone + 1] = { fire.id, fire.moment, 'overlap' }
      skipped = skipped + 1
      state.skipped = (state.skipped or 0) + 1
    else
      if is_new then
        if fire.overlap == 'cancel_previous' then cancel_previous(fire.id) end
        fired = fired + 1
        of_user[fire.user] = own
        new[#new + 1] = { id = fire.task_id, user = fire.user, name = fire.name,
          document = fire.document, head = fire.head, level = fire.level, when = '',
          schedule = fire.id, buffered = overlap == 'buffer' }
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
    local revision = string.match(fire.plan, '^%S+')
    if fire.next_ms ~= '' then
      new_due[#new_due + 1] = fire.due_ms
      new_due[#new_due + 1] = fire.id
    end
    new_plans[#new_plans + 1] = fire.id
    new_plans[#new_plans + 1] = revision .. ' ' .. (fire.next_ms ~= '' and fire.next_ms or '-')
  end
  if words[i] ~= 'moved' then
    new_states[#new_states + 1] = fire.id
    new_states[#new_states + 1] = cjson.encode(state)
  end
end

write_leader(leader, tonumber(A.term_ms))
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
if stopped > 0 then count('set_aside_cron', stopped) end
save_fair()
remember(A.op, 'fired\n' .. table.concat(words, '\n'))
table.insert(words, 1, 'fired')
return words
