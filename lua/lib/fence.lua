-- Refuse a leader whose term is over or taken.
--
-- @include json time
-- KEYS leader  string  JSON: token, scheduler, ends (ms), epoch; gone by itself some time after its end
-- ARGV token  text  random, of the leader who asks

-- The leader of the present term, or nil; a record that somebody has spoilt is none.
local function read_leader()
  local leader = decode(redis.call('GET', K.leader))
  if leader and type(leader.token) == 'string' and type(leader.ends) == 'number'
    and type(leader.epoch) == 'number' and leader.ends > now then return leader end
  return nil
end

local function leads()
  local leader = read_leader()
  if leader and leader.token == A.token then return leader end
  return nil
end

-- The end of the term is data and decides; the expiry of the key only cleans up.
local function write_leader(leader, term_ms)
  leader.ends = now + term_ms
  redis.call('SET', K.leader, cjson.encode(leader), 'PX', term_ms * 10)
end
