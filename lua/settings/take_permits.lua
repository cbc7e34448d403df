-- Bring a partition the permits that the home of a limit has given, or ask it to give some up.
--
-- @include backlog replay
-- @lazy gates
-- FLAGS allow-oom
-- ARGV gate     text  the limit; see lib/gates
-- ARGV version  int   of what was given
-- ARGV count    int   how many permits the partition has from now on
-- ARGV slots    int   of the limit, when they were given
-- ARGV set_by   text  the operation that had set the limits of this partition when it asked
-- ARGV word     text  empty; 'wanted': others wait for permits, so those that become free are given up; 'lend': those
--                     that are not in use are given up at once, too
--
-- Repeated, the call changes nothing: what is not later than what the partition knows is ignored.
--
-- Returns { version, number of permits that the partition has kept, how many more it wants, the operation that
-- has set its limits }.

local given = { version = tonumber(A.version), count = tonumber(A.count), slots = tonumber(A.slots), set_by = A.set_by }
local answer = gates().exchange(A.gate, given, A.word)
save_fair()
return answer
