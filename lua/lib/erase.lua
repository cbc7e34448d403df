-- Delete all records of a schedule. Its tasks stay.
--
-- @include schedules moments changes tenant_schedules

local function erase_schedule(id)
  local state, name = state_of(id), name_in(redis.call('HGET', K.schedules, id))
  redis.call('HDEL', K.schedules, id)
  if state.user then redis.call('ZREM', K.schedule_index, state.user .. '\0' .. id) end
  leave_tenant(id, state)
  redis.call('HDEL', K.plan, id)
  redis.call('ZREM', K.due, id)
  redis.call('HDEL', K.schedule_state, id)
  redis.call('HDEL', K.broken, id)
  name_schedule(id, name, nil)
  for _, key in ipairs({ K.moments, K.changes }) do
    redis.call('ZREMRANGEBYLEX', key, '[' .. id .. '\0', '(' .. id .. '\1')
  end
end
