-- Delete dead letters.
--
-- @include ending
-- FLAGS allow-oom
-- ARGV op   text  random id of this operation
-- ARGV ...  tasks, at most a few hundred
-- ROW id   text  task id
--
-- Tasks that are not dead letters do not change.
--
-- Returns { number deleted, number left because one call may not delete more }.

local before = first_answer(A.op)
if before then
  local dropped, left = string.match(before, '^(%d+) (%d+)$')
  return { tonumber(dropped), tonumber(left) }
end
local dead, seen = {}, {}
for i = FIRST, #ARGV do
  local id = R.id[i]
  if not seen[id] and redis.call('ZSCORE', K.dead, id) then dead[#dead + 1] = id end
  seen[id] = true
end
local dropped = 0
if #dead > 0 then
  dropped = drop_tasks(K.dead, dead)
  count('discarded', dropped)
end
remember(A.op, dropped .. ' ' .. #dead - dropped)
return { dropped, #dead - dropped }
