-- Count what happens, for metrics.
--
-- KEYS stats  hash  counter -> value

-- A counter that somebody has spoilt must not stop a transition in its middle.
local function count(name, by)
  redis.pcall('HINCRBY', K.stats, name, by)
end
