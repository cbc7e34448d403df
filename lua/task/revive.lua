-- Run a dead letter again: a new task that is linked to the old one, which stays as it is.
--
-- @include enqueue ending
-- ARGV op        text  random id of this operation
-- ARGV id        text  the dead letter
-- ARGV new_id    text  of the new task
-- ARGV user      text  of both
-- ARGV task_name text  of both
-- ARGV document  text  of the new task
-- ARGV head      text  of its status
-- ARGV level     int   its priority
-- ARGV schedule  text  of both, or empty
--
-- A dead letter is run again once: asked again, the answer is the task that was made then.
--
-- Returns { 'retried', id of the new task }; or { 'not_dead' } or { 'full', 'queue' or 'user' }, with
-- nothing changed.

local before = first_answer(A.op)
if before then return { 'retried', before } end
local record = read_status(A.id)
if not record or record.state ~= 'buried' then return { 'not_dead' } end
if type(record.retried_as) == 'string' then return { 'retried', remember(A.op, record.retried_as) } end
local full = is_full(A.user, 1, 1)
if full then return { 'full', full } end
store({ { id = A.new_id, user = A.user, name = A.task_name, document = A.document, head = A.head,
  level = tonumber(A.level), when = '', schedule = A.schedule ~= '' and A.schedule or nil } })
record.retried_as = A.new_id
write_status(A.id, record)
count('revived', 1)
save_fair()
return { 'retried', remember(A.op, A.new_id) }
