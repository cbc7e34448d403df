-- Give permits of a limit of the whole queue, in its home, to the partitions that want them.
--
-- @include replay
-- @lazy gates
-- FLAGS allow-oom
-- KEYS permits  hash  gate -> JSON: partition -> what it has been given: version, number, slots of the limit,
--                     the operation that had set it there; since when it waits (0: it does not), how many it waits for, when it was last heard of, and when it was asked to give
--                     some up, ms; '' -> the latest version; see lib/permits
-- ARGV op    text  random id of this operation
-- ARGV gate  text  the limit; see lib/gates
-- ARGV ...         what partitions have said
-- ROW partition  int   its number
-- ROW version    int   of its permits
-- ROW count      int   how many it has kept
-- ROW wants      int   how many more it wants
-- ROW set_by     text  the operation that has set its limits
--
-- Who has waited longest gets the next permit. What a partition says counts if it knows the latest version that it
-- was given: else it has still to get that.
--
-- Returns { 1 if others wait for permits, { what partitions have to be told: { partition, version, number, slots of the
-- limit when they were given } }, { the same for those that have to be asked to give permits up, because others wait } }.

local ASKED_AT_ONCE = 16  -- partitions that one caller asks to give permits up
local ASK_AGAIN = 200     -- ms until a partition is asked again
local FORGOTTEN = 15000   -- ms after which a partition that says nothing more does not wait any more

local before = first_answer(A.op)
if before then return cjson.decode(before) end

local parts, latest = {}, tonumber(redis.call('HGET', K.permits, '') or nil) or 0
for number, each in pairs(decode(redis.call('HGET', K.permits, A.gate)) or {}) do
  parts[tonumber(number)] =
    { version = each[1], count = each[2], slots = each[3], set_by = each[4], since = each[5], wants = each[6],
      heard = each[7], asked = each[8], knows = each[9] }
end

local told, said = {}, {}
for i = FIRST, #ARGV, ROW do
  local number, version = tonumber(R.partition[i]), tonumber(R.version[i])
  local count, wants = tonumber(R.count[i]), tonumber(R.wants[i])
  -- One that nothing is known of has nothing, whatever it said before.
  local part = parts[number]
    or { version = math.min(version, latest), count = 0, slots = 0, set_by = '', since = 0, wants = 0,
      heard = 0, asked = 0, knows = '' }
  parts[number], said[number] = part, true
  if version == part.version then
    part.count = math.min(part.count, count)
  elseif version > part.version then
    part.version, part.count = version, count
    latest = math.max(latest, version)
  else
    told[number] = true
  end
  part.heard, part.knows = now, R.set_by[i]
  if wants > 0 then
    if part.since == 0 then
      latest = latest + 1
      part.since = latest
    end
    part.wants = wants
  else
    part.since = 0
  end
end

local limits = gates().limits_of(A.gate)
local slots = limits and limits.is_shared and limits.slots or 0
local free, waiting = slots, {}
for number, part in pairs(parts) do
  free = free - part.count
  if part.since > 0 and math.abs(now - part.heard) > FORGOTTEN then part.since = 0 end
  if part.since > 0 then waiting[#waiting + 1] = number end
end
table.sort(waiting, function(a, b) return parts[a].since < parts[b].since end)
for i, number in ipairs(waiting) do
  local part = parts[number]
  local given = math.min(free, part.wants, math.max(1, math.floor(free / (#waiting - i + 1))))
  if given > 0 then
    latest = latest + 1
    free = free - given
    part.version, part.count, part.wants, part.asked = latest, part.count + given, part.wants - given, 0
    part.slots, part.set_by = slots, part.knows
    part.since = part.wants > 0 and latest or 0
    told[number] = true
  end
end

local to_tell, to_ask, is_wanted = {}, {}, false
for _, part in pairs(parts) do is_wanted = is_wanted or part.since > 0 end
local kept = {}
for number, part in pairs(parts) do
  if told[number] then
    to_tell[#to_tell + 1] = { number, part.version, part.count, part.slots, part.set_by }
  elseif is_wanted and slots > 0 and part.count > 0 and not said[number] and #to_ask < ASKED_AT_ONCE
    and math.abs(now - part.asked) > ASK_AGAIN then
    part.asked = now
    to_ask[#to_ask + 1] = { number, part.version, part.count, part.slots, part.set_by }
  end
  if part.count > 0 or part.since > 0 then
    kept[tostring(number)] = { part.version, part.count, part.slots, part.set_by, part.since, part.wants, part.heard,
      part.asked, part.knows }
  end
end
redis.call('HSET', K.permits, '', string.format('%.0f', latest))
if next(kept) then
  redis.call('HSET', K.permits, A.gate, cjson.encode(kept))
else
  redis.call('HDEL', K.permits, A.gate)
end
local answer = { is_wanted and 1 or 0, to_tell, to_ask }
remember(A.op, cjson.encode(answer))
return answer
