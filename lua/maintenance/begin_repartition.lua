-- Begin or continue to move the records of a queue to another one: this process takes over.
--
-- @include fair repartition
-- FLAGS allow-oom
-- KEYS tasks      hash  task id -> document
-- KEYS schedules  hash  schedule id -> definition
-- ARGV role   text  'from': records leave this queue; 'to': they arrive here
-- ARGV move   text  random id of the move, the same in both queues
-- ARGV other  text  the other queue, for people
-- ARGV seq    int   with 'to': the arrival number of the other queue
-- ARGV empty  text  '1': the queue must be empty unless this move was begun before
-- ARGV known  text  '1': this move was begun before, and records are on their way
--
-- New tasks of a queue to which others move come after these: it goes on with the larger arrival number.
--
-- Returns { 'begun', arrival number }; or, with nothing changed, { 'busy', role, other queue } if another move is not
-- over, { 'used' } if the queue is not empty, or { 'unknown' } if the move that is known did not go to this queue.

local before = read_move()
local is_same = before and before.role == A.role and before.move == A.move
if before and not is_same then
  local all = redis.call('HGETALL', K.repartition)
  for i = 1, #all, 2 do
    if string.find(all[i], '^[<>]') then return { 'busy', before.role, before.other } end
  end
end
local began_here = redis.call('HEXISTS', K.repartition, '@' .. A.move) == 1
if A.known == '1' and not began_here then return { 'unknown' } end
if A.empty == '1' and not began_here and redis.call('EXISTS', K.tasks, K.schedules) > 0 then return { 'used' } end
redis.call('HSET', K.repartition, '', table.concat({ A.role, A.token, A.move, A.other }, '\0'))
if A.role == 'to' then redis.call('HSET', K.repartition, '@' .. A.move, A.other) end
local seq = tonumber(A.seq)
if A.role == 'to' and seq > fair.seq then
  fair.seq, fair_dirty = seq, true
end
save_fair()
mark_layout()
return { 'begun', string.format('%.0f', fair.seq) }
