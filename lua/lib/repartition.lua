-- Keep records that move to another queue: those set aside here, and those that arrived here.
--
-- @include netstrings
-- KEYS repartition  hash  '' -> 'from' or 'to', the token of the process that moves, the id of the move, and the other
--                         queue, separated by NUL; '@' id of a move -> the queue that was moved here by it; '>' kind
--                         record id -> a record that moves away, as netstrings; '<' kind record id -> the answer: it
--                         has arrived here, and the other queue may still have it. '=': see move_user_in
-- ARGV token  text  random token of the process that moves
--
-- A record that is set aside is in no other key: no script finds it here. It stays until the other queue has
-- it. The other queue notes that it has arrived, and keeps that note until the record is removed here. So a move
-- can be repeated from any point on, even much later, and each record arrives once. A process that begins to move
-- takes over: the scripts of the one before are refused.

-- The kinds of records: a task, a schedule, the counters.
local MOVES_AWAY, HAS_ARRIVED = '>', '<'

local function read_move()
  local role, token, move, other =
    string.match(redis.call('HGET', K.repartition, '') or '', '^(%Z*)%z(%Z*)%z(%Z*)%z(%Z*)$')
  return role and { role = role, token = token, move = move, other = other }
end

-- Whether the caller is the process that moves records from this queue (role 'from'), or to it ('to').
local function is_mover(role)
  local move = read_move()
  return move and move.role == role and move.token == A.token
end

local function set_aside(name, parts)
  redis.call('HSET', K.repartition, MOVES_AWAY .. name, netstrings(parts))
end

-- What is set aside: a flat list of names and records. A script that sets aside returns it first, so there is no
-- more than one call sets aside.
local function moving_away()
  local found, all = {}, redis.call('HGETALL', K.repartition)
  for i = 1, #all, 2 do
    if string.sub(all[i], 1, 1) == MOVES_AWAY then
      found[#found + 1], found[#found + 2] = string.sub(all[i], 2), all[i + 1]
    end
  end
  return found
end
