"""The users: their fair and actual shares, and why they wait."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.inspection import Inspector
from fairqueue.models import Page
from fairqueue.stats.users import FairnessView, ShareSeries, UserInfo
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.formatting import command, options
from fairqueue.web.dashboard.pages.sharers import NamedSharer, action_routes, move
from fairqueue.web.dashboard.pages.user_helpers import (
    WINDOWS,
    evenness,
    hint,
    kind_of,
    scale_of,
    share_document,
    window_of,
    windows,
)
from fairqueue.web.dashboard.shell import has_tenants, page

PAGE = 25  # users on one page
TOP = 8  # users with a colour of their own


def users(request: Request) -> Response:
    """A page of users: by default busy ones by backlog, or all by name if nobody is busy."""
    window = window_of(request)
    order = request.query_params.get("order") or None
    found = _list(request, order or "backlog")
    is_quiet = not found and order is None and "cursor" not in request.query_params
    if is_quiet:
        found = _list(request, "name")
        order = "name" if found else None
    minutes = WINDOWS[window][0]
    tenant = _tenant(request)
    view = _fairness(inspector_of(request), tenant, minutes)
    return page(
        request,
        "users.html",
        users=found,
        order=order,
        is_quiet=is_quiet and bool(found),
        is_filtered=any(request.query_params.get(name) for name in ("prefix", "tenant")),
        tenant=tenant,
        has_tenants=has_tenants(request),
        view=view,
        evenness=evenness(view.jain),
        window=window,
        window_label=WINDOWS[window][1],
        windows=windows(),
        sharer=NamedSharer.of,
        hint=lambda info: hint(info, minutes),
        scale=scale_of(found),
        kind=kind_of(request),
        cli=command("users", "list", *_flags(request, minutes)),
    )


def _tenant(request: Request) -> str | None:
    """The tenant whose users are shown, None for those of all."""
    return actor_of(request).tenant or request.query_params.get("tenant") or None


def _fairness(inspector: Inspector, tenant: str | None, minutes: int) -> FairnessView:
    if tenant is None:
        return inspector.users.overview(minutes)
    return inspector.tenants.overview(tenant, minutes)


def _list(request: Request, order: str) -> Page[UserInfo]:
    given = request.query_params
    return inspector_of(request).users.list(
        order=order,
        prefix=given.get("prefix") or None,
        tenant=given.get("tenant") or None,
        minutes=WINDOWS[window_of(request)][0],
        limit=PAGE,
        cursor=given.get("cursor"),
    )


def _flags(request: Request, minutes: int) -> list[str]:
    given = {name: request.query_params.get(name) for name in ("order", "prefix", "tenant")}
    return options(**given, minutes=minutes)


def shares(request: Request) -> Response:
    """The ended runs over time of those with most runs and of all others, for a chart."""
    tenant, minutes = _tenant(request), WINDOWS[window_of(request)][0]
    inspector = inspector_of(request)
    series: ShareSeries
    if tenant is None:
        series = inspector.users.shares(minutes, TOP)
    else:
        series = inspector.tenants.service(tenant, minutes, TOP)
    return share_document(series, tenant, kind_of(request))


ROUTES: list[BaseRoute] = [
    Route("/users", users, name="users"),
    Route("/charts/users/shares", shares, name="user_shares"),
    *action_routes("user"),
    Route("/do/users/move", move, methods=["POST"], name="user_move"),
]
