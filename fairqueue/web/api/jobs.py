"""Answer requests about jobs: the schedules of a queue."""

from typing import Any
from urllib.parse import quote

from fairqueue.errors import InvalidSchedule
from fairqueue.inspection.documents import document
from fairqueue.inspection.views import ScheduleView
from fairqueue.web.api import models as m
from fairqueue.web.api.endpoint import ApiRequest, Nothing, Reply


def list_jobs(call: ApiRequest[m.JobQuery, Nothing]) -> Reply:
    """List jobs that match."""
    return Reply(content=document(call.inspector.schedules.list(**m.given(call.query))))


def create_job(call: ApiRequest[Nothing, Any]) -> Reply:
    """Make a job."""
    schedule_id = call.inspector.schedules.add(**m.unusual(call.body))
    return _made(call, schedule_id)


def _made(call: ApiRequest[Any, Any], schedule_id: str) -> Reply:
    view = call.inspector.schedules.get(schedule_id)
    location = f"{call.root}/scheduler/jobs/{quote(schedule_id, safe='')}"
    return Reply(content=document(view), headers={"Location": location})


def _job(view: ScheduleView) -> Reply:
    return Reply(content=document(view))


def get_job(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Read a job."""
    return _job(call.inspector.schedules.get(call.path["schedule_id"]))


def replace_job(call: ApiRequest[Nothing, Any]) -> Reply:
    """Replace the definition of a job."""
    return _update(call, m.given(call.body))


def change_job(call: ApiRequest[Nothing, Any]) -> Reply:
    """Change some fields of a job."""
    return _update(call, m.given(call.body))


def _update(call: ApiRequest[Any, Any], changes: dict[str, Any]) -> Reply:
    if not changes:
        raise InvalidSchedule("a change needs at least one field; the body has none")
    schedules = call.inspector.schedules
    return _job(schedules.update(call.path["schedule_id"], changes, if_match=call.if_match))


def delete_job(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Delete a job."""
    call.inspector.schedules.remove(call.path["schedule_id"], if_match=call.if_match)
    return Reply()


def toggle_job(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """Pause a job that is active, resume one that is not."""
    schedule_id = call.path["schedule_id"]
    call.inspector.schedules.toggle(schedule_id)
    return _job(call.inspector.schedules.get(schedule_id))


def pause_job(call: ApiRequest[Nothing, m.Pause]) -> Reply:
    """Pause a job, until it is resumed or until a moment."""
    schedule_id = call.path["schedule_id"]
    call.inspector.schedules.pause(schedule_id, note=call.body.note, until=call.body.until)
    return _job(call.inspector.schedules.get(schedule_id))


def resume_job(call: ApiRequest[Nothing, m.Resume]) -> Reply:
    """Resume a job from now on."""
    schedule_id = call.path["schedule_id"]
    call.inspector.schedules.resume(schedule_id, note=call.body.note)
    return _job(call.inspector.schedules.get(schedule_id))


def run_job(call: ApiRequest[Nothing, m.Trigger]) -> Reply:
    """Run a job now."""
    schedules = call.inspector.schedules
    return started(call, schedules.trigger(call.path["schedule_id"], payload=call.body.payload))


def started(call: ApiRequest[Any, Any], task_id: str) -> Reply:
    """The answer that names a new run."""
    location = f"{call.root}/scheduler/runs/{quote(task_id, safe='')}"
    return Reply(content={"task_id": task_id}, headers={"Location": location})


def copy_job(call: ApiRequest[Nothing, Any]) -> Reply:
    """Make a job like another one."""
    changes = m.given(call.body)
    new_id = changes.pop("schedule_id", None)
    copied = call.inspector.schedules.copy(call.path["schedule_id"], new_id, **changes)
    return _made(call, copied)


def backfill_job(call: ApiRequest[Nothing, m.BackfillRange]) -> Reply:
    """Make runs for past moments that had none."""
    schedules = call.inspector.schedules
    return Reply(
        content=document(schedules.backfill(call.path["schedule_id"], **m.given(call.body)))
    )


def list_job_runs(call: ApiRequest[m.JobRunQuery, Nothing]) -> Reply:
    """List the runs of a job."""
    # One that is not there has no runs to tell.
    schedule_id = call.inspector.schedules.get(call.path["schedule_id"]).schedule.schedule_id
    query = m.given(call.query)
    status = query.pop("status") or None
    return Reply(
        content=document(call.inspector.runs.list(status, schedule_id=schedule_id, **query))
    )


def list_job_moments(call: ApiRequest[m.MomentQuery, Nothing]) -> Reply:
    """List the moments of a job, and what became of each."""
    schedules = call.inspector.schedules
    page = schedules.moments(call.path["schedule_id"], **m.given(call.query))
    return Reply(content=document(page))


def list_job_changes(call: ApiRequest[m.ChangeQuery, Nothing]) -> Reply:
    """List who changed what of a job."""
    schedules = call.inspector.schedules
    return Reply(
        content=document(schedules.changes(call.path["schedule_id"], **m.given(call.query)))
    )


def list_job_logs(call: ApiRequest[m.LogQuery, Nothing]) -> Reply:
    """List the last lines that the runs of a job have logged."""
    lines = call.inspector.schedules.logs(call.path["schedule_id"], limit=call.query.limit)
    return Reply(content={"items": document(lines)})


def get_job_chart(call: ApiRequest[m.ChartQuery, Nothing]) -> Reply:
    """Count how the runs of a job ended, day by day."""
    schedules = call.inspector.schedules
    days = schedules.history_chart(call.path["schedule_id"], days=call.query.days)
    return Reply(content={"items": document(days)})


def change_jobs(call: ApiRequest[Nothing, m.BulkChange]) -> Reply:
    """Pause, resume, run, update or remove all jobs that match."""
    body = m.given(call.body)
    changes: dict[str, Any] = {} if call.body.changes is None else m.given(call.body.changes)
    body |= {"changes": changes}
    return Reply(content=document(call.inspector.schedules.bulk(body.pop("action"), **body)))


def export_jobs(call: ApiRequest[m.JobFilter, Nothing]) -> Reply:
    """Export jobs as documents, with their secrets."""
    found = call.inspector.schedules.export(**m.given(call.query))
    return Reply(content={"documents": document(found)})


def import_jobs(call: ApiRequest[Nothing, m.JobDocuments]) -> Reply:
    """Make the jobs as documents say."""
    diff = call.inspector.schedules.import_(
        call.body.documents, prune=call.body.prune, dry_run=call.body.dry_run
    )
    return Reply(content=document(diff))


def list_upcoming(call: ApiRequest[m.UpcomingQuery, Nothing]) -> Reply:
    """List the jobs that run next."""
    found = call.inspector.schedules.upcoming(limit=call.query.limit)
    return Reply(content={"items": document(found)})


def list_problems(call: ApiRequest[Nothing, Nothing]) -> Reply:
    """List the jobs that had to be set aside, and why."""
    return Reply(content={"items": document(call.inspector.schedules.problems())})


def preview(call: ApiRequest[m.Rule, Nothing]) -> Reply:
    """Say what a rule means, and when it runs next."""
    return _preview(call, call.query)


def preview_body(call: ApiRequest[Nothing, m.Rule]) -> Reply:
    """Say what a rule means, and when it runs next."""
    return _preview(call, call.body)


def _preview(call: ApiRequest[Any, Any], rule: m.Rule) -> Reply:
    return Reply(content=document(call.inspector.schedules.preview(**m.given(rule))))
