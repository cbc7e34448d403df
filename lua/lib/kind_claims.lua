-- Serve a worker that takes only some names.
--
-- LAZY
-- @include serving
-- @lazy kinds rings
--
-- A claim for some names looks at the head of `ready`, then continues where the last claim of its kind
-- stopped, then looks at the users that its kind was told about. If a whole round finds nothing, claims of
-- this kind do not look again for a while unless they are told about a task.

local kind_claims = {}

local LOOK_AGAIN_MS = 250    -- wait when nothing was found anywhere; doubled each time up to LONGEST_WAIT_MS

-- Continue with the units of a ring from a place on, in the order that is stored, if that comes later.
local function skip_to(ring, from)
  local list = ring.ready
  for i = #list.sorted, list.at, -1 do list.sorted[i] = nil end
  ring.read = math.max(list.at - 1, from)
  ring.passed = math.max(ring.passed, from)
  if not list.read then list.read = ring.reader end
end

-- A ring for the units that this kind was told about, which are also in the ring they belong to.
local function told_ring(ring)
  local told = {}
  for name, value in pairs(ring) do told[name] = value end
  told.ready, told.critical = turns.new(), turns.new()
  return told
end

-- Add a seat that this kind was told about to a ring of told ones, and its tenant, unless this claim has looked
-- at it. Returns its unit, or nil.
local function tell(ring, seat)
  local group = layout > 1 and group_of(seat)
  local tag, above = tag_in(K.ready, seat), group and tag_in(K.ready, group)
  if not tag or (group and not above) then return nil end
  if not group then
    local is_new = not ring.units[seat]
    local unit = unit_of(ring, seat, tag)
    if is_new then turns.push(ring.ready, tag, unit) end
    return unit
  end
  local tenant = unit_of(ring, group, above)
  if not tenant.is_told then
    -- Other users of the tenant are not looked at.
    tenant.is_told, tenant.users = true, told_ring(users_of(ring, tenant))
    if tenant.state == 'passed' then tenant.state, tenant.users.passed = 'ready', 0 end
    turns.push(ring.ready, tenant.tag, tenant)
  end
  local users = tenant.users
  local is_new = not users.units[seat]
  local unit = unit_of(users, seat, tag)
  if is_new then turns.push(users.ready, tag, unit) end
  return unit
end

-- Serve the users that this kind of worker was told about, and remember those who may have more.
local function serve_told(kind, open)
  local told, rings_of_told, left = {}, {}, ''
  for i, ring in ipairs(open) do rings_of_told[i] = told_ring(ring) end
  for seat in string.gmatch(kind.news, '[^\n]+') do
    for _, ring in ipairs(rings_of_told) do
      if ring.name == (string.match(seat, '\3.*$') or '') then told[#told + 1] = tell(ring, seat) end
    end
  end
  if #told > 0 then serve_rings(rings_of_told, WORK) end
  for i, ring in ipairs(open) do ring.taken = rings_of_told[i].taken end
  for _, unit in ipairs(told) do
    if unit.state == 'ready' then left = left .. unit.seat .. '\n' end
  end
  kinds().set_news(kind, left == '' and '' or '\n' .. left)
end

-- Decide what the next claim of this kind does: continue, or, if nothing was found since the head of
-- ready, wait for a while.
local function rest(kind, open, is_over, was_clean)
  kind.till = 0
  if #this.taken.ids > 0 then
    kind.pause, kind.clean = 0, false
    return
  end
  kind.clean = was_clean or is_over
  if not has_more(open, false) then
    kind.pause = 0
  elseif is_over and was_clean then
    kind.pause = math.min(math.max(LOOK_AGAIN_MS, 2 * kind.pause), LONGEST_WAIT_MS)
    kind.till = now + kind.pause
  end
end

-- Serve a worker that takes only some names. Returns true if all users were looked at.
function kind_claims.serve(kind, open)
  local told = kind.news
  -- The kind was told about more users than it has room for; some are not in the list.
  local was_clean = kind.clean and not string.find(told, '\n*\n', 1, true)
  if told ~= '' then kind.pause = 0 end
  if told == '' and kind.till > now and kind.till <= now + LONGEST_WAIT_MS then
    this.for_others = true
    return false
  end
  local is_all = serve_rings(open, WORK / 4)
  local is_over = is_all
  if is_all then
    kind.from, was_clean = 0, true
    kinds().set_news(kind, '')
  elseif has_room() then
    for _, ring in ipairs(open) do
      ring.critical = turns.new()
      skip_to(ring, kind.from)
    end
    is_over = serve_rings(open, 3 * WORK / 4)
    kind.from = is_over and 0 or open[1].passed
    if told ~= '' and has_room() then serve_told(kind, open) end
  end
  write_claim(open)
  if kind.news ~= told then redis.call('HSET', K.kinds, kind.place .. '.news', kind.news) end
  rest(kind, open, is_over, was_clean)
  return is_all
end

return kind_claims
