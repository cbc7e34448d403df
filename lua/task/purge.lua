-- Cancel waiting, delayed and held tasks of a user; history shows them as cancelled.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op     text  random id of this operation
-- ARGV user   text  user id
-- ARGV limit  int   at most this many, a few hundred
--
-- The caller repeats the call until it returns 0.
--
-- Returns the number of tasks that no longer wait.

local function ids_in(key, pattern, most)
  local ids, places = {}, {}
  for _, member in ipairs(redis.call('ZRANGEBYLEX', key, '[' .. A.user .. '\0', '(' .. A.user .. '\1',
    'LIMIT', 0, most)) do
    ids[#ids + 1] = string.match(member, pattern) or ''
    places[#ids] = member
  end
  return ids, places
end

-- Drop an invalid entry: its task cannot be read, or does not wait.
local function drop_entry(key, id, member)
  redis.call('ZREM', key, member)
  local record = read_status(id)
  if not record or record.state ~= 'ready' then redis.call('ZREM', K.waiting, id) end
  count('broken_tasks', 1)
end

local function purge(key, pattern, most, state, place_of)
  local ids, places = ids_in(key, pattern, most)
  if #ids == 0 then return 0 end
  local records = read_statuses(ids)
  for i, id in ipairs(ids) do
    local record = records[id]
    if record and record.state == state and place_of(id, record) == places[i] then
      cancel_waiting(id, record)
    else
      drop_entry(key, id, places[i])
    end
  end
  return #ids
end

-- The member of delayed_index for a delayed task; nil for other tasks.
local function delayed_place(id, record)
  local due = tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  return due and delays.member(record.user, due, id)
end

local before = first_answer(A.op)
if before then return tonumber(before) end
local limit = tonumber(A.limit)
local purged = purge(K.backlog, '^%Z*%z%Z*%z(%Z*)', limit, 'ready', member_of)
if not first_waiting(A.user, 1)[1] then leave(A.user) end  -- the last entry may have been invalid
if purged < limit then
  purged = purged + purge(K.held, '%z(%Z*)$', limit - purged, 'ready', held_member_of)
end
if purged < limit then
  purged = purged + purge(K.delayed_index, '%z(%Z*)$', limit - purged, 'delayed', delayed_place)
end
if purged > 0 then trim_all(purged) end
save_fair()
return tonumber(remember(A.op, purged))
