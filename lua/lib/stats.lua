-- Count events, for metrics.
--
-- KEYS stats  hash  counter -> value

-- Does not raise: a counter that is not a number must not stop a transition.
local function count(name, by)
  redis.pcall('HINCRBY', K.stats, name, by)
end
