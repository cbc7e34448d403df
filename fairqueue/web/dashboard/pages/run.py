"""One run: its timeline, attempts and arguments, and actions on it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidInput
from fairqueue.history.filters import UNFINISHED
from fairqueue.history.records import RunDetails
from fairqueue.inspection.runs import FAILED, WAITING
from fairqueue.web.app_state import link
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.formatting import command, json_text, options, short
from fairqueue.web.dashboard.forms import Done, Form, action
from fairqueue.web.dashboard.shell import has_partitions, page, run_path

RUN_TYPES = {
    "queued": "a push to the queue",
    "scheduled": "its schedule",
    "manual": "a trigger of its schedule",
    "retry": "a retry",
}
EXAMPLE = '{"to": "alice"}'
MAX_COMMAND = 500  # characters of a command line that is worth showing


# --- the page -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineStep:
    """A step of a run; `after` is the time since the step before. `at` is None in the future."""

    name: str
    at: datetime | None
    tone: str
    after: timedelta | None = None


def run(request: Request) -> Response:
    """The page of a run. Raises UnknownTask."""
    task_id = request.path_params["id"]
    inspector = inspector_of(request)
    details = inspector.runs.get(task_id, tenant=request.query_params.get("tenant") or None)
    it, task = details.run, details.task
    whose = options(tenant=it.tenant) if has_partitions(request) else []
    return page(
        request,
        "run.html",
        it=it,
        attempts=details.attempts,
        steps=steps(details),
        first_wait=first_wait(details),
        payload=None if task is None else json_text(task.payload, 2),
        policy=None if task is None else task.policy,
        result=None if it.result is None else json_text(it.result, 2),
        origin=RUN_TYPES.get(it.run_type, it.run_type),
        explanation=(
            inspector.runs.explain(task_id, tenant=it.tenant) if it.status in WAITING else None
        ),
        lost=inspector.runs.lost([it]).get(task_id),
        is_failed=it.status in FAILED,
        is_unfinished=it.status in UNFINISHED,
        edit_command=_edit_command(details, whose),
        whose=whose,
        at=from_ms,
    )


def first_wait(details: RunDetails) -> float | None:
    """How many seconds a run with several attempts waited for the first.

    None for a single attempt, or if the record of the first is gone.
    """
    attempts = details.attempts
    if details.run.attempts < 2 or not attempts or attempts[0].number != 1:
        return None
    return (attempts[0].started_at - details.run.pushed_at).total_seconds()


def steps(details: RunDetails) -> list[TimelineStep]:
    """The timeline: due, queued, started, ended, each with the time since the step before."""
    found: list[TimelineStep] = []
    for name, at, tone in _steps(details):
        before = found[-1].at if found else None
        after = None if at is None or before is None else at - before
        found.append(TimelineStep(name=name, at=at, tone=tone, after=after))
    return found


def _steps(details: RunDetails) -> Iterator[tuple[str, datetime | None, str]]:
    run, task = details.run, details.task
    planned = None if task is None else task.scheduled_for
    if planned is not None:
        yield "Due", planned, "idle"
    yield ("Fired" if run.run_type == "scheduled" else "Queued"), run.pushed_at, "idle"
    is_first = run.attempts <= 1 and run.status != "retrying"  # else it is due for a retry
    if run.due_at > run.pushed_at and is_first and run.due_at != planned:
        yield "Ready", run.due_at, "idle"
    for attempt in details.attempts:
        again = "" if len(details.attempts) == 1 else f", attempt {attempt.number}"
        yield f"Started{again}", attempt.started_at, "run"
    if run.status in WAITING:
        yield "Starts" if not details.attempts else "Starts again", None, "idle"
    elif run.ended_at is None:
        yield "Ends", None, "idle"
    else:
        tone = {"succeeded": "ok", "cancelled": "idle", "expired": "warn"}.get(run.status, "bad")
        yield run.status.replace("_", " ").capitalize(), run.ended_at, tone


def _edit_command(details: RunDetails, whose: list[str]) -> str | None:
    if details.task is None:
        return None
    payload = options(payload=json_text(details.task.payload))
    text = command("runs", "retry", *payload, *whose, ids=[details.run.task_id])
    return text if len(text) < MAX_COMMAND else None


# --- actions --------------------------------------------------------------------------------------


@action
def retry(request: Request, form: Form) -> Done:
    """Run a failed run again, and go to the new run."""
    runs, tenant = inspector_of(request).runs, form.text("tenant")
    return _retried(request, runs.retry(form.raw("id"), tenant=tenant), tenant)


@action
def edit(request: Request, form: Form) -> Done:
    """Run a failed run again with other arguments, and go to the new run."""
    payload = form.payload(EXAMPLE)
    if payload is None:
        raise InvalidInput(f"payload must be a JSON object such as {EXAMPLE}")
    runs, tenant = inspector_of(request).runs, form.text("tenant")
    new_id = runs.edit_and_retry(form.raw("id"), payload, tenant=tenant)
    return _retried(request, new_id, tenant)


def _retried(request: Request, new_id: str, tenant: str | None) -> Done:
    return Done(text=f"Retried as run {short(new_id)}.", to=run_path(request, new_id, tenant))


@action
def cancel(request: Request, form: Form) -> Done:
    """Cancel a run."""
    task_id, tenant = form.raw("id"), form.text("tenant")
    if inspector_of(request).runs.cancel(task_id, tenant=tenant):
        text, level = "Cancelled. If it is running, its worker stops it.", "success"
    else:
        text, level = "It had already ended: nothing was changed.", "warning"
    return Done(text=text, level=level, to=run_path(request, task_id, tenant))


@action
def discard(request: Request, form: Form) -> Done:
    """Delete a failed run."""
    task_id = form.raw("id")
    if inspector_of(request).failed.discard(task_id, tenant=form.text("tenant")):
        text, level = f"Run {short(task_id)} was deleted.", "success"
    else:
        text, level = f"Run {short(task_id)} is not a failed run.", "warning"
    return Done(text=text, level=level, to=link(request, "failed"))


ROUTES: list[BaseRoute] = [
    Route("/runs/{id:path}", run, name="run"),
    Route("/do/runs/retry", retry, methods=["POST"], name="run_retry"),
    Route("/do/runs/edit", edit, methods=["POST"], name="run_edit"),
    Route("/do/runs/cancel", cancel, methods=["POST"], name="run_cancel"),
    Route("/do/runs/discard", discard, methods=["POST"], name="run_discard"),
]
