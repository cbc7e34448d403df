"""The runs: what waits, runs and has ended, newest first."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.history import STATUSES, UNFINISHED, Run
from fairqueue.models import Page
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.pages.parts import command, now_of, paths, segment
from fairqueue.web.dashboard.pages.run_parts import (
    LABELS,
    filters_of,
    flags,
    short,
    told_filters,
    took,
    waited,
    window_of,
)
from fairqueue.web.dashboard.shell import page
from fairqueue.web.problems import problem_of
from fairqueue.web.site import link

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
ENDINGS = {"finished", "buried", "cancelled"}


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
        runs=found,
        problem=problem,
        statuses=STATUSES,
        chosen=statuses,
        windows=LABELS,
        window=window,
        is_filtered=bool(told or statuses or run_id),
        narrows=bool(told),
        counters=_counters(statuses),
        unfinished=UNFINISHED,
        sees_tenants=actor_of(request).tenant is None,
        short=short,
        waited=waited,
        took=took,
        segment=segment,
        command=command("runs", "list", *flags(given, statuses)),
        **paths(request),
    )


def _counters(statuses: list[str]) -> list[str]:
    """The counters that say how many runs are new; timed out ones are among the buried."""
    found = {COUNTERS[each] for each in statuses if each in COUNTERS} or ENDINGS
    return sorted(found - {"timed_out"} if "buried" in found else found)


def _to_run(request: Request, run_id: str) -> Response:
    """The way to a run. Raises UnknownTask if there is none that this reader may see."""
    inspector_of(request).runs.get(run_id)
    return RedirectResponse(f"{link(request, 'runs')}/{segment(run_id)}", 303)


ROUTES: list[BaseRoute] = [Route("/runs", runs, name="runs")]
