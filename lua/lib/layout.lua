-- Refuse a queue whose layout this version does not know. Part of every script.
--
-- KEYS fair  hash  layout: its number; a queue without one has layout 1
--
-- A queue has layout 1 until something is stored that needs layout 2: a tenant, a pool, a key, a unique task,
-- an expiry or a cost. Versions that know only layout 1 refuse it from then on.

local layout = 1

local function check_layout(stored)
  if not stored then return end
  layout = tonumber(stored)
  if layout ~= 1 and layout ~= 2 then error(redis.error_reply('WRONGLAYOUT ' .. stored)) end
end

-- For scripts that may be the first to write to a queue. Scripts that push do the same in `save_fair`.
local function mark_layout() redis.call('HSET', K.fair, 'layout', layout) end

-- Called before something is written that needs layout 2. For scripts with `@lazy barrier`.
local function need_layout_2()
  if layout > 1 then return end
  layout = 2
  mark_layout()
  barrier().raise()
end
