-- End runs that do not answer, take back expired leases, and tell of what people should hear of.
--
-- @include stale_runs
-- FLAGS allow-oom
-- ARGV ...  notices that were told before and have been passed on: they are not told again
--
-- Returns notices, see lib/notices.

notices.forget({ unpack(ARGV, FIRST) })
return find_stale()
