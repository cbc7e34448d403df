-- Set ended tasks aside, to be moved to another queue.
--
-- @include ending repartition outcomes
-- FLAGS allow-oom
-- ARGV source  text  'dead' or 'ended': dead letters, or all others
-- ARGV skip    int   how many to pass over, from the oldest on
-- ARGV limit   int   look at so many after them, a few hundred at most
--
-- Records that cannot be read stay. A repeated call returns what is set aside already, and sets nothing more aside.
--
-- Returns { 'taken', how many of those it looked at stay, 1 if there may be more, name, record, name, record, ... }; or
-- { 'taken over' } with nothing changed, if another process moves the queue.

local BYTES_AT_ONCE = 1048576  -- of documents and attempts, roughly

if not is_mover('from') then return { 'taken over' } end
local before = moving_away()
if #before > 0 then return { 'taken', 0, 1, unpack(before) } end

local key, limit = A.source == 'dead' and K.dead or K.ended, tonumber(A.limit)
local ids = redis.call('ZRANGE', key, A.skip, A.skip + limit - 1, 'WITHSCORES')
if #ids == 0 then return { 'taken', 0, 0 } end
local going, records, stay, looked_at, bytes = {}, {}, 0, 0, 0
for i = 1, #ids, 2 do
  if bytes > BYTES_AT_ONCE then break end
  looked_at = looked_at + 1
  local id = ids[i]
  local record, document = read_status(id), redis.call('HGET', K.tasks, id)
  if record and outcome_of(record) and record.ended and document then
    going[#going + 1] = id
    local attempts = redis.call('HGET', K.attempts, id) or ''
    records[id] = { id, A.source, ids[i + 1], document, redis.call('HGET', K.status, id), attempts, '' }
    bytes = bytes + #document + #attempts
  else
    stay = stay + 1
  end
end
local dropped = #going > 0 and drop_tasks(key, going) or 0
for i = 1, dropped do
  local id = going[i]
  set_aside('t' .. id, records[id])
  -- Not the end of the task: it can come back.
  remember('t:' .. id, tombstone_of({ state = 'moved' }, records[id][4]))
end
local has_more = dropped < #going or looked_at * 2 < #ids or #ids == 2 * limit
return { 'taken', stay, has_more and 1 or 0, unpack(moving_away()) }
