-- Extend many leases at once, and report which are lost and which runs must be cancelled.
--
-- @include replay status stats
-- FLAGS allow-oom
-- KEYS leases     zset  task id -> end of lease, ms
-- KEYS deadlines  zset  leased task id -> when its run is ended if the worker has not answered, ms
-- ARGV op        text  random id of this operation
-- ARGV lease_ms  int   length of the leases from now on
-- ARGV ...         leases, at most a few hundred
-- ROW id          text  task id
-- ROW token       text  token of the lease
-- ROW timeout_ms  int   how long the handler may run; 0: no limit; empty: not known
--
-- No lease goes beyond the deadline of its run: one lease after its time-out, or one lease after its
-- worker was told to cancel it. After the deadline the lease is lost. The time-out is that of the task, or
-- that which an operator set for its name, or timeout_ms; other workers may have declared another one.
--
-- Returns a word for each lease: 'extended'; 'cancel' (extended, and cancellation was requested);
-- 'ended' (the holder of the token has ended it; nothing changed); or 'lost_lease' (nothing changed).

-- True if the holder of the token has ended the lease itself. A worker extends many leases in one call
-- while its threads end some of them, and nothing is lost by that. The names of the operations that give
-- a task back are those of TaskQueue.
local function has_ended(id, record, token)
  if record and record.ended and record.token == token then return true end
  if not record then
    local _, by = read_tombstone(first_answer('t:' .. id) or '')
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

-- Apply the time-out that the worker gives to a run, unless another one has precedence.
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

-- The new end of a lease.
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
