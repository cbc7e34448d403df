-- Offer a claimed task again after a delay, and keep the error of this attempt.
--
-- @include ending
-- @lazy delays gates uniques
-- FLAGS allow-oom
-- ARGV op        text  random id of this operation
-- ARGV id        text  task id
-- ARGV token     text  token of its lease
-- ARGV error     text  why the attempt failed
-- ARGV delay_ms  int   0: ready at once
-- ARGV timed_out text  '1' if it ran for too long, or empty
-- ARGV report    text  the worker's report of the attempt, JSON, or empty
-- ARGV cost      num   what the attempt has cost, in the units of the queue; empty: as charged
--
-- A task whose cancellation was requested ends as cancelled instead.
--
-- Returns 'retried', 'cancelled' or 'lost_lease' (nothing changed).

local answer, record = begin_ending(A.op, A.id, A.token, tonumber(A.cost))
if answer then return answer end
if tonumber(A.delay_ms) > 0 then delays() end
end_lease(A.id, record, tonumber(A.cost))
record.error = A.error
record.timed_out = A.timed_out ~= '' or nil
keep_attempt(A.id, record, failure_of(record), A.report)
if record.cancel then
  end_task(A.id, record, 'cancelled')
  trim_all(1)
  save_fair()
  return remember(A.op, 'cancelled')
end
record.token = nil
local delay = tonumber(A.delay_ms)
record.due = now + delay
record.state = delay > 0 and 'delayed' or 'ready'
if record.flow and record.flow.unique then uniques().released(A.id, record) end
write_status(A.id, record)
count('retried', 1)
if delay > 0 then
  delays().add({ record.due, A.id, owner_of(record) })
  wake_for(record)
  if record.flow and record.flow.keys and gates().keeps_place(record) then
    gates().arrive(waiting_task(A.id, record))
  end
elseif add_waiting({ waiting_task(A.id, record) }, true) then
  wake_worker()
end
save_fair()
return remember(A.op, 'retried')
