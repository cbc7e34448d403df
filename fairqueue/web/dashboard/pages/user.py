"""One user: the share of service, waiting tasks, schedules and runs."""

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.history.records import Run
from fairqueue.inspection import Inspector
from fairqueue.inspection.views import ScheduleView
from fairqueue.models import Page
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.charts import chart_document
from fairqueue.web.dashboard.pages.sharers import NamedSharer, user_in
from fairqueue.web.dashboard.pages.user_helpers import WINDOWS, hint, scale_of, window_of, windows
from fairqueue.web.dashboard.shell import page

ROWS = 25  # tasks, schedules and runs that are shown
PAGES = 4  # that are read to find them among those of other users with the same id
STARTED = ("running", "succeeded", "failed", "timed_out", "cancelled")

Owned = TypeVar("Owned", Run, ScheduleView)


def user(request: Request) -> Response:
    """The page of a user, or a page that says there is no such user."""
    user_id, tenant = request.path_params["id"], request.query_params.get("tenant") or None
    window = window_of(request)
    minutes, label = WINDOWS[window]
    inspector = inspector_of(request)
    try:
        info = inspector.users.get(user_id, minutes, tenant=tenant)
    except InvalidInput:
        return _unknown(request, user_id, tenant)
    tenant = info.tenant
    waits = info.backlog or info.delayed
    tasks, runs = _tasks(inspector, user_id, tenant), _runs(inspector, user_id, tenant)
    usual = next(iter([*tasks, *runs]), None)  # what a task of this user is like
    like = {} if usual is None else {"name": usual.name, "pool": usual.pool}
    return page(
        request,
        "user.html",
        info=info,
        who=NamedSharer.of(info),
        hint=hint(info, minutes),
        scale=scale_of([info]),
        next_wait=inspector.users.next_wait(user_id, tenant=tenant) if waits else None,
        quote=inspector.users.quote(user_id, tenant=tenant, **like),
        like=like,
        tasks=tasks,
        schedules=_schedules(inspector, user_id, tenant),
        runs=runs,
        namesakes=_namesakes(request, user_id, tenant),
        window=window,
        window_label="hour" if window == "1h" else label,
        windows=windows(),
    )


def _unknown(request: Request, user_id: str, tenant: str | None) -> Response:
    """A page that says there is no such user, and names those with the same id."""
    return page(
        request,
        "user_unknown.html",
        status=404,
        user_id=user_id[:200],
        tenant=tenant,
        namesakes=_namesakes(request, user_id, tenant),
    )


def _namesakes(request: Request, user_id: str, tenant: str | None) -> list[str | None]:
    """The tenants of other users with this id, None for one without; for who sees all tenants."""
    if actor_of(request).tenant is not None:
        return []
    inspector = inspector_of(request)
    try:
        others: list[str | None] = [*inspector.users.tenants_of(user_id)]
        if tenant is not None and inspector.users.exists(user_id):
            others.insert(0, None)
    except InvalidInput:
        return []
    return [other for other in others if other != tenant]


# --- what belongs to a user -----------------------------------------------------------------------


def _tasks(inspector: Inspector, user_id: str, tenant: str | None) -> Page[Run]:
    return _own(
        lambda cursor: inspector.tasks.list(
            user_id=user_id, tenant=tenant, limit=ROWS, cursor=cursor
        ),
        tenant,
    )


def _runs(inspector: Inspector, user_id: str, tenant: str | None) -> Page[Run]:
    return _own(
        lambda cursor: inspector.runs.list(
            STARTED, user_id=user_id, tenant=tenant, limit=ROWS, cursor=cursor
        ),
        tenant,
    )


def _schedules(inspector: Inspector, user_id: str, tenant: str | None) -> Page[ScheduleView]:
    return _own(
        lambda cursor: inspector.schedules.list(
            user_id=user_id, tenant=tenant, limit=ROWS, cursor=cursor
        ),
        tenant,
    )


def _own(read: Callable[[str | None], Page[Owned]], tenant: str | None) -> Page[Owned]:
    """The first rows of a user. Lists without a tenant have those of all users with the id."""
    found = read(None)
    if tenant is not None:
        return found
    rows: list[Owned] = []
    for _ in range(PAGES):
        rows += [each for each in found if each.tenant is None]
        if found.cursor is None or len(rows) >= ROWS:
            break
        found = read(found.cursor)
    return Page(rows[:ROWS], found.cursor if len(rows) <= ROWS else "more")


def service(request: Request) -> Response:
    """The ended runs of a user over time, for a chart."""
    who = user_in(request)
    minutes = WINDOWS[window_of(request)][0]
    series = inspector_of(request).users.service(who.name, minutes, tenant=who.tenant)
    (counts,) = series.counts.values()
    return chart_document(series.times, [("runs", "run", counts)] if any(counts) else [])


ROUTES: list[BaseRoute] = [
    Route("/charts/users/service", service, name="user_service"),
    Route("/users/{id:path}", user, name="user"),
]
