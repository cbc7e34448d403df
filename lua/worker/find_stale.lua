-- End runs that do not answer, take back expired leases, and tell of what people should hear of.
--
-- @include stale_runs
-- FLAGS allow-oom
--
-- Returns notices, see lib/notices.

forget_notices()
return find_stale()
