-- Say that a worker is alive and what it does; learn of the others.
--
-- @include stale_runs
-- FLAGS allow-oom
-- KEYS workers      hash  worker id -> JSON: host, pid, version, slots, names, current tasks, times,
--                         drain: who asked it to end, http: where its HTTP tasks may go; '' -> the
--                         names that any of them runs, in lines
-- KEYS worker_ends  zset  worker id -> when it counts as gone, ms
-- KEYS limits       hash  name -> JSON: slots, rate, timeout_ms; by: who set them
-- ARGV worker  text  its id
-- ARGV record  text  JSON without its closing brace
-- ARGV ttl_ms  int   it counts as gone after so long without another beat; 0: it goes now
-- ARGV limits  text  JSON: name -> limits, for all its handlers; empty: as said before
--
-- Limits that an operator has set stand over what workers declare. Repeated, it says the same
-- again, but for notices: those come again later.
--
-- It also ends what does not answer: also when all slots of all workers are stuck, and nobody claims.
--
-- Returns { ms of the clock, { names that workers which are alive run }, { notices, see lib/notices },
-- { workers that are gone without a word }, who asked this one to drain or '' }; the lists are empty
-- for one that leaves.

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

-- The list of names in the text of a record, as a worker writes it; nil if it is not found. In JSON a
-- quote inside a value has a backslash before it, so that neither end is found inside a name.
local function names_text(text)
  local _, before = string.find(text, '"names":', 1, true)
  local behind = before and string.find(text, ',"current":[', before, true)
  return behind and string.sub(text, before + 1, behind - 1)
end

-- Most workers run the same names: each list is decoded once, and nothing else of the records.
local function names_of_all()
  local alive = redis.call('ZRANGE', K.worker_ends, '+inf', string.format('(%.0f', now), 'BYSCORE', 'REV',
    'LIMIT', 0, ALIVE_READ)
  local lines, seen = {}, {}
  for _, text in ipairs(redis.call('HMGET', K.workers, unpack(alive))) do
    local list = text and names_text(text)
    if not list then
      lines[#lines + 1] = names_of(decode(text) or {})
    elseif not seen[list] then
      seen[list] = true
      lines[#lines + 1] = names_of({ names = decode(list) })
    end
  end
  return table.concat(lines, '\n')
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

forget_notices()
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
