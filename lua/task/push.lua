-- Store new tasks, all or none of them.
--
-- @include enqueue
-- PROBES itself: a lone task of a user who is being served touches few keys, and is the hot path,
--   where no worker waits for some names only
-- ARGV ...  tasks, eight each: id, user, name, document, head of the status, level, when, schedule
--           (when: empty now, +ms after so long, ms at that moment; schedule: mostly empty)
--
-- Replay: a task that is stored, or was until a minute ago, with the same document is counted as
-- pushed and left as it is.
--
-- Returns { 'pushed', how many are new }, { 'other', id } when an id means another task, or
-- { 'full', 'queue' or 'user', id }; the last two changed nothing.

local ids, documents, list = {}, {}, {}
for i = FIRST, #ARGV, 8 do
  ids[#ids + 1] = ARGV[i]
  documents[#documents + 1] = ARGV[i + 3]
  list[#list + 1] = { id = ARGV[i], user = ARGV[i + 1], name = ARGV[i + 2], document = ARGV[i + 3],
    head = ARGV[i + 4], level = tonumber(ARGV[i + 5]), when = ARGV[i + 6],
    schedule = ARGV[i + 7] ~= '' and ARGV[i + 7] or nil }
end

local answers = known(ids, documents)
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
