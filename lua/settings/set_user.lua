-- Change the settings of a user or a tenant, and apply them to tasks that wait already.
--
-- @include backlog replay tenants
-- @lazy gates rings barrier
-- KEYS user_names  zset  owners and tenants with settings, all scores 0
-- KEYS slot_line   zset  turns at limits; see lib/gates
-- ARGV op      text  random id of this operation
-- ARGV owner   text  a user, a user of a tenant, or a tenant; see lib/owners
-- ARGV user    text  the user; empty for a tenant
-- ARGV tenant  text  the tenant, or the user's tenant; empty: none
-- ARGV change  text  the fields to change, JSON; null removes a limit
--
-- With `paused` come paused_by, pause_note and paused_until (ms, when the pause ends by itself), or null. Those
-- who are paused again count as paused since the first time.
--
-- A new weight rescales how far the owner is ahead of the clocks, and its turns at limits. Otherwise a user whose
-- weight is raised from 0.01 to 10 would still wait out the old debt.
--
-- Returns the settings, JSON.

local LINES = 20        -- limits that the user's held tasks wait for, at most,
local LINE_READ = 2000  -- and turns at all these limits together

-- Rescale the turn of a seat in a line by the ratio of two weights.
local function rescale_turn(line, seat, turns, ratio)
  local first = turns[1] and gates().tag_of_turn(turns[1])
  for _, turn in ipairs(turns) do
    if string.match(turn, '%z(%Z*)$') == seat then
      local tag = gates().tag_of_turn(turn)
      if not first or not tag then return end
      redis.call('ZREM', K.slot_line, turn)
      redis.call('ZADD', K.slot_line, 0,
        string.format('%s\0%014.0f\0%s', line, first + math.floor((tag - first) * ratio), seat))
      return
    end
  end
end

-- Rescale the turns at the limits for which tasks of the owner wait.
local function rescale_turns(ratio)
  local from, to = '[' .. A.owner .. '\0', '(' .. A.owner .. '\4'
  local is_tenant = A.user == ''
  if is_tenant then from, to = '[' .. A.owner .. '\2', '(' .. A.owner .. '\3' end
  local left, seen = LINE_READ, {}
  for _ = 1, LINES do
    local held = redis.call('ZRANGEBYLEX', K.held, from, to, 'LIMIT', 0, 1)[1]
    if not held or left <= 0 then return end
    local seat, gate = string.match(held, '^(%Z*)%z(%Z*)')
    local whose = is_tenant and group_of(seat) or seat
    local line = is_tenant and gate or gates().line_of(gate, seat)
    if whose and not seen[line .. '\0' .. whose] then
      seen[line .. '\0' .. whose] = true
      local turns = redis.call('ZRANGEBYLEX', K.slot_line, '[' .. line .. '\0', '(' .. line .. '\1',
        'LIMIT', 0, left)
      rescale_turn(line, whose, turns, ratio)
      left = left - #turns
    end
    from = '[' .. seat .. '\0' .. gate .. '\1'
  end
end

-- Rescale how far a seat is ahead of the clock of its ring.
local function rescale(seat, ratio)
  local ring = ring_of(seat)
  for _, pair in ipairs({ { K.ready, ring.clock }, { K.idle, ring.clock }, { K.critical, ring.critical_clock } }) do
    local key, clock = pair[1], pair[2]
    local tag = tag_in(key, seat)
    if tag and tag > clock then put_tag(key, seat, clock + (tag - clock) * ratio) end
  end
end

local before = first_answer(A.op)
if before then return before end
if A.tenant ~= '' then need_layout_2() end
local change = cjson.decode(A.change)
if A.tenant ~= '' and A.user ~= '' then join_tenant(A.user, A.tenant) end
local stored = redis.call('HGET', K.users, A.owner)
local inherited = not stored and A.tenant ~= '' and rings().inherited(A.owner) or nil
local settings = parse_settings(stored or inherited)
local old_weight = settings.weight or 1
local paused_at = settings.paused and settings.paused_at
for field, value in pairs(change) do
  if value == cjson.null then value = nil end
  settings[field] = value
end
if change.paused then
  settings.paused_at = paused_at or now
elseif change.paused == false then
  for field in pairs(PAUSE_TYPES) do settings[field] = nil end
end
local weight = settings.weight or 1
if next(settings) == nil and not inherited then
  redis.call('HDEL', K.users, A.owner)
  redis.call('ZREM', K.user_names, A.owner)
else
  redis.call('HSET', K.users, A.owner, cjson.encode(settings))
  redis.call('ZADD', K.user_names, 0, A.owner)
end
user_cache[A.owner] = nil
if not settings.rate then redis.call('HDEL', K.throttle, A.owner) end
if weight ~= old_weight then
  rescale(A.owner, old_weight / weight)
  for pool in string.gmatch(fair.pools or '', '[^\n]+') do rescale(A.owner .. '\3' .. pool, old_weight / weight) end
  rescale_turns(old_weight / weight)
end
if review(A.owner) then wake_worker() end
save_fair()
mark_layout()
return remember(A.op, cjson.encode(settings))
