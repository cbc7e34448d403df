"""Log in with a key or a one-time link, and log out."""

import logging
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.access.credentials import id_of
from fairqueue.logs import log_event
from fairqueue.web.app_state import answer, app_state, link
from fairqueue.web.auth import (
    LOOPBACK,
    SESSION_S,
    actor_of,
    clear_session,
    set_session,
)
from fairqueue.web.dashboard.shell import form_of, local_path, page
from fairqueue.web.problems import too_many

logger = logging.getLogger("fairqueue.web")

MAX_SECRET = 200  # characters; ours have 63
# Why somebody is asked to log in who was logged in before.
REASONS = {
    "expired": "Your session has expired. Log in again to go on.",
    "unsaved": "Your session has expired, so nothing was saved. Log in again to go on; the Back "
    "button of your browser may still have what you typed.",
}


def login_page(request: Request) -> Response:
    """Ask for a key; or, at a one-time link, for a click.

    The link itself changes nothing: programs that preview links would use it up otherwise. On one's
    own machine a script presses the button.
    """
    host = urlsplit(str(request.url)).hostname
    return page(
        request,
        "login.html",
        token=request.query_params.get("token", "")[:MAX_SECRET],
        next=local_path(request, request.query_params.get("next")),
        is_local=host in LOOPBACK,
        reason=REASONS.get(request.query_params.get("why", "")),
        problem=None,
    )


async def login(request: Request) -> Response:
    """Begin a session with a key or a one-time secret."""
    form = await form_of(request, max_files=0, max_fields=10)
    secret = str(form.get("secret") or "").strip()
    where = local_path(request, str(form.get("next") or ""))
    access = app_state(request).access
    session = None
    key_id, address = id_of(secret), request.client.host if request.client else ""
    if key_id is not None:
        wait = app_state(request).logins.wait(address)
        if wait > 0:
            return await run_in_threadpool(answer, request, too_many(wait, "from this address"))
        session = await run_in_threadpool(access.redeem, secret, seconds=SESSION_S)
    if session is None:
        if key_id is not None:  # else it is a slip, and anybody could fill the log with such
            log_event(logger, "login_refused", logging.WARNING, address=address, key=key_id)
        return await run_in_threadpool(_refused, request, where)
    response = RedirectResponse(where, 303)
    set_session(request, response, session.secret)
    return response


def _refused(request: Request, where: str) -> Response:
    problem = "This key is unknown, was revoked, or the link was used before or is too old."
    return page(
        request,
        "login.html",
        status=401,
        token="",
        next=where,
        is_local=False,
        reason=None,
        problem=problem,
    )


async def logout(request: Request) -> Response:
    """End the session, here and in Redis, and the streams of its pages."""
    state = app_state(request)
    secret = getattr(request.state, "secret", None)
    if secret is not None:
        await run_in_threadpool(state.access.end, secret)
        state.live_updates.end(actor_of(request).key_id)
    response = RedirectResponse(link(request, "login"), 303)
    clear_session(request, response)
    return response


ROUTES: list[BaseRoute] = [
    Route("/login", login_page, name="login"),
    Route("/login", login, methods=["POST"]),
    Route("/logout", logout, methods=["POST"], name="logout"),
]
