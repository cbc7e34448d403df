-- Move the time of a task that no worker has claimed.
--
-- @include ending enqueue
-- ARGV op    text  random id of this operation
-- ARGV id    text  the task
-- ARGV when  text  empty now, +ms after so long, ms at that moment
--
-- Its rank stays: it is as old as it was.
--
-- Returns 'moved'; or 'running', 'over' (it has ended) or 'absent', with nothing changed.

local before = first_answer(A.op)
if before then return before end
local record = read_status(A.id)
if not record then return remember(A.op, 'absent') end
if record.state == 'running' then return remember(A.op, 'running') end
if record.state ~= 'ready' and record.state ~= 'delayed' then return remember(A.op, 'over') end

if record.state == 'delayed' then
  delays.remove(A.id, record.user)
else
  remove_waiting(A.id, record)
end
record.due, record.buffered = math.max(due_at(A.when), now), nil
record.state = record.due > now and 'delayed' or 'ready'
write_status(A.id, record)
if record.state == 'delayed' then
  delays.add({ record.due, A.id, record.user })
else
  add_waiting({ { id = A.id, user = record.user, rank = record.rank, name = record.name } })
end
wake_worker()
kinds.wake(record.name)
save_fair()
return remember(A.op, 'moved')
