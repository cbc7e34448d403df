-- List the users who have waiting or running tasks, and maybe some who had: one bounded read.
--
-- @include users
-- FLAGS no-writes
-- KEYS tenants       hash  user -> tenant
-- KEYS tenant_users  zset  tenant NUL user
-- ARGV tenant  text  whose users, or empty: all
-- ARGV limit   int   so many who are ready, are parked, run or are held are looked at; and so many
--                    of the tenant
--
-- Returns users. Those of a tenant are all that it ever had, as far as the limit goes.

local most = tonumber(A.limit)
local crowd = new_crowd()
admit_active(crowd, most)
if A.tenant ~= '' then
  -- A tenant's own list finds those whom the others are too many for.
  local lead, everybody = A.tenant .. '\0', crowd.list
  crowd = new_crowd()
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.tenant_users, '[' .. lead, '(' .. A.tenant .. '\1',
    'LIMIT', 0, most)) do
    admit(crowd, { string.sub(member, #lead + 1) })
  end
  for i, tenant in ipairs(fields_of(K.tenants, everybody)) do
    if tenant == A.tenant then admit(crowd, { everybody[i] }) end
  end
end
return crowd.list
