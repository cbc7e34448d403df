-- Since when the history of runs is whole.
--
-- @include time settings
-- KEYS ended  zset  task id -> when it finished or was cancelled, ms
-- KEYS dead   zset  task id -> when it was buried, ms

-- The end of the oldest entry, where there are so many that older ones were dropped.
local function whole_since(key, most, keep_ms)
  local since = now - keep_ms
  if redis.call('ZCARD', key) < most then return since end
  return math.max(since, tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) or now)
end

-- A moment, or a later one if runs that ended after it have been dropped by now. Dead letters that
-- are not kept at all are counted nowhere, and take nothing from the others.
local function cut_window(since)
  since = math.max(since, whole_since(K.ended, SETTINGS.keep_finished, SETTINGS.keep_finished_ms))
  if SETTINGS.keep_dead == 0 then return since end
  return math.max(since, whole_since(K.dead, SETTINGS.keep_dead, SETTINGS.keep_dead_ms))
end
