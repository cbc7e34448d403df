-- Say that a worker is alive and what it does; learn of the others.
--
-- @include stale
-- FLAGS allow-oom
-- KEYS workers      hash  worker id -> JSON: host, pid, version, slots, names, current tasks, times,
--                         drain: who asked it to end; '' -> the names that any of them runs, in lines
-- KEYS worker_ends  zset  worker id -> when it counts as gone, ms
-- KEYS limits       hash  name -> JSON: slots, rate, timeout_ms; by: who set them
-- ARGV worker  text  its id
-- ARGV record  text  JSON without its closing brace
-- ARGV ttl_ms  int   it counts as gone after so long without another beat; 0: it goes now
-- ARGV limits  text  JSON: name -> limits, for all its handlers; empty: as said before
--
-- Limits that an operator has set stand over what workers declare. Repeated, it says the same again.
--
-- Returns { ms of the clock, { names that workers which are alive run }, { stale runs, five values
-- each }, { workers that are gone without a word }, who asked this one to drain or '' }; the lists
-- are empty for one that leaves.

local GONE_READ = 100    -- the next beat finds those that are left over
local ALIVE_READ = 1000  -- workers whose names are known

local function declare(name, declared)
  local stored = decode(redis.call('HGET', K.limits, name))
  if stored and stored.by ~= 'worker' then return end
  if next(declared) == nil then
    if stored then redis.call('HDEL', K.limits, name) end
    return
  end
  declared.by = 'worker'
  redis.call('HSET', K.limits, name, cjson.encode(declared))
end

-- The names in a worker's record, in lines.
local function names_of(record)
  local names = {}
  for _, name in ipairs(type(record.names) == 'table' and record.names or {}) do
    if type(name) == 'string' then names[#names + 1] = name end
  end
  return table.concat(names, '\n')
end

-- Who asked the worker to drain. Another one that has its id by now was not asked.
local function drained_by(before, record)
  local is_same = before.pid == record.pid and before.started == record.started
  return is_same and type(before.drain) == 'string' and before.drain or nil
end

local function names_of_all()
  local alive = redis.call('ZRANGE', K.worker_ends, '+inf', string.format('(%.0f', now), 'BYSCORE', 'REV',
    'LIMIT', 0, ALIVE_READ)
  local texts = redis.call('HMGET', K.workers, unpack(alive))
  for i, text in ipairs(texts) do texts[i] = names_of(decode(text) or {}) end
  return table.concat(texts, '\n')
end

-- Each name of some lines once.
local function distinct(lines)
  local names, seen = {}, {}
  for name in string.gmatch(lines, '[^\n]+') do
    if not seen[name] then names[#names + 1] = name end
    seen[name] = true
  end
  return names
end

-- One that leaves looks for nothing: nobody would hear of what it finds.
if tonumber(A.ttl_ms) == 0 then
  redis.call('HDEL', K.workers, A.worker, '')
  redis.call('ZREM', K.worker_ends, A.worker)
  return { now, {}, {}, {}, '' }
end

local before, known = unpack(redis.call('HMGET', K.workers, A.worker, ''))
local earlier = decode(before) or {}
local text = string.format('%s,"seen":%.0f', A.record, now)
local record = decode(text .. '}') or {}
local drain = drained_by(earlier, record)
text = text .. (drain and ',"drain":' .. cjson.encode(drain) or '') .. '}'
local own = names_of(record)
redis.call('HSET', K.workers, A.worker, text)
redis.call('ZADD', K.worker_ends, now + tonumber(A.ttl_ms), A.worker)
local gone = redis.call('ZRANGE', K.worker_ends, '-inf', now, 'BYSCORE', 'LIMIT', 0, GONE_READ)
if #gone > 0 then
  redis.call('HDEL', K.workers, unpack(gone))
  redis.call('ZREM', K.worker_ends, unpack(gone))
end

-- Reading the records of all workers at each beat of each of them would be what Redis does all day:
-- that is done only after one has gone or has changed its names.
local is_known = known and #gone == 0 and (not before or names_of(earlier) == own)
local names = distinct(is_known and known .. '\n' .. own or names_of_all())
redis.call('HSET', K.workers, '', table.concat(names, '\n'))

for name, declared in pairs(decode(A.limits) or {}) do
  if type(declared) == 'table' then declare(name, declared) end
end
return { now, names, find_stale(), gone, drain or '' }
