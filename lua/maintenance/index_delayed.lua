-- Bring delayed tasks into the index by user, or drop entries of it that are not delayed so.
--
-- @include status delays
-- KEYS fair  hash  index_from: where the next step goes on; index_off: by how many entries the two
--                 differed after the last walk, and when that was, ms
-- ARGV source  text  'delayed': the entries are ids to bring in; 'delayed_index': members to look at
-- ARGV next    text  where the next step goes on, or empty: the walk is over
-- ARGV ...     entries, a few hundred at most
-- ROW entry   text  task id, or member of the index
--
-- Clients of before the index leave it as it is when they delay a task or take one up. Each entry is
-- looked at as it is now; repeated, nothing changes.
--
-- Returns how many were brought in or dropped.

local wrong = {}

local function look_for(ids)
  local records = read_statuses(ids)
  for i, due in ipairs(redis.call('ZMSCORE', K.delayed, unpack(ids))) do
    local record = records[ids[i]]
    if due and record then
      for _, value in ipairs({ tonumber(due), ids[i], record.user }) do wrong[#wrong + 1] = value end
    end
  end
  return delays.enter(wrong)
end

local function look_at(members)
  for _, member in ipairs(members) do
    local due, id = string.match(member, '^%Z*%z(%d+)%z(%Z*)$')
    local score = id and tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
    if not score or score ~= tonumber(due) then wrong[#wrong + 1] = member end
  end
  return #wrong > 0 and redis.call('ZREM', K.delayed_index, unpack(wrong)) or 0
end

local entries = {}
for i = FIRST, #ARGV do entries[#entries + 1] = R.entry[i] end
local changed = 0
if #entries > 0 then changed = A.source == 'delayed' and look_for(entries) or look_at(entries) end
local off = redis.call('ZCARD', K.delayed) - redis.call('ZCARD', K.delayed_index)
if off == 0 then
  redis.call('HDEL', K.fair, 'index_from', 'index_off')
elseif A.next == '' then
  redis.call('HDEL', K.fair, 'index_from')
  redis.call('HSET', K.fair, 'index_off', off .. ' ' .. now_text)
else
  redis.call('HSET', K.fair, 'index_from', A.next)
end
return changed
