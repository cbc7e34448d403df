-- Read one page of a list of runs, newest first. One bounded read.
--
-- @include status byte_order
-- FLAGS no-writes
-- KEYS runs      zset  <kind> <value> NUL <end, ms> <outcome> <task id>: ended runs
-- KEYS open      zset  schedule NUL task id: unfinished tasks of schedules
-- KEYS backlog   zset  seat NUL rank NUL task id NUL label: waiting tasks
-- KEYS held      zset  seat NUL gate NUL rank NUL task id NUL label: tasks that wait for room at a limit
-- KEYS waiting   zset  task id -> when it started waiting, ms
-- KEYS delayed   zset  task id -> when it becomes ready, ms
-- KEYS delayed_index  zset  owner NUL when NUL task id: delayed tasks, by owner
-- ARGV source  text  the key to read
-- ARGV from    text  for waiting and delayed: the position to continue after, or empty; for others the last
--                    member, in the syntax of ZREVRANGEBYLEX
-- ARGV to      text  the first member, in the syntax of ZREVRANGEBYLEX; not used for waiting and delayed
-- ARGV limit   int   at most this many
--
-- A position says where to continue, even if its run has left the source. It is the score and the task id,
-- or the part of a member after the first NUL.
--
-- Returns { 1 if the page was cut because of its size or 0; then for each run: position, task id, status or
-- '' if it is gone }.

local GROUP = 50         -- runs read at a time
local MAX_BYTES = 524288 -- of records in one answer, roughly

local BY_NAME = { runs = K.runs, open = K.open, backlog = K.backlog, held = K.held,
  delayed_index = K.delayed_index }
local BY_TIME = { waiting = K.waiting, delayed = K.delayed }
local ID_IN_POSITION = { runs = '^%d+%a(.*)$', open = '^(.*)$', backlog = '^%Z*%z(%Z*)',
  held = '^%Z*%z%Z*%z(%Z*)', delayed_index = '%z(%Z*)$' }

-- The number of entries up to a position, latest first.
local function rank_after(key, position)
  local score, id = string.match(position, '^(%S+) (.*)$')
  if not score then return 0 end
  local low = redis.call('ZCOUNT', key, '(' .. score, '+inf')
  local high = redis.call('ZCOUNT', key, score, '+inf')
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_before(redis.call('ZRANGE', key, middle, middle, 'REV')[1], id) then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

local positions, ids = {}, {}
if BY_NAME[A.source] then
  local members = redis.call('ZREVRANGEBYLEX', BY_NAME[A.source], A.from, A.to, 'LIMIT', 0, A.limit)
  for i, member in ipairs(members) do
    positions[i] = string.match(member, '%z(.*)$') or ''
    ids[i] = string.match(positions[i], ID_IN_POSITION[A.source]) or ''
  end
else
  local skip = rank_after(BY_TIME[A.source], A.from)
  local flat = redis.call('ZRANGE', BY_TIME[A.source], skip, skip + tonumber(A.limit) - 1, 'REV',
    'WITHSCORES')
  for i = 1, #flat, 2 do
    ids[#ids + 1] = flat[i]
    positions[#ids] = flat[i + 1] .. ' ' .. flat[i]
  end
end
local answer, bytes = { 0 }, 0
for from = 1, #ids, GROUP do
  local last = math.min(from + GROUP - 1, #ids)
  for i, text in ipairs(redis.call('HMGET', K.status, unpack(ids, from, last))) do
    answer[#answer + 1] = positions[from + i - 1]
    answer[#answer + 1] = ids[from + i - 1]
    answer[#answer + 1] = text or ''
    bytes = bytes + #(text or '')
  end
  if bytes > MAX_BYTES and last < #ids then
    answer[1] = 1
    break
  end
end
return answer
