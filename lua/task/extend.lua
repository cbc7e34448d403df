-- Prolong many leases at once, and say which are lost and which are to be cancelled.
--
-- @include replay status stats
-- FLAGS allow-oom
-- KEYS leases     zset  task id -> end of lease, ms
-- KEYS deadlines  zset  leased task id -> when it is ended if it has not answered, ms
-- ARGV op        text  random id of this operation
-- ARGV lease_ms  int   how long from now
-- ARGV ...         leases, at most a few hundred
-- ROW id          text  of the task
-- ROW token       text  of the lease
-- ROW timeout_ms  int   how long the handler may run; 0: no limit; empty: not known
--
-- No lease goes beyond the deadline of its run, which is a lease after its time-out; and a lease after
-- its worker has heard that it is to be cancelled. From then on its lease is lost. The time-out is the
-- task's own, or one that an operator has set for its name, or what the worker says here: other
-- workers may have declared another one.
--
-- Returns a word for each: 'extended', 'cancel' (extended, and its cancelling was asked for), 'ended'
-- (whoever holds the token has ended it; nothing was changed), or 'lost_lease' (nothing was changed).

-- Whether the holder of the token has ended the lease itself. A worker extends many leases in one
-- call while its slots end some of them: that loses nothing. What TaskQueue calls the operations
-- that give a task back is known here.
local function has_ended(id, record, token)
  if record and record.ended and record.token == token then return true end
  if not record then
    local _, by = read_grave(first_answer('t:' .. id) or '')
    if by == token then return true end
  end
  for _, operation in ipairs({ 'retry:', 'release:' }) do
    local word = first_answer(operation .. token .. ':' .. id)
    if word and word ~= 'lost_lease' then return true end
  end
  return false
end

local answer = {}
local before = first_answer(A.op)
if before then
  for word in string.gmatch(before, '[^\n]+') do answer[#answer + 1] = word end
  return answer
end
local lost, ends = 0, {}
local lease_ms = tonumber(A.lease_ms)

-- Let a run have the time that its worker gives it.
local function set_deadline(id, record, timeout_ms)
  if not timeout_ms or record.timeout_ms or record.ruled or record.heard then return end
  local deadline = timeout_ms > 0 and (tonumber(record.claimed) or now) + timeout_ms + lease_ms or nil
  if deadline == record.deadline then return end
  record.deadline = deadline
  write_status(id, record)
  if deadline then
    redis.call('ZADD', K.deadlines, deadline, id)
  else
    redis.call('ZREM', K.deadlines, id)
  end
end

-- When the lease of a run ends that is extended now.
local function new_end(id, record)
  local longest = now + lease_ms
  if record.cancel and not record.heard then
    record.heard, record.deadline = true, math.min(longest, record.deadline or longest)
    write_status(id, record)
    redis.call('ZADD', K.deadlines, record.deadline, id)
  end
  return math.min(longest, record.deadline or longest)
end

local function is_held(record, token)
  return record and record.state == 'running' and record.token == token
    and not (record.deadline and record.deadline <= now)
end

for i = FIRST, #ARGV, ROW do
  local id, token = R.id[i], R.token[i]
  local record = read_status(id)
  if is_held(record, token) then
    set_deadline(id, record, tonumber(R.timeout_ms[i]))
    ends[#ends + 1] = new_end(id, record)
    ends[#ends + 1] = id
    answer[#answer + 1] = record.cancel and 'cancel' or 'extended'
  elseif has_ended(id, record, token) then
    answer[#answer + 1] = 'ended'
  else
    answer[#answer + 1] = 'lost_lease'
    lost = lost + 1
  end
end
if #ends > 0 then redis.call('ZADD', K.leases, unpack(ends)) end
if lost > 0 then count('lost_leases', lost) end
remember(A.op, table.concat(answer, '\n'))
return answer
