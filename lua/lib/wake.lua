-- Wake a blocked worker by a token in a list.
--
-- KEYS wake  list  at most one token, for a blocked worker of the default pool that takes all names, or whose
--                  kind has no place in lib/kinds

local PASSES = 16  -- times that a token which was meant for another worker is passed on

local function leave_token(list)
  return redis.call('LLEN', list) == 0 and redis.call('LPUSH', list, '1')
end
