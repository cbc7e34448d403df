-- Compare the clocks of a queue's partitions, so that the whole queue is fair.
--
-- LAZY
-- @include fair
-- @lazy rings
-- KEYS fair  hash  shift: of the default pool, four numbers: how much is added to its tags to compare them with those
--                  of other partitions, and 1 if nothing waited there before; the same two of the CRITICAL lane
--
-- Each partition has virtual clocks of its own. If all partitions serve as much for each weight, the clocks run
-- alike; so clients claim where the level is lowest: the tag of the unit that is served next, and the shift. A
-- partition that had nothing to serve has no service stored up: when tasks come, its clock is moved to the floor,
-- the lowest level of the other partitions, which the claim brings. The clock and not the first tag, so that
-- somebody who comes again and again, each time alone, pays for the service like all others.

local level = {}

-- The floors that a claim brings: of ordinary turns and of the CRITICAL lane, each a number or '-'.
function level.floors(text)
  local floor, lane = string.match(text, '^(%S+) (%S+)$')
  return tonumber(floor), tonumber(lane)
end

-- How much is added to the tags of the default pool, and whether it rests; the same of its CRITICAL lane.
function level.shift()
  local offset, rests, lane, lane_rests =
    string.match(redis.call('HGET', K.fair, 'shift') or '', '^(%S+) (%d) (%S+) (%d)$')
  return tonumber(offset) or 0, rests ~= '0', tonumber(lane) or 0, lane_rests ~= '0'
end

-- How much is added to the tags of the ring of a pool, by its name, and whether nothing waited there before.
function level.of_ring(name)
  local offset, rests = level.shift()
  if name == '' then return offset, rests end
  local clocks = rings().named(name)
  return clocks.offset, clocks.rested
end

function level.save(offset, rests, lane, lane_rests)
  redis.call('HSET', K.fair, 'shift', string.format('%.17g %d %.17g %d',
    offset, rests and 1 or 0, lane, lane_rests and 1 or 0))
end

-- The lowest tag of a ring of a kind; nil if it is empty.
function level.first(key, name)
  local flat
  if name == '' then flat = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES') else flat = rings().range(key, name, 0, 1) end
  return tonumber(flat[2] or nil)
end

-- The lowest level of the rings of some pools, or nil; and that of their CRITICAL lane, if it may be served.
-- `offset`, `lane_offset`: of the default pool, as level.shift returns them.
function level.lowest(names, offset, lane_offset)
  local lowest, lane
  for _, name in ipairs(names) do
    local tag = level.first(K.ready, name)
    if tag then
      tag = tag + (name == '' and offset or rings().named(name).offset)
      lowest = math.min(lowest or tag, tag)
      local clocks, share = name == '' and fair or rings().named(name), SETTINGS.critical_share
      local may_jump = share >= 1 or (share > 0 and (clocks.credit or 1) >= 1)
      local jump = may_jump and level.first(K.critical, name)
      if jump then lane = math.min(lane or math.huge, jump + (name == '' and lane_offset or 0)) end
    end
  end
  return lowest, lane
end

-- The answer for a client: both levels, each '-' if nothing waits.
function level.text(lowest, lane)
  return (lowest and string.format('%.17g', lowest) or '-') .. ' ' .. (lane and string.format('%.17g', lane) or '-')
end

return level
