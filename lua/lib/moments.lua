-- Record fire times of schedules that did not become a task in the regular way, and why.
--
-- @include time
-- KEYS moments  zset  schedule NUL last time NUL first time NUL how many NUL reason, all scores 0
--
-- An entry is a stretch of fire times with the same reason. Fire times without an entry, up to the last run,
-- were fired; so a schedule that just runs costs nothing here.

local MOMENTS_KEPT = 200  -- entries of one schedule; the oldest go first

local function moment_text(ms)
  return string.format('%013d', ms)
end

-- Record a stretch of fire times; `what` is `last NUL first NUL how many NUL reason`.
local function note_moments(schedule, what)
  redis.call('ZADD', K.moments, 0, schedule .. '\0' .. what)
  local first, last = '[' .. schedule .. '\0', '(' .. schedule .. '\1'
  local over = redis.call('ZLEXCOUNT', K.moments, first, last) - MOMENTS_KEPT
  if over > 0 then
    local gone = redis.call('ZRANGEBYLEX', K.moments, first, last, 'LIMIT', 0, over)
    redis.call('ZREM', K.moments, unpack(gone))
  end
end

local function note_moment(schedule, ms, reason)
  note_moments(schedule, moment_text(ms) .. '\0' .. moment_text(ms) .. '\0001\0' .. reason)
end
