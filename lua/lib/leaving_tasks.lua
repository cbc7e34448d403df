-- Take unfinished tasks out of all keys, to be stored in another queue or another partition.
--
-- @include ending
-- @lazy delays gates uniques

local function is_unfinished(record)
  return record and (record.state == 'ready' or record.state == 'delayed')
end

-- Make the parts that a task needs; they check their keys before anything is written.
local function prepare_aside(record)
  prepare_end(record)
  if record.flow and record.flow.unique then delays() end
end

-- Take a task out. `entry`: that of its unique key, or ''. Returns its parts; see lib/arriving_tasks.
local function take_out(id, record, entry)
  local is_ready = record.state == 'ready'
  local at = redis.call('ZSCORE', is_ready and K.waiting or K.delayed, id) or text_of(tonumber(record.due) or now)
  local document = redis.call('HGET', K.tasks, id)
  local parts = { id, is_ready and 'waiting' or 'delayed', at, document, redis.call('HGET', K.status, id),
    redis.call('HGET', K.attempts, id) or '', entry }
  if is_ready then
    remove_waiting(id, record)
  else
    delays().remove(id, owner_of(record))
    if record.flow and record.flow.keys then gates().forget(waiting_task(id, record)) end
  end
  if record.expires then redis.call('ZREM', K.expiring, id) end
  if record.schedule then redis.call('ZREM', K.open, record.schedule .. '\0' .. id) end
  redis.call('HDEL', K.tasks, id)
  redis.call('HDEL', K.status, id)
  redis.call('HDEL', K.attempts, id)
  remember('t:' .. id, tombstone_of({ state = 'moved', digest = record.digest }, document))
  return parts
end
