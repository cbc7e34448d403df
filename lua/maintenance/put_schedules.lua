-- Store schedules that come from another queue as they were there, with plan, state and history.
--
-- @include schedules tenant_schedules repartition
-- KEYS moments  zset  schedule NUL last time NUL first time NUL how many NUL reason, all scores 0
-- KEYS changes  zset  schedule NUL time in ms NUL operation NUL JSON, all scores 0
-- ARGV back  text  '1': they come back to the queue that they were to leave, because the other one refused them
-- ARGV ...   schedules, a few hundred at most
-- ROW moved   text  the name under which it was set aside
-- ROW record  text  what was set aside
--
-- Revision and next fire time stay the same, so what was fired before is not fired again. A schedule that has arrived is
-- stored only once, even if the call is repeated after it was changed or removed here.
--
-- Returns { 'put', a word for each }: 'stored' or 'refused' (a schedule with this id is here), the same word if it is
-- repeated; or { 'taken over' } with nothing changed, if another process moves the queue.

local is_back = A.back == '1'
if not is_mover(is_back and 'from' or 'to') then return { 'taken over' } end

-- The word for a schedule, if it is not to be stored; else nil.
local function verdict_on(moved, id)
  if is_back then return redis.call('HEXISTS', K.repartition, MOVES_AWAY .. moved) == 0 and 'stored' or nil end
  if redis.call('HEXISTS', K.repartition, HAS_ARRIVED .. moved) == 1 then return 'stored' end
  return redis.call('HEXISTS', K.schedules, id) == 1 and 'refused' or nil
end

local function put(parts)
  local id, definition, plan, due, state, broken, user = unpack(parts)
  redis.call('HSET', K.schedules, id, definition)
  if plan ~= '' then redis.call('HSET', K.plan, id, plan) end
  if due ~= '' then redis.call('ZADD', K.due, due, id) end
  if state ~= '' then redis.call('HSET', K.schedule_state, id, state) end
  if broken ~= '' then redis.call('HSET', K.broken, id, broken) end
  redis.call('ZADD', K.schedule_index, 0, user .. '\0' .. id)
  name_schedule(id, nil, name_in(definition))
  local known = read_state(state)
  if known.user then enter_tenant(id, known) end
  for _, member in ipairs(parts_in(parts[8])) do redis.call('ZADD', K.moments, 0, member) end
  for _, member in ipairs(parts_in(parts[9])) do redis.call('ZADD', K.changes, 0, member) end
end

local words = {}
for i = FIRST, #ARGV, ROW do
  local parts = parts_in(R.record[i])
  local word = verdict_on(R.moved[i], parts[1])
  if not word then put(parts) end
  if is_back then
    redis.call('HDEL', K.repartition, MOVES_AWAY .. R.moved[i])
  elseif not word then
    redis.call('HSET', K.repartition, HAS_ARRIVED .. R.moved[i], 'stored')
  end
  words[#words + 1] = word or 'stored'
end
wake_scheduler()
mark_layout()
return { 'put', unpack(words) }
