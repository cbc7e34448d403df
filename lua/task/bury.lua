-- Put a claimed task among the dead letters: it is not offered again.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op     text  random id of this operation
-- ARGV id     text  the task
-- ARGV token  text  of its lease
-- ARGV error  text  why
-- ARGV timed_out    text  '1' if it ran for too long, or empty
-- ARGV fingerprint  text  what failures of one cause have in common
-- ARGV report       text  what the attempt has to tell, JSON, or empty
--
-- A task whose cancelling was asked for ends as cancelled instead.
--
-- Returns 'buried', 'cancelled' or 'lost_lease' (nothing was changed).

local answer, record = begin(A.op, A.id, A.token)
if answer then return answer end
local word = record.cancel and 'cancelled' or 'buried'
end_lease(A.id, record)
record.error = A.error
record.timed_out = A.timed_out ~= '' or nil
if word == 'buried' then record.fingerprint = A.fingerprint end
keep_attempt(A.id, record, failure_of(record), A.report)
close(A.id, record, word)
trim_all(1)
save_fair()
return remember(A.op, word)
