-- Bring a partition the starts that the home of a limit has given.
--
-- @include backlog replay
-- @lazy gates
-- FLAGS allow-oom
-- ARGV gate    text  the limit; see lib/gates
-- ARGV units   num   of cost that may start
-- ARGV wait    num   ms until the home gives more
-- ARGV number  int   of the question of the partition
-- ARGV asked   int   when it was asked, by the clock of the partition, ms
--
-- Repeated, or if a later question was answered, the call changes nothing.
--
-- Returns 'taken'.

gates().take_starts(A.gate, { units = tonumber(A.units), wait = tonumber(A.wait), number = tonumber(A.number),
  asked = tonumber(A.asked) })
save_fair()
return 'taken'
