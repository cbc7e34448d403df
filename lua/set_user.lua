-- Change limits, weight and tenant of a user, and let the change act on what already waits.
--
-- @include waiting replay tenants
-- KEYS user_names  zset  user, all scores 0: those with settings, in order
-- ARGV op      text  random id of this operation
-- ARGV user    text  whose
-- ARGV change  text  JSON: the fields to change; null takes a limit, or the tenant, away
--
-- A new weight rescales what the user is ahead of the clock: otherwise somebody raised from 0.01 to
-- 10 would still wait out the old debt.
--
-- Returns the settings with the tenant, JSON.

local before = first_answer(A.op)
if before then return before end
local change = cjson.decode(A.change)
local old_tenant = redis.call('HGET', K.tenants, A.user)
if change.tenant and change.tenant ~= old_tenant then
  if old_tenant then
    redis.call('ZREM', K.tenant_users, old_tenant .. '\0' .. A.user)
    redis.call('HDEL', K.tenants, A.user)
  end
  if change.tenant ~= cjson.null then join_tenant(A.user, change.tenant) end
end
change.tenant = nil
local settings = parse_settings(redis.call('HGET', K.users, A.user))
local old_weight = settings.weight or 1
for field, value in pairs(change) do
  if value == cjson.null then value = nil end
  settings[field] = value
end
local weight = settings.weight or 1
if next(settings) == nil then
  redis.call('HDEL', K.users, A.user)
  redis.call('ZREM', K.user_names, A.user)
else
  redis.call('HSET', K.users, A.user, cjson.encode(settings))
  redis.call('ZADD', K.user_names, 0, A.user)
end
if not settings.rate then redis.call('HDEL', K.throttle, A.user) end
if weight ~= old_weight then
  local function rescale(key, clock)
    local tag = tonumber(redis.call('ZSCORE', key, A.user) or nil)
    if tag and tag > clock then
      redis.call('ZADD', key, 'XX', clock + (tag - clock) * old_weight / weight, A.user)
    end
  end
  rescale(K.ready, fair.clock)
  rescale(K.idle, fair.clock)
  rescale(K.critical, fair.critical_clock)
end
if review(A.user) then wake_worker() end
save_fair()
settings.tenant = redis.call('HGET', K.tenants, A.user) or nil
return remember(A.op, cjson.encode(settings))
