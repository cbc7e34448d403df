-- Refuse a queue whose layout this version does not know. Part of every script.
--
-- KEYS fair  hash  layout: its number; a queue without one has layout 1

local LAYOUT = 1

local function check_layout(layout)
  if layout and tonumber(layout) ~= LAYOUT then error(redis.error_reply('WRONGLAYOUT ' .. layout)) end
end

-- For scripts that may be the first to write to a queue. Scripts that push do the same in `save_fair`.
local function mark_layout() redis.call('HSET', K.fair, 'layout', LAYOUT) end
