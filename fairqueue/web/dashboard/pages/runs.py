"""The runs: what waits, runs and has ended, newest first."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.history.records import Run
from fairqueue.history.runs import STATUSES, UNFINISHED
from fairqueue.models import Page
from fairqueue.web.app_state import link
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.pages.helpers import command, now_of, paths, segment
from fairqueue.web.dashboard.pages.run_helpers import (
    LABELS,
    filters_of,
    flags,
    short,
    told_filters,
    took,
    waited,
    window_of,
)
from fairqueue.web.dashboard.shell import page, partial
from fairqueue.web.problems import problem_of

PAGE = 25  # runs on one page

# The counters of the queue that grow with a run of a status.
COUNTERS = {
    "pending": "pushed",
    "retrying": "retried",
    "running": "claimed",
    "succeeded": "finished",
    "failed": "buried",
    "timed_out": "timed_out",
    "cancelled": "cancelled",
}
LABELS_OF = {"user_id": "user", "schedule_id": "schedule", "name": "task", "last": "the last"}


def runs(request: Request) -> Response:
    """A page of the runs that match; an id leads to its run."""
    given = request.query_params
    run_id = given.get("id", "").strip()
    # One that is none is left to the library to name.
    statuses = [each for each in given.getlist("status") if each]
    problem, found, window = None, Page[Run]([], None), ""
    try:
        if run_id:
            return _to_run(request, run_id)
        now = now_of(request)
        window = window_of(given, now)[2]
        found = inspector_of(request).runs.list(
            statuses or None, limit=PAGE, cursor=given.get("cursor"), **filters_of(given, now)
        )
    except InvalidInput as error:
        problem = problem_of(error)
    told = told_filters(given)
    return page(
        request,
        "runs.html",
        status=200 if problem is None else problem.status,
        problem=problem,
        statuses=STATUSES,
        chosen=statuses,
        windows=LABELS,
        window=window,
        is_filtered=bool(told or statuses or run_id),
        narrows=bool(told),
        filtered_by=_filtered_by(told, statuses),
        counters=_counters(statuses),
        command=command("runs", "list", *flags(given, statuses)),
        **_rows(request, found),
    )


def rows(request: Request) -> Response:
    """Some of the rows of a list, as they are now: those that the address names."""
    ids = request.query_params.getlist("id")[:PAGE]
    found = inspector_of(request).runs.find(ids)
    return partial(request, "runs_rows.html", **_rows(request, found))


def _rows(request: Request, found: Sequence[Run]) -> dict[str, Any]:
    """What run_rows.html needs."""
    return {
        "runs": found,
        "lost": inspector_of(request).runs.lost(found),
        "unfinished": UNFINISHED,
        "sees_tenants": actor_of(request).tenant is None,
        "short": short,
        "waited": waited,
        "took": took,
        "segment": segment,
        **paths(request),
    }


def _filtered_by(told: dict[str, str], statuses: list[str]) -> list[str]:
    """What the list is filtered by, in words."""
    found = [f"{LABELS_OF.get(name, name)} {value}" for name, value in told.items()]
    chosen = [each.replace("_", " ") for each in statuses]
    return [*found, *([f"status {' or '.join(chosen)}"] if chosen else [])]


def _counters(statuses: list[str]) -> list[str]:
    """The counters that say how many runs are new; timed out ones are among the buried."""
    found = {COUNTERS[each] for each in statuses if each in COUNTERS} or {"pushed"}
    return sorted(found - {"timed_out"} if "buried" in found else found)


def _to_run(request: Request, run_id: str) -> Response:
    """The way to a run. Raises UnknownTask if there is none that this reader may see."""
    inspector_of(request).runs.get(run_id)
    return RedirectResponse(f"{link(request, 'runs')}/{segment(run_id)}", 303)


ROUTES: list[BaseRoute] = [
    Route("/runs", runs, name="runs"),
    Route("/do/runs/rows", rows, name="runs_rows"),
]
