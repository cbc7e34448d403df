-- Say which tenant a user belongs to.
--
-- KEYS tenants       hash  user -> tenant
-- KEYS tenant_users  zset  tenant NUL user, all scores 0: the users of a tenant in order

-- A user without a tenant belongs to the first one that is named for it. The keys are written only
-- after both were looked at: a push of a lone task has not probed them.
local function join_tenant(user, tenant)
  if redis.call('HEXISTS', K.tenants, user) == 1 then return end
  redis.call('ZADD', K.tenant_users, 0, tenant .. '\0' .. user)
  redis.call('HSET', K.tenants, user, tenant)
end
