-- See to it that a task does not run, or, if it runs, ends as cancelled.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op  text  random id of this operation
-- ARGV id  text  the task
--
-- Returns 'cancelled' (it will not run), 'asked' (it runs; recorded for its worker to see), or
-- 'over' (it has ended otherwise, or there is none; nothing was changed).

local before = first_answer(A.op)
if before then return before end
local record = read_status(A.id)
if not record or record.state == 'finished' or record.state == 'buried' then
  return remember(A.op, 'over')
end
if record.state == 'cancelled' then return remember(A.op, 'cancelled') end
if record.state == 'running' then
  record.cancel = true
  write_status(A.id, record)
  return remember(A.op, 'asked')
end
cancel_waiting(A.id, record)
trim_all(1)
save_fair()
return remember(A.op, 'cancelled')
