-- Say which users want service in a window: a part of them, in one bounded read.
--
-- @include users retention ended_runs
-- FLAGS no-writes
-- KEYS users         hash  user -> settings, JSON
-- KEYS tenant_users  zset  tenant NUL user
-- ARGV since_ms  int   the begin of the window
-- ARGV tenant    text  whose users, or empty: all
-- ARGV after     text  the user behind whom to go on, or empty: the first part
-- ARGV limit     int   so many who ended something at any time, or are of the tenant, are looked at
-- ARGV most      int   so many who wait or run are named at most
--
-- Those who wait or run are named with the first part, whatever their tenant; then all who ended
-- something in the window, in the order of their names.
--
-- Returns { the user behind whom the next part begins or '', for each user: the name, how many runs
-- ended in the window, settings or '' }. Some come twice.

local window = cut_window(tonumber(A.since_ms))
local source, lead = K.runs, 'u'
if A.tenant ~= '' then source, lead = K.tenant_users, A.tenant .. '\0' end

local users, ended = {}, {}
if A.after == '' and A.tenant == '' then
  local crowd = new_crowd()
  admit_active(crowd, tonumber(A.most))
  for i = 1, math.min(#crowd.list, tonumber(A.most)) do users[i], ended[i] = crowd.list[i], 0 end
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
