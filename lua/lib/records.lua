-- Read and write the status records of tasks.
--
-- @include json
-- KEYS status  hash  task id -> JSON: state, user, rank, name, attempts, times, holder, error
--
-- A status holds all that a transition needs, so that no script decodes a payload. Its state is one
-- of ready, delayed, running, finished, buried, cancelled. A record that cannot be read is nil here.

-- Fields that a transition calculates with: of another type, they count as absent.
local NUMBERS = { 'claimed', 'charge' }
local TEXTS = { 'token', 'worker' }

local function parse_status(text)
  local record = decode(text)
  if not record or type(record.user) ~= 'string' or type(record.rank) ~= 'string'
    or type(record.state) ~= 'string' or type(record.attempts) ~= 'number' then return nil end
  for _, field in ipairs(NUMBERS) do
    if type(record[field]) ~= 'number' then record[field] = nil end
  end
  for _, field in ipairs(TEXTS) do
    if type(record[field]) ~= 'string' then record[field] = nil end
  end
  return record
end

local function read_status(id)
  return parse_status(redis.call('HGET', K.status, id))
end

-- The records of many tasks, by id; those that cannot be read are left out.
local function read_statuses(ids)
  local records = {}
  for i, text in ipairs(redis.call('HMGET', K.status, unpack(ids))) do
    records[ids[i]] = parse_status(text)
  end
  return records
end

local function write_status(id, record)
  redis.call('HSET', K.status, id, cjson.encode(record))
end

local function write_statuses(ids, records)
  local flat = {}
  for i, id in ipairs(ids) do flat[2 * i - 1], flat[2 * i] = id, cjson.encode(records[id]) end
  redis.call('HSET', K.status, unpack(flat))
end
