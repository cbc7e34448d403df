-- Record who changed what of a schedule.
--
-- @include time
-- KEYS changes  zset  schedule NUL time in ms NUL operation NUL JSON, all scores 0

local CHANGES_KEPT = 50  -- changes of one schedule; the oldest go first

local function change_member(schedule, op, change)
  return schedule .. '\0' .. string.format('%013d', now) .. '\0' .. op .. '\0' .. change
end

-- `change` is JSON: by, note, the old and new values of fields, and `made` if the schedule is new. Empty:
-- there is nothing to record.
local function note_change(schedule, op, change)
  if change == '' then return end
  redis.call('ZADD', K.changes, 0, change_member(schedule, op, change))
  local first, last = '[' .. schedule .. '\0', '(' .. schedule .. '\1'
  local over = redis.call('ZLEXCOUNT', K.changes, first, last) - CHANGES_KEPT
  if over > 0 then
    local gone = redis.call('ZRANGEBYLEX', K.changes, first, last, 'LIMIT', 0, over)
    redis.call('ZREM', K.changes, unpack(gone))
  end
end
