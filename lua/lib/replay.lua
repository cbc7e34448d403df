-- Recognise a command that is sent again because its reply was lost, and give the first answer.
--
-- @include time
-- KEYS ops         hash  operation id -> its answer; 't:' .. task id -> its tombstone; '' -> since when, ms
-- KEYS ops_before  hash  the same, of the time before
--
-- Two generations that change places after REPLAY_MS: an answer is kept for at least that long,
-- whatever the retention of finished tasks, at the cost of one or two look-ups and no clean-up.
-- The client gives up repeating an operation after half of it at the latest.

local REPLAY_MS = 60000

local generation  -- since when ops is in use; nil: not read yet; false: not in use

local function first_answer(op)
  local found = redis.call('HMGET', K.ops, op, '')
  generation = tonumber(found[2] or nil) or false
  return found[1] or redis.call('HGET', K.ops_before, op)
end

local function turn_generation()
  local since = generation
  if since == nil then since = tonumber(redis.call('HGET', K.ops, '') or nil) end
  if since and math.abs(now - since) > REPLAY_MS then
    redis.call('UNLINK', K.ops_before)
    redis.call('RENAME', K.ops, K.ops_before)
    since = nil
  end
  if not since then
    redis.call('HSET', K.ops, '', now)
    since = now
  end
  generation = since
end

local function remember(op, answer)
  turn_generation()
  redis.call('HSET', K.ops, op, answer)
  return answer
end

-- What stays of a task that is gone: how it ended, under which token, and a digest of its document,
-- so that a repeated finish or push is told from another task's.
local function digest(document)
  return redis.sha1hex and redis.sha1hex(document) or ''  -- fakeredis has none
end

-- `document` is of use where the record has no digest.
local function tombstone_of(record, document)
  return (record and record.state or '') .. ' ' .. (record and record.token or '') .. ' '
    .. (record and record.digest or digest(document or ''))
end

local function read_tombstone(text)
  return string.match(text, '^(%S*) (%S*) (%S*)$')
end
