-- Give a claimed task back as if it had not been claimed: restore its attempt, charge and rank.
--
-- @include ending
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
local user = record.user
redis.call('ZREM', K.leases, A.id)
change_running(user, -1)
end_limited(A.id, record)
adjust(user, -(record.charge or 1) / settings_of(user).weight)
local word = 'released'
if record.cancel then
  word = 'cancelled'
  end_task(A.id, record, word)
  trim_all(1)
else
  record.state, record.token, record.worker = 'ready', nil, nil
  record.claimed, record.charge, record.place = nil, nil, nil
  record.attempts = record.attempts - 1
  write_status(A.id, record)
  count(word, 1)
  add_waiting({ waiting_task(A.id, record) }, true)
end
review(user)
wake_worker()
save_fair()
return remember(A.op, word)
