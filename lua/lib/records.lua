-- Read and write the status records of tasks.
--
-- KEYS status  hash  task id -> JSON: state, user, rank, name, attempts, times, holder, error
--
-- A status holds all that a transition needs, so that no script decodes a payload. Its state is one
-- of ready, delayed, running, finished, buried, cancelled. A record that cannot be read is nil here:
-- cjson raises, and an error in the middle of a script would leave half a transition.

local function decode(text)
  if not text then return nil end
  local ok, record = pcall(cjson.decode, text)
  if ok and type(record) == 'table' then return record end
  return nil
end

local function read_status(id)
  local record = decode(redis.call('HGET', K.status, id))
  if record and record.user and record.rank and record.state then return record end
  return nil
end

local function write_status(id, record)
  redis.call('HSET', K.status, id, cjson.encode(record))
end
