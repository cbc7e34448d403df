-- Record that a worker is alive and what it runs, and report about other workers.
--
-- @include stale_runs
-- FLAGS allow-oom
-- KEYS workers      hash  worker id -> JSON: host, pid, version, slots, pools (unless it is the default one
--                         alone), names, current tasks, times, drain (who asked it to stop), http (where its
--                         HTTP tasks may go);
--                         '' -> the names that live workers run, one per line;
--                         \0 -> if any of them has pools: pool NUL name, one per line
-- KEYS worker_ends  zset  worker id -> when it counts as gone, ms
-- KEYS limits       hash  name -> JSON: slots, rate, timeout_ms, by (who set them)
-- ARGV worker  text  worker id
-- ARGV record  text  JSON without the closing brace
-- ARGV ttl_ms  int   the worker counts as gone after this long without a heartbeat; 0: it leaves now
-- ARGV limits  text  name -> limits of all its handlers, JSON; empty: unchanged
--
-- Limits that an operator has set take precedence over those that workers declare. A repeated call has the
-- same effect, but the notices that it returned are returned again only later.
--
-- The script also ends runs that do not answer, even if all slots of all workers are stuck and no worker
-- claims.
--
-- Returns { time in ms, { names that live workers of the same pools run }, { notices, see lib/notices }, { workers that are
-- gone without having left }, who asked this worker to drain or '' }. The lists are empty for a worker that
-- leaves.

local GONE_READ = 100    -- at most; the next heartbeat finds the others
local ALIVE_READ = 1000  -- live workers whose names are read, at most

local function declare(name, declared)
  local stored = decode(redis.call('HGET', K.limits, name))
  if stored and stored.by ~= 'worker' then return end
  if next(declared) == nil then
    if stored then redis.call('HDEL', K.limits, name) end
    return
  end
  declared.by = 'worker'
  -- In a partition, permits that were given under other limits count no more; see lib/permits.
  if string.find(K.limits, '^{[^:}]*:[^:}]*:') then
    declared.op = stored and stored.slots == declared.slots and stored.op or now_text
  end
  redis.call('HSET', K.limits, name, cjson.encode(declared))
end

local ANY_POOLS = '\0'  -- the field of the names by pool

local function texts_in(list, usual)
  local texts = {}
  for _, text in ipairs(type(list) == 'table' and list or usual) do
    if type(text) == 'string' then texts[#texts + 1] = text end
  end
  return texts
end

-- The names in a worker's record, one per line.
local function names_of(record)
  return table.concat(texts_in(record.names, {}), '\n')
end

local function pools_of(record)
  return texts_in(record.pools, { 'default' })
end

-- The names in a worker's record for each of its pools, one per line.
local function pooled_of(record)
  local lines = {}
  for _, pool in ipairs(pools_of(record)) do
    for _, name in ipairs(texts_in(record.names, {})) do lines[#lines + 1] = pool .. '\0' .. name end
  end
  return table.concat(lines, '\n')
end

-- Who asked the worker to drain. A new worker with the same id was not asked.
local function drained_by(before, record)
  local is_same = before.pid == record.pid and before.started == record.started
  return is_same and type(before.drain) == 'string' and before.drain or nil
end

-- The pools and the names in the text of a record, or nil. JSON escapes quotes inside values, so no end can
-- be found inside a name.
local function names_text(text)
  local before = string.find(text, '"pools":', 1, true) or string.find(text, '"names":', 1, true)
  local behind = before and string.find(text, ',"current":[', before, true)
  return behind and '{' .. string.sub(text, before, behind - 1) .. '}'
end

-- The names of all live workers, and by pool if any of them has pools. Most run the same names, so each
-- distinct list is decoded once, and nothing else of the records.
local function names_of_all()
  local alive = redis.call('ZRANGE', K.worker_ends, '+inf', string.format('(%.0f', now), 'BYSCORE', 'REV',
    'LIMIT', 0, ALIVE_READ)
  local lines, pooled, seen, has_pools = {}, {}, {}, false
  for _, text in ipairs(redis.call('HMGET', K.workers, unpack(alive))) do
    local list = text and names_text(text) or text or ''
    if not seen[list] then
      seen[list] = true
      local record = decode(list) or {}
      lines[#lines + 1], pooled[#pooled + 1] = names_of(record), pooled_of(record)
      has_pools = has_pools or record.pools ~= nil
    end
  end
  return table.concat(lines, '\n'), has_pools and table.concat(pooled, '\n')
end

-- Each distinct name in some lines.
local function distinct(lines)
  local names, seen = {}, {}
  for name in string.gmatch(lines, '[^\n]+') do
    if not seen[name] then names[#names + 1] = name end
    seen[name] = true
  end
  return names
end

-- The names in lines of names by pool that are of one of some pools.
local function names_in(pooled, pools)
  local wanted, lines = {}, {}
  for _, pool in ipairs(pools) do wanted[pool] = true end
  for _, line in ipairs(pooled) do
    local pool, name = string.match(line, '^(%Z*)%z(.*)$')
    if wanted[pool] then lines[#lines + 1] = name end
  end
  return distinct(table.concat(lines, '\n'))
end

forget_notices()
-- A worker that leaves gets no report: it could not pass it on.
if tonumber(A.ttl_ms) == 0 then
  redis.call('HDEL', K.workers, A.worker, '', ANY_POOLS)
  redis.call('ZREM', K.worker_ends, A.worker)
  return { now, {}, {}, {}, '' }
end

local before, known, known_pooled = unpack(redis.call('HMGET', K.workers, A.worker, '', ANY_POOLS))
local earlier = decode(before) or {}
local text = string.format('%s,"seen":%.0f', A.record, now)
local record = decode(text .. '}') or {}
local drain = drained_by(earlier, record)
text = text .. (drain and ',"drain":' .. cjson.encode(drain) or '') .. '}'
local own, own_pooled = names_of(record), (known_pooled or record.pools) and pooled_of(record)
redis.call('HSET', K.workers, A.worker, text)
redis.call('ZADD', K.worker_ends, now + tonumber(A.ttl_ms), A.worker)
local gone = redis.call('ZRANGE', K.worker_ends, '-inf', now, 'BYSCORE', 'LIMIT', 0, GONE_READ)
if #gone > 0 then
  redis.call('HDEL', K.workers, unpack(gone))
  redis.call('ZREM', K.worker_ends, unpack(gone))
end

-- Reading the records of all workers at each heartbeat would keep Redis busy. They are read only after a
-- worker is gone or has changed its names or its pools.
local is_same = not before or (names_of(earlier) == own
  and (not own_pooled or pooled_of(earlier) == own_pooled))
local is_known = known and #gone == 0 and is_same and (known_pooled or not record.pools)
local lines, pooled_lines
if is_known then
  lines, pooled_lines = known .. '\n' .. own, known_pooled and known_pooled .. '\n' .. own_pooled
else
  lines, pooled_lines = names_of_all()
end
local names = distinct(lines)
redis.call('HSET', K.workers, '', table.concat(names, '\n'))
if pooled_lines then
  local pooled = distinct(pooled_lines)
  redis.call('HSET', K.workers, ANY_POOLS, table.concat(pooled, '\n'))
  names = names_in(pooled, pools_of(record))
elseif known_pooled then
  redis.call('HDEL', K.workers, ANY_POOLS)
end

for name, declared in pairs(decode(A.limits) or {}) do
  if type(declared) == 'table' then declare(name, declared) end
end
return { now, names, find_stale(), gone, drain or '' }
