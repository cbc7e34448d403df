-- The queue's settings: what `TaskQueue.configure` stored over the defaults.
--
-- KEYS settings  hash  name -> value

local SETTINGS = {
  max_attempts = 5,
  max_waiting = 0,
  keep_finished = 1000,
  keep_finished_ms = 86400000,
  keep_dead = 10000,
  keep_dead_ms = 2592000000,
  cost = 'tasks',
  critical_share = 0.5,
  ageing_ms = 0,
}

local function load_settings()
  local stored = redis.call('HGETALL', K.settings)
  for i = 1, #stored, 2 do
    SETTINGS[stored[i]] = tonumber(stored[i + 1]) or stored[i + 1]
  end
end

load_settings()
