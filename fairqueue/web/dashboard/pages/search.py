"""Find what has an id or a name: one box for schedules, users and runs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import Forbidden, InvalidInput
from fairqueue.history.records import RunDetails
from fairqueue.inspection.views import ScheduleView
from fairqueue.models import Page
from fairqueue.stats.users import UserInfo
from fairqueue.web.app_state import link
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.pages.helpers import paths, query_value, segment
from fairqueue.web.dashboard.shell import page

Found = TypeVar("Found")

MAX_QUERY = 200  # characters
SHOWN = 5  # of a kind
LOOKED = 50  # of a kind; how many more there are is said up to here


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Something that was found."""

    label: str
    about: str
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What was found of a kind; `rest`: how many more there are, in words, and where."""

    title: str
    icon: str
    hits: Sequence[Hit]
    rest: str = ""
    path: str = ""


def search(request: Request) -> Response:
    """The schedules, users and runs that are meant, the first of each."""
    q = request.query_params.get("q", "").strip()[:MAX_QUERY]
    groups = [_schedules(request, q), _users(request, q), _runs(request, q)] if q else []
    return page(request, "search.html", q=q, groups=[each for each in groups if each.hits])


def _schedules(request: Request, q: str) -> Group:
    """Those whose id it is, or whose name, id or title contains it."""
    schedules = inspector_of(request).schedules
    own = _or_none(lambda: schedules.get(q))
    found = _or_none(lambda: schedules.list(contains=q, limit=LOOKED)) or Page[ScheduleView](
        [], None
    )
    own_id = None if own is None else own.schedule.schedule_id
    others = [view for view in found if view.schedule.schedule_id != own_id]
    listed = ([] if own is None else [own]) + others
    hits = [
        Hit(
            label=view.schedule.label,
            about=f"{view.schedule.schedule_id}, of {view.schedule.user_id}: {view.sentence}",
            path=paths(request)["schedule_path"] + segment(view.schedule.schedule_id),
        )
        for view in listed[:SHOWN]
    ]
    return Group(
        title="Schedules",
        icon="schedules",
        hits=hits,
        rest=_rest(len(listed), found.cursor),
        path=f"{link(request, 'schedules')}?text={query_value(q)}",
    )


def _users(request: Request, q: str) -> Group:
    """Those whose name starts with it."""
    users = inspector_of(request).users
    found = _or_none(lambda: users.list(order="name", prefix=q, limit=LOOKED))
    found = found if found is not None else Page[UserInfo]([], None)
    start = paths(request)["user_path"]
    hits = [
        Hit(label=info.user_id, about=info.state, path=start + segment(info.user_id))
        for info in found[:SHOWN]
    ]
    return Group(
        title="Users",
        icon="users",
        hits=hits,
        rest=_rest(len(found), found.cursor),
        path=f"{link(request, 'users')}?order=name&prefix={query_value(q)}",
    )


def _runs(request: Request, q: str) -> Group:
    """The one whose id it is."""
    found: RunDetails | None = _or_none(lambda: inspector_of(request).runs.get(q))
    hits = []
    if found is not None:
        about = f"{found.run.name}, of {found.run.user_id}: {found.run.status.replace('_', ' ')}"
        hits = [Hit(label=q, about=about, path=paths(request)["run_path"] + segment(q))]
    return Group(title="Runs", icon="runs", hits=hits)


def _rest(found: int, cursor: str | None) -> str:
    """How many are not shown; nothing if all are."""
    left = max(found - SHOWN, 0)
    if cursor is not None:
        return f"{left} more, and others" if left else "There may be more"
    return f"{left} more" if left else ""


def _or_none(find: Callable[[], Found]) -> Found | None:
    """What is found, or nothing: also where the text cannot be an id, or is not for this reader."""
    try:
        return find()
    except (InvalidInput, Forbidden):
        return None


ROUTES: list[BaseRoute] = [Route("/search", search, name="search")]
