"""Know who sends a request, and let in only those who may: keys, sessions, origins, read-only."""

from dataclasses import replace
from ipaddress import IPv6Address, ip_address
from typing import cast
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fairqueue.access.credentials import Actor
from fairqueue.errors import ConfigurationError, FairQueueError
from fairqueue.inspection import Inspector
from fairqueue.web.app_state import SAFE_METHODS, AppState, answer, app_state, path_of, root_of
from fairqueue.web.problems import ProblemDetails, problem_of, too_many, unauthorized

SESSION_COOKIE = "fairqueue_session"
SESSION_S = 12 * 3600  # after so long one has to log in again
# The browser keeps the cookie for longer: one that has expired tells the login why it is asked for.
COOKIE_S = SESSION_S + 30 * 86_400
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
TEST_CLIENT = "testclient"  # what Starlette's TestClient calls itself; no address can be that
LOCAL = Actor(name="local", role="admin", via="web")

# Paths that need no credential, beside those that the API names. Everything else is closed.
PUBLIC = frozenset({"/healthz", "/readyz", "/login"})
PUBLIC_FOLDERS = ("/static/",)
WRITES_FOR_ALL = frozenset({"/login", "/logout"})  # also where the app is read-only


def inspector_of(request: Request) -> Inspector:
    """What the sender of a request may see and do."""
    return app_state(request).inspector.acting_as(actor_of(request))


def actor_of(request: Request) -> Actor:
    """Who sends a request. The gate has let it in; on public paths nobody is known."""
    return cast(Actor, request.state.actor)


class AuthMiddleware:
    """Stands before all routes: answers those who may not pass, and names those who may.

    Sets `request.state.actor`, and `request.state.secret` where there is one. Closed by default: a
    new route is protected without doing anything.
    """

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] == "websocket":  # there are none, so nobody need be let in
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            problem = self._check(request) or await self._admit(request)
        except FairQueueError as error:
            problem = problem_of(error)
        if problem is None:
            await self._app(scope, receive, send)
        else:
            await self._refuse(request, problem)(scope, receive, send)

    def _check(self, request: Request) -> ProblemDetails | None:
        """What is wrong with a request, whoever sent it."""
        if not self._state.auth and not _is_loopback(request):
            return ProblemDetails(
                status=403,
                kind="forbidden",
                detail="without authentication only this machine is served, by the name localhost",
            )
        if request.method in SAFE_METHODS:
            return None
        if not _is_same_origin(request, self._state.base_url):
            return ProblemDetails(
                status=403,
                kind="cross-site-request",
                detail="this request comes from another site: nothing was changed",
            )
        if self._state.read_only and path_of(request.scope) not in WRITES_FOR_ALL:
            return ProblemDetails(
                status=403, kind="read-only", detail="this dashboard is read-only: nothing changed"
            )
        return None

    async def _admit(self, request: Request) -> ProblemDetails | None:
        path = path_of(request.scope)
        if path in self._state.public or path.startswith(PUBLIC_FOLDERS):
            return None
        if not self._state.auth:
            request.state.actor = LOCAL
            return None
        secret, via = _credential(request)
        if secret is None:
            return unauthorized("send an API key as `Authorization: Bearer fq_...`, or log in")
        admission = await run_in_threadpool(
            self._state.access.admit, secret, rate=self._state.rate, burst=self._state.burst
        )
        if admission.wait > 0:
            return too_many(admission.wait)
        if admission.actor is None:
            return unauthorized("this API key or session is unknown, was revoked or has expired")
        request.state.actor = replace(admission.actor, via=via)
        request.state.secret = secret
        return None

    def _refuse(self, request: Request, problem: ProblemDetails) -> Response:
        request.state.actor = None
        return answer(request, problem)


def _credential(request: Request) -> tuple[str | None, str]:
    """The secret that came with a request, and by which face."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        return (secret.strip() if scheme.lower() == "bearer" else None) or None, "rest"
    key = request.headers.get("x-api-key")
    if key is not None:
        return key.strip() or None, "rest"
    return request.cookies.get(SESSION_COOKIE), "web"


def _is_same_origin(request: Request, base_url: str | None) -> bool:
    """Whether a change was asked for by a page of ours, or by a program.

    Browsers say where a request comes from; programs do not, and have no cookie, or a key beside
    it, which counts then. No page of another site can add the header of a key.
    """
    fetch_site = request.headers.get("sec-fetch-site")
    if fetch_site is not None:
        return fetch_site in ("same-origin", "none")
    origin = request.headers.get("origin")
    if origin is None:
        has_key = bool({"authorization", "x-api-key"} & set(request.headers))
        return has_key or SESSION_COOKIE not in request.cookies
    ours = {request.headers.get("host", "")}
    if base_url is not None:
        ours.add(urlsplit(base_url).netloc)
    theirs = origin.partition("://")[2]  # empty for `null`, which is nobody's
    return bool(theirs) and theirs in ours


def _is_loopback(request: Request) -> bool:
    """Whether a request comes from this machine, and its browser thinks so too.

    The latter is not so after DNS rebinding. Anybody can write `Host: localhost` where the server
    listens to other machines, so that this alone would say nothing.
    """
    try:
        by_name = urlsplit(f"//{request.headers.get('host', '')}").hostname in LOOPBACK
        client = request.client.host if request.client else ""  # none: a socket in a folder
        return by_name and (client in ("", TEST_CLIENT) or _is_here(client))
    except ValueError:
        return False


def _is_here(address: str) -> bool:
    found = ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def check_base_url(base_url: str) -> str:
    """What browsers see, without a slash at the end. Raises ConfigurationError."""
    try:
        parts = urlsplit(base_url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return base_url.rstrip("/")
    except ValueError:
        pass
    raise ConfigurationError(
        f"base_url {base_url!r:.80} is none: such as https://queue.example.com/ops"
    )


def set_session(request: Request, response: Response, secret: str) -> None:
    """Keep a session in the browser: for scripts invisible, for other sites unusable."""
    response.set_cookie(
        SESSION_COOKIE,
        secret,
        max_age=COOKIE_S,
        path=root_of(request.scope) or "/",
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )


def clear_session(request: Request, response: Response) -> None:
    """Forget the session in the browser."""
    response.delete_cookie(
        SESSION_COOKIE,
        path=root_of(request.scope) or "/",
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )


def is_secure(request: Request) -> bool:
    """Whether cookies may travel by https only: as told, or as the request itself came."""
    state = app_state(request)
    if state.secure_cookies is not None:
        return state.secure_cookies
    base = state.base_url or str(request.url)
    return urlsplit(base).scheme == "https"
