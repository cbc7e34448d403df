-- Give up leadership, if it is still held.
--
-- @include fence
-- FLAGS allow-oom
--
-- Returns 'resigned' or 'stale' (somebody else leads, or nobody; nothing was changed).

if not leads() then return 'stale' end
redis.call('DEL', K.leader)
return 'resigned'
