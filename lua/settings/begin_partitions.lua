-- Record that a queue has several partitions, with the keys that it would have without.
--
-- @lazy barrier
-- FLAGS allow-oom
-- KEYS fair         hash  the layout of these keys; 'partitions=' and the number, if the queue has several
-- KEYS tasks        hash  task id -> document
-- KEYS schedules    hash  schedule id -> definition
-- KEYS settings     hash  name -> value
-- KEYS users        hash  owner or tenant -> settings
-- KEYS limits       hash  name -> limits
-- KEYS credentials  hash  of the API
-- ARGV partitions  int  how many the queue is to have, 2 at least
--
-- The layout makes all scripts refuse these keys, also those of versions without partitions: a client that was
-- made for a queue without partitions changes nothing. So does this script, if the number is recorded already:
-- the error has the number.
--
-- Returns the number of partitions: 1 if the queue has none and something is stored in it (nothing changed).

if redis.call('EXISTS', K.fair, K.tasks, K.schedules, K.settings, K.users, K.limits, K.credentials) > 0 then
  return 1
end
layout = 'partitions=' .. A.partitions
mark_layout()
barrier().raise()
return tonumber(A.partitions)
