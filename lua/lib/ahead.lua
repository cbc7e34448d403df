-- Estimate how many tasks are served before one.
--
-- @include backlog
-- @lazy rings

local AHEAD = 200  -- units of a ring that are looked at; the others count as the average of these

-- The first seats of the ring of a seat, with their tags, and how many seats it has.
local function ring_around(seat)
  if in_root(seat) then
    return redis.call('ZRANGE', K.ready, 0, AHEAD - 1, 'WITHSCORES'), redis.call('ZCARD', K.ready)
  end
  local name = rings().name_of(seat)
  return rings().range(K.ready, name, 0, AHEAD), rings().count(K.ready, name)
end

local function count_waiting(seat)
  if layout > 1 and rings().is_tenant(seat) then
    return redis.call('ZLEXCOUNT', K.backlog, '[' .. seat .. '\2', '(' .. seat .. '\3')
  end
  return redis.call('ZLEXCOUNT', K.backlog, '[' .. seat .. '\0', '(' .. seat .. '\1')
end

-- When a rate allows the next task of a cost, ms. The same as free_at in lib/fair, which writes.
local function allowed_at(key, field, rate, cost)
  local interval, burst = 1000 / rate, math.max(1, math.floor(rate * BURST_S))
  local debt_until, last = string.match(redis.call('HGET', key, field) or '0', '^(%S+) ?(%S*)')
  local most = now + math.max(burst, tonumber(last) or 1) * interval
  return math.min(tonumber(debt_until) or 0, most) - math.max(0, burst - (cost or 1)) * interval
end

-- How far a serve moves a seat.
local function stride_of(seat)
  local owner, head = owner_in(seat), first_waiting(seat, 1)[1]
  return (head and cost_in(label_in(head)) or cost_of(owner)) / settings_of(owner).weight
end

-- The tag of a seat for its next task, or that it would get if a task came now.
local function next_tag(seat)
  local tag = tag_in(K.ready, seat)
  if tag then return tag end
  local clock = ring_of(seat).clock
  local debt = debt_of(seat)
  if debt then return math.max(clock, debt) end
  return running_of(owner_in(seat)) > 0 and clock or clock + stride_of(seat)
end

-- How often the seats of a ring but one are served up to a tag, and how many of them are.
local function serves_until(flat, size, tag, seat)
  local sum, looked = 0, 0
  for i = 1, #flat, 2 do
    local other, at = flat[i], tonumber(flat[i + 1])
    if at > tag or looked == AHEAD then break end
    looked = looked + 1
    if other ~= seat then
      local times = math.floor((tag - at) / stride_of(other)) + 1
      sum = sum + math.min(times, count_waiting(other))
    end
  end
  if looked == AHEAD and size > AHEAD then return math.floor(sum * size / AHEAD), size end
  return sum, looked
end

-- How often other seats of its ring are served before a seat is served at a tag.
local function serves_before(seat, tag)
  local flat, size = ring_around(seat)
  return (serves_until(flat, size, tag, seat))
end

-- How many tasks are served before the one that has `own` tasks of its seat before it; and the tag at which its
-- seat, or its tenant, is served then.
local function served_before(seat, own)
  local group = group_of(seat)
  local tag = next_tag(seat) + own * stride_of(seat)
  local total = own + serves_before(seat, tag)
  if group then
    tag = next_tag(group) + total * stride_of(group)
    total = total + serves_before(group, tag)
  end
  return total, tag
end

-- How fast the tasks of a pool are served, as note_pace in lib/serving writes it; nil if none was.
local function pace_of(pool)
  return (pool and rings().named('\3' .. pool) or fair).pace
end
