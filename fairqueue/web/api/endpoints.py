"""The table of all endpoints: routes, checks, the OpenAPI document and tests use it."""

from functools import lru_cache
from typing import Any

from fairqueue.access.audit import AuditEntry
from fairqueue.access.credentials import KeyInfo, NewKey
from fairqueue.history.records import FailureGroup, Run, RunDetails
from fairqueue.inspection.partitions import PartitionsView
from fairqueue.inspection.views import (
    Attention,
    DayCount,
    LogEntry,
    Overview,
    Preview,
    RedisInfo,
    ScheduleView,
    Upcoming,
)
from fairqueue.models import (
    Explanation,
    HandlerLimits,
    KeyLimits,
    Problem,
    QueueSettings,
    QueueSnapshot,
    UserSettings,
)
from fairqueue.queue.estimate import Quote
from fairqueue.queue.pools import PoolInfo
from fairqueue.queue.workers import WorkerInfo
from fairqueue.schedules.backfill import Backfill
from fairqueue.schedules.bulk import BulkResult
from fairqueue.schedules.changes import ScheduleChange
from fairqueue.schedules.import_export import Diff
from fairqueue.schedules.outcomes import FireTime
from fairqueue.stats.samples import Series
from fairqueue.stats.users import FairnessView, ShareSeries, TenantInfo, UserInfo
from fairqueue.web.api import jobs, runs, sharers, system
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import (
    LISTING,
    NEW,
    OBJECT,
    OPEN,
    PREFIX,
    SHARED,
    ApiRequest,
    Endpoint,
    Nothing,
)
from fairqueue.web.api.openapi import describe
from fairqueue.web.api.response_models import fields_of, page, record, shape, whole

VIEWER, OPERATOR, ADMIN = "viewer", "operator", "admin"


Started = record("Started", "The id of a new run.", {"task_id": str})
Cancelled = record(
    "Cancelled", "The run was cancelled; a running one is stopped.", {"cancelled": bool}
)
Counted = record("Counted", "The count, or what it would be.", {"dry_run": bool, "count": int})
Moved = record("Moved", "How many waiting tasks were moved.", {"moved": int})
JobExport = record("JobExport", "Jobs for an import.", {"documents": list[dict[str, Any]]})
Draining = record(
    "Draining", "The worker takes no more tasks.", {"worker_id": str, "draining": bool}
)
HealthAnswer = record("Health", "The process responds.", {"status": str})
ReadinessAnswer = record(
    "Readiness", "Whether the queue can be used, or why not.", {"status": str, "reasons": list[str]}
)

JOB = shape(ScheduleView, "Job")
RUN_PAGE = page(shape(Run), "RunPage")
RUN = shape(RunDetails)
USER_PAGE = page(shape(UserInfo), "UserPage")
BULK = shape(BulkResult)
_HANDLER_LIMITS, _KEY_LIMITS = shape(HandlerLimits), shape(KeyLimits)
LIMITS = record(
    "Limits",
    "Limits by task name.",
    {"limits": dict[str, _HANDLER_LIMITS]},  # type: ignore[valid-type]
)
KEY_LIMITS = record(
    "KeyLimitsByKey",
    "Limits by key and pattern.",
    {"limits": dict[str, _KEY_LIMITS]},  # type: ignore[valid-type]
)
SETTINGS = record(
    "Settings",
    "The settings of the queue.",
    {
        "queue": str,
        "settings": shape(QueueSettings),
        "limits": dict[str, _HANDLER_LIMITS],  # type: ignore[valid-type]
        "key_limits": dict[str, _KEY_LIMITS],  # type: ignore[valid-type]
    },
)
MADE_KEY = record(
    "CreatedKey",
    "A new key. `secret` is returned once; a repeated request gets null.",
    {**fields_of(NewKey), "secret": str | None},
)

_JOB = "/scheduler/jobs/{schedule_id}"
_RUN = "/scheduler/runs/{task_id}"
_TASK = "/tasks/{task_id}"
_USER, _TENANT = "/users/{user_id}", "/tenants/{tenant}"


def openapi(call: ApiRequest[Nothing, Nothing]) -> Any:
    """Get this description of the API."""
    return _described(call.root.removesuffix(PREFIX))


