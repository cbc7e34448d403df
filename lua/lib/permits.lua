-- Keep the permits that this partition has for limits of the whole queue.
--
-- LAZY
-- @include backlog
-- KEYS paced       hash  \5 gate -> the permits of this partition: version, number, slots of the limit when they were
--                        given, 1 if others want them, when they came (0: one was used since), 1 if some were given
--                        up and the home was not told, when to ask for more (0: now), the operation that had set the
--                        limits then; \5 -> the latest version of gates that have no such record
-- KEYS gate_times  zset  gate -> when to look at it, ms
--
-- A gate that all partitions share has a home: one of them, chosen by its name, which gives permits to the others; see
-- settings/share_permits. A partition starts no more tasks than it has permits. Clients carry what one partition has
-- to say to another: an answer of a claim lists the gates that somebody has to see to.
--
-- The home counts a permit for a partition before the partition has it, and until it has said that it is given up. A
-- partition takes what the home has given only under a later version than its own, and only gives up under the same
-- one. So the home counts at least what the partition has, whoever dies in between and whatever is repeated.

local permits = {}

local ASKED = 20         -- gates that one answer lists
local ASK_AGAIN = 250    -- ms until a partition asks again
local IDLE = 10000       -- ms until permits that nobody uses are given up
local FRESH = 200        -- ms in which a partition that waited may use its new permits

local NO_VALUE = 1000000  -- more slots than a limit can have

local own = {}    -- gate -> its permits here
local asked = {}  -- gates that clients have to see to
permits.names = {}

-- The permits of this partition.
function permits.of(gate)
  local mine = own[gate]
  if mine then return mine end
  local text, floor = unpack(redis.call('HMGET', K.paced, '\5' .. gate, '\5'))
  local version, count, slots, wanted, since, given, later, set_by =
    string.match(text or '', '^(%d+) (%d+) (%d+) (%d) (%d+) (%d) (%d+) (%S*)$')
  mine = { version = tonumber(version or floor) or 0, count = tonumber(count) or 0, slots = tonumber(slots) or 0,
    wanted = wanted == '1', since = tonumber(since) or 0, given = given == '1', later = tonumber(later) or 0,
    set_by = set_by or '' }
  own[gate] = mine
  return mine
end

function permits.save(gate, mine)
  redis.call('HSET', K.paced, '\5' .. gate, string.format('%.0f %.0f %.0f %d %.0f %d %.0f %s', mine.version,
    mine.count, mine.slots, mine.wanted and 1 or 0, mine.since, mine.given and 1 or 0, mine.later,
    mine.set_by))
end

-- Forget a gate that this partition has no permits for. Older versions are refused from now on.
local function drop(gate, mine)
  local floor = tonumber(redis.call('HGET', K.paced, '\5') or nil) or 0
  if mine.version > floor then redis.call('HSET', K.paced, '\5', string.format('%.0f', mine.version)) end
  redis.call('HDEL', K.paced, '\5' .. gate)
  own[gate] = nil
end

-- Whether permits were given under the limits that are set now. If a limit was lowered since, there may be more of
-- them than slots; whether it was raised again meanwhile does not matter.
local function is_valid(mine, limits)
  return mine.slots <= limits.slots and mine.set_by == limits.set_by
end

-- The slots that this partition may use.
function permits.slots(gate, limits)
  local mine = permits.of(gate)
  return is_valid(mine, limits) and math.min(mine.count, limits.slots) or 0
end

-- Take what the home has given, if it is news: { version, number, slots of the limit, the operation that had set it
-- here when the partition asked }. `is_wanted`: others wait for permits.
function permits.accept(gate, given, is_wanted)
  local mine = permits.of(gate)
  if given.version <= mine.version then return end
  mine.since = given.count > mine.count and now or 0
  mine.version, mine.count, mine.slots, mine.set_by = given.version, given.count, given.slots, given.set_by
  mine.wanted, mine.given, mine.later = is_wanted, false, 0
  permits.save(gate, mine)
end

-- Whether permits came just now and none was used since.
local function is_fresh(mine, limits)
  return is_valid(mine, limits) and mine.since > 0 and math.abs(now - mine.since) < FRESH
end

