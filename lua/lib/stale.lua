-- Find runs that go on after their handler's time-out: reported once, by whoever looks first.
--
-- @include time records stats
-- KEYS deadlines  zset  leased task id -> when it is over its handler's time-out, ms

local STALE_READ = 100

-- Returns for each run found: task id, user, name, worker, ms since its claim.
local function find_stale()
  local found = {}
  local ids = redis.call('ZRANGE', K.deadlines, '-inf', now, 'BYSCORE', 'LIMIT', 0, STALE_READ)
  if #ids == 0 then return found end
  redis.call('ZREM', K.deadlines, unpack(ids))
  local records = read_statuses(ids)
  for _, id in ipairs(ids) do
    local record = records[id]
    if record and record.state == 'running' then
      record.stale = now
      write_status(id, record)
      count('stale_runs', 1)
      for _, value in ipairs({ id, record.user, record.name or '', record.worker or '',
        now - (record.claimed or now) }) do
        found[#found + 1] = value
      end
    end
  end
  return found
end
