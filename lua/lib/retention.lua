-- Compute the time from which the run history is complete.
--
-- @include time settings
-- KEYS ended  zset  task id -> when it finished or was cancelled, ms
-- KEYS dead   zset  task id -> when it was buried, ms

-- Since when the entries of a key are complete: the retention time, or the oldest entry if the number of
-- entries is at its limit.
local function whole_since(key, most, keep_ms)
  local since = now - keep_ms
  if redis.call('ZCARD', key) < most then return since end
  return math.max(since, tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) or now)
end

-- The start of a window, moved to a later time if runs that ended in it have been dropped. If dead letters
-- are not kept at all, they are not counted and do not shorten the window.
local function cut_window(since)
  since = math.max(since, whole_since(K.ended, SETTINGS.keep_finished, SETTINGS.keep_finished_ms))
  if SETTINGS.keep_dead == 0 then return since end
  return math.max(since, whole_since(K.dead, SETTINGS.keep_dead, SETTINGS.keep_dead_ms))
end
