-- Keep a list of the users of each tenant.
--
-- @include layout
-- @lazy barrier
-- KEYS tenant_users  zset  tenant NUL user, all scores 0: the users of a tenant in order
-- KEYS user_tenants  zset  user NUL tenant, all scores 0: the tenants of a user
--
-- A user of a tenant is listed from the first task, schedule or setting that names both.

-- List a user of a tenant. ZSCORE and ZADD raise before anything is written if a key has a wrong type: the push
-- of a single task has not probed them.
local function join_tenant(user, tenant)
  need_layout_2()
  if redis.call('ZSCORE', K.user_tenants, user .. '\0' .. tenant) then return end
  redis.call('ZADD', K.tenant_users, 0, tenant .. '\0' .. user)
  redis.call('ZADD', K.user_tenants, 0, user .. '\0' .. tenant)
end
