-- Take a schedule out of its partition, to be stored in another one: the first of three steps.
--
-- @include erase
-- FLAGS allow-oom
-- KEYS moving  hash  schedule id -> JSON: a schedule that has left, until it is stored elsewhere; see move_in
-- ARGV op    text  random id of this operation, and of the move
-- ARGV id    text  schedule id
-- ARGV base  text  the revision of its plan, as it was read
-- ARGV to    int   the number of the other partition
--
-- From this step on the schedule is in `moving`, whole, and nowhere else: it neither fires nor is lost if its
-- caller dies. Whoever finds it there goes on with move_in and end_move.
--
-- Returns { 'moving', its record in `moving` }, or { 'changed' } (nothing changed).

local before = first_answer(A.op)
if before == 'changed' then return { before } end
if before then return { before, redis.call('HGET', K.moving, A.id) or '' } end
local definition = redis.call('HGET', K.schedules, A.id)
if not definition or revision_of(A.id) ~= A.base then return { remember(A.op, 'changed') } end

local first, last = '[' .. A.id .. '\0', '(' .. A.id .. '\1'
local due = redis.call('ZSCORE', K.due, A.id)
local record = cjson.encode({
  move = A.op,
  to = A.to,
  definition = definition,
  plan = redis.call('HGET', K.plan, A.id) or '',
  state = redis.call('HGET', K.schedule_state, A.id) or '',
  broken = redis.call('HGET', K.broken, A.id) or '',
  due = due and string.format('%.0f', tonumber(due)) or '',
  moments = redis.call('ZRANGEBYLEX', K.moments, first, last),
  changes = redis.call('ZRANGEBYLEX', K.changes, first, last),
})
redis.call('HSET', K.moving, A.id, record)
erase_schedule(A.id)
return { remember(A.op, 'moving'), record }
