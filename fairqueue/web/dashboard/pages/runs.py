"""The runs: waiting, running and ended, newest first."""

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.history.filters import STATUSES, UNFINISHED
from fairqueue.history.records import Run
from fairqueue.models import Page
from fairqueue.outcomes import OUTCOMES
from fairqueue.web.app_state import link
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.formatting import command, segment
from fairqueue.web.dashboard.pages.helpers import now_of
from fairqueue.web.dashboard.pages.run_helpers import (
    LABELS,
    filters_of,
    flags,
    given_filters,
    window_of,
)
from fairqueue.web.dashboard.shell import page, partial
from fairqueue.web.problems import problem_of

PAGE = 25  # runs on one page

# The counters of the queue that grow with the runs of a status.
COUNTERS = {
    "pending": "pushed",
    "retrying": "retried",
    "running": "claimed",
    **{outcome.status: outcome.counter for outcome in OUTCOMES},
}
LABELS_OF = {"user_id": "user", "schedule_id": "schedule", "name": "task", "last": "the last"}


def runs(request: Request) -> Response:
    """A page of the runs that match; an id redirects to its run."""
    given = request.query_params
    run_id = given.get("id", "").strip()
    # The library reports a status that does not exist.
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
    filters = given_filters(given)
    return page(
        request,
        "runs.html",
        problem=problem,
        statuses=STATUSES,
        chosen=statuses,
        windows=LABELS,
        window=window,
        is_filtered=bool(filters or statuses or run_id),
        narrows=bool(filters),
        filtered_by=_filtered_by(filters, statuses),
        counters=_counters(statuses),
        cli=command("runs", "list", *flags(given, statuses)),
        **_rows(request, found),
    )


def rows(request: Request) -> Response:
    """Rows of a list, brought up to date: those whose ids are in the query."""
    ids = request.query_params.getlist("id")[:PAGE]
    found = inspector_of(request).runs.find(ids)
    return partial(request, "runs_rows.html", **_rows(request, found))


def _rows(request: Request, found: Sequence[Run]) -> dict[str, Any]:
    """The context of run_rows.html."""
    lost = inspector_of(request).runs.lost(found)
    return {"runs": found, "lost": lost, "unfinished": UNFINISHED}


def _filtered_by(filters: dict[str, str], statuses: list[str]) -> list[str]:
    """The filters in words."""
    found = [f"{LABELS_OF.get(name, name)} {value}" for name, value in filters.items()]
    chosen = [each.replace("_", " ") for each in statuses]
    return [*found, *([f"status {' or '.join(chosen)}"] if chosen else [])]


def _counters(statuses: list[str]) -> list[str]:
    """The counters that count new runs; buried runs include those that timed out."""
    found = {COUNTERS[each] for each in statuses if each in COUNTERS} or {"pushed"}
    return sorted(found - {"timed_out"} if "buried" in found else found)


def _to_run(request: Request, run_id: str) -> Response:
    """Redirect to a run. Raises UnknownTask if the actor cannot see it."""
    inspector_of(request).runs.get(run_id)
    return RedirectResponse(f"{link(request, 'runs')}/{segment(run_id)}", 303)


ROUTES: list[BaseRoute] = [
    Route("/runs", runs, name="runs"),
    Route("/do/runs/rows", rows, name="runs_rows"),
]
