-- Prolong many leases at once, and say which are lost and which are to be cancelled.
--
-- @include replay records stats
-- FLAGS allow-oom
-- KEYS leases  zset  task id -> end of lease, ms
-- ARGV op        text  random id of this operation
-- ARGV lease_ms  int   how long from now
-- ARGV ...  leases, two each: task id, token
--
-- Returns a word for each: 'extended', 'cancel' (extended, and its cancelling was asked for), or
-- 'lost_lease' (nothing was changed).

local answer = {}
local before = first_answer(A.op)
if before then
  for word in string.gmatch(before, '[^\n]+') do answer[#answer + 1] = word end
  return answer
end
local lost, ends = 0, {}
for i = FIRST, #ARGV, 2 do
  local record = read_status(ARGV[i])
  if record and record.state == 'running' and record.token == ARGV[i + 1] then
    ends[#ends + 1] = now + tonumber(A.lease_ms)
    ends[#ends + 1] = ARGV[i]
    answer[#answer + 1] = record.cancel and 'cancel' or 'extended'
  else
    answer[#answer + 1] = 'lost_lease'
    lost = lost + 1
  end
end
if #ends > 0 then redis.call('ZADD', K.leases, unpack(ends)) end
if lost > 0 then count('lost_leases', lost) end
remember(A.op, table.concat(answer, '\n'))
return answer
