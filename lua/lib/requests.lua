-- Requests that carry a key of their own, and the answers to them.
--
-- @include json time
-- KEYS replies         hash  hash of the key -> JSON: digest, owner, at, and of an answer status,
--                            headers (JSON) and body; '' -> since when it is in use, ms, and bytes
-- KEYS replies_before  hash  the same, of the time before
-- ARGV request  text  hash of the key
--
-- Two generations that change places: nothing has to look for what is old.

local KEPT_MS = 86400000           -- for so long at least, and for twice that at most;
local MAX_REPLIES = 10000          -- for less where there are more
local MAX_BYTES = 32 * 1024 * 1024 -- or larger ones

-- What is known of the request, or nil. A record that somebody has spoilt is none.
local function read_reply()
  local record = decode(redis.call('HGET', K.replies, A.request)
    or redis.call('HGET', K.replies_before, A.request))
  if not record or type(record.digest) ~= 'string' or type(record.owner) ~= 'string'
    or type(record.at) ~= 'number' then return nil end
  if record.status ~= nil and (type(record.status) ~= 'number' or type(record.headers) ~= 'string'
    or type(record.body) ~= 'string') then return nil end
  return record
end

local function drop_reply()
  redis.call('HDEL', K.replies, A.request)
  redis.call('HDEL', K.replies_before, A.request)
end

-- Keep a record in the present generation, or in a new one.
local function write_reply(record)
  local text = cjson.encode(record)
  drop_reply()
  local since, bytes = string.match(redis.call('HGET', K.replies, '') or '', '^(%d+) (%d+)$')
  since, bytes = tonumber(since), tonumber(bytes)
  local is_over = not since or math.abs(now - since) > KEPT_MS or bytes > MAX_BYTES
    or redis.call('HLEN', K.replies) > MAX_REPLIES
  if is_over then
    redis.call('UNLINK', K.replies_before)
    if redis.call('EXISTS', K.replies) == 1 then
      redis.call('RENAME', K.replies, K.replies_before)
    end
    since, bytes = now, 0
  end
  redis.call('HSET', K.replies, A.request, text, '', string.format('%d %d', since, bytes + #text))
end
