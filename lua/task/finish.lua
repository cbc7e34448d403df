-- Record that tasks are done, each by the token of its lease.
--
-- @include ending
-- @lazy uniques
-- FLAGS allow-oom
-- ARGV ...     tasks, at most a few hundred
-- ROW id      text  task id
-- ROW token   text  token of its lease
-- ROW result  text  JSON, or empty
-- ROW took    int   ms that the handler took, or empty
-- ROW report  text  the worker's report of the attempt, JSON, or empty
-- ROW cost    num   what the attempt has cost, in the units of the queue; empty: as charged
--
-- Replay: a task that this token has finished stays finished, even if its record is gone.
-- A task whose cancellation was requested ends as cancelled.
--
-- Returns a word for each task: 'finished', 'cancelled', or 'lost_lease' (nothing changed).

local ids = {}
for i = FIRST, #ARGV, ROW do ids[#ids + 1] = R.id[i] end
local records = read_statuses(ids)

local function ended_before(id, token)
  local record = records[id]
  if record then
    return (record.state == 'finished' or record.state == 'cancelled') and record.token == token
      and record.state
  end
  local state, by = read_tombstone(first_answer('t:' .. id) or '')
  return (state == 'finished' or state == 'cancelled') and by == token and state
end

local names = {}
for i = FIRST, #ARGV, ROW do
  local record = records[R.id[i]]
  if record then prepare_end(record, tonumber(R.cost[i])) end
  local owner = record and owner_of(record)
  names[#names + 1] = owner
  names[#names + 1] = owner and group_of(owner)
end
prefetch_users(names)

-- Edit the text of a record that finishes at its first attempt, as almost all do: faster than encoding it.
-- Returns nil for other records.
local function finished_text(id, record, result, took)
  if record.attempts ~= 1 or record.error or record.cancel or record.slot or record.slots or record.deadline
    or record.took or record.result or record.spent then return nil end
  local text = replace_text(status_texts[id], '"state":"running"', '"state":"finished"')
  if not text then return nil end
  local more = ',"ended":' .. now_text
  if result ~= '' then more = more .. ',"result":' .. cjson.encode(result) end
  if tonumber(took) then more = more .. ',"took":' .. took end
  return string.sub(text, 1, -2) .. more .. '}'
end

local texts = {}
local answer, closed, ended, counts = {}, {}, {}, { finished = 0, cancelled = 0, lost_lease = 0 }
for i = FIRST, #ARGV, ROW do
  local id, token, result = R.id[i], R.token[i], R.result[i]
  local record = records[id]
  local word
  if is_held(record, token) then
    word = record.cancel and 'cancelled' or 'finished'
    local cost = tonumber(R.cost[i])
    texts[id] = not cost and finished_text(id, record, result, R.took[i]) or nil
    free_lease(id, record, cost)
    record.spent = cost
    record.state, record.ended, record.error, record.timed_out = word, now, nil, nil
    if result ~= '' then record.result = result end
    record.took = tonumber(R.took[i])
    if R.report[i] ~= '' then
      keep_attempt(id, record, outcome_of(record), R.report[i])
    end
    closed[#closed + 1] = id
    ended[#ended + 1] = now_text
    ended[#ended + 1] = id
    counts[word] = counts[word] + 1
  else
    word = ended_before(id, token) or 'lost_lease'
    if word == 'lost_lease' then counts.lost_lease = counts.lost_lease + 1 end
  end
  answer[#answer + 1] = word
end
if #closed > 0 then
  redis.call('ZREM', K.leases, unpack(closed))
  write_statuses(closed, records, texts)
  redis.call('ZADD', K.ended, unpack(ended))
  list_runs(closed, records)
  end_open_runs(closed, records)
  for _, id in ipairs(closed) do
    local record = records[id]
    end_streak(record, record.state)
    if record.flow and record.flow.unique then uniques().ended(id, record) end
  end
  trim_all(#closed)
  save_fair()
end
if counts.finished > 0 then count('finished', counts.finished) end
if counts.cancelled > 0 then count('cancelled', counts.cancelled) end
if counts.lost_lease > 0 then count('lost_leases', counts.lost_lease) end
return answer
