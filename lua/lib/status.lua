-- Read and write the status records of tasks.
--
-- @include json
-- KEYS status  hash  task id -> JSON: state, user, rank, name, attempts, times, holder, error, ...
--
-- A status has all that a transition needs, so that no script decodes a payload. Its state is one of ready,
-- delayed, running, finished, buried, cancelled. A record that cannot be read is nil here.

-- Fields that transitions use. Values of another type count as absent.
local NUMBERS = { 'claimed', 'charge', 'ended', 'deadline', 'timeout_ms', 'max_attempts' }
local TEXTS = { 'token', 'worker', 'place', 'name', 'schedule', 'fingerprint', 'tenant', 'digest' }

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

local status_texts = {}  -- id -> text of the record, as it was read

-- The records of many tasks by id, without those that cannot be read.
local function read_statuses(ids)
  local records = {}
  for i, text in ipairs(redis.call('HMGET', K.status, unpack(ids))) do
    records[ids[i]] = parse_status(text)
    status_texts[ids[i]] = text
  end
  return records
end

-- Replace one part of a text; nil if it is not found. JSON escapes quotes inside values, so a part that
-- includes the quotes of its field name matches nothing else.
local function replace_text(text, part, new)
  local from, to = string.find(text, part, 1, true)
  return from and string.sub(text, 1, from - 1) .. new .. string.sub(text, to + 1)
end

local function write_status(id, record)
  redis.call('HSET', K.status, id, cjson.encode(record))
end

-- Write records by id. `texts` has records that are encoded already: encoding costs three times as much as
-- decoding.
local function write_statuses(ids, records, texts)
  local flat = {}
  for i, id in ipairs(ids) do
    flat[2 * i - 1], flat[2 * i] = id, texts and texts[id] or cjson.encode(records[id])
  end
  redis.call('HSET', K.status, unpack(flat))
end
