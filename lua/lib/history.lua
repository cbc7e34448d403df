-- Record runs that have ended: their attempts, and their entries in the index.
--
-- @include time status owners outcomes
-- KEYS attempts  hash  task id -> a JSON line for each attempt that failed or has a report
-- KEYS runs      zset  <kind> <value> NUL <end, ms> <outcome> <task id>, all scores 0: ended runs
-- KEYS failures  zset  fingerprint -> when a task was last buried with it, ms
--
-- A run is in the index from its end until its record is dropped, so waiting tasks cost nothing here. Kinds:
-- o outcome, u owner, n name, c schedule, f fingerprint, t tenant; of an owner with a tenant also p its user and
-- g its tenant. The outcomes are letters; see lib/outcomes. A task that did not run has the kind d instead of u,
-- and no g; if it was cancelled, it has od instead of oc. A range of one kind and value, read backwards, is a
-- list of runs, newest first.

local ATTEMPT_BYTES = 65536  -- of all attempts of one task; the oldest go first

-- Add the index entries of an ended run to a list.
local function add_places(list, id, record)
  local outcome = outcome_of(record)
  local ended = record.ended == now and now_text or text_of(record.ended or 0)
  local letter = LETTERS[outcome]
  local tail = '\0' .. string.rep('0', 13 - #ended) .. ended .. letter .. id
  -- A task that did not run does not count as service of its owner.
  local never_ran = outcome == 'expired' or (outcome == 'cancelled' and not record.claimed)
  list[#list + 1] = 'o' .. (never_ran and letter == 'c' and NEVER_RAN or letter) .. tail
  list[#list + 1] = (never_ran and NEVER_RAN or 'u') .. owner_of(record) .. tail
  if record.group then
    list[#list + 1] = 'p' .. record.user .. tail
    if not never_ran then list[#list + 1] = 'g' .. record.group .. tail end
  end
  list[#list + 1] = 'n' .. (record.name or '') .. tail
  if record.schedule then list[#list + 1] = 'c' .. record.schedule .. tail end
  if record.fingerprint then list[#list + 1] = 'f' .. record.fingerprint .. tail end
  if record.tenant then list[#list + 1] = 't' .. record.tenant .. tail end
end

-- Add runs that have just ended to the index.
local function list_runs(ids, records)
  local places, flat = {}, {}
  for _, id in ipairs(ids) do
    local record = records[id]
    add_places(places, id, record)
    if record.fingerprint then redis.call('ZADD', K.failures, record.ended, record.fingerprint) end
  end
  for i, place in ipairs(places) do flat[2 * i - 1], flat[2 * i] = '0', place end
  redis.call('ZADD', K.runs, unpack(flat))
end

-- Set the time of the last run with a fingerprint, after runs with it were dropped.
local function refresh_failure(fingerprint)
  local range = 'f' .. fingerprint
  local last = redis.call('ZREVRANGEBYLEX', K.runs, '(' .. range .. '\1', '[' .. range .. '\0',
    'LIMIT', 0, 1)[1]
  if last then
    redis.call('ZADD', K.failures, string.match(last, '%z(%d+)') or 0, fingerprint)
  else
    redis.call('ZREM', K.failures, fingerprint)
  end
end

-- Remove runs whose records are dropped.
local function unlist_runs(ids, records)
  local places, prints = {}, {}
  for _, id in ipairs(ids) do
    if records[id] then
      add_places(places, id, records[id])
      if records[id].fingerprint then prints[records[id].fingerprint] = true end
    end
  end
  if #places > 0 then redis.call('ZREM', K.runs, unpack(places)) end
  redis.call('HDEL', K.attempts, unpack(ids))
  for fingerprint in pairs(prints) do refresh_failure(fingerprint) end
end

-- Record an attempt that has just ended. `report` is JSON from the worker; if it is empty, the error of the
-- record is stored instead.
local function keep_attempt(id, record, outcome, report)
  local told = ''
  if report ~= '' then
    told = ',"report":' .. report
  elseif type(record.error) == 'string' and record.error ~= '' then
    told = ',"error":' .. cjson.encode(record.error)
  end
  local line = string.format('{"attempt":%d,"outcome":"%s","start":%.0f,"end":%.0f,"worker":%s,"place":%s',
    record.attempts, outcome, record.claimed or now, now, cjson.encode(record.worker or ''),
    cjson.encode(record.place or '')) .. told .. '}'
  local before = redis.call('HGET', K.attempts, id)
  local text = before and before .. '\n' .. line or line
  while #text > ATTEMPT_BYTES and string.find(text, '\n', 1, true) do
    text = string.sub(text, string.find(text, '\n', 1, true) + 1)
  end
  redis.call('HSET', K.attempts, id, text)
end
