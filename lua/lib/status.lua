-- Read and write the status records of tasks.
--
-- @include json
-- KEYS status  hash  task id -> JSON: state, user, rank, name, attempts, times, holder, error, ...
--
-- A status has all that a transition needs, so that no script decodes a payload. Its state is one of ready,
-- delayed, running, finished, buried, cancelled, expired. A record that cannot be read is nil here.

-- Fields that transitions use. Values of another type count as absent.
local TYPES = { claimed = 'number', charge = 'number', ended = 'number', deadline = 'number',
  timeout_ms = 'number', max_attempts = 'number', expires = 'number', token = 'string', worker = 'string',
  place = 'string', name = 'string', schedule = 'string', fingerprint = 'string', tenant = 'string',
  digest = 'string', group = 'string', pool = 'string' }

-- The fields of `flow`, the options of a task; durations in ms. `keys` is a list of texts, `expires` '+ms' or
-- ms, `unique_for` 'waiting' or ms.
local FLOW = { cost = 'number', unique = 'string', on_duplicate = 'string', debounce = 'number',
  max_wait = 'number' }

local function is_list_of_texts(list)
  if type(list) ~= 'table' or #list < 1 or #list > 4 then return false end
  for _, item in pairs(list) do
    if type(item) ~= 'string' then return false end
  end
  return true
end

-- The options without values of another type; nil if nothing is left to be read.
local function check_flow(flow)
  if type(flow) ~= 'table' then return nil end
  for field, kind in pairs(FLOW) do
    if type(flow[field]) ~= kind then flow[field] = nil end
  end
  if flow.cost and not (flow.cost > 0 and flow.cost <= 1e6) then flow.cost = nil end
  if not is_list_of_texts(flow.keys) then flow.keys = nil end
  for _, field in ipairs({ 'expires', 'unique_for' }) do
    local kind = type(flow[field])
    if kind ~= 'number' and kind ~= 'string' then flow[field] = nil end
  end
  return next(flow) and flow
end

local function parse_status(text)
  local record = decode(text)
  if not record or type(record.user) ~= 'string' or type(record.rank) ~= 'string'
    or type(record.state) ~= 'string' or type(record.attempts) ~= 'number' then return nil end
  -- Setting an absent field to nil would make room for it in the table.
  for field, value in pairs(record) do
    local kind = TYPES[field]
    if kind and type(value) ~= kind then record[field] = nil end
  end
  if record.flow then record.flow = check_flow(record.flow) end
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
