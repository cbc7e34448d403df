-- Store new tasks, all of them or none.
--
-- @include enqueue
-- @lazy unique_pushes rings
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
-- does not change. A task whose unique key another task had gets the same answer again for as long.
--
-- Returns { 'pushed', number of new tasks }, and for each task that was not stored because another task has its
-- unique key: its id, the id of that task. Or, with nothing changed: { 'other', id } if the id belongs to a
-- task with another document; { 'full', 'queue', 'user' or 'tenant', id } if max_waiting is reached;
-- { 'duplicate', id, id of the task with its key } if a duplicate is an error; { 'pools', id } if the queue has
-- no room for another pool.

local ids, documents, list = {}, {}, {}
for i = FIRST, #ARGV, ROW do
  ids[#ids + 1] = R.id[i]
  documents[#documents + 1] = R.document[i]
  list[#list + 1] = { id = R.id[i], user = R.user[i], name = R.name[i], document = R.document[i],
    head = R.head[i], level = tonumber(R.level[i]), when = R.when[i],
    schedule = R.schedule[i] ~= '' and R.schedule[i] or nil }
end

local answers = known_tasks(ids, documents)
local new, replacing, answered, duplicates = {}, {}, {}, 0
-- What becomes of a new task with a unique key; see lib/unique_pushes. Returns a refusal, or nil.
local function decide(task)
  local before = unique_pushes().answered(task)
  if before == 'other' then return { 'other', task.id } end
  local word, holder = 'ignored', before
  if not before then word, holder = unique_pushes().decide(task) end
  if word == 'refused' then return { 'duplicate', task.id, holder } end
  if word == 'new' then
    new[#new + 1] = task
    return nil
  end
  if word == 'replaces' then replacing[#replacing + 1] = { holder, task } end
  answered[#answered + 1] = { task, holder }
  return nil
end

for i, task in ipairs(list) do
  if answers[i] == 'other' then return { 'other', task.id } end
  if answers[i] == 'same' then
    duplicates = duplicates + 1
  else
    read_head(task)
    if task.pool and not rings().has_room_for(task.pool) then return { 'pools', task.id } end
    if task.flow and task.flow.unique then
      local refusal = decide(task)
      if refusal then return refusal end
    else
      new[#new + 1] = task
    end
  end
end
local of_owner, of_tenant = {}, {}
for i, task in ipairs(new) do
  local owner, tenant = task.user, task.group
  if tenant then
    owner = owner_of(task)
    of_tenant[tenant] = (of_tenant[tenant] or 0) + 1
  end
  of_owner[owner] = (of_owner[owner] or 0) + 1
  local full = is_full(task, owner, i, of_owner[owner], tenant and of_tenant[tenant])
  if full then
    probe_all()
    count('refused', 1)
    return { 'full', full, task.id }
  end
end
local lone = #list == 1 and #new == 1 and new[1].when == '' and new[1].level < CRITICAL
  and not new[1].schedule and not new[1].is_special and not fair.mixed
if lone and tag_in(K.ready, new[1].user) then
  probe('status')
  probe('backlog')
  probe('waiting')
  probe('wake')
  probe('stats')
else
  probe_all()
end
for _, pair in ipairs(replacing) do unique_pushes().replace(unpack(pair)) end
store(new)
if duplicates > 0 then count('duplicates', duplicates) end
local answer = { 'pushed', #new }
for _, pair in ipairs(answered) do
  local task, holder = unpack(pair)
  unique_pushes().remember(task, holder)
  answer[#answer + 1] = task.id
  answer[#answer + 1] = holder
end
if #answered > 0 then count('not_unique', #answered) end
save_fair()
return answer
