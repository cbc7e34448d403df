-- Move room for waiting tasks from one partition to another: give it up here, or take it here.
--
-- @include replay settings
-- KEYS settings  hash  name -> value; waiting_room: how many tasks may wait here, the part of max_waiting that this partition
--                      has; waiting_epoch: the call of configure that shared max_waiting out; waiting_gift: room on its
--                      way to another partition: its number, how much, and the gift's id; waiting_from_<number>: the id
--                      of the last gift that came from a partition
-- KEYS backlog   zset  waiting tasks
-- KEYS held      zset  tasks that wait for a limit
-- KEYS delayed   zset  delayed tasks
-- ARGV op     text  random id of this operation
-- ARGV what   text  'give': give up room; 'take': take a gift; 'given': the gift was taken
-- ARGV epoch  text  as in waiting_epoch: after another call of configure, nothing is taken
-- ARGV other  int   the other partition
-- ARGV count  int   how much room: at most this much is given up, and never what is in use
-- ARGV gift   text  the id of the gift
--
-- What was given up is used by nobody until it is taken: the sum of all rooms is never more than max_waiting. Only one
-- gift of a partition is on its way; whoever finds it delivers it.
--
-- Returns how much was given, or taken; 0 for nothing.

local before = first_answer(A.op)
if before then return tonumber(before) end
local v = redis.call('HMGET', K.settings, 'waiting_room', 'waiting_epoch', 'waiting_gift')
local room, gift = tonumber(v[1] or nil), v[3] or ''
if not room or v[2] ~= A.epoch then return remember(A.op, 0) end
local count = tonumber(A.count)

if A.what == 'given' then
  if string.match(gift, '%S+$') == A.gift then redis.call('HDEL', K.settings, 'waiting_gift') end
  return remember(A.op, 0)
elseif A.what == 'take' then
  local field = 'waiting_from_' .. A.other
  if redis.call('HGET', K.settings, field) == A.gift then return remember(A.op, 0) end
  redis.call('HSET', K.settings, 'waiting_room', room + count, field, A.gift)
  return remember(A.op, count)
end
local used = redis.call('ZCARD', K.backlog) + redis.call('ZCARD', K.held) + redis.call('ZCARD', K.delayed)
count = math.min(count, room - used)
if gift ~= '' or count <= 0 then return remember(A.op, 0) end
redis.call('HSET', K.settings, 'waiting_room', room - count, 'waiting_gift', A.other .. ' ' .. count .. ' ' .. A.gift)
return remember(A.op, count)
