-- List those who wanted service in a window, page by page. One bounded read.
--
-- @include users retention ended_runs
-- FLAGS no-writes
-- KEYS users         hash  owner or tenant -> settings, JSON
-- KEYS tenant_users  zset  tenant NUL user
-- ARGV since_ms  int   start of the window
-- ARGV tenant    text  the users of this tenant; empty: tenants and users without one, who share the queue
-- ARGV after     text  continue after this owner or tenant; empty: the first page
-- ARGV limit     int   look at most at this many owners and tenants who ever ended a run, or are of the tenant
-- ARGV most      int   return at most this many who have waiting or running tasks
--
-- Without a tenant, the first page begins with those who have waiting or running tasks. Then come all who ended
-- a run in the window, in the order of their names: tenants, then users.
--
-- Returns { the owner or tenant after which the next page begins or '', then for each: its name (see lib/owners),
-- number of runs that ended in the window, settings or '' }. Some may be listed twice.

local window = cut_window(tonumber(A.since_ms))
local owners, ended = {}, {}
if A.after == '' and A.tenant == '' then
  local active, most = new_user_set(), tonumber(A.most)
  add_active_users(active, most)
  for _, owner in ipairs(active.list) do
    if #owners < most and not group_of(owner) then owners[#owners + 1], ended[#ended + 1] = owner, 0 end
  end
end

-- The next tenant or user after a name; nil at the end.
local function next_after(name)
  if A.tenant ~= '' then
    local user = string.match(name, '^\2[^\2]*\2(.*)$') or ''
    user = user_from(K.tenant_users, A.tenant .. '\0', user .. '\1')
    return user and '\2' .. A.tenant .. '\2' .. user
  end
  if name == '' or string.byte(name) == 2 then
    local tenant = user_from(K.runs, 'g', string.sub(name, 2) .. '\1')
    if tenant then return '\2' .. tenant end
    name = '\3'  -- users of tenants come before those without one
  end
  return user_from(K.runs, 'u', name .. '\1')
end

local owner, last = next_after(A.after), ''
for _ = 1, tonumber(A.limit) do
  if not owner then break end
  local count = count_runs(service_of(owner), window)
  if count > 0 then owners[#owners + 1], ended[#ended + 1] = owner, count end
  last = owner
  owner = next_after(owner)
end

local answer = { owner and last or '' }
for i, settings in ipairs(fields_of(K.users, owners)) do
  answer[3 * i - 1], answer[3 * i], answer[3 * i + 1] = owners[i], ended[i], settings or ''
end
return answer
