-- List users who have waiting or running tasks; may include users whose tasks have just ended.
-- One bounded read.
--
-- @include users
-- FLAGS no-writes
-- KEYS tenants       hash  user -> tenant
-- KEYS tenant_users  zset  tenant NUL user
-- ARGV tenant  text  only its users; empty: all users
-- ARGV limit   int   maximum number of users read from each of ready, parked, running, held and the tenant
--
-- Returns user ids. With a tenant these are all users it ever had, up to the limit.

local most = tonumber(A.limit)
local found = new_user_set()
add_active_users(found, most)
if A.tenant ~= '' then
  -- The tenant's own list includes users beyond the limit.
  local lead, everybody = A.tenant .. '\0', found.list
  found = new_user_set()
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.tenant_users, '[' .. lead, '(' .. A.tenant .. '\1',
    'LIMIT', 0, most)) do
    add_users(found, { string.sub(member, #lead + 1) })
  end
  for i, tenant in ipairs(fields_of(K.tenants, everybody)) do
    if tenant == A.tenant then add_users(found, { everybody[i] }) end
  end
end
return found.list
