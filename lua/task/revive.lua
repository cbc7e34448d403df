-- Run a dead letter again as a new task that is linked to the old one; the old one stays.
--
-- @include enqueue ending
-- ARGV op        text  random id of this operation
-- ARGV id        text  the dead letter
-- ARGV new_id    text  id of the new task
-- ARGV user      text  user id of both
-- ARGV task_name text  name of both
-- ARGV document  text  document of the new task
-- ARGV head      text  head of its status; see push
-- ARGV level     int   its priority
-- ARGV schedule  text  id of the schedule of both, or empty
--
-- A dead letter is run again only once. Further calls return the task that the first call made.
--
-- Returns { 'retried', id of the new task }; or { 'not_dead' } or { 'full', 'queue', 'user' or 'tenant' }, with
-- nothing changed.

local before = first_answer(A.op)
if before then return { 'retried', before } end
local record = read_status(A.id)
if not record or record.state ~= 'buried' then return { 'not_dead' } end
if type(record.retried_as) == 'string' then return { 'retried', remember(A.op, record.retried_as) } end
local task = { id = A.new_id, user = A.user, name = A.task_name, document = A.document, head = A.head,
  level = tonumber(A.level), when = '', schedule = A.schedule ~= '' and A.schedule or nil }
read_head(task)
local full = is_full(task, owner_of(task), 1, 1, 1)
if full then return { 'full', full } end
store({ task })
record.retried_as = A.new_id
write_status(A.id, record)
count('revived', 1)
save_fair()
return { 'retried', remember(A.op, A.new_id) }
