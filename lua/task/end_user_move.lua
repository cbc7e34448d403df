-- Forget tasks of a user that have left: the last of three steps, when another partition has them.
--
-- @include arriving_tasks user_tasks
-- @lazy delays gates specials uniques rings barrier
-- FLAGS allow-oom
-- KEYS moving      hash  \1 number of another partition -> tasks that have left for it; see move_user_out
-- KEYS user_names  zset  owners and tenants with settings, all scores 0
-- ARGV partition  int   the number of the other partition
-- ARGV batch      int   the number of the batch: others may have left since
-- ARGV words      text  what the other partition answered; see move_user_in
--
-- Tasks that it has refused come back to their places here. The settings of the user are removed, if it has stored
-- them and they are still the same.
--
-- Returns 'ended', or 'absent' if that was done before (nothing changed).

local field = '\1' .. A.partition
local parts = parts_in(redis.call('HGET', K.moving, field) or '')
if parts[1] ~= A.batch then return 'absent' end

local tasks = {}
for i = 7, #parts do
  if string.sub(A.words, i - 5, i - 5) == 'r' then
    local task = task_in(parts[i])
    leave_behind(task)
    prepare_arrival(task)
    tasks[#tasks + 1] = task
  end
end
for _, task in ipairs(tasks) do
  put_unfinished(task, hold_key)
  put_records(task)
end
let_arrivals_begin()
local owner = owner_at(parts[2], parts[3])
if string.sub(A.words, 1, 1) == 's' and redis.call('HGET', K.users, owner) == parts[6] then
  redis.call('HDEL', K.users, owner)
  redis.call('ZREM', K.user_names, owner)
  user_cache[owner] = nil
  if review(owner) then wake_worker() end
end
redis.call('HDEL', K.moving, field)
save_fair()
return 'ended'
