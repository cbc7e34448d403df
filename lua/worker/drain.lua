-- Ask a worker to claim no more tasks, finish those it runs, and stop. Its next heartbeat tells it.
--
-- @include json replay
-- FLAGS allow-oom
-- KEYS workers      hash  worker id -> its last heartbeat, JSON; drain: who asked it to stop
-- KEYS worker_ends  zset  worker id -> when it counts as gone, ms
-- ARGV op      text  random id of this operation
-- ARGV worker  text  worker id
-- ARGV by      text  who asks
--
-- Returns 'asked', also if it was asked before, or 'absent' if no such worker is alive.

local before = first_answer(A.op)
if before then return before end
local ends = tonumber(redis.call('ZSCORE', K.worker_ends, A.worker) or nil)
local text = redis.call('HGET', K.workers, A.worker)
local record = decode(text) or {}
if not ends or ends <= now or type(record.id) ~= 'string' then
  return remember(A.op, 'absent')
end
if not record.drain then
  -- Edit the text: Lua would encode an empty list as an object.
  local open = string.match(text, '^(.*)}%s*$')
  redis.call('HSET', K.workers, A.worker, open .. ',"drain":' .. cjson.encode(A.by) .. '}')
end
return remember(A.op, 'asked')
