"""What all parts of the web app share: the inspector, credentials, live updates and options."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from fairqueue.access.credentials import AccessStore
from fairqueue.errors import FairQueueError
from fairqueue.inspection import Inspector
from fairqueue.web.cache import Cache
from fairqueue.web.live_updates import POLL_S, LiveUpdates
from fairqueue.web.missing import Absences
from fairqueue.web.problems import ProblemDetails
from fairqueue.web.rate_limit import RateLimiter

API_PREFIX = "/api"
ROOT = "fairqueue.root"  # in a scope: the path under which the app is mounted
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
# Logins from one address. Secrets cannot be guessed, but attempts must not keep Redis busy.
LOGIN_EVERY_S, LOGINS_AT_ONCE = 2.0, 30


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """The state of one app.

    public: paths that need no credential. error_page: renders errors for people; None without a
    dashboard. cache: what many viewers read at the same time. paths: of routes by name and
    parameters, because a look-up searches all routes. logins: limits attempts per address.
    """

    inspector: Inspector
    access: AccessStore
    live_updates: LiveUpdates
    absences: Absences
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
    """The path that the app is mounted at: empty, or such as `/ops/queue`."""
    return cast(str, scope.get(ROOT, scope.get("root_path", "")))


def path_of(scope: Scope) -> str:
    """The path of a request below the mount point."""
    path, root = cast(str, scope["path"]), root_of(scope)
    return path[len(root) :] or "/" if root and path.startswith(root) else path


def link(request: Request, name: str, **parameters: Any) -> str:
    """The path of a route by its name, with the mount point.

    Values may contain any character; a slash needs `{name:path}` in the route.
    """
    paths = app_state(request).paths
    key = (name, *parameters)
    if key not in paths:
        marks = {parameter: f"\0{parameter}\0" for parameter in parameters}
        paths[key] = str(request.app.url_path_for(name, **marks))
    path = quote(root_of(request.scope) + paths[key], safe="/:@!$&'()*+,;=~\0")
    for parameter, value in parameters.items():
        # Slashes are quoted too: browsers resolve `a/../b`.
        path = path.replace(f"\0{parameter}\0", quote(str(value), safe=":@!$'()*+,;=~"), 1)
    return path


def is_for_programs(request: Request) -> bool:
    """Whether errors are sent as problem+json: for the API, or without a dashboard."""
    path = path_of(request.scope)
    is_api = path == API_PREFIX or path.startswith(API_PREFIX + "/")
    return is_api or not app_state(request).has_dashboard


def answer(request: Request, problem: ProblemDetails) -> Response:
    """The response for a problem, as a page or as problem+json."""
    state = app_state(request)
    if state.error_page is None or is_for_programs(request):
        return problem.response(path_of(request.scope))
    return state.error_page(request, problem)


def readiness(state: AppState) -> list[str]:
    """Why the queue cannot be used; empty if it can. Redis is asked at most once per second."""

    def ask() -> list[str]:
        try:
            return state.inspector.system.ready()
        except FairQueueError:
            return ["Redis does not respond"]

    return state.cache.get("readiness", ask)
