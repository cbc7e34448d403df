-- List users who wanted service in a window, page by page. One bounded read.
--
-- @include users retention ended_runs
-- FLAGS no-writes
-- KEYS users         hash  user -> settings, JSON
-- KEYS tenant_users  zset  tenant NUL user
-- ARGV since_ms  int   start of the window
-- ARGV tenant    text  only users of this tenant, or empty
-- ARGV after     text  continue after this user; empty: the first page
-- ARGV limit     int   look at most at this many users who ever ended a run, or are of the tenant
-- ARGV most      int   return at most this many users who have waiting or running tasks
--
-- Without a tenant, the first page begins with the users who have waiting or running tasks. Then come all
-- who ended a run in the window, in the order of their names.
--
-- Returns { the user after which the next page begins or '', then for each user: user id, number of runs
-- that ended in the window, settings or '' }. Some users may be listed twice.

local window = cut_window(tonumber(A.since_ms))
local source, lead = K.runs, 'u'
if A.tenant ~= '' then source, lead = K.tenant_users, A.tenant .. '\0' end

local users, ended = {}, {}
if A.after == '' and A.tenant == '' then
  local active = new_user_set()
  add_active_users(active, tonumber(A.most))
  for i = 1, math.min(#active.list, tonumber(A.most)) do users[i], ended[i] = active.list[i], 0 end
end

local user = user_from(source, lead, A.after .. '\1')
local last = ''
for _ = 1, tonumber(A.limit) do
  if not user then break end
  local count = count_runs('u' .. user, window)
  if count > 0 then users[#users + 1], ended[#users + 1] = user, count end
  last = user
  user = user_after(source, lead, user)
end

local answer = { user and last or '' }
for i, settings in ipairs(fields_of(K.users, users)) do
  answer[3 * i - 1], answer[3 * i], answer[3 * i + 1] = users[i], ended[i], settings or ''
end
return answer
