-- Change the time at which a task that nobody has claimed becomes ready.
--
-- @include ending enqueue
-- @lazy delays
-- ARGV op    text  random id of this operation
-- ARGV id    text  task id
-- ARGV when  text  empty: now; '+ms': after a delay; 'ms': at that time
--
-- The task keeps its rank, and with it its age. One that waits behind another task with its unique key goes on to
-- do so; the time counts when that one has ended.
--
-- Returns 'moved'; or 'running', 'over' (it has ended) or 'absent', with nothing changed.

local before = first_answer(A.op)
if before then return before end
local record = read_status(A.id)
if not record then return remember(A.op, 'absent') end
if record.state == 'running' then return remember(A.op, 'running') end
if record.state ~= 'ready' and record.state ~= 'delayed' then return remember(A.op, 'over') end

if record.behind then
  record.due = math.max(due_at(A.when), now)
  write_status(A.id, record)
  return remember(A.op, 'moved')
end
prepare_end(record)
delays()
if record.state == 'delayed' then
  delays().remove(A.id, owner_of(record))
else
  remove_waiting(A.id, record)
end
record.due, record.buffered = math.max(due_at(A.when), now), nil
record.state = record.due > now and 'delayed' or 'ready'
write_status(A.id, record)
prepare_end(record)
delays()
if record.state == 'delayed' then
  delays().add({ record.due, A.id, owner_of(record) })
else
  add_waiting({ waiting_task(A.id, record) })
end
wake_for(record)
save_fair()
return remember(A.op, 'moved')
