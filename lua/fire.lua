-- Fire due schedules: enqueue the task of the moment and advance the plan, in one step.
--
-- @include fence plans enqueue
-- ARGV op       text  random id of this operation
-- ARGV term_ms  int   the leader's term is renewed by this
-- ARGV ...  fires, ten each: schedule id, plan as it was read, moment in ms, next moment in ms or
--           empty, how many moments were missed, user, document, head of the status, level,
--           reason to stop planning when there is no next moment
--
-- Fence: an actor who does not lead changes nothing. Compare: a schedule whose plan is not the one
-- that was read (fired, saved, removed by others) is left alone. The task's id is made of the
-- schedule and the moment, so that a second fire of a moment is the same task.
-- A fire that a limit refuses keeps its plan and is looked at again a little later.
--
-- Returns { 'stale' }, or 'fired' and a word for each: 'fired', 'moved' or 'refused'.

local REFUSED_MS = 5000

local before = first_answer(A.op)
if before then
  local words = {}
  for word in string.gmatch(before, '[^\n]+') do words[#words + 1] = word end
  return words
end
local leader = leads()
if not leader then return { remember(A.op, 'stale') } end

local fires, ids, task_ids, documents = {}, {}, {}, {}
for i = FIRST, #ARGV, 10 do
  local fire = { id = ARGV[i], plan = ARGV[i + 1], moment = tonumber(ARGV[i + 2]),
    next_ms = ARGV[i + 3], missed = tonumber(ARGV[i + 4]), user = ARGV[i + 5],
    document = ARGV[i + 6], head = ARGV[i + 7], level = tonumber(ARGV[i + 8]),
    reason = ARGV[i + 9] }
  fire.task_id = fire.id .. ':' .. ARGV[i + 2]
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
local fired, missed, refused, stopped = 0, 0, 0, 0
for i, fire in ipairs(fires) do
  local state = read_state(states[i])
  -- It is due, so it is active, whatever has become of its record.
  state.user, state.active = state.user or fire.user, true
  local is_new = tasks[i] == 'new'
  local own = (of_user[fire.user] or 0) + 1
  if plans[i] ~= fire.plan or done[fire.id] then
    words[i] = 'moved'
  elseif is_new and is_full(fire.user, #new + 1, own) then
    words[i] = 'refused'
    refused = refused + 1
    state.refused = (state.refused or 0) + 1
    new_due[#new_due + 1] = now + REFUSED_MS
    new_due[#new_due + 1] = fire.id
  else
    words[i] = 'fired'
    done[fire.id] = true
    if is_new then
      fired = fired + 1
      of_user[fire.user] = own
      new[#new + 1] = { id = fire.task_id, user = fire.user, document = fire.document,
        head = fire.head, level = fire.level, when = '' }
    end
    state.last_run = fire.moment
    state.runs = (state.runs or 0) + 1
    if fire.missed > 0 then state.missed = (state.missed or 0) + fire.missed end
    missed = missed + fire.missed
    local revision = string.match(fire.plan, '^%S+')
    if fire.next_ms ~= '' then
      new_due[#new_due + 1] = fire.next_ms
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
  if words[i] == 'fired' and fire.next_ms == '' then
    stop_planning(fire.id, fire.reason)
    stopped = stopped + 1
  end
end
if fired > 0 then count('fired', fired) end
if missed > 0 then count('missed', missed) end
if refused > 0 then count('refused', refused) end
if stopped > 0 then count('set_aside_cron', stopped) end
save_fair()
remember(A.op, 'fired\n' .. table.concat(words, '\n'))
table.insert(words, 1, 'fired')
return words
