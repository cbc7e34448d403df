-- End what no claim ends because nobody claims, and tell of what ended without a word.
--
-- @include upkeep notices
-- ARGV can_alert  text  '1' if whoever asks can alert people, or empty

local function find_stale()
  lost.end_overdue()
  lost.take_back()
  if lost.found then wake_worker() end
  save_fair()
  return notices.tell(A.can_alert ~= '')
end
