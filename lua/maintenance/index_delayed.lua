-- Add delayed tasks to the index by user, or drop entries of the index that are not valid.
--
-- @include status backlog
-- @lazy delays
-- KEYS fair  hash  index_from: where the next step continues; index_off: by how many entries index and
--                 `delayed` differed after the last walk, and when that was, ms
-- ARGV source  text  'delayed': entries are task ids to add; 'delayed_index': entries are members to check
-- ARGV next    text  where the next step continues; empty: the walk is over
-- ARGV ...     entries, a few hundred at most
-- ROW entry   text  task id, or member of the index
--
-- Versions that do not know the index do not update it when they delay or promote a task. Each entry is
-- checked as it is now; a repeated call changes nothing.
--
-- Returns the number of entries added or dropped.

local wrong = {}

local function look_for(ids)
  local records = read_statuses(ids)
  for i, due in ipairs(redis.call('ZMSCORE', K.delayed, unpack(ids))) do
    local record = records[ids[i]]
    if due and record then
      for _, value in ipairs({ tonumber(due), ids[i], owner_of(record) }) do wrong[#wrong + 1] = value end
    end
  end
  return delays().enter(wrong)
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