@lru_cache(maxsize=8)
def _described(root: str) -> dict[str, Any]:
    return describe(ENDPOINTS, root)  # cached: it needs no key


_row = Endpoint  # keeps the rows short

# fmt: off
_JOBS = (
    _row("GET", "/scheduler/jobs", jobs.list_jobs, VIEWER, LISTING, page(JOB, "JobPage"),
         query=m.JobQuery),
    _row("POST", "/scheduler/jobs", jobs.create_job, ADMIN, NEW, JOB,
         body=m.NewJob, status=201, has_etag=True),
    _row("POST", "/scheduler/jobs/bulk", jobs.change_jobs, OPERATOR, LISTING, BULK,
         body=m.BulkChange),
    _row("GET", "/scheduler/jobs/export", jobs.export_jobs, ADMIN, LISTING, JobExport,
         query=m.JobFilter),
    _row("POST", "/scheduler/jobs/import", jobs.import_jobs, ADMIN, NEW, shape(Diff),
         body=m.JobDocuments),
    _row("GET", _JOB, jobs.get_job, VIEWER, OBJECT, JOB, has_etag=True),
    _row("PUT", _JOB, jobs.replace_job, ADMIN, OBJECT, JOB,
         body=m.JobReplacement, has_etag=True, supports_if_match=True),
    _row("PATCH", _JOB, jobs.change_job, ADMIN, OBJECT, JOB,
         body=m.JobChanges, has_etag=True, supports_if_match=True),
    _row("DELETE", _JOB, jobs.delete_job, ADMIN, OBJECT, None, status=204, supports_if_match=True),
    _row("POST", f"{_JOB}/toggle", jobs.toggle_job, OPERATOR, OBJECT, JOB, has_etag=True),
    _row("POST", f"{_JOB}/pause", jobs.pause_job, OPERATOR, OBJECT, JOB,
         body=m.Pause, has_etag=True),
    _row("POST", f"{_JOB}/resume", jobs.resume_job, OPERATOR, OBJECT, JOB,
         body=m.Resume, has_etag=True),
    _row("POST", f"{_JOB}/run", jobs.run_job, OPERATOR, OBJECT, Started,
         body=m.Trigger, status=201),
    _row("POST", f"{_JOB}/copy", jobs.copy_job, ADMIN, OBJECT, JOB,
         body=m.JobCopy, status=201, has_etag=True),
    _row("POST", f"{_JOB}/backfill", jobs.backfill_job, OPERATOR, OBJECT, shape(Backfill),
         body=m.BackfillRange),
    _row("GET", f"{_JOB}/runs", jobs.list_job_runs, VIEWER, OBJECT, RUN_PAGE,
         query=m.JobRunQuery),
    _row("GET", f"{_JOB}/moments", jobs.list_job_moments, VIEWER, OBJECT,
         page(shape(FireTime, "Moment"), "MomentPage"), query=m.MomentQuery),
    _row("GET", f"{_JOB}/changes", jobs.list_job_changes, VIEWER, OBJECT,
         page(shape(ScheduleChange), "ChangePage"), query=m.ChangeQuery),
    _row("GET", f"{_JOB}/logs", jobs.list_job_logs, VIEWER, OBJECT, whole(LogEntry, "LogEntries"),
         query=m.LogQuery),
    _row("GET", f"{_JOB}/chart", jobs.get_job_chart, VIEWER, OBJECT, whole(DayCount, "DayCounts"),
         query=m.ChartQuery),
    _row("GET", "/scheduler/upcoming", jobs.list_upcoming, VIEWER, LISTING,
         whole(Upcoming, "UpcomingRuns"), query=m.UpcomingQuery),
    _row("GET", "/scheduler/problems", jobs.list_problems, VIEWER, LISTING,
         whole(Problem, "JobProblems")),
    _row("GET", "/preview", jobs.preview, VIEWER, OPEN, shape(Preview), query=m.Rule),
    _row("POST", "/preview", jobs.preview_body, VIEWER, OPEN, shape(Preview), body=m.Rule),
)
_RUNS = (
    _row("GET", "/scheduler/runs", runs.list_runs, VIEWER, LISTING, RUN_PAGE, query=m.RunQuery),
    _row("POST", "/scheduler/runs/prune", runs.prune_runs, ADMIN, SHARED, Counted, body=m.Prune),
    _row("GET", _RUN, runs.get_run, VIEWER, OBJECT, RUN, query=m.TaskOwnerQuery),
    _row("POST", f"{_RUN}/retry", runs.retry_run, OPERATOR, OBJECT, Started,
         query=m.TaskOwnerQuery, body=m.Trigger, status=201),
    _row("POST", f"{_RUN}/cancel", runs.cancel_run, OPERATOR, OBJECT, Cancelled,
         query=m.TaskOwnerQuery),
    _row("GET", "/scheduler/failed", runs.list_failed, VIEWER, LISTING, RUN_PAGE,
         query=m.FailedQuery),
    _row("GET", "/scheduler/failed/groups", runs.list_failure_groups, VIEWER, LISTING,
         page(shape(FailureGroup), "FailureGroupPage"), query=m.PageQuery),
    _row("POST", "/scheduler/failed/retry", runs.retry_all_failed, OPERATOR, LISTING, BULK,
         body=m.FailedMany),
    _row("POST", "/scheduler/failed/discard", runs.discard_all_failed, OPERATOR, LISTING, BULK,
         body=m.FailedMany),
    _row("POST", "/scheduler/failed/{task_id}/retry", runs.retry_failed, OPERATOR, OBJECT, Started,
         query=m.TaskOwnerQuery, status=201),
    _row("DELETE", "/scheduler/failed/{task_id}", runs.discard_failed, OPERATOR, OBJECT, None,
         query=m.TaskOwnerQuery, status=204),
    _row("GET", "/tasks", runs.list_tasks, VIEWER, LISTING, RUN_PAGE, query=m.TaskQuery),
    _row("POST", "/tasks", runs.push_task, OPERATOR, NEW, Started,
         body=m.NewTask, status=201),
    _row("GET", _TASK, runs.get_task, VIEWER, OBJECT, RUN, query=m.TaskOwnerQuery),
    _row("GET", f"{_TASK}/explain", runs.explain_task, VIEWER, OBJECT, shape(Explanation),
         query=m.TaskOwnerQuery),
    _row("POST", f"{_TASK}/cancel", runs.cancel_task, OPERATOR, OBJECT, Cancelled,
         query=m.TaskOwnerQuery),
    _row("POST", f"{_TASK}/reschedule", runs.reschedule_task, OPERATOR, OBJECT, RUN,
         query=m.TaskOwnerQuery, body=m.NewTime),
)
_SHARERS = (
    _row("GET", "/users", sharers.list_users, VIEWER, LISTING, USER_PAGE,
         query=m.UserQuery),
    _row("GET", _USER, sharers.get_user, VIEWER, OBJECT, shape(UserInfo),
         query=m.OwnerWindowQuery),
    _row("PATCH", _USER, sharers.change_user, ADMIN, SHARED, shape(UserSettings),
         query=m.OwnerQuery, body=m.UserChanges),
    _row("POST", f"{_USER}/pause", sharers.pause_user, OPERATOR, OBJECT, shape(UserSettings),
         query=m.OwnerQuery, body=m.Pause),
    _row("POST", f"{_USER}/resume", sharers.resume_user, OPERATOR, OBJECT, shape(UserSettings),
         query=m.OwnerQuery),
    _row("POST", f"{_USER}/purge", sharers.purge_user, ADMIN, OBJECT, Counted,
         query=m.OwnerQuery, body=m.DryRunOnly),
    _row("POST", f"{_USER}/move", sharers.move_user, ADMIN, SHARED, Moved,
         query=m.OwnerQuery, body=m.UserMove),
    _row("GET", f"{_USER}/quote", sharers.quote_user, VIEWER, LISTING, shape(Quote),
         query=m.QuoteQuery),
    _row("GET", "/tenants", sharers.list_tenants, VIEWER, LISTING,
         page(shape(TenantInfo), "TenantPage"), query=m.TenantQuery),
    _row("GET", _TENANT, sharers.get_tenant, VIEWER, OBJECT, shape(TenantInfo),
         query=m.WindowQuery),
    _row("PATCH", _TENANT, sharers.change_tenant, ADMIN, SHARED, shape(UserSettings),
         body=m.TenantChanges),
    _row("POST", f"{_TENANT}/pause", sharers.pause_tenant, OPERATOR, SHARED, shape(UserSettings),
         body=m.Pause),
    _row("POST", f"{_TENANT}/resume", sharers.resume_tenant, OPERATOR, SHARED,
         shape(UserSettings)),
    _row("POST", f"{_TENANT}/purge", sharers.purge_tenant, ADMIN, OBJECT, Counted,
         body=m.DryRunOnly),
    _row("GET", f"{_TENANT}/users", sharers.list_tenant_users, VIEWER, OBJECT, USER_PAGE,
         query=m.TenantUserQuery),
    _row("GET", f"{_TENANT}/fairness", sharers.get_tenant_fairness, VIEWER, OBJECT,
         shape(FairnessView), query=m.WindowQuery),
    _row("GET", f"{_TENANT}/shares", sharers.get_tenant_shares, VIEWER, OBJECT,
         shape(ShareSeries), query=m.ShareQuery),
)
_SYSTEM = (
    _row("GET", "/workers", system.list_workers, VIEWER, SHARED, whole(WorkerInfo, "Workers")),
    _row("POST", "/workers/{worker_id}/drain", system.drain_worker, OPERATOR, SHARED, Draining),
    _row("GET", "/pools", system.list_pools, VIEWER, SHARED, whole(PoolInfo, "Pools")),
    _row("GET", "/partitions", system.list_partitions, VIEWER, SHARED, shape(PartitionsView),
         query=m.PartitionQuery),
    _row("GET", "/stats/snapshot", system.get_snapshot, VIEWER, SHARED, shape(QueueSnapshot)),
    _row("GET", "/stats/series", system.get_series, VIEWER, SHARED, shape(Series),
         query=m.SeriesQuery),
    _row("GET", "/stats/overview", system.get_overview, VIEWER, LISTING, shape(Overview)),
    _row("GET", "/stats/attention", system.list_attention, VIEWER, LISTING,
         whole(Attention, "AttentionList")),
    _row("GET", "/stats/fairness", sharers.get_fairness, VIEWER, LISTING, shape(FairnessView),
         query=m.WindowQuery),
    _row("GET", "/stats/shares", sharers.get_shares, VIEWER, LISTING, shape(ShareSeries),
         query=m.ShareQuery),
    _row("GET", "/stats/redis", system.get_redis, VIEWER, SHARED, shape(RedisInfo)),
    _row("GET", "/audit", system.list_audit, VIEWER, LISTING,
         page(shape(AuditEntry), "AuditPage"), query=m.AuditQuery),
    _row("GET", "/keys", system.list_keys, ADMIN, SHARED, whole(KeyInfo, "Keys")),
    _row("POST", "/keys", system.create_key, ADMIN, SHARED, MADE_KEY,
         body=m.NewKeyRequest, status=201),
    _row("DELETE", "/keys/{key_id}", system.revoke_key, ADMIN, SHARED, None, status=204),
    _row("GET", "/settings", system.get_settings, VIEWER, SHARED, SETTINGS),
    _row("PATCH", "/settings", system.change_settings, ADMIN, SHARED, SETTINGS,
         body=m.SettingChanges),
    _row("GET", "/limits", system.list_limits, VIEWER, SHARED, LIMITS),
    _row("PUT", "/limits/{name}", system.set_limits, ADMIN, SHARED, LIMITS, body=m.LimitChanges),
    _row("GET", "/key-limits", system.list_key_limits, VIEWER, SHARED, KEY_LIMITS),
    _row("PUT", "/key-limits/{key}", system.set_key_limit, ADMIN, SHARED, KEY_LIMITS,
         body=m.KeyLimitChanges),
    _row("DELETE", "/key-limits/{key}", system.remove_key_limit, ADMIN, SHARED, None, status=204),
)
_PUBLIC = (
    _row("GET", "/health", system.health, None, OPEN, HealthAnswer),
    _row("GET", "/ready", system.ready, None, OPEN, ReadinessAnswer, other_statuses=(503,)),
    _row("GET", "/openapi.json", openapi, None, OPEN, dict[str, Any]),
)
# fmt: on
ENDPOINTS: tuple[Endpoint, ...] = (*_JOBS, *_RUNS, *_SHARERS, *_SYSTEM, *_PUBLIC)
