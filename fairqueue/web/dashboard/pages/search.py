"""Find what has an id: one box for schedules, runs and users."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, NoMatchFound, Route

from fairqueue.errors import Forbidden, InvalidInput
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.shell import page
from fairqueue.web.site import link

Found = TypeVar("Found")

MAX_QUERY = 200  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Something that was found."""

    label: str
    about: str
    icon: str
    path: str


def search(request: Request) -> Response:
    """What has this id, and the lists in which to look on."""
    q = request.query_params.get("q", "").strip()[:MAX_QUERY]
    return page(request, "search.html", q=q, hits=_hits(request, q) if q else [])


def _hits(request: Request, q: str) -> list[Hit]:
    inspector = inspector_of(request)
    found: list[Hit | None] = []
    view = _or_none(lambda: inspector.schedules.get(q))
    if view is not None:
        about = f"schedule of {view.schedule.user_id}: {view.sentence}"
        found.append(_hit(request, view.schedule.name, about, "schedules", "schedule", id=q))
    run = _or_none(lambda: inspector.runs.get(q))
    if run is not None:
        about = f"run of {run.run.user_id}: {run.run.status}"
        found.append(_hit(request, q, about, "runs", "run", id=q))
    user = _or_none(lambda: inspector.users.get(q))
    if user is not None:
        found.append(_hit(request, q, f"user: {user.state}", "users", "user", id=q))
    found.append(_list(request, f"Schedules that start with “{q}”", "schedules", "name_prefix", q))
    found.append(_list(request, f"Runs of user {q}", "runs", "user_id", q))
    return [hit for hit in found if hit is not None]


def _or_none(find: Callable[[], Found]) -> Found | None:
    """What is found, or nothing: also where the text cannot be an id, or is not for this reader."""
    try:
        return find()
    except (InvalidInput, Forbidden):
        return None


def _hit(request: Request, label: str, about: str, icon: str, route: str, **ids: str) -> Hit | None:
    try:
        return Hit(label=label, about=about, icon=icon, path=link(request, route, **ids))
    except NoMatchFound:
        return None


def _list(request: Request, label: str, route: str, field: str, q: str) -> Hit | None:
    found = _hit(request, label, "a list", route, route)
    return found and replace(found, path=f"{found.path}?{field}={quote(q, safe='')}")


ROUTES: list[BaseRoute] = [Route("/search", search, name="search")]
