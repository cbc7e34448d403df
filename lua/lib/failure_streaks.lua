-- Count how often a schedule fails in a row, and pause it when it fails too often.
--
-- @include schedule_state plan stats
--
-- Only tasks whose record has a `fail_limit` count, so others cost nothing.

local function end_streak(record, state)
  local limit = record.fail_limit
  if not record.schedule or type(limit) ~= 'number' then return end
  local schedule = state_of(record.schedule)
  if not schedule.user then return end  -- it is gone
  if state == 'finished' then
    if not schedule.failures then return end
    schedule.failures = nil
  elseif state == 'buried' then
    schedule.failures = (schedule.failures or 0) + 1
    if schedule.failures >= limit and schedule.active then
      schedule.active = false
      schedule.reason = 'paused after ' .. schedule.failures .. ' failures in a row'
      schedule.paused = now
      redis.call('ZREM', K.due, record.schedule)
      write_plan(record.schedule, revision_of(record.schedule))
      count('auto_paused', 1)
    end
  else
    return
  end
  write_state(record.schedule, schedule)
end
