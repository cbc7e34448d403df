-- Keep notices for people until a caller has passed them on.
--
-- LAZY
-- @include time
-- KEYS notices  zset  task id, user, name, schedule, worker, attempt, outcome, ms since its claim, end in
--                     ms, error, separated by NUL -> when to return it (again), ms; 0: never returned yet
--
-- A notice is about a task that has ended, or still runs, without an answer from its worker. It is returned
-- at least once: again after a while, until a caller confirms that it was passed on.

local notices = {}

function notices.leave(id, record, outcome)
  local most = 1000  -- beyond that, those returned last are dropped
  local fields = { id, record.user, record.name or '', record.schedule or '', record.worker or '',
    text_of(record.attempts), outcome, text_of(math.max(0, now - (record.claimed or now))), now_text,
    record.error }
  redis.call('ZADD', K.notices, 0, table.concat(fields, '\0'))
  local over = redis.call('ZCARD', K.notices) - most
  if over > 0 then redis.call('ZREMRANGEBYRANK', K.notices, -over, -1) end
end

-- The notices to return now: all that are due to a caller that can alert people; to others, for their log,
-- those that were never returned.
function notices.tell(can_alert)
  local at_once = 100
  local again_ms = 30000   -- longer than the time between two heartbeats
  local news_ms = 3600000  -- older notices are dropped
  local told, again, old = {}, {}, {}
  local last = can_alert and now or 0
  for _, notice in ipairs(redis.call('ZRANGE', K.notices, '-inf', last, 'BYSCORE', 'LIMIT', 0,
    at_once)) do
    local ended = tonumber(string.match(notice, '%z(%d+)%z[^%z]*$')) or 0
    if now - ended > news_ms then
      old[#old + 1] = notice
    else
      told[#told + 1] = notice
      again[#again + 1] = can_alert and now + again_ms or now
      again[#again + 1] = notice
    end
  end
  if #old > 0 then redis.call('ZREM', K.notices, unpack(old)) end
  if #again > 0 then redis.call('ZADD', K.notices, unpack(again)) end
  return told
end

-- Drop notices that the caller has passed on.
function notices.forget(heard)
  if #heard > 0 then redis.call('ZREM', K.notices, unpack(heard)) end
end

return notices
