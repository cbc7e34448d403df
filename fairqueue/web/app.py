"""Create the web app: routes, middleware, security headers, health checks."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fairqueue.access.credentials import AccessStore, Actor
from fairqueue.errors import FairQueueError
from fairqueue.inspection import Inspector
from fairqueue.inspection.missing import missing_text, note_missing
from fairqueue.queue.queue import TaskQueue
from fairqueue.stats.samples import SampleStore
from fairqueue.web.app_state import (
    API_PREFIX,
    ROOT,
    AppState,
    answer,
    app_state,
    path_of,
    readiness,
)
from fairqueue.web.auth import PUBLIC, AuthMiddleware, actor_of, check_base_url
from fairqueue.web.live_updates import LiveUpdates, Numbers
from fairqueue.web.missing import Absences, MissingMiddleware
from fairqueue.web.problems import ProblemDetails, problem_of, problem_of_status

MAX_BODY_BYTES = 16 * 1024 * 1024  # enough to import ten thousand schedules

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
    )
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # With `no-referrer`, browsers would send `Origin: null` with our own forms.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


def create_app(
    queue: TaskQueue,
    *,
    dashboard: bool = True,
    api: bool = True,
    read_only: bool = False,
    base_url: str | None = None,
    rate: float = 20.0,
    burst: int = 40,
    secure_cookies: bool | None = None,
    auth: bool = True,
) -> Starlette:
    """Create the dashboard and the REST API of a queue, as an ASGI app that can be mounted.

    read_only: refuse all changes. base_url: the URL that browsers use, behind a proxy that changes
    the host name. rate, burst: requests per second of one key or session. secure_cookies: by
    default as the request came. auth=False: no login, and only requests from this machine to
    localhost are served, as admin; for tests and development.

    If uvicorn serves in the main thread, open event streams end when it stops. If it serves in
    another thread, or its signal handlers were replaced, call `close_streams` before it stops.
    Other servers cut streams off after their own grace period. A stream ends after two and a half
    minutes in any case.

    Opens no connection. Raises ConfigurationError if the files of the dashboard are missing, or for
    an invalid base_url.
    """
    inspector = Inspector(queue, Actor(name="web", via="web"))
    access = AccessStore(queue.link)
    absences = Absences(queue.link)
    state = AppState(
        inspector=inspector,
        access=access,
        live_updates=LiveUpdates(reader(inspector, absences), holding=access.holding),
        absences=absences,
        has_dashboard=dashboard,
        read_only=read_only,
        base_url=check_base_url(base_url) if base_url else None,
        rate=rate,
        burst=burst,
        secure_cookies=secure_cookies,
        auth=auth,
        public=PUBLIC | _public_of_api() if api else PUBLIC,
        error_page=_error_page if dashboard else None,
    )
    app = Starlette(
        routes=_routes(dashboard, api),
        middleware=_middleware(state),
        exception_handlers={
            FairQueueError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_crash,
        },
        lifespan=_lifespan,
    )
    app.state.fairqueue = state
    return app


def _middleware(state: AppState) -> list[Middleware]:
    return [
        Middleware(EdgeMiddleware),
        Middleware(AuthMiddleware, state=state),
        Middleware(MissingMiddleware, absences=state.absences, path_of=path_of),
    ]


def _routes(dashboard: bool, api: bool) -> list[BaseRoute]:
    routes: list[BaseRoute] = [
        Route("/healthz", _healthz, name="healthz"),
        Route("/readyz", _readyz, name="readyz"),
        Route("/events", _events, name="events"),
    ]
    # Imported here, so that an app without one of them does not need its dependencies.
    if api:
        from fairqueue.web import api as rest

        routes.append(Mount(API_PREFIX, routes=rest.routes(), name="api"))
    if dashboard:
        from fairqueue.web import dashboard as pages

        routes += pages.routes()
    return routes


def _public_of_api() -> frozenset[str]:
    from fairqueue.web import api as rest

    return rest.PUBLIC


def _error_page(request: Request, problem: ProblemDetails) -> Response:
    from fairqueue.web.dashboard.shell import error_page

    return error_page(request, problem)


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    try:
        yield
    finally:
        close_streams(app)


def close_streams(app: Starlette) -> None:
    """End all event streams of an app permanently. Call it on the event loop."""
    app.state.fairqueue.live_updates.close()


# --- events ---------------------------------------------------------------------------------------


def reader(inspector: Inspector, absences: Absences) -> Callable[[str | None], Numbers]:
    """Return a function that reads the live numbers for the viewers of a tenant.

    They are the overview, the counters, which tell a page how much is new, and what to tell about
    partitions that do not answer.
    """
    link = inspector.queue.link
    samples = SampleStore(link)

    def read(tenant: str | None) -> Numbers:
        actor = Actor(name="web", role="viewer", tenant=tenant, via="web")
        with note_missing(absences.known()) as missing:
            overview = inspector.acting_as(actor).system.overview()
        if not missing:  # a sample of a part would look like one of the whole
            samples.take()
        absences.learn(missing.partitions)
        snapshot = overview.snapshot
        numbers = {
            name: value
            for name, value in _fields(overview).items()
            if value is None or isinstance(value, int | float | dict)
        }
        told = missing_text(link, missing.partitions, with_nodes=tenant is None)
        return {**numbers, "counters": snapshot.counters if snapshot else {}, "missing": told}

    return read


def _fields(overview: Any) -> dict[str, Any]:
    named = {name: getattr(overview, name) for name in overview.__dataclass_fields__}
    named.pop("snapshot", None)
    leader = named.pop("leader", None)
    if leader is not None:
        named["has_leader"] = int(asdict(leader)["scheduler"] is not None)
    return named


async def _events(request: Request) -> Response:
    """The event stream of one page."""
    live_updates, actor = app_state(request).live_updates, actor_of(request)
    if live_updates.is_full(actor.key_id):
        return ProblemDetails(
            status=503,
            kind="too-many-viewers",
            detail="too many pages are open",
            headers={"Retry-After": "30"},
        ).response()
    return StreamingResponse(
        live_updates.stream(actor.tenant, actor.key_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


# --- health ---------------------------------------------------------------------------------------


async def _healthz(_: Request) -> Response:
    """Respond that this process is alive, without asking Redis."""
    return JSONResponse({"status": "ok"})


async def _readyz(request: Request) -> Response:
    """Respond with 200, or with 503 and the reasons."""
    reasons = await run_in_threadpool(readiness, app_state(request))
    if not reasons:
        return JSONResponse({"status": "ready"})
    return JSONResponse({"status": "not ready", "reasons": reasons}, 503)


# --- errors ---------------------------------------------------------------------------------------


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FairQueueError)  # noqa: S101 - registered for these
    return answer(request, problem_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these
    detail = "there is nothing at this URL" if error.status_code == 404 else error.detail
    response = answer(request, problem_of_status(error.status_code, detail))
    response.headers.update(error.headers or {})
    return response


async def _on_crash(request: Request, error: Exception) -> Response:
    """Respond to an unexpected error; the log has the traceback."""
    detail = "internal error; see the log of the server"
    response = answer(request, problem_of_status(500, detail))
    _add_headers(response.headers, HEADERS)  # this response bypasses EdgeMiddleware
    return response


# --- outermost middleware -------------------------------------------------------------------------


class EdgeMiddleware:
    """Record the mount point, add security headers, and limit the size of bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Routes and names are those of this app, not of the app that it is mounted in.
        root = scope.get("root_path", "")
        scope[ROOT] = scope["app_root_path"] = root
        scope["router"] = scope["app"].router
        scope["headers"] = [_readable(*header) for header in scope["headers"]]
        read = 0

        async def bounded() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BODY_BYTES:
                raise HTTPException(413, f"a request may have at most {MAX_BODY_BYTES} bytes")
            return message

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(MutableHeaders(scope=message), HEADERS)
            await send(message)

        await self._app(scope, bounded, framed)


def _readable(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header; a malformed host, which Starlette cannot parse, becomes `invalid`."""
    if name == b"host":
        try:
            urlsplit(f"http://{value.decode('latin-1')}")
        except ValueError:
            return name, b"invalid"
    return name, value


def _add_headers(headers: MutableHeaders, more: Mapping[str, str]) -> None:
    for name, value in more.items():
        headers.setdefault(name, value)
    # Pages are private. Files set their own Cache-Control.
    headers.setdefault("Cache-Control", "no-store")
