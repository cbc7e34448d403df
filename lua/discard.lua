-- Drop dead letters for good.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op   text  random id of this operation
-- ARGV ...  ids of tasks, at most a few hundred
--
-- What is no dead letter is left alone.
--
-- Returns how many were dropped.

local before = first_answer(A.op)
if before then return tonumber(before) end
local dead, seen = {}, {}
for i = FIRST, #ARGV do
  local id = ARGV[i]
  if not seen[id] and redis.call('ZSCORE', K.dead, id) then dead[#dead + 1] = id end
  seen[id] = true
end
if #dead > 0 then
  drop(K.dead, dead)
  count('discarded', #dead)
end
return tonumber(remember(A.op, #dead))
