-- Do what time has made due: promote delayed tasks, take back expired leases, look at parked users.
--
-- @include ending
-- KEYS delayed  zset  task id -> when it becomes ready, ms
--
-- Part of every claim, so that no other process has to be alive for a retry to happen. Each part is
-- bounded; what is left over is done by the next claim, which is told not to wait.

local UPKEEP = 100

local function due_in(key)
  return redis.call('ZRANGE', key, '-inf', now, 'BYSCORE', 'LIMIT', 0, UPKEEP)
end

local function promote()
  local ids = due_in(K.delayed)
  if #ids == 0 then return end
  local list = {}
  for _, id in ipairs(ids) do
    local record = read_status(id)
    if record and record.state == 'delayed' then
      record.state = 'ready'
      write_status(id, record)
      list[#list + 1] = { id = id, user = record.user, rank = record.rank }
    else
      redis.call('HINCRBY', K.stats, 'broken_tasks', 1)
    end
  end
  redis.call('ZREM', K.delayed, unpack(ids))
  add_waiting(list)
end

local function take_back()
  local ids = due_in(K.leases)
  if #ids == 0 then return end
  local list, closed = {}, 0
  for _, id in ipairs(ids) do
    local record = read_status(id)
    if not record or record.state ~= 'running' then
      redis.call('ZREM', K.leases, id)
      redis.call('HINCRBY', K.stats, 'broken_tasks', 1)
    else
      end_lease(id, record)
      redis.call('HINCRBY', K.stats, 'expired', 1)
      record.error = 'the lease of worker ' .. (record.worker or '?') .. ' expired'
      if record.cancel then
        close(id, record, 'cancelled')
        closed = closed + 1
      elseif record.attempts >= SETTINGS.max_attempts then
        close(id, record, 'buried')
        closed = closed + 1
      else
        record.state, record.token = 'ready', nil
        write_status(id, record)
        list[#list + 1] = { id = id, user = record.user, rank = record.rank }
      end
    end
  end
  add_waiting(list, true)
  if closed > 0 then trim_all(closed) end
end

local function upkeep()
  promote()
  take_back()
  for _, user in ipairs(due_in(K.parked)) do review(user) end
end
