-- Change the limits and the weight of a user, and let the change act on what already waits.
--
-- @include waiting replay
-- ARGV op      text  random id of this operation
-- ARGV user    text  whose
-- ARGV change  text  JSON: the fields to change; null takes a limit away
--
-- A new weight rescales what the user is ahead of the clock: otherwise somebody raised from 0.01 to
-- 10 would still wait out the old debt.
--
-- Returns the settings, JSON.

local before = first_answer(A.op)
if before then return before end
local change = cjson.decode(A.change)
local settings = parse_settings(redis.call('HGET', K.users, A.user))
local old_weight = settings.weight or 1
for field, value in pairs(change) do
  if value == cjson.null then value = nil end
  settings[field] = value
end
local weight = settings.weight or 1
local text = '{}'
if next(settings) == nil then
  redis.call('HDEL', K.users, A.user)
else
  text = cjson.encode(settings)
  redis.call('HSET', K.users, A.user, text)
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
end
if review(A.user) then wake_worker() end
save_fair()
return remember(A.op, text)
