-- Refuse a queue whose keys are laid out as this version does not know. Part of every script.
--
-- KEYS fair  hash  layout: its number; a queue without one has the first

local LAYOUT = 1

local function check_layout(layout)
  if layout and tonumber(layout) ~= LAYOUT then error(redis.error_reply('WRONGLAYOUT ' .. layout)) end
end

-- For scripts that may be the first to write to a queue; those that push do so with `save_fair`.
local function mark_layout() redis.call('HSET', K.fair, 'layout', LAYOUT) end
