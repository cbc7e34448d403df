"""Answer requests about runs: tasks that wait, run, have ended or have failed."""

from typing import Any

from fairqueue.errors import UnknownTask
from fairqueue.inspection.documents import document
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import ApiRequest, Nothing, Reply
from fairqueue.web.api.errors import Refused, conflict
from fairqueue.web.api.jobs import started


def list_runs(call: ApiRequest[m.RunQuery, Nothing]) -> Reply:
    """List runs that match."""
    query = m.given(call.query)
    status = query.pop("status") or None
    return Reply(content=document(call.inspector.runs.list(status, **query)))


def get_run(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Read a run with its attempts and their logs."""
    return Reply(content=document(call.inspector.runs.get(call.path["task_id"])))


def retry_run(call: ApiRequest[Nothing, m.Trigger]) -> Reply:
    """Run a failed run again."""
    task_id, payload = call.path["task_id"], call.body.payload
    runs = call.inspector.runs
    new_id = runs.retry(task_id) if payload is None else runs.edit_and_retry(task_id, payload)
    return started(call, new_id)


def cancel_run(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Cancel a run."""
    return _cancel(call.path["task_id"], call.inspector.runs.cancel(call.path["task_id"]))


def _cancel(task_id: str, is_cancelled: bool) -> Reply:
    if not is_cancelled:
        raise Refused(conflict(f"run {task_id!r} has ended: there is nothing to cancel"))
    return Reply(content={"cancelled": True})


def prune_runs(call: ApiRequest[Nothing, m.Prune]) -> Reply:
    """Forget runs that ended long ago."""
    count = call.inspector.system.prune(call.body.older_than, dry_run=call.body.dry_run)
    return _counted(call.body.dry_run, count)


def _counted(dry_run: bool, count: int) -> Reply:
    return Reply(content={"dry_run": dry_run, "count": count})


# --- failed ---------------------------------------------------------------------------------------


def list_failed(call: ApiRequest[m.FailedQuery, Nothing]) -> Reply:
    """List failed runs that match."""
    return Reply(content=document(call.inspector.failed.list(**m.given(call.query))))


def list_failure_groups(call: ApiRequest[m.PageQuery, Nothing]) -> Reply:
    """List failed runs by cause."""
    return Reply(content=document(call.inspector.failed.groups(**m.given(call.query))))


def retry_failed(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Run a failed run again."""
    return started(call, call.inspector.failed.retry(call.path["task_id"]))


def discard_failed(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Forget a failed run."""
    task_id = call.path["task_id"]
    if not call.inspector.failed.discard(task_id):
        raise UnknownTask(f"task {task_id!r} is not among the failed ones")
    return Reply()


def retry_all_failed(call: ApiRequest[Nothing, m.FailedMany]) -> Reply:
    """Run all failed runs that match again."""
    return Reply(content=document(call.inspector.failed.retry_many(**m.given(call.body))))


def discard_all_failed(call: ApiRequest[Nothing, m.FailedMany]) -> Reply:
    """Forget all failed runs that match."""
    return Reply(content=document(call.inspector.failed.discard_many(**m.given(call.body))))


# --- tasks ----------------------------------------------------------------------------------------


def list_tasks(call: ApiRequest[m.TaskQuery, Nothing]) -> Reply:
    """List tasks that wait."""
    return Reply(content=document(call.inspector.tasks.list(**m.given(call.query))))


def push_task(call: ApiRequest[Nothing, m.NewTask]) -> Reply:
    """Push a task."""
    return started(call, call.inspector.tasks.push(**m.unusual(call.body)))


def get_task(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Read a task as a run."""
    return Reply(content=document(call.inspector.tasks.get(call.path["task_id"])))


def explain_task(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Say why a task waits."""
    task_id = call.path["task_id"]
    explanation = call.inspector.tasks.explain(task_id)
    if explanation is None:
        raise UnknownTask(f"there is no task {task_id!r}")
    return Reply(content=document(explanation))


def cancel_task(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Cancel a task."""
    return _cancel(call.path["task_id"], call.inspector.tasks.cancel(call.path["task_id"]))


def reschedule_task(call: ApiRequest[Nothing, m.NewTime]) -> Reply:
    """Move the time of a task."""
    task_id = call.path["task_id"]
    times: dict[str, Any] = m.given(call.body)
    if not call.inspector.tasks.reschedule(task_id, **times):
        raise Refused(conflict(f"task {task_id!r} runs or has ended: its time cannot be moved"))
    return Reply(content=document(call.inspector.tasks.get(task_id)))
