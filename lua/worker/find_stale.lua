-- End runs that do not answer, take back expired leases, and return notices for people.
--
-- @include stale_runs
-- FLAGS allow-oom
--
-- Returns notices; see lib/notices.

forget_notices()
return find_stale()
