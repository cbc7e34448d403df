-- Give a claimed task back as if it had not been claimed: restore its attempt, charge and rank.
--
-- @include ending
-- @lazy specials uniques
-- FLAGS allow-oom
-- ARGV op     text  random id of this operation
-- ARGV id     text  task id
-- ARGV token  text  token of its lease
--
-- A task whose cancellation was requested ends as cancelled instead.
--
-- Returns 'released', 'cancelled' or 'lost_lease' (nothing changed).

local answer, record = begin_ending(A.op, A.id, A.token)
if answer then return answer end
local owner = owner_of(record)
redis.call('ZREM', K.leases, A.id)
change_running(owner, -1)
end_limits(A.id, record)
charge_more(record, -(record.charge or 1))
local word = 'released'
if record.cancel then
  word = 'cancelled'
  end_task(A.id, record, word)
  trim_all(1)
else
  record.state, record.token, record.worker = 'ready', nil, nil
  record.claimed, record.charge, record.place = nil, nil, nil
  record.attempts = record.attempts - 1
  if record.attempts == 0 and record.flow and record.flow.expires then specials().expire(A.id, record) end
  if record.flow and record.flow.unique then uniques().released(A.id, record) end
  write_status(A.id, record)
  count(word, 1)
  add_waiting({ waiting_task(A.id, record) }, true)
end
review(owner)
if group_of(owner) then review(group_of(owner)) end
wake_worker()
save_fair()
return remember(A.op, word)
