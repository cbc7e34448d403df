-- Keep what people should hear of, until somebody who can tell them has.
--
-- @include time
-- KEYS notices  zset  task id, user, name, schedule, worker, attempt, outcome, ms since its claim, end in
--                     ms, error, with NUL between -> when it is told (again), ms; 0: nobody knows of it
--
-- That is of tasks which have ended for good, or run on, without a word of their worker. A notice is
-- told at least once: again after a while, until whoever heard it says so.

-- A table, and not functions of their own: a script has room for 200 local variables.
local notices = {}

function notices.leave(id, record, outcome)
  local most = 1000  -- beyond, those go that were told last
  local fields = { id, record.user, record.name or '', record.schedule or '', record.worker or '',
    text_of(record.attempts), outcome, text_of(math.max(0, now - (record.claimed or now))), now_text,
    record.error }
  redis.call('ZADD', K.notices, 0, table.concat(fields, '\0'))
  local over = redis.call('ZCARD', K.notices) - most
  if over > 0 then redis.call('ZREMRANGEBYRANK', K.notices, -over, -1) end
end

-- What is to be told now. To one who can alert people all that is due; to others, for their log, what
-- nobody knows of.
function notices.tell(can_alert)
  local at_once = 100
  local again_ms = 30000   -- longer than from one heartbeat to the next
  local news_ms = 3600000  -- what nobody could be told of for so long is no news
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

-- Whoever asks has passed these on: they are not told again.
function notices.forget(heard)
  if #heard > 0 then redis.call('ZREM', K.notices, unpack(heard)) end
end
