-- Keep the tenants of users.
--
-- KEYS tenants       hash  user -> tenant
-- KEYS tenant_users  zset  tenant NUL user, all scores 0: the users of a tenant in order

-- Assign a user without a tenant to one. HEXISTS and ZADD raise before anything is written if a key has a
-- wrong type: the push of a single task has not probed them.
local function join_tenant(user, tenant)
  if redis.call('HEXISTS', K.tenants, user) == 1 then return end
  redis.call('ZADD', K.tenant_users, 0, tenant .. '\0' .. user)
  redis.call('HSET', K.tenants, user, tenant)
end
