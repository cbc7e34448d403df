-- Refuse a caller that does not lead: its term is over, or another leader was elected.
--
-- @include json time
-- KEYS leader  string  JSON: token, scheduler, ends and term (ms), epoch
-- ARGV token  text  random token of the caller

-- The longest term that a scheduler may ask for, ms. Records of older versions have no term.
local LONGEST_TERM = 3600000

-- True if the term ends later than any term can: the clock was set back. Nobody waits for such a leader: it
-- may be dead, and if not, it is elected again. Twice the term, because clocks are adjusted all the time.
local function is_from_later(leader)
  return leader.ends > now + 2 * (tonumber(leader.term) or LONGEST_TERM)
end

-- The leader of the current term. Returns nil if there is none or the record is damaged.
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

-- The end of the term in the record decides. The key has no expiry, because a full server with a volatile-*
-- policy may evict keys that have one.
local function write_leader(leader, term_ms)
  leader.ends, leader.term = now + term_ms, term_ms
  redis.call('SET', K.leader, cjson.encode(leader))
end
