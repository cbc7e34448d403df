-- Keep the index of schedules by tenant.
--
-- @include schedule_state tenants
-- KEYS tenant_schedules  zset  tenant NUL user NUL schedule id, all scores 0
--
-- The state of a schedule has the user and tenant under which the index lists it.

-- Remove a schedule from the index, by its old state.
local function leave_tenant(id, state)
  if state.tenant and state.user then
    redis.call('ZREM', K.tenant_schedules, state.tenant .. '\0' .. state.user .. '\0' .. id)
  end
end

-- Add a schedule to the index, by its new state.
local function enter_tenant(id, state)
  if not state.tenant then return end
  redis.call('ZADD', K.tenant_schedules, 0, state.tenant .. '\0' .. state.user .. '\0' .. id)
  join_tenant(state.user, state.tenant)
end
