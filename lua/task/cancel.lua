-- Cancel a task. If it is running, request its cancellation.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op  text  random id of this operation
-- ARGV id  text  task id
--
-- Returns 'cancelled' (it will not run), 'asked' (it is running; its worker will see the request), or
-- 'over' (it has ended, or does not exist; nothing changed).

local before = first_answer(A.op)
if before then return before end
local record = read_status(A.id)
if not record or record.state == 'finished' or record.state == 'buried' or record.state == 'expired' then
  return remember(A.op, 'over')
end
if record.state == 'cancelled' then return remember(A.op, 'cancelled') end
if record.state == 'running' then
  record.cancel = true
  write_status(A.id, record)
  return remember(A.op, 'asked')
end
end_waiting(A.id, record, 'cancelled')
trim_all(1)
save_fair()
return remember(A.op, 'cancelled')
