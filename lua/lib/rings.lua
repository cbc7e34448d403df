-- Keep the rings of tenants and of pools: fair orders besides that of the default pool.
--
-- LAZY UNLESS layout > 1
-- @include owners fair
-- @lazy barrier
-- KEYS rings   zset  kind ring NUL tag NUL seat, all scores 0: kind r has the seats that may be served, c
--                    those of them whose next task is CRITICAL, i the finish tags of others, d when to look
--                    at the delayed tasks of a tenant's user, ms
-- KEYS tags    hash  kind seat -> its tag in that kind, as in `rings`
-- KEYS clocks  hash  ring -> clock, critical_clock, credit ('-': none), how much is added to its clock to
--                    compare it with other pools, and 1 if its pool had nothing to serve before; of a pool also
--                    its pace (see lib/serving)
-- KEYS tenants hash  user -> tenant, written by versions that know only layout 1
-- KEYS delayed_users  zset  see lib/delays
-- KEYS pool_tasks     zset  see lib/specials
--
-- The name of a ring is the seat of its tenant, or \3 and its pool; '' is the ring of the default pool, of which
-- only the last two numbers are kept here. Tags are decimals of one length, so that they sort as text. Tags
-- of all kinds and the clocks of a tenant's ring go when its seat has left `idle` of the ring above.

local rings = {}

local KINDS_OF_TAGS = { [K.ready] = 'r', [K.critical] = 'c', [K.idle] = 'i', [K.delayed_users] = 'd' }
local POOLS = 100   -- of a queue: every event of a user with limits looks at each
local REAPED_RINGS = 4  -- rings of tenants whose old tags one claim drops
local REAPED = 100      -- old tags of each of them that are dropped at most
local DROPPED = 20  -- entries of the ring of a tenant that is gone that are dropped at once

-- The ring that a seat is in.
function rings.name_of(seat)
  return group_of(seat) or string.match(seat, '\3.*$') or ''
end

function rings.is_tenant(seat)
  return string.byte(seat) == 2 and not group_of(seat)
end

-- A tag as text: decimals sort as numbers if they have the same number of digits.
local function sortable(tag)
  return string.format('%025.9f', math.max(0, tag))
end

-- --- clocks ---

local known, dirty = {}, {}

local function keep_clocks(name, text)
  local ring = {}
  if name == '' then ring = fair end
  local clock, critical, credit, offset, rested, pace =
    string.match(text or '', '^(%S+) (%S+) (%S+) (%S+) (%S+) ?(.*)$')
  if name ~= '' then
    ring.pace = pace ~= '' and pace or nil
    ring.clock, ring.critical_clock = tonumber(clock) or 0, tonumber(critical) or 0
    ring.credit = tonumber(credit)
  end
  ring.name, ring.offset, ring.rested = name, tonumber(offset) or 0, rested == '1'
  known[name] = ring
  return ring
end

-- The clocks of a ring, by its name.
function rings.named(name)
  return known[name] or keep_clocks(name, redis.call('HGET', K.clocks, name))
end