-- Whether to ask for permits: not if that was done just now, under the same limits.
local function is_time(mine, limits)
  return mine.later <= now or mine.later > now + ASK_AGAIN or mine.set_by ~= limits.set_by
end

-- Others want permits: give up those that are not in use now, and each that becomes free. `kept`: how many are kept
-- for tasks that have reserved the gate.
function permits.lend(gate, limits, used, kept)
  local mine = permits.of(gate)
  mine.wanted = true
  if is_valid(mine, limits) then used = used + kept end
  if not is_fresh(mine, limits) then mine.count = math.min(mine.count, used) end
  permits.save(gate, mine)
end

-- Slots may have been freed: give permits up that others want. Returns true if some are.
function permits.give_up(gate, limits, used, kept)
  local mine = permits.of(gate)
  local is_good = is_valid(mine, limits)
  if is_good then used = used + kept end
  if mine.count <= used or is_fresh(mine, limits) or (is_good and not mine.wanted) then return false end
  mine.count, mine.given = used, true
  permits.save(gate, mine)
  return true
end

-- A task starts with a permit, or waits elsewhere. Returns true if others want permits.
function permits.use(gate)
  local mine = permits.of(gate)
  if mine.since > 0 then
    mine.since = 0
    permits.save(gate, mine)
  end
  return mine.wanted
end

local function ask(gate)
  if not asked[gate] then permits.names[#permits.names + 1] = gate end
  asked[gate] = true
end

-- A task is held because this partition has no permit for it: ask the home, unless that was done just now.
function permits.want(gate, limits)
  local mine = permits.of(gate)
  if mine.count >= limits.slots and is_valid(mine, limits) then return end
  if is_time(mine, limits) then ask(gate) end
end

-- When to look at a gate again, after its held tasks have come back: ms, or nil. `is_held`: some are still held.
function permits.look(gate, limits, used, is_held)
  local mine = permits.of(gate)
  local is_short = is_held and (mine.count < limits.slots or not is_valid(mine, limits))
  if not is_held and used == 0 and mine.count > 0 and not mine.given then
    local at = tonumber(redis.call('ZSCORE', K.gate_times, gate) or nil)
    if not at or at > now then return now + IDLE end
    mine.count, mine.given = 0, true
    permits.save(gate, mine)
  end
  if mine.given or (is_short and is_time(mine, limits)) then
    ask(gate)
    return now
  end
  return is_short and mine.later or nil
end

-- How many more permits this partition could use. `is_held`: tasks are held at the gate.
function permits.wants(gate, slots, is_held)
  local count = permits.of(gate).count
  if not is_held or count >= slots then return 0 end
  return math.max(1, math.min(slots - count, redis.call('ZCARD', K.held)))
end

-- Settle when to ask again, after the home was asked or has given permits.
function permits.settle(gate, limits, is_short)
  local mine = permits.of(gate)
  -- Those of other limits stay without value.
  if not is_valid(mine, limits) then mine.slots = math.max(mine.slots, NO_VALUE) end
  mine.set_by = limits.set_by
  mine.later = is_short and now + ASK_AGAIN or 0
  if is_short then redis.call('ZADD', K.gate_times, mine.later, gate) end
  if is_short or mine.count > 0 then permits.save(gate, mine) else drop(gate, mine) end
end

-- Add what clients have to carry to the homes of gates to a list, for the answer of a claim: gate, version and number of permits,
-- how many more are wanted, and the operation that has set the limits. `state_of`: the limits of a gate, how many are in use and how many are kept, and
-- whether tasks are held; `look_later`: when there is nothing to wait for.
function permits.answer(list, state_of, look_later)
  for i, gate in ipairs(permits.names) do
    local limits, used, kept, is_held = state_of(gate)
    if limits and #list >= ASKED then
      redis.call('ZADD', K.gate_times, now, gate)
    elseif limits then
      permits.give_up(gate, limits, used, kept)
      local mine, wants = permits.of(gate), permits.wants(gate, limits.slots, is_held)
      list[#list + 1] = { gate, mine.version, mine.count, wants, limits.set_by }
      mine.given = false
      permits.settle(gate, limits, wants > 0)
      if wants == 0 then
        redis.call('ZREM', K.gate_times, gate)
        look_later(gate)
      end
    end
  end
end

return permits
