-- Count the runs of users that ended in stretches of time: one bounded read.
--
-- @include retention ended_runs
-- FLAGS no-writes
-- ARGV since_ms  int   the begin of the first stretch
-- ARGV until_ms  int   the end of the last one
-- ARGV buckets   int   how many there are
-- ARGV tenant    text  of whose runs all are counted, or empty: of everybody's
-- ARGV ...  users
-- ROW user  text  user id
--
-- Returns { since when the history is whole, ms; how many of all runs ended in each stretch; then for
-- each user how many of its own did }.

local PLACES = {}
for i, outcome in ipairs(OUTCOMES) do PLACES[i] = 'o' .. LETTERS[outcome] end
if A.tenant ~= '' then PLACES = { 't' .. A.tenant } end

local first, buckets = tonumber(A.since_ms), tonumber(A.buckets)
local width = (tonumber(A.until_ms) - first) / buckets
local FEW = 4 * buckets  -- to read so many runs costs less than to count each stretch

local starts = {}  -- of the stretches, and of what follows the last one
for i = 0, buckets do starts[i + 1] = math.floor(first + i * width) end

-- Add the runs of a kind and value to the counts of stretches.
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
for i = FIRST, #ARGV do answer[#answer + 1] = counts_of({ 'u' .. R.user[i] }) end
return answer
