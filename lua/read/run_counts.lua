-- Count the runs of users that ended in each of several equal intervals. One bounded read.
--
-- @include users retention ended_runs
-- FLAGS no-writes
-- ARGV since_ms  int   start of the first interval
-- ARGV until_ms  int   end of the last interval
-- ARGV buckets   int   number of intervals
-- ARGV tenant    text  count all runs of this tenant; empty: all runs of the queue
-- ARGV ...  owners and tenants; see lib/owners
-- ROW user  text  an owner or a tenant
--
-- Returns { since when the history is complete, ms; number of all runs in each interval; then for each owner
-- the number of its runs in each interval }.

local PLACES = {}
for i, outcome in ipairs(OUTCOMES) do PLACES[i] = 'o' .. LETTERS[outcome] end
if A.tenant ~= '' then PLACES = { 't' .. A.tenant } end

local first, buckets = tonumber(A.since_ms), tonumber(A.buckets)
local width = (tonumber(A.until_ms) - first) / buckets
local FEW = 4 * buckets  -- reading this many runs costs less than counting each interval

local starts = {}  -- of the intervals, and the end of the last one
for i = 0, buckets do starts[i + 1] = math.floor(first + i * width) end

-- Add the runs of a kind and value to the counts of the intervals.
local function add_runs(counts, place)
  local total = count_runs(place, starts[1], starts[buckets + 1])
  if total > FEW then
    for i = 1, buckets do counts[i] = counts[i] + count_runs(place, starts[i], starts[i + 1]) end
  elseif total > 0 then
    local i = 1
    for _, member in ipairs(runs_between(place, starts[1], starts[buckets + 1])) do
      local at = tonumber(string.sub(member, #place + 2, #place + 14)) or starts[i]
      while i < buckets and at >= starts[i + 1] do i = i + 1 end
      counts[i] = counts[i] + 1
    end
  end
end

local function counts_of(places)
  local counts = {}
  for i = 1, buckets do counts[i] = 0 end
  for _, place in ipairs(places) do add_runs(counts, place) end
  return counts
end

local answer = { cut_window(first), counts_of(PLACES) }
for i = FIRST, #ARGV do answer[#answer + 1] = counts_of({ service_of(R.user[i]) }) end
return answer
