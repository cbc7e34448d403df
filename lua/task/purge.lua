-- Cancel waiting, delayed and held tasks of a user or a tenant; history shows them as cancelled.
--
-- @include ending
-- @lazy delays rings
-- FLAGS allow-oom
-- ARGV op     text  random id of this operation
-- ARGV owner  text  a user, a user of a tenant, or a tenant; see lib/owners
-- ARGV limit  int   at most this many, a few hundred
--
-- The caller repeats the call until it returns 0.
--
-- Returns the number of tasks that no longer wait.

local from, to = '[' .. A.owner .. '\0', '(' .. A.owner .. '\4'  -- seats in all pools
if rings().is_tenant(A.owner) then from, to = '[' .. A.owner .. '\2', '(' .. A.owner .. '\3' end

local seats = {}  -- of the entries that were dropped

local function ids_in(key, pattern, most)
  local ids, places = {}, {}
  for _, member in ipairs(redis.call('ZRANGEBYLEX', key, from, to, 'LIMIT', 0, most)) do
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
  if key == K.backlog then seats[string.match(member, '^%Z*')] = true end
  count('broken_tasks', 1)
end

local function purge(key, pattern, most, state, is_place)
  local ids, places = ids_in(key, pattern, most)
  if #ids == 0 then return 0 end
  local records = read_statuses(ids)
  for _, record in pairs(records) do prepare_end(record) end
  for i, id in ipairs(ids) do
    local record = records[id]
    if record and record.state == state and is_place(id, record, places[i]) then
      end_waiting(id, record, 'cancelled')
    else
      drop_entry(key, id, places[i])
    end
  end
  return #ids
end

local function is_waiting_place(id, record, place)
  return member_of(id, record) == place
end

-- Whether a member of `held` is of this task; it may be held at any of its limits.
local function is_held_place(id, record, place)
  local task = waiting_task(id, record)
  return gates().held_member(string.match(place, '^%Z*%z(%Z*)') or '', task) == place
end

local function is_delayed_place(id, record, place)
  local due = tonumber(redis.call('ZSCORE', K.delayed, id) or nil)
  return due and delays().member(owner_of(record), due, id) == place
end

local before = first_answer(A.op)
if before then return tonumber(before) end
local limit = tonumber(A.limit)
local purged = purge(K.backlog, '^%Z*%z%Z*%z(%Z*)', limit, 'ready', is_waiting_place)
for seat in pairs(seats) do
  if not first_waiting(seat, 1)[1] then leave(seat) end
end
if purged < limit then
  purged = purged + purge(K.held, '^%Z*%z%Z*%z%Z*%z(%Z*)', limit - purged, 'ready', is_held_place)
end
if purged < limit then
  purged = purged + purge(K.delayed_index, '%z(%Z*)$', limit - purged, 'delayed', is_delayed_place)
end
if purged > 0 then trim_all(purged) end
save_fair()
return tonumber(remember(A.op, purged))
