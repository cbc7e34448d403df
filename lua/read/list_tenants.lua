-- List the tenants of a queue in order. One bounded read.
--
-- @include user_index byte_order
-- FLAGS no-writes
-- KEYS tenant_users      zset  tenant NUL user
-- KEYS tenant_schedules  zset  tenant NUL user NUL schedule id
-- KEYS user_names        zset  owners and tenants with settings; see lib/owners
-- ARGV after   text  start after this tenant, or empty
-- ARGV prefix  text  only tenants whose names begin with this, or empty
-- ARGV limit   int   at most this many
--
-- Returns { 1 if there may be more or 0, then the tenants }.

-- The first tenant with settings at or after a name. The list also has users of tenants: \2 tenant \2 user.
local function with_settings_from(from)
  while true do
    local entry = redis.call('ZRANGEBYLEX', K.user_names, '[\2' .. from, '(\3', 'LIMIT', 0, 1)[1]
    local tenant, rest = string.match(entry or '', '^\2([^\2]*)(.*)$')
    if not tenant or rest == '' then return tenant end
    from = tenant .. '\3'
  end
end

local SOURCES = {
  function(from) return user_from(K.tenant_users, '', from) end,
  function(from) return user_from(K.tenant_schedules, '', from) end,
  with_settings_from,
}

local function with_prefix(tenant)
  return tenant and string.sub(tenant, 1, #A.prefix) == A.prefix and tenant or nil
end

local from = A.after ~= '' and A.after .. '\1' or A.prefix
local heads = {}
for i, source in ipairs(SOURCES) do heads[i] = with_prefix(source(from)) end

local function least_head()
  local least
  for i = 1, #SOURCES do
    if heads[i] and (not least or is_before(heads[i], least)) then least = heads[i] end
  end
  return least
end

local tenants = {}
local tenant = least_head()
while tenant and #tenants < tonumber(A.limit) do
  tenants[#tenants + 1] = tenant
  for i, source in ipairs(SOURCES) do
    if heads[i] == tenant then heads[i] = with_prefix(source(tenant .. '\1')) end
  end
  tenant = least_head()
end
return { tenant and 1 or 0, unpack(tenants) }
