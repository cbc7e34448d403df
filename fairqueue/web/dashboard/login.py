"""Log in with a key or a one-time link, and log out."""

import logging
from typing import Any
from urllib.parse import urlsplit

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.access.credentials import id_of
from fairqueue.logs import log_event
from fairqueue.web.app_state import answer, app_state, link
from fairqueue.web.auth import LOOPBACK, SESSION_S, actor_of, clear_session, set_session
from fairqueue.web.dashboard.forms import form_of
from fairqueue.web.dashboard.shell import local_path, page
from fairqueue.web.problems import too_many

logger = logging.getLogger("fairqueue.web")

MAX_SECRET = 200  # characters; ours have 63
# Why a user has to log in again.
REASONS = {
    "expired": "Your session has expired. Log in again to continue.",
    "unsaved": "Your session has expired, so nothing was saved. Log in again to continue; the Back "
    "button of your browser may still have what you typed.",
}


def _page(request: Request, next_path: str, status: int = 200, **context: Any) -> Response:
    shown = {"token": "", "is_local": False, "reason": None, "problem": None, **context}
    return page(request, "login.html", status=status, next=next_path, **shown)


def login_page(request: Request) -> Response:
    """Ask for a key or, at a one-time link, for a click.

    The link itself does not log in, because programs that preview links would use it up. On the
    user's own machine a script presses the button.
    """
    query = request.query_params
    return _page(
        request,
        local_path(request, query.get("next")),
        token=query.get("token", "")[:MAX_SECRET],
        is_local=urlsplit(str(request.url)).hostname in LOOPBACK,
        reason=REASONS.get(query.get("why", "")),
    )


async def login(request: Request) -> Response:
    """Start a session with a key or a one-time secret."""
    form = await form_of(request, max_files=0, max_fields=10)
    secret = str(form.get("secret") or "").strip()
    where = local_path(request, str(form.get("next") or ""))
    session = None
    key_id, address = id_of(secret), request.client.host if request.client else ""
    if key_id is not None:
        wait = app_state(request).logins.wait(address)
        if wait > 0:
            return await run_in_threadpool(answer, request, too_many(wait, "from this address"))
        access = app_state(request).access
        session = await run_in_threadpool(access.redeem, secret, seconds=SESSION_S)
    if session is None:
        if key_id is not None:  # anything else is a typo, which must not fill the log
            log_event(logger, "login_refused", logging.WARNING, address=address, key=key_id)
        problem = "This key is unknown or was revoked, or the link was already used or has expired."
        return await run_in_threadpool(_page, request, where, 401, problem=problem)
    response = RedirectResponse(where, 303)
    set_session(request, response, session.secret)
    return response


async def logout(request: Request) -> Response:
    """End the session, and the event streams of its pages."""
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
