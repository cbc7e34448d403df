-- Refuse a leader whose term is over or taken.
--
-- @include json time
-- KEYS leader  string  JSON: token, scheduler, ends and term (ms), epoch
-- ARGV token  text  random, of the leader who asks

-- The longest term that a scheduler may ask for, ms. Records of older versions do not say theirs.
local LONGEST_TERM = 3600000

-- Whether the clock was set back since: no term ends that late. Nobody waits for its leader then, who
-- may be dead; if not, it is elected anew. Twice the term, since clocks are slewed a little all the time.
local function is_from_later(leader)
  return leader.ends > now + 2 * (tonumber(leader.term) or LONGEST_TERM)
end

-- The leader of the present term, or nil; a record that somebody has spoilt is none.
local function read_leader()
  local leader = decode(redis.call('GET', K.leader))
  if leader and type(leader.token) == 'string' and type(leader.ends) == 'number'
    and type(leader.epoch) == 'number' and not is_from_later(leader)
    and leader.ends > now then return leader end
  return nil
end

local function leads()
  local leader = read_leader()
  if leader and leader.token == A.token then return leader end
  return nil
end

-- The end of the term is data and decides. The key has no expiry: a server with a volatile-* policy
-- may throw away, when it is full, whatever has one.
local function write_leader(leader, term_ms)
  leader.ends, leader.term = now + term_ms, term_ms
  redis.call('SET', K.leader, cjson.encode(leader))
end
