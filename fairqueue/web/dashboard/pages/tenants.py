"""The tenants, and one tenant: shares, users and limits."""

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput
from fairqueue.stats.users import TenantInfo
from fairqueue.web.app_state import link
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.formatting import command, options
from fairqueue.web.dashboard.pages.sharers import NamedSharer, action_routes
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
from fairqueue.web.dashboard.shell import page

PAGE = 25  # tenants on one page
ROWS = 25  # users on the page of a tenant
TOP = 8  # users with a colour of their own


def tenants(request: Request) -> Response:
    """A page of tenants, A to Z; an actor of one tenant is sent to the page of the tenant."""
    own = actor_of(request).tenant
    if own is not None:
        return RedirectResponse(link(request, "tenant", id=own), 303)
    given = request.query_params
    window = window_of(request)
    minutes = WINDOWS[window][0]
    inspector = inspector_of(request)
    prefix = given.get("prefix") or None
    found = inspector.tenants.list(
        prefix=prefix, minutes=minutes, limit=PAGE, cursor=given.get("cursor")
    )
    view = inspector.users.overview(minutes)
    return page(
        request,
        "tenants.html",
        tenants=found,
        is_filtered=prefix is not None,
        view=view,
        evenness=evenness(view.jain),
        evenness_of=evenness,
        window=window,
        window_label=WINDOWS[window][1],
        windows=windows(),
        sharer=NamedSharer.of,
        hint=lambda info: hint(info, minutes),
        scale=scale_of(found),
        kind=kind_of(request),
        cli=command("tenants", "list", *options(prefix=prefix, minutes=minutes)),
    )


def tenant(request: Request) -> Response:
    """The page of a tenant, or a page that says there is no such tenant."""
    name = request.path_params["id"]
    window = window_of(request)
    minutes, label = WINDOWS[window]
    inspector = inspector_of(request)
    try:
        info = _read(request, name, minutes)
    except InvalidInput:
        return page(request, "tenant_unknown.html", status=404, tenant=name[:200])
    users = inspector.users.list(tenant=name, minutes=minutes, limit=ROWS)
    is_quiet = not users
    if is_quiet:
        users = inspector.users.list(tenant=name, minutes=minutes, limit=ROWS, order="name")
    view = inspector.tenants.overview(name, minutes)
    return page(
        request,
        "tenant.html",
        info=info,
        who=NamedSharer.of(info),
        users=users,
        is_quiet=is_quiet,
        view=view,
        evenness=evenness(view.jain),
        sharer=NamedSharer.of,
        hint=lambda each: hint(each, minutes),
        scale=scale_of([info]),
        users_scale=scale_of(users),
        kind=kind_of(request),
        window=window,
        window_label="hour" if window == "1h" else label,
        windows=windows(),
    )


def _read(request: Request, name: str, minutes: int) -> TenantInfo:
    """The state of a tenant. An actor's own is there before it has any data."""
    inspector = inspector_of(request)
    if actor_of(request).tenant == name:
        return inspector.tenants.list(minutes=minutes)[0]
    return inspector.tenants.get(name, minutes)


def service(request: Request) -> Response:
    """The ended runs over time of the users of a tenant, for a chart."""
    name, minutes = request.query_params.get("id", ""), WINDOWS[window_of(request)][0]
    series = inspector_of(request).tenants.service(name, minutes, TOP)
    return share_document(series, name, kind_of(request))


ROUTES: list[BaseRoute] = [
    Route("/tenants", tenants, name="tenants"),
    Route("/charts/tenants/service", service, name="tenant_service"),
    *action_routes("tenant"),
    Route("/tenants/{id:path}", tenant, name="tenant"),
]
