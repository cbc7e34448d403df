"""Answer requests about jobs: the schedules of a queue."""

from typing import Any
from urllib.parse import quote

from fairqueue.errors import InvalidSchedule
from fairqueue.inspection.documents import document
from fairqueue.inspection.views import ScheduleView
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import ApiRequest, Nothing, Reply


def list_jobs(call: ApiRequest[m.JobQuery, Nothing]) -> Any:
    """List the jobs that match."""
    return call.inspector.schedules.list(**call.arguments)


def create_job(call: ApiRequest[Nothing, Any]) -> Reply:
    """Create a job."""
    return _created(call, call.inspector.schedules.add(**m.unusual(call.body)))


def _created(call: ApiRequest[Any, Any], schedule_id: str) -> Reply:
    view = call.inspector.schedules.get(schedule_id)
    location = f"{call.root}/scheduler/jobs/{quote(schedule_id, safe='')}"
    return Reply(content=document(view), headers={"Location": location})


def get_job(call: ApiRequest[Any, Any]) -> ScheduleView:
    """Get a job."""
    return call.inspector.schedules.get(call.id)


def replace_job(call: ApiRequest[Nothing, Any]) -> ScheduleView:
    """Replace a job."""
    return change_job(call)


def change_job(call: ApiRequest[Nothing, Any]) -> ScheduleView:
    """Change some fields of a job."""
    if not call.arguments:
        raise InvalidSchedule("the body must have at least one field to change")
    return call.inspector.schedules.update(call.id, call.arguments, if_match=call.if_match)


def delete_job(call: ApiRequest[Nothing, Nothing]) -> None:
    """Delete a job."""
    call.inspector.schedules.remove(call.id, if_match=call.if_match)


def toggle_job(call: ApiRequest[Nothing, Nothing]) -> ScheduleView:
    """Pause an active job, or resume an inactive one."""
    call.inspector.schedules.toggle(call.id)
    return get_job(call)


def pause_job(call: ApiRequest[Nothing, m.Pause]) -> ScheduleView:
    """Pause a job until it is resumed, or until a time."""
    call.inspector.schedules.pause(call.id, **call.arguments)
    return get_job(call)


def resume_job(call: ApiRequest[Nothing, m.Resume]) -> ScheduleView:
    """Resume a job from now on."""
    call.inspector.schedules.resume(call.id, **call.arguments)
    return get_job(call)


def run_job(call: ApiRequest[Nothing, m.Trigger]) -> Reply:
    """Run a job now."""
    return started(call, call.inspector.schedules.trigger(call.id, **call.arguments))


def started(call: ApiRequest[Any, Any], task_id: str) -> Reply:
    """The response with the id of a new run."""
    location = f"{call.root}/scheduler/runs/{quote(task_id, safe='')}"
    return Reply(content={"task_id": task_id}, headers={"Location": location})


def copy_job(call: ApiRequest[Nothing, Any]) -> Reply:
    """Copy a job, with changes."""
    changes = call.arguments
    new_id = changes.pop("schedule_id", None)
    return _created(call, call.inspector.schedules.copy(call.id, new_id, **changes))


def backfill_job(call: ApiRequest[Nothing, m.BackfillRange]) -> Any:
    """Create runs for past fire times that did not run."""
    return call.inspector.schedules.backfill(call.id, **call.arguments)


def list_job_runs(call: ApiRequest[m.JobRunQuery, Nothing]) -> Any:
    """List the runs of a job."""
    query = call.arguments
    status = query.pop("status") or None
    schedule_id = get_job(call).schedule.schedule_id  # 404 for an unknown job
    return call.inspector.runs.list(status, schedule_id=schedule_id, **query)


def list_job_moments(call: ApiRequest[m.MomentQuery, Nothing]) -> Any:
    """List the fire times of a job, and the outcome of each."""
    return call.inspector.schedules.moments(call.id, **call.arguments)


def list_job_changes(call: ApiRequest[m.ChangeQuery, Nothing]) -> Any:
    """List the changes of a job."""
    return call.inspector.schedules.changes(call.id, **call.arguments)


def list_job_logs(call: ApiRequest[m.LogQuery, Nothing]) -> Any:
    """List the last log lines of the runs of a job."""
    return call.inspector.schedules.logs(call.id, **call.arguments)


def get_job_chart(call: ApiRequest[m.ChartQuery, Nothing]) -> Any:
    """Count the ended runs of a job by day and outcome."""
    return call.inspector.schedules.history_chart(call.id, **call.arguments)


def change_jobs(call: ApiRequest[Nothing, m.BulkChange]) -> Any:
    """Pause, resume, run, update or remove all jobs that match."""
    body = call.arguments
    body["changes"] = {} if call.body.changes is None else m.given(call.body.changes)
    return call.inspector.schedules.bulk(body.pop("action"), **body)


def export_jobs(call: ApiRequest[m.JobFilter, Nothing]) -> Any:
    """Export jobs as documents, with their secrets."""
    return {"documents": call.inspector.schedules.export(**call.arguments)}


def import_jobs(call: ApiRequest[Nothing, m.JobDocuments]) -> Any:
    """Create and change jobs to match documents."""
    return call.inspector.schedules.import_(**call.arguments)


def list_upcoming(call: ApiRequest[m.UpcomingQuery, Nothing]) -> Any:
    """List the jobs that run next."""
    return call.inspector.schedules.upcoming(**call.arguments)


def list_problems(call: ApiRequest[Nothing, Nothing]) -> Any:
    """List the jobs that cannot run, with the reasons."""
    return call.inspector.schedules.problems()


def preview(call: ApiRequest[m.Rule, Nothing]) -> Any:
    """Describe a rule and its next runs."""
    return call.inspector.schedules.preview(**call.arguments)


def preview_body(call: ApiRequest[Nothing, m.Rule]) -> Any:
    """Describe a rule and its next runs."""
    return call.inspector.schedules.preview(**call.arguments)
