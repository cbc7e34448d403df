"""Answer requests about runs and tasks."""

from typing import Any

from fairqueue.errors import UnknownTask
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import ApiRequest, Nothing, Reply
from fairqueue.web.api.errors import refuse
from fairqueue.web.api.jobs import started


def list_runs(call: ApiRequest[m.RunQuery, Nothing]) -> Any:
    """List the runs that match."""
    query = call.arguments
    return call.inspector.runs.list(query.pop("status") or None, **query)


def get_run(call: ApiRequest[m.TaskOwnerQuery, Nothing]) -> Any:
    """Get a run with its attempts and their logs."""
    return call.inspector.runs.get(call.id, tenant=call.query.tenant)


def retry_run(call: ApiRequest[m.TaskOwnerQuery, m.Trigger]) -> Reply:
    """Retry a failed run."""
    runs, payload, whose = call.inspector.runs, call.body.payload, call.query.tenant
    if payload is None:
        return started(call, runs.retry(call.id, tenant=whose))
    return started(call, runs.edit_and_retry(call.id, payload, tenant=whose))


def cancel_run(call: ApiRequest[m.TaskOwnerQuery, Nothing]) -> Any:
    """Cancel a run."""
    if not call.inspector.runs.cancel(call.id, tenant=call.query.tenant):
        raise refuse(409, "conflict", f"run {call.id!r} has ended and cannot be cancelled")
    return {"cancelled": True}


def prune_runs(call: ApiRequest[Nothing, m.Prune]) -> Any:
    """Delete runs that ended long ago."""
    dry_run = call.body.dry_run
    count = call.inspector.system.prune(call.body.older_than, dry_run=dry_run)
    return {"dry_run": dry_run, "count": count}


# --- failed ---------------------------------------------------------------------------------------


def list_failed(call: ApiRequest[m.FailedQuery, Nothing]) -> Any:
    """List the failed runs that match."""
    return call.inspector.failed.list(**call.arguments)


def list_failure_groups(call: ApiRequest[m.PageQuery, Nothing]) -> Any:
    """List failed runs by cause."""
    return call.inspector.failed.groups(**call.arguments)


def retry_failed(call: ApiRequest[m.TaskOwnerQuery, Nothing]) -> Reply:
    """Retry a failed run."""
    return started(call, call.inspector.failed.retry(call.id, tenant=call.query.tenant))


def discard_failed(call: ApiRequest[m.TaskOwnerQuery, Nothing]) -> None:
    """Delete a failed run."""
    if not call.inspector.failed.discard(call.id, tenant=call.query.tenant):
        raise UnknownTask(f"task {call.id!r} is not a failed run")


def retry_all_failed(call: ApiRequest[Nothing, m.FailedMany]) -> Any:
    """Retry all failed runs that match."""
    return call.inspector.failed.retry_many(**call.arguments)


def discard_all_failed(call: ApiRequest[Nothing, m.FailedMany]) -> Any:
    """Delete all failed runs that match."""
    return call.inspector.failed.discard_many(**call.arguments)


# --- tasks ----------------------------------------------------------------------------------------


def list_tasks(call: ApiRequest[m.TaskQuery, Nothing]) -> Any:
    """List waiting tasks."""
    return call.inspector.tasks.list(**call.arguments)


def push_task(call: ApiRequest[Nothing, m.NewTask]) -> Reply:
    """Push a task."""
    return started(call, call.inspector.tasks.push(**m.unusual(call.body)))


def get_task(call: ApiRequest[Any, Any]) -> Any:
    """Get a task as a run."""
    return call.inspector.tasks.get(call.id, tenant=call.query.tenant)


def explain_task(call: ApiRequest[m.TaskOwnerQuery, Nothing]) -> Any:
    """Explain why a task waits."""
    explanation = call.inspector.tasks.explain(call.id, tenant=call.query.tenant)
    if explanation is None:
        raise UnknownTask(f"there is no task {call.id!r}")
    return explanation


def cancel_task(call: ApiRequest[m.TaskOwnerQuery, Nothing]) -> Any:
    """Cancel a task."""
    return cancel_run(call)


def reschedule_task(call: ApiRequest[m.TaskOwnerQuery, m.NewTime]) -> Any:
    """Change when a waiting task is due."""
    if not call.inspector.tasks.reschedule(call.id, **call.arguments):
        detail = f"task {call.id!r} is running or has ended and cannot be rescheduled"
        raise refuse(409, "conflict", detail)
    return get_task(call)
