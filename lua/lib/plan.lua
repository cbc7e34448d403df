-- A plan: the revision of a schedule and its next fire time.
--
-- KEYS plan  hash  schedule id -> revision, space, next fire time in ms or '-'
--
-- The revision is random and new with every save. A caller that acts on a plan compares all of it with
-- the plan that it read, so that it does not act on one that has fired or changed since.

-- `moment`: the next fire time as text; nil or empty: nothing is planned.
local function make_plan(revision, moment)
  return revision .. ' ' .. ((moment or '') ~= '' and moment or '-')
end

-- The revision ('' if there is none) and the next fire time as text, or '-'.
local function read_plan(text)
  local revision, moment = string.match(text or '', '^(%S*) ?(.*)$')
  return revision, moment ~= '' and moment or '-'
end

-- The parts of a stored plan.
local function plan_of(id)
  return read_plan(redis.call('HGET', K.plan, id))
end

local function revision_of(id)
  return (plan_of(id))
end

-- The planned fire time in ms, or nil.
local function planned_ms(id)
  local _, moment = plan_of(id)
  return tonumber(string.match(moment, '^%d+$') or nil)
end

local function write_plan(id, revision, moment)
  redis.call('HSET', K.plan, id, make_plan(revision, moment))
end
