-- List users or tenants with waiting or running tasks, and maybe some whose tasks have just ended.
-- One bounded read.
--
-- @include users
-- FLAGS no-writes
-- KEYS tenant_users  zset  tenant NUL user
-- ARGV tenant  text  only its users; empty: all users
-- ARGV whole   int   1: tenants instead of users; not together with a tenant
-- ARGV limit   int   maximum number of users read from each of ready, parked, running, held, the rings and the
--                    tenant
--
-- Returns owners or tenants; see lib/owners. With a tenant these are all users it ever had, up to the limit.

local most = tonumber(A.limit)
local found = new_user_set()
if A.tenant ~= '' then
  local lead = A.tenant .. '\0'
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.tenant_users, '[' .. lead, '(' .. A.tenant .. '\1',
    'LIMIT', 0, most)) do
    add_users(found, { '\2' .. A.tenant .. '\2' .. string.sub(member, #lead + 1) })
  end
  -- The list begins with the first names: those with tasks may come later.
  local ring = '\2' .. A.tenant
  for _, member in ipairs(redis.call('ZRANGEBYLEX', K.rings, '[r' .. ring .. '\0', '(r' .. ring .. '\4',
    'LIMIT', 0, most)) do
    add_users(found, { string.match(member, '([^%z]*)$') })
  end
  return found.list
end
add_active_users(found, most)
local owners = {}
for _, owner in ipairs(found.list) do
  if is_tenant(owner) == (A.whole == '1') then owners[#owners + 1] = owner end
end
return owners
