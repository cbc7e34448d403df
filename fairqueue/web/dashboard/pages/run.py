"""One run: how it went, step by step, what it was given, and what can be done with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidInput
from fairqueue.history.records import RunDetails
from fairqueue.history.runs import UNFINISHED
from fairqueue.inspection.runs import FAILED, WAITING
from fairqueue.web.app_state import link
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.pages.helpers import command, json_text, options, paths, segment
from fairqueue.web.dashboard.pages.run_helpers import short, took, waited
from fairqueue.web.dashboard.shell import Done, Form, action, page

RUN_TYPES = {
    "queued": "pushed to the queue",
    "scheduled": "fired by its schedule",
    "manual": "its schedule was triggered",
    "retry": "a failed run was run again",
}
MOST_COMMAND = 500  # characters of a command line that is worth showing


# --- the page -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A moment in the life of a run; `after`: how long after the one before."""

    name: str
    at: datetime | None
    tone: str
    after: timedelta | None = None


def run(request: Request) -> Response:
    """The page of a run. Raises UnknownTask."""
    task_id = request.path_params["id"]
    inspector = inspector_of(request)
    details = inspector.runs.get(task_id)
    it = details.run
    return page(
        request,
        "run.html",
        it=it,
        attempts=details.attempts,
        steps=steps(details),
        first_wait=first_wait(details),
        payload=None if details.task is None else json_text(details.task.payload, 2),
        policy=None if details.task is None else details.task.policy,
        result=None if it.result is None else json_text(it.result, 2),
        origin=RUN_TYPES.get(it.run_type, it.run_type),
        explanation=inspector.runs.explain(task_id) if it.status in WAITING else None,
        lost=inspector.runs.lost([it]).get(task_id),
        is_failed=it.status in FAILED,
        is_unfinished=it.status in UNFINISHED,
        edit_command=_edit_command(details),
        at=from_ms,
        short=short,
        waited=waited,
        took=took,
        json_text=json_text,
        segment=segment,
        command=command,
        **paths(request),
    )


def first_wait(details: RunDetails) -> float | None:
    """Of a run with several attempts: for how many seconds it was queued before the first.

    None where the first is not kept any more.
    """
    attempts = details.attempts
    if details.run.attempts < 2 or not attempts or attempts[0].number != 1:
        return None
    return (attempts[0].started_at - details.run.pushed_at).total_seconds()


def steps(details: RunDetails) -> list[Step]:
    """What happened when: due, queued, started, ended, each with its distance to the one before.

    What is still to come has no moment.
    """
    found: list[Step] = []
    for name, at, tone in _moments(details):
        before = found[-1].at if found else None
        after = None if at is None or before is None else at - before
        found.append(Step(name=name, at=at, tone=tone, after=after))
    return found


def _moments(details: RunDetails) -> Iterator[tuple[str, datetime | None, str]]:
    run, task = details.run, details.task
    planned = None if task is None else task.scheduled_for
    if planned is not None:
        yield "Due", planned, "idle"
    yield ("Fired" if run.run_type == "scheduled" else "Queued"), run.pushed_at, "idle"
    is_first = run.attempts <= 1 and run.status != "retrying"  # else it is due for another attempt
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
        yield run.status.replace("_", " ").capitalize(), run.ended_at, _tone(run.status)


def _tone(status: str) -> str:
    return {"succeeded": "ok", "cancelled": "idle"}.get(status, "bad")


def _edit_command(details: RunDetails) -> str | None:
    if details.task is None:
        return None
    payload = json_text(details.task.payload)
    told = command("runs", "retry", *options(payload=payload), ids=[details.run.task_id])
    return told if len(told) < MOST_COMMAND else None


# --- actions --------------------------------------------------------------------------------------


@action
def retry(request: Request, form: Form) -> Done:
    """Run it again as it was, and go to the new run."""
    new_id = inspector_of(request).runs.retry(form.raw("id"))
    return Done(text=f"It runs again as {short(new_id)}.", to=_path(request, new_id))


@action
def edit(request: Request, form: Form) -> Done:
    """Run it again with other arguments, and go to the new run."""
    payload = form.json("payload")
    if not isinstance(payload, dict):
        raise InvalidInput('payload is no JSON object: such as {"to": "alice"}')
    new_id = inspector_of(request).runs.edit_and_retry(form.raw("id"), payload)
    return Done(text=f"It runs again as {short(new_id)}.", to=_path(request, new_id))


@action
def cancel(request: Request, form: Form) -> Done:
    """See to it that it does not run any more."""
    task_id = form.raw("id")
    cancelled = inspector_of(request).runs.cancel(task_id)
    text = "Cancelled; if it runs, its worker is told to stop it."
    if not cancelled:
        text = "It had ended before: nothing was changed."
    level = "success" if cancelled else "warning"
    return Done(text=text, level=level, to=_path(request, task_id))


@action
def discard(request: Request, form: Form) -> Done:
    """Forget it for good."""
    task_id = form.raw("id")
    discarded = inspector_of(request).failed.discard(task_id)
    text = f"Run {short(task_id)} is discarded."
    if not discarded:
        text = f"Run {short(task_id)} is not among the failed ones."
    return Done(text=text, level="success" if discarded else "warning", to=link(request, "failed"))


def _path(request: Request, task_id: str) -> str:
    return f"{link(request, 'runs')}/{segment(task_id)}"


ROUTES: list[BaseRoute] = [
    Route("/runs/{id:path}", run, name="run"),
    Route("/do/runs/retry", retry, methods=["POST"], name="run_retry"),
    Route("/do/runs/edit", edit, methods=["POST"], name="run_edit"),
    Route("/do/runs/cancel", cancel, methods=["POST"], name="run_cancel"),
    Route("/do/runs/discard", discard, methods=["POST"], name="run_discard"),
]
