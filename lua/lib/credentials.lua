-- Find, store and drop credentials: API keys, logins and sessions.
--
-- @include json time
-- KEYS credentials      hash  id -> JSON: kind, name, role, tenant, by, hash, created, ends, parent
-- KEYS credential_ends  zset  id -> when it expires, ms
-- KEYS api_keys         zset  id of a key -> when it was created, ms
-- KEYS sessions         zset  id of a session or login -> when it was created, ms
-- KEYS api_pace         hash  id, or '+' and the id of a key for its sessions -> when it is free of debt, ms

local KEY_LIMIT = 10000      -- keys; more are refused
local SESSION_LIMIT = 10000  -- sessions and logins; the oldest make room
local CLEANED = 100         -- expired credentials that one call drops; later calls drop the others

-- The record of a credential that has not expired. Returns nil if there is none or it is damaged.
local function read_credential(id)
  local record = decode(redis.call('HGET', K.credentials, id))
  if not record or type(record.hash) ~= 'string' or type(record.kind) ~= 'string' then return nil end
  if record.ends ~= nil and (type(record.ends) ~= 'number' or record.ends <= now) then return nil end
  return record
end

-- The record of a valid credential: its parent, if it has one, must still exist. Returns nil otherwise.
local function read_holding(id)
  local record = read_credential(id)
  if not record or record.parent == nil then return record end
  if type(record.parent) == 'string' and read_credential(record.parent) then return record end
  return nil
end

local function drop_credentials(ids)
  if #ids == 0 then return end
  redis.call('HDEL', K.credentials, unpack(ids))
  redis.call('HDEL', K.api_pace, unpack(ids))
  for _, id in ipairs(ids) do redis.call('HDEL', K.api_pace, '+' .. id) end
  redis.call('ZREM', K.credential_ends, unpack(ids))
  redis.call('ZREM', K.api_keys, unpack(ids))
  redis.call('ZREM', K.sessions, unpack(ids))
end

-- Drop expired credentials, and the oldest session if there is no room for another.
local function make_room()
  drop_credentials(redis.call('ZRANGE', K.credential_ends, '-inf', now_text, 'BYSCORE', 'LIMIT', 0, CLEANED))
  if redis.call('ZCARD', K.sessions) >= SESSION_LIMIT then
    drop_credentials(redis.call('ZRANGE', K.sessions, 0, 0))
  end
end

-- Count one use against a rate: one every `interval` ms, and `burst` at once. Returns the ms to wait if it is
-- too soon, or 0.
local function use_pace(field, interval, burst)
  local most = now + burst * interval
  local free = tonumber(redis.call('HGET', K.api_pace, field) or nil) or now
  if not (free > now) then free = now end
  if free > most then
    -- The clock was set back, or the rate was lower: nobody waits longer than for one use.
    free = most
    redis.call('HSET', K.api_pace, field, text_of(free))
  end
  local wait = free + interval - most
  if wait > 0.001 then return math.ceil(wait) end
  redis.call('HSET', K.api_pace, field, text_of(free + interval))
  return 0
end

-- Store a record with the times of its creation and expiry. Returns its text.
local function write_credential(id, record, ends)
  record.created, record.ends = now, ends
  local text = cjson.encode(record)
  redis.call('HSET', K.credentials, id, text)
  if ends then redis.call('ZADD', K.credential_ends, text_of(ends), id) end
  redis.call('ZADD', record.kind == 'key' and K.api_keys or K.sessions, now_text, id)
  return text
end
