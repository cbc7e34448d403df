-- Name who waits: the owner of a task, its seat in a pool, and what a claim has to know of it.
--
-- An owner is a user, or a user of a tenant: \2 tenant \2 user. The tenant itself, as one of those who share
-- the queue, is \2 tenant. A seat is a place where an owner or a tenant waits: an owner in the default pool,
-- or owner \3 pool. So a range from seat NUL to seat \1 has what belongs to a seat, one from owner NUL to
-- owner \4 what belongs to an owner in all pools, and one from \2 tenant \2 to \2 tenant \3 all users of a
-- tenant. Names of users, tenants and pools have no control characters.
--
-- @include time
--
-- The label of a task is its name, followed by its keys, each after \3, its cost after \4, and when it expires
-- after \5. It ends the task's member in `backlog`.

local function owner_of(record)
  if record.group then return '\2' .. record.group .. '\2' .. record.user end
  return record.user
end

local function seat_of(record)
  local owner = owner_of(record)
  return record.pool and owner .. '\3' .. record.pool or owner
end

local function owner_in(seat)
  local from = layout > 1 and string.find(seat, '\3', 1, true)
  return from and string.sub(seat, 1, from - 1) or seat
end

-- The seat of the tenant to which a seat belongs; the tenant of an owner. Returns nil for those without one.
local groups = {}  -- of seats that were asked for: a claim asks for each several times
local function group_of(seat)
  if string.byte(seat) ~= 2 then return nil end
  local found = groups[seat]
  if found == nil then
    local tenant, pool = string.match(seat, '^(\2[^\2\3]*)\2[^\3]*(.*)$')
    found = tenant and tenant .. pool or false
    groups[seat] = found
  end
  return found or nil
end

local function label_of(record)
  local label, flow = record.name or '', record.flow
  if not flow and not record.expires then return label end
  for _, key in ipairs(flow and flow.keys or {}) do label = label .. '\3' .. key end
  if flow and flow.cost then label = label .. '\4' .. text_of(flow.cost) end
  if record.expires then label = label .. '\5' .. text_of(record.expires) end
  return label
end

local function label_in(member) return string.match(member, '%z(%Z*)$') end

local function name_in_label(label)
  local from = layout > 1 and string.find(label, '[\3-\5]')
  return from and string.sub(label, 1, from - 1) or label
end

-- The cost that a task declares in its label; nil if it declares none.
local function cost_in(label)
  if layout == 1 or not string.find(label, '\4', 1, true) then return nil end
  return tonumber(string.match(label, '\4([^\5]*)') or nil)
end
