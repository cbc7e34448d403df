"""Put the web app together: routes, the gate before them, security headers, health."""

import time
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
from fairqueue.queue.queue import TaskQueue
from fairqueue.stats.samples import SampleStore
from fairqueue.web.app_state import API_PREFIX, ROOT, AppState, answer, app_state
from fairqueue.web.auth import PUBLIC, AuthMiddleware, actor_of, check_base_url
from fairqueue.web.live_updates import LiveUpdates, Numbers
from fairqueue.web.problems import ProblemDetails, problem_of, problem_of_status

MAX_BODY_BYTES = 16 * 1024 * 1024  # an import of ten thousand schedules has room
READY_S = 1.0  # for so long an answer of /readyz is good: anyone may ask, Redis must not notice

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
    # Not `no-referrer`: browsers would then send `Origin: null` with our own forms.
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
    """The pages and the API of one queue. Opens no connection; mounts into any ASGI app.

    read_only refuses all changes. base_url is what browsers see behind a proxy that changes the
    host name. rate and burst: requests per second of one key or session. secure_cookies: by default
    as the request came. auth=False lets everybody in as admin who comes from this machine, by the
    name localhost: for tests and for one's own machine only.

    Open event streams end with the server: by themselves where uvicorn serves in the main thread,
    also from within another app; where it serves in another thread, or its signal handlers were
    replaced, call `close_streams` before it ends. Other servers cut them off after a grace period
    of their own. In any case a stream ends after two and a half minutes.

    Raises ConfigurationError where the dashboard's files are not installed, and for a base_url that
    is none.
    """
    inspector = Inspector(queue, Actor(name="web", via="web"))
    access = AccessStore(queue.link)
    state = AppState(
        inspector=inspector,
        access=access,
        live_updates=LiveUpdates(reader(inspector), holding=access.holding),
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
        routes=_routes(dashboard, api, Readiness(inspector)),
        middleware=[
            Middleware(EdgeMiddleware),
            Middleware(AuthMiddleware, state=state),
        ],
        exception_handlers={
            FairQueueError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_crash,
        },
        lifespan=_lifespan,
    )
    app.state.fairqueue = state
    return app


def _routes(dashboard: bool, api: bool, readiness: "Readiness") -> list[BaseRoute]:
    routes: list[BaseRoute] = [
        Route("/healthz", _healthz, name="healthz"),
        Route("/readyz", readiness, name="readyz"),
        Route("/events", _events, name="events"),
    ]
    # Imported here: an app without one of them does without its imports and its files.
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
    """End all event streams of an app, for good. Call it on the event loop."""
    app.state.fairqueue.live_updates.close()


# --- events ---------------------------------------------------------------------------------------


def reader(inspector: Inspector) -> Callable[[str | None], Numbers]:
    """What LiveUpdates reads: the overview's numbers, and the counters that only grow.

    Counters tell a page that there is something new, and how much. A tenant's viewers get what
    their tenant may see.
    """
    samples = SampleStore(inspector.queue.link)

    def read(tenant: str | None) -> Numbers:
        samples.take()
        actor = Actor(name="web", role="viewer", tenant=tenant, via="web")
        overview = inspector.acting_as(actor).system.overview()
        snapshot = overview.snapshot
        numbers = {
            name: value
            for name, value in _fields(overview).items()
            if value is None or isinstance(value, int | float | dict)
        }
        return {**numbers, "counters": snapshot.counters if snapshot else {}}

    return read


def _fields(overview: Any) -> dict[str, Any]:
    named = {name: getattr(overview, name) for name in overview.__dataclass_fields__}
    named.pop("snapshot", None)
    leader = named.pop("leader", None)
    if leader is not None:
        named["has_leader"] = int(asdict(leader)["scheduler"] is not None)
    return named


async def _events(request: Request) -> Response:
    """The stream of one page."""
    live_updates, actor = app_state(request).live_updates, actor_of(request)
    if live_updates.is_full(actor.key_id):
        return ProblemDetails(
            status=503,
            kind="too-many-viewers",
            detail="too many pages are open at once",
            headers={"Retry-After": "30"},
        ).response()
    return StreamingResponse(
        live_updates.stream(actor.tenant, actor.key_id),
        media_type="text/event-stream",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


# --- health ---------------------------------------------------------------------------------------


async def _healthz(_: Request) -> Response:
    """That the loop of this process turns; Redis has no part in it."""
    return JSONResponse({"status": "ok"})


class Readiness:
    """The answer of /readyz, read once for all who ask in the same second."""

    def __init__(self, inspector: Inspector) -> None:
        self._inspector = inspector
        self._reasons: list[str] = []
        self._until = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 200, or 503 with the reasons in words."""
        if time.monotonic() >= self._until:
            self._until = time.monotonic() + READY_S
            self._reasons = await run_in_threadpool(self._ask)
        ready = not self._reasons
        body = {"status": "ready"} if ready else {"status": "not ready", "reasons": self._reasons}
        await JSONResponse(body, 200 if ready else 503)(scope, receive, send)

    def _ask(self) -> list[str]:
        try:
            return self._inspector.system.ready()
        except FairQueueError:
            return ["Redis does not answer"]


# --- errors ---------------------------------------------------------------------------------------


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, FairQueueError)  # noqa: S101 - registered for these
    return answer(request, problem_of(error))


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these
    detail = "there is nothing at this address" if error.status_code == 404 else error.detail
    response = answer(request, problem_of_status(error.status_code, detail))
    response.headers.update(error.headers or {})
    return response


async def _on_crash(request: Request, error: Exception) -> Response:
    """A mistake of ours: the log has the traceback, the reader only learns that it happened."""
    detail = "something went wrong here; the log says what"
    response = answer(request, problem_of_status(500, detail))
    _add_headers(response.headers, HEADERS)  # this answer is given outside of the frame
    return response


# --- around everything ----------------------------------------------------------------------------


class EdgeMiddleware:
    """Outermost: says where the app is mounted, adds security headers, and bounds bodies."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, with its frame."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Below us, paths and names are those of this app, not of the one that we are mounted in.
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
                raise HTTPException(413, f"a request may have {MAX_BODY_BYTES} bytes at most")
            return message

        async def framed(message: Message) -> None:
            if message["type"] == "http.response.start":
                _add_headers(MutableHeaders(scope=message), HEADERS)
            await send(message)

        await self._app(scope, bounded, framed)


def _readable(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """A header, with another host for one such as `[`: most Starlettes fail to read a URL of it."""
    if name == b"host":
        try:
            urlsplit(f"http://{value.decode('latin-1')}")
        except ValueError:
            return name, b"invalid"
    return name, value


def _add_headers(headers: MutableHeaders, more: Mapping[str, str]) -> None:
    for name, value in more.items():
        headers.setdefault(name, value)
    # What a page shows is for the one who is logged in; files say themselves how long they keep.
    headers.setdefault("Cache-Control", "no-store")
