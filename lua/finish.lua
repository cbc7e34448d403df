-- Record that tasks are done, each by the token of its lease.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV ...  tasks, three each: id, token, result (JSON, or empty)
--
-- Replay: a task that this token finished before is finished, also when its record is gone by now.
-- A task whose cancelling was asked for ends as cancelled.
--
-- Returns a word for each: 'finished', 'cancelled', or 'lost_lease' (nothing was changed).

local function finished_before(id, token)
  local record = read_status(id)
  if record then
    return (record.state == 'finished' or record.state == 'cancelled') and record.token == token
      and record.state
  end
  return first_answer('t:' .. id) == token and 'finished'
end

local answer, closed = {}, 0
for i = FIRST, #ARGV, 3 do
  local id, token = ARGV[i], ARGV[i + 1]
  local record = held(id, token)
  local word
  if record then
    word = record.cancel and 'cancelled' or 'finished'
    end_lease(id, record)
    record.error = nil
    if ARGV[i + 2] ~= '' then record.result = ARGV[i + 2] end
    close(id, record, word)
    closed = closed + 1
  else
    word = finished_before(id, token)
    if not word then
      word = 'lost_lease'
      redis.call('HINCRBY', K.stats, 'lost_leases', 1)
    end
  end
  answer[#answer + 1] = word
end
if closed > 0 then
  trim_all(closed)
  save_fair()
end
return answer
