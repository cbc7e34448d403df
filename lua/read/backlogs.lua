-- Count the waiting and running tasks of users and tenants. One bounded read.
--
-- @include users
-- FLAGS no-writes
-- ARGV ...  owners and tenants; see lib/owners
-- ROW user  text  an owner or a tenant
--
-- Returns for each: number of waiting tasks, number of running tasks.

local users = {}
for i = FIRST, #ARGV do users[#users + 1] = R.user[i] end

local answer = {}
for i, running in ipairs(fields_of(K.running, users)) do
  answer[#answer + 1] = waiting_of(users[i])
  answer[#answer + 1] = math.max(0, tonumber(running or nil) or 0)
end
return answer
