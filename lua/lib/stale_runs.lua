-- End what no claim ends because nobody claims, and tell of what ended without a word.
--
-- @include upkeep notices
-- ARGV can_alert  text  '1' if the caller can alert people, or empty
-- ARGV ...  notices from an earlier call that the caller has passed on
-- ROW notice  text  as it was returned

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
