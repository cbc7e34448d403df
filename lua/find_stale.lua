-- Find runs that go on after their handler's time-out, and mark them.
--
-- @include stale
-- FLAGS allow-oom
--
-- Each is reported once; if the answer is lost, its record and the counter still say so.
--
-- Returns for each run: task id, user, name, worker, ms since its claim.

return find_stale()
