-- Move a claimed task to the dead letters; it does not run again.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op     text  random id of this operation
-- ARGV id     text  task id
-- ARGV token  text  token of its lease
-- ARGV error  text  why it failed
-- ARGV timed_out    text  '1' if it ran for too long, or empty
-- ARGV fingerprint  text  the same for failures with the same cause
-- ARGV report       text  the worker's report of the attempt, JSON, or empty
-- ARGV cost         num   what the attempt has cost, in the units of the queue; empty: as charged
--
-- A task whose cancellation was requested ends as cancelled instead.
--
-- Returns 'buried', 'cancelled' or 'lost_lease' (nothing changed).

local answer, record = begin_ending(A.op, A.id, A.token, tonumber(A.cost))
if answer then return answer end
local word = record.cancel and 'cancelled' or 'buried'
end_lease(A.id, record, tonumber(A.cost))
record.error = A.error
record.timed_out = A.timed_out ~= '' or nil
if word == 'buried' then record.fingerprint = A.fingerprint end
keep_attempt(A.id, record, failure_of(record), A.report)
end_task(A.id, record, word)
trim_all(1)
save_fair()
return remember(A.op, word)
