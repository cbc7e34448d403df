"""One user: the share of service, waiting tasks, schedules and runs."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.charts import chart_document
from fairqueue.web.dashboard.pages.user_helpers import WINDOWS, hint, scale_of, window_of, windows
from fairqueue.web.dashboard.shell import page

ROWS = 25  # tasks, schedules and runs that are shown
STARTED = ("running", "succeeded", "failed", "timed_out", "cancelled")


def user(request: Request) -> Response:
    """The page of a user, or a page that says there is no such user."""
    user_id = request.path_params["id"]
    window = window_of(request)
    minutes, label = WINDOWS[window]
    inspector = inspector_of(request)
    try:
        info = inspector.users.get(user_id, minutes)
    except InvalidInput:
        return page(request, "user_unknown.html", status=404, user_id=user_id[:200])
    return page(
        request,
        "user.html",
        info=info,
        hint=hint(info, minutes),
        scale=scale_of([info]),
        next_wait=inspector.users.next_wait(user_id) if info.backlog or info.delayed else None,
        tasks=inspector.tasks.list(user_id=user_id, limit=ROWS),
        schedules=inspector.schedules.list(user_id=user_id, limit=ROWS),
        runs=inspector.runs.list(STARTED, user_id=user_id, limit=ROWS),
        window=window,
        window_label="hour" if window == "1h" else label,
        windows=windows(),
    )


def service(request: Request) -> Response:
    """The ended runs of a user over time, for a chart."""
    user_id = request.query_params.get("id", "")
    series = inspector_of(request).users.service(user_id, WINDOWS[window_of(request)][0])
    (counts,) = series.counts.values()
    return chart_document(series.times, [("runs", "run", counts)] if any(counts) else [])


ROUTES: list[BaseRoute] = [
    Route("/charts/users/service", service, name="user_service"),
    Route("/users/{id:path}", user, name="user"),
]
