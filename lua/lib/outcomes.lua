-- How tasks end: the words of records, runs, counters and the index of ended runs.
--
-- fairqueue/outcomes.py has the same tables. The counter of an end is named after the state, unless
-- COUNTER_OF_STATE has another name; a task that timed out is counted as 'timed_out' as well.

-- State of a task that has ended -> outcome of its run; one that timed out is 'buried' too.
local OUTCOME_OF_STATE = { finished = 'succeeded', buried = 'failed', cancelled = 'cancelled',
  expired = 'expired' }

-- The counter 'expired' counts leases that expired.
local COUNTER_OF_STATE = { expired = 'expired_tasks' }

-- Outcome -> letter in the index of ended runs.
local LETTERS = { succeeded = 's', failed = 'f', timed_out = 't', cancelled = 'c', expired = 'e' }
local NEVER_RAN = 'd'  -- the letter of tasks that were cancelled before they ran, and the kind of those that
                       -- did not run

-- The outcome of an attempt that failed.
local function failure_of(record)
  return record.timed_out and 'timed_out' or 'failed'
end

-- The outcome of a task that has ended; nil for others.
local function outcome_of(record)
  return record.state == 'buried' and failure_of(record) or OUTCOME_OF_STATE[record.state]
end
