-- Keep versions without layout numbers out of a queue that gets layout 2.
--
-- LAZY
-- KEYS usage  hash  user -> average seconds of a task, of versions before layout 2; since then a text
--
-- All that those versions check before they write is that their keys have the right types. This key is one that
-- each of their scripts that moves tasks uses, and that no script of this version does.

local barrier = {}

function barrier.raise()
  redis.call('UNLINK', K.usage)
  redis.call('SET', K.usage, 'This queue has layout 2. Upgrade this process: see docs/operations.md#upgrades')
end

return barrier
