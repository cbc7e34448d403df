-- Store requests that have an idempotency key, and the replies to them.
--
-- @include json time
-- KEYS replies         hash  hash of the key -> JSON: digest, owner, at; of a reply also status, headers
--                            (JSON) and body; '' -> since when this generation is in use, ms, and its bytes
-- KEYS replies_before  hash  the previous generation
-- ARGV request  text  hash of the idempotency key
--
-- Two generations replace each other, so nothing has to look for old entries.

local KEPT_MS = 86400000           -- replies are kept for this long at least and twice as long at most,
local MAX_REPLIES = 10000          -- or for less if there are more of them
local MAX_BYTES = 32 * 1024 * 1024 -- or they are larger

-- The record of the request. Returns nil if there is none or it is damaged.
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

-- Store a record in the current generation, or begin a new one.
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
