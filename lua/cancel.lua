-- See to it that a task does not run, or, if it runs, ends as cancelled.
--
-- @include ending
-- FLAGS allow-oom
-- KEYS delayed  zset  task id -> when it becomes ready, ms
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
if record.state == 'delayed' then
  redis.call('ZREM', K.delayed, A.id)
else
  remove_waiting(A.id, record)
end
close(A.id, record, 'cancelled')
trim_all(1)
save_fair()
return remember(A.op, 'cancelled')
