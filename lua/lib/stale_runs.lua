-- End runs that do not answer even if no worker claims, and return notices about them.
--
-- @include upkeep notices
-- ARGV can_alert  text  '1' if the caller can alert people, or empty
-- ARGV ...    notices of an earlier call that the caller has passed on: they are not returned again
-- ROW notice  text  the notice as it was returned

local function forget_notices()
  local heard = {}
  for i = FIRST, #ARGV do heard[#heard + 1] = R.notice[i] end
  notices.forget(heard)
end

local function find_stale()
  lost.end_overdue()
  lost.take_back()
  if lost.found then wake_worker() end
  save_fair()
  return notices.tell(A.can_alert ~= '')
end
