-- End runs that do not answer even if no worker claims, and return notices about them.
--
-- @include upkeep
-- @lazy notices
-- ARGV can_alert  text  '1' if the caller can alert people, or empty
-- ARGV ...    notices of an earlier call that the caller has passed on: they are not returned again
-- ROW notice  text  the notice as it was returned

local function forget_notices()
  local heard = {}
  for i = FIRST, #ARGV do heard[#heard + 1] = R.notice[i] end
  notices().forget(heard)
end

local function find_stale()
  local leases, expired = due_in(K.leases), layout > 1 and due_in(K.expiring) or {}
  lost.prepare_ends(leases, expired)
  lost.end_overdue()
  lost.take_back(due_in(K.leases))
  if #expired > 0 then lost.expire(expired) end
  -- No claim comes to a partition in which nothing waits.
  trim_all(UPKEEP)
  if lost.found then wake_worker() end
  save_fair()
  return notices().tell(A.can_alert ~= '')
end
