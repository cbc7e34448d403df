"""Search schedules, tenants, users and runs by id or name."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import Forbidden, InvalidInput
from fairqueue.inspection.views import ScheduleView
from fairqueue.models import Page
from fairqueue.stats.users import TenantInfo, UserInfo
from fairqueue.web.app_state import link
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.formatting import query_value, segment
from fairqueue.web.dashboard.shell import page, user_link

Found = TypeVar("Found")

MAX_QUERY = 200  # characters
SHOWN = 5  # results per group
MAX_FOUND = 50  # results per group that are counted


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchHit:
    """A search result; `path` leads to it."""

    label: str
    about: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchGroup:
    """The results of one type; `rest` says how many more there are, `path` leads to them."""

    title: str
    icon: str
    hits: Sequence[SearchHit]
    rest: str = ""
    path: str = ""


def search(request: Request) -> Response:
    """The first schedules, tenants, users and runs that match."""
    q = request.query_params.get("q", "").strip()[:MAX_QUERY]
    finders = (_schedules, _tenants, _users, _runs)
    groups = [find(request, q) for find in finders] if q else []
    return page(request, "search.html", q=q, groups=[each for each in groups if each.hits])


def _schedules(request: Request, q: str) -> SearchGroup:
    """Schedules with this id, or with it in name, id or title."""
    schedules = inspector_of(request).schedules
    own = _or_none(lambda: schedules.get(q))
    found = _or_none(lambda: schedules.list(contains=q, limit=MAX_FOUND)) or Page[ScheduleView](
        [], None
    )
    own_id = None if own is None else own.schedule.schedule_id
    others = [view for view in found if view.schedule.schedule_id != own_id]
    hits = [
        SearchHit(
            label=view.schedule.label,
            about=f"{view.schedule.schedule_id}, user {view.schedule.user_id}: {view.sentence}",
            path=f"{link(request, 'schedules')}/{segment(view.schedule.schedule_id)}",
        )
        for view in ([] if own is None else [own]) + others
    ]
    return _group(request, "schedules", hits, found.cursor, f"text={query_value(q)}")


def _tenants(request: Request, q: str) -> SearchGroup:
    """Tenants whose name starts with it, for who sees all tenants."""
    tenants = inspector_of(request).tenants
    found = Page[TenantInfo]([], None)
    if actor_of(request).tenant is None:
        found = _or_none(lambda: tenants.list(prefix=q, limit=MAX_FOUND)) or found
    path = link(request, "tenants")
    hits = [
        SearchHit(label=info.tenant, about=info.state, path=f"{path}/{segment(info.tenant)}")
        for info in found
    ]
    return _group(request, "tenants", hits, found.cursor, f"prefix={query_value(q)}")


def _users(request: Request, q: str) -> SearchGroup:
    """Users whose name starts with it."""
    users = inspector_of(request).users
    found = _or_none(lambda: users.list(order="name", prefix=q, limit=MAX_FOUND))
    found = found if found is not None else Page[UserInfo]([], None)
    sees_tenants = actor_of(request).tenant is None
    hits = [
        SearchHit(
            label=str(info.owner) if sees_tenants else info.user_id,
            about=info.state,
            path=user_link(request, info.user_id, info.tenant),
        )
        for info in found
    ]
    return _group(request, "users", hits, found.cursor, f"order=name&prefix={query_value(q)}")


def _runs(request: Request, q: str) -> SearchGroup:
    """The run with this id."""
    found = _or_none(lambda: inspector_of(request).runs.get(q).run)
    about = f"{found.name}, user {found.user_id}: {found.status.replace('_', ' ')}" if found else ""
    path = f"{link(request, 'runs')}/{segment(q)}"
    hits = [SearchHit(label=q, about=about, path=path)] if found else []
    return _group(request, "runs", hits, None, "")


def _group(
    request: Request, name: str, hits: list[SearchHit], cursor: str | None, query: str
) -> SearchGroup:
    return SearchGroup(
        title=name.capitalize(),
        icon=name,
        hits=hits[:SHOWN],
        rest=_rest(len(hits), cursor),
        path=f"{link(request, name)}?{query}",
    )


def _rest(found: int, cursor: str | None) -> str:
    """How many results are not shown, in words; empty if all are."""
    left = max(found - SHOWN, 0)
    if cursor is not None:
        return f"More than {left} more" if left else "There may be more"
    return f"{left} more" if left else ""


def _or_none(find: Callable[[], Found]) -> Found | None:
    """The result, or None if the text cannot be an id or the actor may not see it."""
    try:
        return find()
    except (InvalidInput, Forbidden):
        return None


ROUTES: list[BaseRoute] = [Route("/search", search, name="search")]
