-- The settings of the queue: the defaults, and what `TaskQueue.configure` has stored.
--
-- KEYS settings  hash  name -> value

local SETTINGS = {
  max_attempts = 5,
  max_waiting = 0,
  waiting_room = -1,  -- of a partition: its part of max_waiting
  keep_finished = 100000,
  keep_finished_ms = 604800000,
  keep_dead = 10000,
  keep_dead_ms = 2592000000,
  cost = 'tasks',
  critical_share = 0.5,
  ageing_ms = 0,
  max_schedules = 0,
  min_interval_ms = 0,
}

-- A value that is not a number where one is needed is ignored: it must not stop a transition.
local function load_settings()
  local stored = redis.call('HGETALL', K.settings)
  for i = 1, #stored, 2 do
    local default, value = SETTINGS[stored[i]], stored[i + 1]
    if type(default) == 'number' then value = tonumber(value) end
    if default ~= nil and value ~= nil then SETTINGS[stored[i]] = value end
  end
end

load_settings()