-- Read the clocks of the rings of the tenants among some seats, in one call.
function rings.prefetch(seats)
  local names = {}
  for _, seat in ipairs(seats) do
    if rings.is_tenant(seat) and not known[seat] then names[#names + 1] = seat end
  end
  if #names < 2 then return end
  for i, text in ipairs(redis.call('HMGET', K.clocks, unpack(names))) do keep_clocks(names[i], text) end
end

function rings.of(seat)
  return rings.named(rings.name_of(seat))
end

-- Note that the clocks of a ring have changed.
function rings.touch(name)
  dirty[name] = true
end

function rings.save()
  local values = {}
  for name in pairs(dirty) do
    local ring = known[name]
    values[#values + 1] = name
    values[#values + 1] = string.format('%.17g %.17g %s %.17g %d %s', name == '' and 0 or ring.clock,
      name == '' and 0 or ring.critical_clock, name ~= '' and ring.credit and text_of(ring.credit) or '-',
      ring.offset, ring.rested and 1 or 0, name ~= '' and ring.pace or '')
  end
  if #values > 0 then redis.call('HSET', K.clocks, unpack(values)) end
  dirty = {}
end
fair.unsaved[#fair.unsaved + 1] = rings.save

-- --- tags ---

local function range_of(kind, name)
  return '[' .. kind .. name .. '\0', '(' .. kind .. name .. '\1'
end

function rings.tag_in(key, seat)
  return tonumber(redis.call('HGET', K.tags, KINDS_OF_TAGS[key] .. seat) or nil)
end

function rings.put_all(key, list)
  if #list == 0 then return end
  local kind, fields = KINDS_OF_TAGS[key], {}
  for i = 2, #list, 2 do fields[i / 2] = kind .. list[i] end
  local old, added, tags = {}, {}, {}
  for i, before in ipairs(redis.call('HMGET', K.tags, unpack(fields))) do
    local seat = list[2 * i]
    local ring, tag = kind .. rings.name_of(seat) .. '\0', sortable(list[2 * i - 1])
    if before then old[#old + 1] = ring .. before .. '\0' .. seat end
    added[2 * i - 1], added[2 * i] = '0', ring .. tag .. '\0' .. seat
    tags[2 * i - 1], tags[2 * i] = fields[i], tag
  end
  if #old > 0 then redis.call('ZREM', K.rings, unpack(old)) end
  redis.call('ZADD', K.rings, unpack(added))
  redis.call('HSET', K.tags, unpack(tags))
end

-- Set the tag of a seat.
function rings.put(key, seat, tag)
  rings.put_all(key, { tag, seat })
end

function rings.drop_all(key, seats)
  if #seats == 0 then return end
  local kind, fields, old = KINDS_OF_TAGS[key], {}, {}
  for i, seat in ipairs(seats) do fields[i] = kind .. seat end
  for i, before in ipairs(redis.call('HMGET', K.tags, unpack(fields))) do
    if before then
      old[#old + 1] = kind .. rings.name_of(seats[i]) .. '\0' .. before .. '\0' .. seats[i]
    end
  end
  if #old == 0 then return end
  redis.call('ZREM', K.rings, unpack(old))
  redis.call('HDEL', K.tags, unpack(fields))
end

function rings.drop(key, seat)
  rings.drop_all(key, { seat })
end

-- Some seats of a ring in order, with their tags, as ZRANGE WITHSCORES returns them; and how many entries were
-- read: those that cannot be parsed are left out.
function rings.range(key, name, skip, most)
  local flat = {}
  local from, to = range_of(KINDS_OF_TAGS[key], name)
  local members = redis.call('ZRANGEBYLEX', K.rings, from, to, 'LIMIT', skip, most)
  for _, member in ipairs(members) do
    local tag, seat = string.match(member, '^%Z*%z(%d+%.%d+)%z(.+)$')
    if tag then flat[#flat + 1], flat[#flat + 2] = seat, tag end
  end
  return flat, #members
end

-- The number of seats of a ring of a kind.
function rings.count(key, name)
  if name == '' then return redis.call('ZCARD', key) end
  return redis.call('ZLEXCOUNT', K.rings, range_of(KINDS_OF_TAGS[key], name))
end

function rings.is_empty(key, name)
  if name == '' then return redis.call('EXISTS', key) == 0 end
  local from, to = range_of(KINDS_OF_TAGS[key], name)
  return #redis.call('ZRANGEBYLEX', K.rings, from, to, 'LIMIT', 0, 1) == 0
end

-- The number of seats that are served before one.
function rings.rank(seat)
  local name, tag = rings.name_of(seat), redis.call('HGET', K.tags, 'r' .. seat)
  if not tag then return nil end
  return redis.call('ZLEXCOUNT', K.rings, '[r' .. name .. '\0', '(r' .. name .. '\0' .. tag .. '\0' .. seat)
end

-- --- tenants ---

-- Give the tenant of a seat that has just become ready its place, unless it has one. Returns true if the seat
-- may be served: it has no tenant, or its tenant is ready.
function rings.place_tenant(seat, newcomer, cost, critical)
  local group = group_of(seat)
  if not group then return true end
  if redis.call('ZSCORE', K.parked, group) then return false end
  if tag_in(K.ready, group) then return true end
  local is_new = newcomer and running_of(owner_in(group)) == 0 and not debt_of(group)
  return place(group, is_new, cost, critical or false)
end

-- Whether a seat that is in its ring may be served: its tenant is not parked.
function rings.is_served(seat)
  local group = group_of(seat)
  return not group or tag_in(K.ready, group) ~= nil
end

-- Place a tenant that was parked.
function rings.return_tenant(group)
  if rings.is_empty(K.ready, group) then return false end
  return place(group, false, nil, not rings.is_empty(K.critical, group))
end

-- A seat has left its ring. If no other seat of its tenant is ready, the tenant leaves the ring above.
function rings.left(seat)
  local group = group_of(seat)
  if not group then return end
  if rings.is_empty(K.ready, group) then
    leave(group)
    -- Also for one that was never served: what is left in its ring is dropped together with the tag.
    if not tag_in(K.idle, group) then put_tag(K.idle, group, ring_of(group).clock) end
  elseif rings.is_empty(K.critical, group) then
    drop_tag(K.critical, group)
  end
end

-- The settings of a user of a tenant who has none of their own: those that the user has without a tenant, if a
-- version with layout 1 knew the user as one of this tenant.
local has_older  -- whether such a version has stored anything
function rings.inherited(owner)
  if has_older == nil then has_older = redis.call('EXISTS', K.tenants) == 1 end
  if not has_older then return nil end
  local tenant, user = string.match(owner, '^\2([^\2]*)\2(.*)$')
  if not tenant or redis.call('HGET', K.tenants, user) ~= tenant then return nil end
  return redis.call('HGET', K.users, user) or nil
end

-- --- housekeeping ---

-- Move the clock of a ring to its largest finish tag: past service no longer counts.
function rings.end_past(name)
  local ring = rings.named(name)
  local from, to = range_of('i', name)
  local top = redis.call('ZREVRANGEBYLEX', K.rings, to, from, 'LIMIT', 0, 1)[1]
  local tag = top and tonumber(string.match(top, '^%Z*%z(%Z*)'))
  if tag and tag > ring.clock then
    ring.clock = tag
    rings.touch(name)
  end
end

-- Settle the ring of a pool, or of a tenant that has no place and nothing running, before a seat is placed.
function rings.settle_for(seat, of_all)
  local group = group_of(seat)
  if group then
    rings.settle_for(group)
    if not tag_in(K.ready, group) and running_of(owner_in(group)) == 0
      and rings.is_empty(K.ready, group) and not debt_of(group) then rings.end_past(group) end
    return
  end
  local name = rings.name_of(seat)
  if fair.shift and not of_all then return end
  if name ~= '' and rings.is_empty(K.ready, name) and redis.call('ZCARD', K.leases) == 0 then
    rings.end_past(name)
  end
end

-- Drop finish tags that the clock of a ring has passed, and of tenants also what is left in their rings: at
-- most `most`, and some entries of each tenant.
function rings.reap(name, most)
  local seats, clock = {}, (name == '' and fair or rings.named(name)).clock
  if name == '' then
    seats = redis.call('ZRANGE', K.idle, '-inf', clock, 'BYSCORE', 'LIMIT', 0, most)
  else
    local from = 'i' .. name .. '\0'
    for _, member in ipairs(redis.call('ZRANGEBYLEX', K.rings, '[' .. from, '(' .. from .. sortable(clock) .. '\1',
      'LIMIT', 0, most)) do
      seats[#seats + 1] = string.match(member, '^%Z*%z%d+%.%d+%z(.+)$')
    end
  end
  local gone = {}
  for _, seat in ipairs(seats) do
    if not rings.is_tenant(seat) or rings.close(seat) then gone[#gone + 1] = seat end
  end
  if #gone == 0 then return end
  if name == '' then
    redis.call('ZREM', K.idle, unpack(gone))
  else
    rings.drop_all(K.idle, gone)
  end
  if SETTINGS.cost ~= 'time' then return end
  for i, seat in ipairs(gone) do gone[i] = owner_in(seat) end
  redis.call('HDEL', K.averages, unpack(gone))
end

-- Drop old tags of some of the rings of tenants that a claim has used, at most `most` of each. Of many rings, others
-- have their turn at another time.
function rings.reap_some(used, most)
  for i = 1, math.min(#used, REAPED_RINGS) do
    rings.reap(used[(now + i) % #used + 1].name, math.min(most, REAPED))
  end
end

-- Drop what is left in a ring without waiting seats, some of it at a time. Returns true if nothing is left.
local function empty(name)
  local flat = rings.range(K.idle, name, 0, DROPPED)
  local seats, owners = {}, {}
  for i = 1, #flat, 2 do
    if not rings.is_tenant(flat[i]) or empty(flat[i]) then seats[#seats + 1] = flat[i] end
  end
  rings.drop_all(K.idle, seats)
  for i, seat in ipairs(seats) do owners[i] = owner_in(seat) end
  if SETTINGS.cost == 'time' and #owners > 0 then redis.call('HDEL', K.averages, unpack(owners)) end
  if #flat == 2 * DROPPED or #flat > 2 * #seats then return false end
  known[name], dirty[name] = nil, nil
  redis.call('HDEL', K.clocks, name)
  return true
end

-- Drop what is left in the ring of a tenant. Returns false if there is more.
function rings.close(group)
  if tag_in(K.ready, group) or redis.call('ZSCORE', K.parked, group) then return true end
  return empty(group)
end

-- --- pools ---

local asked = {}  -- pools that this call needs, and has found room for

local function is_known(pool)
  return string.find('\n' .. (fair.pools or '') .. '\n', '\n' .. pool .. '\n', 1, true) ~= nil
end

-- Pools without waiting tasks, whose places other pools may take, at most so many. Of a pool that many users have
-- left, not all can be dropped at once.
local function unused_pools(most)
  local found = {}
  for pool in string.gmatch(fair.pools or '', '[^\n]+') do
    if #found == most then break end
    local name = '\3' .. pool
    if not asked[pool]
      and #redis.call('ZRANGEBYLEX', K.pool_tasks, '[' .. pool .. '\0', '(' .. pool .. '\1', 'LIMIT', 0, 1) == 0
      and rings.is_empty(K.ready, name) and rings.count(K.idle, name) < DROPPED then found[#found + 1] = pool end
  end
  return found
end

-- How many pools there would be with one more, beyond those that a queue can have.
local function excess(is_counted)
  local number = 1 - POOLS
  for _ in string.gmatch(fair.pools or '', '[^\n]+') do number = number + 1 end
  for pool in pairs(is_counted and asked or {}) do
    if not is_known(pool) then number = number + 1 end
  end
  return number
end

-- Whether a pool is known, or can be added besides those that this call asked for before.
function rings.has_room_for(pool)
  local over = not (asked[pool] or is_known(pool)) and excess(true) or 0
  if over > 0 and #unused_pools(over) < over then return false end
  asked[pool] = true
  return true
end

-- Add a pool to those of the queue. If there are many, it takes the place of one without waiting tasks: the
-- places of the others, and with them their wake lists, do not change.
function rings.add_pool(pool)
  if is_known(pool) then return end
  need_layout_2()
  local unused = excess() > 0 and unused_pools(1)[1]
  if unused then
    empty('\3' .. unused)
    local names = {}
    for each in string.gmatch(fair.pools, '[^\n]+') do names[#names + 1] = each == unused and pool or each end
    fair.pools = table.concat(names, '\n')
  else
    fair.pools = fair.pools and fair.pools .. '\n' .. pool or pool
  end
  redis.call('HSET', K.fair, 'pools', fair.pools)
end

-- Note that a pool which had nothing to serve begins to: a claim from several pools sets its offset, so that
-- it has no service stored up.
function rings.note_start(seat)
  local name = rings.name_of(seat)
  if string.byte(name) == 2 or not rings.is_empty(K.ready, name) then return end
  rings.named(name).rested = true
  rings.touch(name)
end

return rings
