-- Note in the home partition that settings are being changed in all partitions, or that they were.
--
-- KEYS settings  hash  name -> value; changing: the last change that may not have reached all partitions
-- ARGV mark   text  a change that begins; empty: one has ended
-- ARGV ended  text  the change that has ended
--
-- If another change began meanwhile, partitions may have got the two in another order than the home: the mark stays,
-- and the leader of the home compares all partitions with it. Repeated, the script changes nothing more.
--
-- Returns 1 if all partitions are known to have the same settings, else 0.

if A.mark ~= '' then
  redis.call('HSET', K.settings, 'changing', A.mark)
  return 0
end
local mark = redis.call('HGET', K.settings, 'changing')
if mark == A.ended then
  redis.call('HDEL', K.settings, 'changing')
  return 1
end
return mark and 0 or 1
