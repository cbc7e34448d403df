-- Change the limits, weight and tenant of a user, and apply the change to waiting tasks.
--
-- @include limits replay tenants
-- KEYS user_names  zset  users with settings, all scores 0
-- ARGV op      text  random id of this operation
-- ARGV user    text  user id
-- ARGV change  text  the fields to change, JSON; null removes a limit or the tenant
--
-- With `paused` come paused_by, pause_note and paused_until (ms, when the pause ends by itself), or null.
-- A user who is paused again counts as paused since the first time.
--
-- A new weight rescales how far the user is ahead of the clock, and its turns for slots and rates of
-- names. Otherwise a user whose weight is raised from 0.01 to 10 would still wait out the old debt.
--
-- Returns the settings with the tenant, JSON.

local LINES = 20        -- names that the user's held tasks wait for, at most,
local LINE_READ = 2000  -- and turns of all these names together

-- Rescale the user's turn for a name by the ratio of two weights.
local function rescale_turn(name, turns, ratio)
  local first = turns[1] and tag_of_turn(turns[1])
  for _, turn in ipairs(turns) do
    if string.match(turn, '%z(%Z*)$') == A.user then
      local tag = tag_of_turn(turn)
      if not first or not tag then return end
      redis.call('ZREM', K.slot_line, turn)
      redis.call('ZADD', K.slot_line, 0,
        string.format('%s\0%014.0f\0%s', name, first + math.floor((tag - first) * ratio), A.user))
      return
    end
  end
end

local function rescale_turns(ratio)
  local from, left = '[' .. A.user .. '\0', LINE_READ
  for _ = 1, LINES do
    local held = redis.call('ZRANGEBYLEX', K.held, from, '(' .. A.user .. '\1', 'LIMIT', 0, 1)[1]
    if not held or left <= 0 then return end
    local name = string.match(held, '^%Z*%z(%Z*)')
    local turns = redis.call('ZRANGEBYLEX', K.slot_line, '[' .. name .. '\0', '(' .. name .. '\1',
      'LIMIT', 0, left)
    rescale_turn(name, turns, ratio)
    from, left = '[' .. A.user .. '\0' .. name .. '\1', left - #turns
  end
end

local before = first_answer(A.op)
if before then return before end
local change = cjson.decode(A.change)
local old_tenant = redis.call('HGET', K.tenants, A.user)
if change.tenant and change.tenant ~= old_tenant then
  if old_tenant then
    redis.call('ZREM', K.tenant_users, old_tenant .. '\0' .. A.user)
    redis.call('HDEL', K.tenants, A.user)
  end
  if change.tenant ~= cjson.null then join_tenant(A.user, change.tenant) end
end
change.tenant = nil
local settings = parse_settings(redis.call('HGET', K.users, A.user))
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
if next(settings) == nil then
  redis.call('HDEL', K.users, A.user)
  redis.call('ZREM', K.user_names, A.user)
else
  redis.call('HSET', K.users, A.user, cjson.encode(settings))
  redis.call('ZADD', K.user_names, 0, A.user)
end
if not settings.rate then redis.call('HDEL', K.throttle, A.user) end
if weight ~= old_weight then
  local function rescale(key, clock)
    local tag = tonumber(redis.call('ZSCORE', key, A.user) or nil)
    if tag and tag > clock then
      redis.call('ZADD', key, 'XX', clock + (tag - clock) * old_weight / weight, A.user)
    end
  end
  rescale(K.ready, fair.clock)
  rescale(K.idle, fair.clock)
  rescale(K.critical, fair.critical_clock)
  rescale_turns(old_weight / weight)
end
if review(A.user) then wake_worker() end
save_fair()
mark_layout()
settings.tenant = redis.call('HGET', K.tenants, A.user) or nil
return remember(A.op, cjson.encode(settings))
