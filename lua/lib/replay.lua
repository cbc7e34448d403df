-- Recognise a command that is sent again because its reply was lost, and give the first answer.
--
-- @include time
-- KEYS ops         hash  operation id -> its answer; 't:' .. task id -> last token; '' -> since when, ms
-- KEYS ops_before  hash  the same, of the time before
--
-- Two generations that change places after REPLAY_MS: an answer is kept for at least that long,
-- whatever the retention of finished tasks, at the cost of one or two look-ups and no clean-up.
-- The client gives up repeating an operation after half of it at the latest.

local REPLAY_MS = 60000

local function first_answer(op)
  return redis.call('HGET', K.ops, op) or redis.call('HGET', K.ops_before, op)
end

local function turn_generation()
  local since = tonumber(redis.call('HGET', K.ops, '') or nil)
  if since and math.abs(now - since) > REPLAY_MS then
    redis.call('UNLINK', K.ops_before)
    redis.call('RENAME', K.ops, K.ops_before)
    since = nil
  end
  if not since then redis.call('HSET', K.ops, '', now) end
end

local function remember(op, answer)
  turn_generation()
  redis.call('HSET', K.ops, op, answer)
  return answer
end
