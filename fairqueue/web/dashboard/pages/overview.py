"""The overview: the state of the queue, what needs attention, what fires next."""

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, NoMatchFound, Route

from fairqueue.inspection.views import Attention
from fairqueue.web.app_state import app_state, link
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.charts import series_document
from fairqueue.web.dashboard.shell import page

WINDOWS = ("15m", "1h", "24h")
DEFAULT = "15m"  # in a longer window, the first minutes of a queue are a dot
FIRES = 10  # upcoming schedules that are listed

# The lines of each chart (name in the samples, label, tone) and their unit.
CHARTS = {
    "throughput": (
        [
            ("finished", "succeeded", "ok"),
            ("failed", "failed", "bad"),
            ("timed_out", "timed out", "warn"),
            ("cancelled", "cancelled", "idle"),
            ("expired", "expired", "6"),
        ],
        "/s",
    ),
    "wait": ([("wait_p95", "p95", "run"), ("wait_p50", "median", "ok")], "s"),
    "backlog": (
        [
            ("ready", "ready", "run"),
            ("running", "running", "ok"),
            ("delayed", "delayed", "idle"),
            ("dead", "dead letters", "bad"),
        ],
        "",
    ),
}
RARE = {"expired"}  # lines that are left out while they are zero


def overview(request: Request) -> Response:
    """The overview page."""
    inspector = inspector_of(request)
    tenant = actor_of(request).tenant
    # Open pages refresh themselves; fifty of them must not cost more than one.
    view, attention, upcoming, pools = app_state(request).cache.get(
        ("overview", tenant),
        lambda: (
            inspector.system.overview(),
            inspector.system.attention(),
            inspector.schedules.upcoming(FIRES),
            inspector.system.pools() if tenant is None else [],
        ),
    )
    return page(
        request,
        "overview.html",
        window=_window(request),
        view=view,
        attention=[(each, _path_of(request, each)) for each in attention],
        upcoming=upcoming,
        pools=pools if len(pools) > 1 else [],
        has_series=tenant is None,
    )


def series(request: Request) -> Response:
    """The data of a chart."""
    kind = request.path_params["kind"]
    if kind not in CHARTS:
        raise HTTPException(404)
    lines, unit = CHARTS[kind]
    window, system = _window(request), inspector_of(request).system
    key = ("series", window, actor_of(request).tenant)
    found = app_state(request).cache.get(key, lambda: system.series(window))
    shown = [line for line in lines if line[0] not in RARE or any(found.values.get(line[0], ()))]
    return series_document(found, shown, unit)


def _path_of(request: Request, attention: Attention) -> str | None:
    """The page that shows more about it."""
    pages = {"schedule": "schedules", "user": "users", "partition": "partitions"}
    pages |= dict.fromkeys(("leader", "redis", "pool"), "workers")
    one = attention.kind in ("schedule", "user") and bool(attention.target)
    try:
        if attention.kind == "expired":
            return f"{link(request, 'runs')}?status=expired"
        if one:
            return link(request, attention.kind, id=attention.target)
        if attention.kind == "expired":
            return f"{link(request, 'runs')}?status=expired"
        return link(request, pages.get(attention.kind, attention.kind))
    except NoMatchFound:
        return None


def _window(request: Request) -> str:
    found = request.query_params.get("window", DEFAULT)
    return found if found in WINDOWS else DEFAULT


ROUTES: list[BaseRoute] = [
    Route("/", overview, name="overview"),
    Route("/charts/{kind}", series, name="series"),
]
