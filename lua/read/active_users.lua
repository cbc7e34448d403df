-- List users who have waiting or running tasks, and perhaps some who had. One bounded read.
--
-- @include users
-- FLAGS no-writes
-- KEYS tenants       hash  user -> tenant
-- KEYS tenant_users  zset  tenant NUL user
-- ARGV tenant  text  only its users; empty: all users
-- ARGV limit   int   look at most at this many users who are ready, as many who are parked, who have running
--                    tasks and who have held tasks; and at as many of the tenant
--
-- Returns user ids. With a tenant these are all users it ever had, up to the limit.

local most = tonumber(A.limit)
local found = new_user_set()
add_active_users(found, most)
if A.tenant ~= '' then
  -- The tenant's own list has users whom the limit left out.
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
