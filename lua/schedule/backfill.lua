-- Push tasks for past fire times of a schedule that have no task.
--
-- @include schedules enqueue moments
-- @lazy rings
-- ARGV op        text  random id of this operation
-- ARGV id        text  schedule id
-- ARGV base      text  the revision of its plan, as it was read
-- ARGV revision  text  a new random revision: what others have read of its fire times is out of date then
-- ARGV user      text  user id
-- ARGV task_name text  name of the tasks
-- ARGV head      text  head of their status; see push
-- ARGV level     int   their priority
-- ARGV notes     text  stretches of fire times to note (see lib/moments), one per line
-- ARGV ...  fire times, at most a few hundred
-- ROW moment    int   the fire time, ms
-- ROW document  text  the task, JSON
--
-- A fire time has one task: if its task exists, or did a minute ago, no other is pushed.
--
-- Returns { 'filled', number of new tasks }; or, with nothing changed, { 'changed' }, { 'full', 'queue',
-- 'user' or 'tenant' }, or { 'pools' } if the queue has no room for another pool.

local before = first_answer(A.op)
if before then return { 'filled', tonumber(before) } end
local revision, next_moment = plan_of(A.id)
if revision == '' or revision ~= A.base then return { 'changed' } end

local ids, documents, new = {}, {}, {}
for i = FIRST, #ARGV, ROW do
  ids[#ids + 1] = A.id .. ':' .. R.moment[i]
  documents[#documents + 1] = R.document[i]
end
for i, word in ipairs(known_tasks(ids, documents)) do
  if word == 'new' then
    new[#new + 1] = { id = ids[i], user = A.user, name = A.task_name, document = documents[i],
      head = A.head, level = tonumber(A.level), when = '', schedule = A.id }
    read_head(new[#new])
  end
end
local full = #new > 0 and is_full(new[1], owner_of(new[1]), #new, #new, #new)
if full then return { 'full', full } end
if #new > 0 and new[1].pool and not rings().has_room_for(new[1].pool) then return { 'pools' } end
store(new)
write_plan(A.id, A.revision, next_moment)
for note in string.gmatch(A.notes, '[^\n]+') do note_moments(A.id, note) end
count('backfilled', #new)
save_fair()
return { 'filled', tonumber(remember(A.op, tostring(#new))) }
