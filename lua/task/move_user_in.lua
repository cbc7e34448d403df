-- Store tasks of a user that have left another partition: the second step of their move.
--
-- @include arriving_tasks user_tasks
-- @lazy delays gates specials uniques rings unique_pushes barrier
-- KEYS user_names   zset  owners and tenants with settings, all scores 0
-- KEYS repartition  hash  '=' number of another partition -> the number of the last batch that came from there, and
--                         its words, separated by NUL
-- ARGV partition  int   the number of the partition that they left
-- ARGV batch      text  as move_user_out made it
--
-- They are tasks of another tenant from now on, and keep ids, places and times. One whose unique key another task has
-- here gives up the key. The settings of the user are stored unless there are some here. Limits of waiting tasks do not
-- apply. A batch is stored once, however late it is repeated: those of a partition come one after the other, with
-- rising numbers.
--
-- Returns a letter for the settings and one for each task. 's': stored; 'r': refused, because another task has or had
-- its id, there is no room for its pool, or there are settings; '-': no settings. Empty for a batch before the last one.

local parts = parts_in(A.batch)
local seq, tenant_to, is_first, settings = tonumber(parts[1]), parts[4], parts[5] == '1', parts[6]
local last, words_before = string.match(redis.call('HGET', K.repartition, '=' .. A.partition) or '', '^(%d+)%z(.*)$')
if last and tonumber(last) >= seq then return tonumber(last) == seq and words_before or '' end

-- Give a task to the other tenant; its unique key was given up.
local function hand_over(task)
  local record = task.record
  if not record then return end
  task.document = with_tenant(task.document, record.tenant, tenant_to)
  record.group = tenant_to ~= '' and tenant_to or nil
  record.tenant = record.group
  if record.digest then record.digest, record.bytes = digest(task.document), #task.document end
  task.is_changed = true
  leave_behind(task)
end

local tasks, words = {}, {}
for i = 7, #parts do
  local task = task_in(parts[i])
  hand_over(task)
  tasks[#tasks + 1] = task
  words[#tasks] = verdict_on_arrival(task) and 'r' or 's'  -- a known one is another task: each batch comes once
  if words[#tasks] == 's' then prepare_arrival(task) end
end
specials().prepare({})

need_layout_2()
local owner = owner_at(parts[2], tenant_to)
local of_settings = settings == '' and '-' or redis.call('HEXISTS', K.users, owner) == 1 and 'r' or 's'
if of_settings == 's' then
  redis.call('HSET', K.users, owner, settings)
  redis.call('ZADD', K.user_names, 0, owner)
  user_cache[owner] = nil
end
if is_first and tenant_to ~= '' then specials().join(parts[2], tenant_to) end
fair.seq, fair_dirty = math.max(fair.seq, seq), true
local stored = 0
for i, task in ipairs(tasks) do
  if words[i] == 's' then
    put_unfinished(task, hold_key)
    put_records(task)
    stored = stored + 1
  end
end
let_arrivals_begin()
if of_settings == 's' and review(owner) then wake_worker() end
count('moved', stored)
local answer = of_settings .. table.concat(words)
redis.call('HSET', K.repartition, '=' .. A.partition, parts[1] .. '\0' .. answer)
save_fair()
mark_layout()
return answer
