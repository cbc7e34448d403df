-- Do what time has made due: promote delayed tasks, take back expired leases, look at parked users.
--
-- @include ending
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
  local list, good, records = {}, {}, read_statuses(ids)
  for _, id in ipairs(ids) do
    local record = records[id]
    if record and record.state == 'delayed' then
      record.state, record.buffered = 'ready', nil
      good[#good + 1] = id
      list[#list + 1] = { id = id, user = record.user, rank = record.rank, name = record.name }
    else
      count('broken_tasks', 1)
    end
  end
  if #good > 0 then write_statuses(good, records) end
  redis.call('ZREM', K.delayed, unpack(ids))
  add_waiting(list)
end

-- A lease whose record cannot be read still counts as a run of its user, whom the document names.
local function forget_run(id)
  local document = decode(redis.call('HGET', K.tasks, id))
  local user = document and document.user
  if type(user) ~= 'string' or running_of(user) == 0 then return end
  change_running(user, -1)
  review(user)
end

local function take_back()
  local ids = due_in(K.leases)
  if #ids == 0 then return end
  local list, closed, records = {}, 0, read_statuses(ids)
  for _, id in ipairs(ids) do
    local record = records[id]
    if not record or record.state ~= 'running' then
      redis.call('ZREM', K.leases, id)
      count('broken_tasks', 1)
      forget_run(id)
    else
      end_lease(id, record)
      count('expired', 1)
      record.error = 'the lease of worker ' .. (record.worker or '?') .. ' expired'
      record.timed_out = nil
      keep_attempt(id, record, 'expired', '')
      if record.cancel then
        close(id, record, 'cancelled')
        closed = closed + 1
      elseif record.attempts >= SETTINGS.max_attempts then
        record.fingerprint = 'lease-expired'
        close(id, record, 'buried')
        closed = closed + 1
      else
        record.state, record.token = 'ready', nil
        write_status(id, record)
        list[#list + 1] = { id = id, user = record.user, rank = record.rank, name = record.name }
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
