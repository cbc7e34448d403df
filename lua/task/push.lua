-- Store new tasks, all of them or none.
--
-- @include enqueue
-- PROBES itself: a single task for a user who is in `ready` touches few keys. This is the hot path while
--   all workers take all names.
-- ARGV ...       tasks, at most a few hundred
-- ROW id        text  task id
-- ROW user      text  user id
-- ROW name      text  name of the task
-- ROW document  text  the task, JSON
-- ROW head      text  the part of its status that the client knows: JSON without the closing brace
-- ROW level     int   priority
-- ROW when      text  empty: now; '+ms': after a delay; 'ms': at that time
-- ROW schedule  text  id of its schedule, or empty
--
-- Replay: a task that is stored with the same document, or was until a minute ago, counts as pushed and
-- does not change.
--
-- Returns { 'pushed', number of new tasks }; or, with nothing changed, { 'other', id } if the id belongs
-- to a task with another document, or { 'full', 'queue' or 'user', id } if max_waiting is reached.

local ids, documents, list = {}, {}, {}
for i = FIRST, #ARGV, ROW do
  ids[#ids + 1] = R.id[i]
  documents[#documents + 1] = R.document[i]
  list[#list + 1] = { id = R.id[i], user = R.user[i], name = R.name[i], document = R.document[i],
    head = R.head[i], level = tonumber(R.level[i]), when = R.when[i],
    schedule = R.schedule[i] ~= '' and R.schedule[i] or nil }
end

local answers = known_tasks(ids, documents)
local new, of_user = {}, {}
for i, task in ipairs(list) do
  if answers[i] == 'other' then return { 'other', task.id } end
  if answers[i] == 'new' then new[#new + 1] = task end
end
for i, task in ipairs(new) do
  of_user[task.user] = (of_user[task.user] or 0) + 1
  local full = is_full(task.user, i, of_user[task.user])
  if full then
    probe_all()
    count('refused', 1)
    return { 'full', full, task.id }
  end
end
local lone = #new == 1 and new[1].when == '' and new[1].level < CRITICAL and not new[1].schedule
if lone and redis.call('ZSCORE', K.ready, new[1].user) and #kinds.all() == 0 then
  for _, name in ipairs({ 'status', 'backlog', 'waiting', 'wake', 'stats' }) do probe(name) end
else
  probe_all()
end
store(new)
if #list > #new then count('duplicates', #list - #new) end
save_fair()
return { 'pushed', #new }
