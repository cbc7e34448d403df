-- Count how often a schedule fails in a row, and pause it when it fails too often.
--
-- LAZY
-- @include schedule_state plan stats

local failure_streaks = {}

-- A task of a schedule with a `fail_limit` has ended.
function failure_streaks.count(record, state)
  local limit = record.fail_limit
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

return failure_streaks
