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
-- partition that had nothing to serve rests: it has no service stored up. When tasks come, its first tag is moved up
-- to the floor, the lowest level of the other partitions, which the claim brings. It is never moved down: somebody
-- who comes again and again, each time alone, pays for the service like all others.

local level = {}

-- The floors that a claim brings, of ordinary turns and of the CRITICAL lane, each a number or '-'. Before them a
-- mark: '~' if nothing waits in the other partitions, so that the floor is how far they were; '!' if this partition
-- was out of reach, so that it counts as one that rests.
function level.floors(text)
  local mark, floor, lane = string.match(text, '^([~!]?)(%S+) (%S+)$')
  return tonumber(floor), tonumber(lane), mark
end

-- How much is added to the tags of the default pool, and whether it rests; the same of its CRITICAL lane.
function level.shift()
  local offset, rests, lane, lane_rests = string.match(fair.shift or '', '^(%S+) (%d) (%S+) (%d)$')
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
  local text = string.format('%.17g %d %.17g %d', offset, rests and 1 or 0, lane, lane_rests and 1 or 0)
  if text == fair.shift then return end
  fair.shift = text
  redis.call('HSET', K.fair, 'shift', text)
end

-- Note that the order of the default pool, or its CRITICAL lane, begins to have something to serve, if it does.
function level.note_start(key)
  if redis.call('EXISTS', key) == 1 then return end
  local offset, rests, lane, lane_rests = level.shift()
  level.save(offset, rests or key == K.ready, lane, lane_rests or key == K.critical)
end

-- The lowest tag of a ring of a kind; nil if it is empty.
function level.first(key, name)
  local flat
  if name == '' then flat = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES') else flat = rings().range(key, name, 0, 1) end
  return tonumber(flat[2] or nil)
end

local function shown(mark, value)
  return mark .. string.format('%.17g', value)
end

-- The levels of some pools for a client: of ordinary turns and of the CRITICAL lane. Each is the lowest one, after '~'
-- if it rests; or '=' and how far it was if nothing waits; '-' if nothing may be served in the lane for now. A ring
-- is not behind its clock: units that no worker took when it was their turn do not hold it back.
function level.text(names, offset, rests, lane_offset, lane_rests)
  local lowest, mark, lane, far, lane_mark
  for _, name in ipairs(names) do
    local clocks = name == '' and fair or rings().named(name)
    local shift, tag = name == '' and offset or clocks.offset, level.first(K.ready, name)
    local at = math.max(tag or 0, clocks.clock) + shift
    if not tag then
      far = math.max(far or at, at)
    else
      if not lowest or at < lowest then
        lowest, mark = at, (name == '' and rests or (name ~= '' and clocks.rested)) and '~' or ''
      end
      local may_jump = SETTINGS.critical_share >= 1 or (SETTINGS.critical_share > 0 and (clocks.credit or 1) >= 1)
      local jump = may_jump and level.first(K.critical, name)
      if jump then
        jump = jump + (name == '' and lane_offset or 0)
        if not lane or jump < lane then lane, lane_mark = jump, name == '' and lane_rests and '~' or '' end
      end
    end
  end
  return (lowest and shown(mark, lowest) or shown('=', far)) .. ' '
    .. (lane and shown(lane_mark, lane) or shown('=', fair.critical_clock + lane_offset))
end

return level
