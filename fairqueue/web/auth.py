"""Authenticate requests by key or session, and refuse those that are not allowed."""

from dataclasses import replace
from ipaddress import IPv6Address, ip_address
from typing import Any, cast
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
SESSION_S = 12 * 3600  # lifetime of a session
# The cookie lives longer than the session, so that the login can say that the session has expired.
COOKIE_S = SESSION_S + 30 * 86_400
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
TEST_CLIENT = "testclient"  # the address of Starlette's TestClient
LOCAL = Actor(name="local", role="admin", via="web")

# Paths that need no credential, in addition to those of the API. All other paths need one.
PUBLIC = frozenset({"/healthz", "/readyz", "/login"})
PUBLIC_FOLDERS = ("/static/",)
ALWAYS_WRITABLE = frozenset({"/login", "/logout"})  # even if the app is read-only


def inspector_of(request: Request) -> Inspector:
    """An inspector that acts as the sender of a request."""
    return app_state(request).inspector.acting_as(actor_of(request))


def actor_of(request: Request) -> Actor:
    """The sender of a request, as AuthMiddleware has found it. Not for public paths."""
    return cast(Actor, request.state.actor)


class AuthMiddleware:
    """Authenticate each request before it reaches a route, or refuse it.

    Sets `request.state.actor`, and `request.state.secret` if there is one. New routes are protected
    by default.
    """

    def __init__(self, app: ASGIApp, state: AppState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "websocket":  # no route uses them
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
        """The problem of a request that does not depend on its sender, if any."""
        if not self._state.auth and not _is_loopback(request):
            return ProblemDetails(
                status=403,
                kind="forbidden",
                detail="without authentication, only this machine is served, by the name localhost",
            )
        if request.method in SAFE_METHODS:
            return None
        if not _is_same_origin(request, self._state.base_url):
            return ProblemDetails(
                status=403,
                kind="cross-site-request",
                detail="the request comes from another site: nothing was changed",
            )
        if self._state.read_only and path_of(request.scope) not in ALWAYS_WRITABLE:
            return ProblemDetails(
                status=403,
                kind="read-only",
                detail="this dashboard is read-only: nothing was changed",
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
            return unauthorized("the API key or session is unknown, was revoked or has expired")
        request.state.actor = replace(admission.actor, via=via)
        request.state.secret = secret
        return None

    def _refuse(self, request: Request, problem: ProblemDetails) -> Response:
        request.state.actor = None
        return answer(request, problem)


def _credential(request: Request) -> tuple[str | None, str]:
    """The secret in a request, and whether it came by `rest` or `web`."""
    header = request.headers.get("authorization")
    if header is not None:
        scheme, _, secret = header.partition(" ")
        return (secret.strip() if scheme.lower() == "bearer" else None) or None, "rest"
    key = request.headers.get("x-api-key")
    if key is not None:
        return key.strip() or None, "rest"
    return request.cookies.get(SESSION_COOKIE), "web"


def _is_same_origin(request: Request, base_url: str | None) -> bool:
    """Whether a write was sent by a page of ours or by a program, not by another site.

    Browsers send the origin of a request. Programs do not, and send no cookie, or a key, which
    takes precedence. A page of another site cannot add the header with a key.
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
    theirs = origin.partition("://")[2]  # empty for `null`
    return bool(theirs) and theirs in ours


def _is_loopback(request: Request) -> bool:
    """Whether a request comes from this machine and is addressed to it.

    The host name is checked against DNS rebinding. The address is checked because anyone can send
    `Host: localhost` to a server that listens to other machines.
    """
    try:
        by_name = urlsplit(f"//{request.headers.get('host', '')}").hostname in LOOPBACK
        client = request.client.host if request.client else ""  # no address: a Unix socket
        return by_name and (client in ("", TEST_CLIENT) or _is_here(client))
    except ValueError:
        return False


def _is_here(address: str) -> bool:
    found = ip_address(address.partition("%")[0])
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback


def check_base_url(base_url: str) -> str:
    """The base URL without a trailing slash. Raises ConfigurationError."""
    try:
        parts = urlsplit(base_url)
        if parts.scheme in ("http", "https") and parts.hostname:
            return base_url.rstrip("/")
    except ValueError:
        pass
    raise ConfigurationError(
        f"base_url must be a URL such as https://queue.example.com/ops, not {base_url!r:.80}"
    )


def set_session(request: Request, response: Response, secret: str) -> None:
    """Store a session in a cookie."""
    response.set_cookie(SESSION_COOKIE, secret, max_age=COOKIE_S, **cookie_settings(request))


def clear_session(request: Request, response: Response) -> None:
    """Delete the cookie of the session."""
    response.delete_cookie(SESSION_COOKIE, **cookie_settings(request))


def cookie_settings(request: Request) -> dict[str, Any]:
    """Settings of a cookie that scripts cannot read and other sites cannot use.

    It is sent over https only if `secure_cookies` says so, or else if the app is served by https.
    """
    state = app_state(request)
    secure = state.secure_cookies
    if secure is None:
        secure = urlsplit(state.base_url or str(request.url)).scheme == "https"
    path = root_of(request.scope) or "/"
    return {"path": path, "secure": secure, "httponly": True, "samesite": "strict"}
