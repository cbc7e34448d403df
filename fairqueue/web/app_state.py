"""What all parts of the web app share: the inspector, credentials, live updates and options."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from fairqueue.access.credentials import AccessStore
from fairqueue.inspection import Inspector
from fairqueue.web.cache import Cache
from fairqueue.web.live_updates import POLL_S, LiveUpdates
from fairqueue.web.problems import ProblemDetails
from fairqueue.web.rate_limit import RateLimiter

API_PREFIX = "/api"
ROOT = "fairqueue.root"  # in a scope: the path under which the app is mounted
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Of one address. Nobody guesses 256 bits; it keeps those who try from keeping Redis busy.
LOGIN_EVERY_S, LOGINS_AT_ONCE = 2.0, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """One app.

    public: paths that need no credential. error_page: makes the answer for people; without a
    dashboard all get problems. cache: what many viewers read at the same time. paths: of routes by
    name and parameters; to look one up goes through all routes. logins: how often one address may
    try.
    """

    inspector: Inspector
    access: AccessStore
    live_updates: LiveUpdates
    has_dashboard: bool
    read_only: bool
    base_url: str | None
    rate: float
    burst: int
    secure_cookies: bool | None
    auth: bool
    public: frozenset[str]
    error_page: Callable[[Request, ProblemDetails], Response] | None
    cache: Cache = field(default_factory=lambda: Cache(POLL_S))
    logins: RateLimiter = field(default_factory=lambda: RateLimiter(LOGIN_EVERY_S, LOGINS_AT_ONCE))
    paths: dict[tuple[str, ...], str] = field(default_factory=dict)


def app_state(request: Request) -> AppState:
    """Return the shared state of the app that received a request."""
    return cast(AppState, request.app.state.fairqueue)


def root_of(scope: Scope) -> str:
    """The path under which the app is mounted: empty, or such as `/ops/queue`."""
    return cast(str, scope.get(ROOT, scope.get("root_path", "")))


def path_of(scope: Scope) -> str:
    """The path of a request as the app's own routes see it."""
    path, root = cast(str, scope["path"]), root_of(scope)
    return path[len(root) :] or "/" if root and path.startswith(root) else path


def link(request: Request, name: str, **parameters: Any) -> str:
    """The path of a route of ours by its name, wherever the app is mounted.

    Values may hold any character; one that may hold a slash needs `{name:path}` in its route.
    """
    paths = app_state(request).paths
    key = (name, *parameters)
    if key not in paths:
        marks = {parameter: f"\0{parameter}\0" for parameter in parameters}
        paths[key] = str(request.app.url_path_for(name, **marks))
    path = quote(root_of(request.scope) + paths[key], safe="/:@!$&'()*+,;=~\0")
    for parameter, value in parameters.items():
        # Slashes too: browsers would resolve `a/../b`.
        path = path.replace(f"\0{parameter}\0", quote(str(value), safe=":@!$'()*+,;=~"), 1)
    return path


def is_for_programs(request: Request) -> bool:
    """Whether errors go out as problem+json: for the API, and where there are no pages."""
    path = path_of(request.scope)
    is_api = path == API_PREFIX or path.startswith(API_PREFIX + "/")
    return is_api or not app_state(request).has_dashboard


def answer(request: Request, problem: ProblemDetails) -> Response:
    """A problem as its reader wants it."""
    state = app_state(request)
    if state.error_page is None or is_for_programs(request):
        return problem.response(path_of(request.scope))
    return state.error_page(request, problem)
