-- Find schedules by their tenants.
--
-- @include schedule_state tenants
-- KEYS tenant_schedules  zset  tenant NUL user NUL schedule id, all scores 0
--
-- The state of a schedule has its user and its tenant as they are in the index.

-- Take a schedule out of the index, by its state as it was.
local function leave_tenant(id, state)
  if state.tenant and state.user then
    redis.call('ZREM', K.tenant_schedules, state.tenant .. '\0' .. state.user .. '\0' .. id)
  end
end

-- Put it in, by its state as it is from now on.
local function enter_tenant(id, state)
  if not state.tenant then return end
  redis.call('ZADD', K.tenant_schedules, 0, state.tenant .. '\0' .. state.user .. '\0' .. id)
  join_tenant(state.user, state.tenant)
end
