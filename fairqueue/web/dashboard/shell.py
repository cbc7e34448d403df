"""What every page is made with: the frame around it, its actions and their toasts, its errors."""

import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache, wraps
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jinja2
from python_multipart.exceptions import FormParserError
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from fairqueue.access.credentials import Actor
from fairqueue.clock import from_ms
from fairqueue.errors import ConfigurationError, FairQueueError, InvalidInput
from fairqueue.web.app_state import SAFE_METHODS, app_state, link, path_of, root_of
from fairqueue.web.auth import SESSION_COOKIE, is_secure
from fairqueue.web.dashboard.filters import FILTERS
from fairqueue.web.dashboard.icons import icon
from fairqueue.web.problems import ProblemDetails, problem_of

FOLDER = Path(__file__).parent
ASSETS = FOLDER / "assets"  # ours
STATIC = FOLDER / "static"  # those of others, put there by `make static`
TOAST_COOKIE = "fairqueue_toast"
TOAST_S = 60  # a toast that no page has shown by then is forgotten
MAX_FIELDS = 2000  # of a form

# name of the route, label, icon, live number of its badge, whether one tenant may see it
NAVIGATION = (
    ("overview", "Overview", "overview", None, True),
    ("schedules", "Schedules", "schedules", None, True),
    ("users", "Users", "users", None, True),
    ("runs", "Runs", "runs", "running", True),
    ("failed", "Failed", "failed", "dead", True),
    ("workers", "Workers", "workers", None, False),
    ("audit", "Audit", "audit", None, True),
    ("settings", "Settings", "settings", None, False),
)


# --- templates ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The templates. Everything that is put into one is escaped; a name that is not there fails."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(FILTERS)
    found.globals.update(
        icon=icon, link=_link, asset=_asset, query=_query, may=_may, version=_version()
    )
    return found


@jinja2.pass_context
def _link(context: jinja2.runtime.Context, name: str, **parameters: Any) -> str:
    return link(context["request"], name, **parameters)


@jinja2.pass_context
def _asset(context: jinja2.runtime.Context, name: str) -> str:
    """The address of a file, with a digest of what is in it: it may be kept forever."""
    return f"{link(context['request'], 'static', path=name)}?v={_digest(name)}"


@jinja2.pass_context
def _query(context: jinja2.runtime.Context, **changes: object) -> str:
    """The query string of this page with some values changed; None takes one away."""
    kept = [(k, v) for k, v in context["request"].query_params.multi_items() if k not in changes]
    added = [(name, str(value)) for name, value in changes.items() if value is not None]
    return "?" + urlencode(kept + added)


@jinja2.pass_context
def _may(context: jinja2.runtime.Context, role: str) -> bool:
    """Whether to show what takes this role; the Inspector decides again when it is used."""
    actor: Actor | None = context["actor"]
    return actor is not None and actor.may(role) and not context["read_only"]


@lru_cache(maxsize=100)
def _digest(name: str) -> str:
    return sha256(find_file(name).read_bytes()).hexdigest()[:12]


def find_file(name: str) -> Path:
    """A file of ours or of others by its name."""
    ours = ASSETS / name
    return ours if ours.exists() else STATIC / name


def check_files() -> None:
    """Raises ConfigurationError where what the pages load is not installed."""
    if not (STATIC / "versions.json").exists():
        raise ConfigurationError(
            "the dashboard's files are not here: run `make static` in a checkout, install the "
            "wheel, or pass dashboard=False"
        )


def _version() -> str:
    try:
        return version("fairqueue")
    except PackageNotFoundError:
        return ""


# --- pages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NavigationItem:
    """A line of the navigation; `badge` is the live number beside it."""

    label: str
    icon: str
    path: str
    is_current: bool
    badge: str | None


def page(request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
    """A page from a template that extends base.html. Call it in a thread, as handlers are.

    The template gets `actor`, `read_only`, `navigation`, `toast` and what is passed.
    """
    actor = getattr(request.state, "actor", None)
    response = _render(request, template, status, actor, {"now": _now(request), **context})
    if TOAST_COOKIE in request.cookies:
        response.delete_cookie(TOAST_COOKIE, path=root_of(request.scope) or "/")
    return response


def partial(request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
    """A part of a page, for htmx: the same names, without the frame."""
    actor = getattr(request.state, "actor", None)
    return _render(request, template, status, actor, {"now": _now(request), **context})


def _render(
    request: Request, template: str, status: int, actor: Actor | None, context: dict[str, Any]
) -> HTMLResponse:
    state = app_state(request)
    text = (
        environment()
        .get_template(template)
        .render(
            {
                "request": request,
                "actor": actor,
                "read_only": state.read_only,
                "has_login": state.auth,
                "navigation": navigation(request, actor),
                "queue_name": state.inspector.queue.name,
                "toast": _read_toast(request),
                **context,
            }
        )
    )
    # Text that somebody has put into a record may be such that UTF-8 cannot hold it.
    return HTMLResponse(text.encode("utf-8", "replace"), status)


def _now(request: Request) -> datetime:
    """The time of the queue, which is what moments on a page are compared with."""
    try:
        return from_ms(app_state(request).inspector.queue.link.now_ms())
    except FairQueueError:
        return datetime.now(UTC)


def navigation(request: Request, actor: Actor | None) -> list[NavigationItem]:
    """What this actor can go to."""
    here, root = path_of(request.scope), root_of(request.scope)
    found = []
    for name, label, icon_name, badge, for_tenants in NAVIGATION:
        if actor is None or (actor.tenant is not None and not for_tenants):
            continue
        path = link(request, name)
        own = path.removeprefix(root)
        item = NavigationItem(
            label=label,
            icon=icon_name,
            path=path,
            is_current=here == own or (own != "/" and here.startswith(own + "/")),
            badge=badge if actor.tenant is None else None,
        )
        found.append(item)
    return found


# --- actions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How an action went: a sentence for the toast, and where to go from here.

    to: a path of ours; without one, back to the page that it came from. stay: the page is left as
    it is. response: what htmx swaps in, instead of going anywhere.
    """

    text: str
    to: str | None = None
    stay: bool = False
    level: str = "success"
    response: Response | None = None


class Form:
    """The fields of a form. An empty one counts as absent."""

    def __init__(self, data: FormData) -> None:
        self._data = data

    def text(self, name: str) -> str | None:
        """A field without the white space around it."""
        value = self._data.get(name)
        return (value.strip() or None) if isinstance(value, str) else None

    def need(self, name: str) -> str:
        """A field that must be there. Raises InvalidInput."""
        found = self.text(name)
        if found is None:
            raise InvalidInput(f"{name.replace('_', ' ')} is missing: fill it in")
        return found

    def raw(self, name: str) -> str:
        """A field as it came, such as a JSON text; empty if absent."""
        value = self._data.get(name)
        return value if isinstance(value, str) else ""

    def has(self, name: str) -> bool:
        """Whether a box is ticked."""
        return name in self._data

    def every(self, name: str) -> list[str]:
        """All values of a field, such as ticked rows."""
        return [value for value in self._data.getlist(name) if isinstance(value, str)]

    def integer(self, name: str) -> int | None:
        """A whole number. Raises InvalidInput."""
        found = self.text(name)
        try:
            return None if found is None else int(found)
        except ValueError:
            raise InvalidInput(f"{name} {found!r:.80} is no whole number") from None

    def decimal(self, name: str) -> float | None:
        """A number. Raises InvalidInput."""
        found = self.text(name)
        try:
            return None if found is None else float(found)
        except ValueError:
            raise InvalidInput(f"{name} {found!r:.80} is no number") from None

    def json(self, name: str) -> Any:
        """A JSON text; None if empty. Raises InvalidInput."""
        found = self.text(name)
        try:
            return None if found is None else json.loads(found)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{name} is no JSON: {error}") from None


Act = Callable[[Request, Form], Done]


def action(act: Act) -> Callable[[Request], Awaitable[Response]]:
    """Make a POST handler from a function that changes something and says how it went.

    The function runs in a thread. An error of the library becomes a toast with its message and its
    status; nothing is left half said.
    """

    @wraps(act)
    async def handle(request: Request) -> Response:
        data = await form_of(request, max_files=10, max_fields=MAX_FIELDS)
        try:
            done = await run_in_threadpool(act, request, Form(data))
        except FairQueueError as error:
            return await run_in_threadpool(error_page, request, problem_of(error))
        finally:
            await data.close()
        return _answer(request, done)

    return handle


async def form_of(request: Request, *, max_files: int, max_fields: int) -> FormData:
    """Read the form of a request. Raises HTTPException (400) if it cannot be read."""
    try:
        return await request.form(max_files=max_files, max_fields=max_fields)
    except FormParserError as error:  # versions of Starlette differ in what they pass on
        raise HTTPException(400, "The form that was sent cannot be read.") from error


def _answer(request: Request, done: Done) -> Response:
    toast = {"text": done.text, "level": done.level}
    by_htmx = is_htmx(request)
    if by_htmx and (done.stay or done.response is not None):
        response = done.response or Response(status_code=204)
        response.headers["HX-Trigger"] = json.dumps({"toast": toast})
        return response
    where = done.to or came_from(request)
    response = Response(status_code=204) if by_htmx else RedirectResponse(where, 303)
    if by_htmx:
        response.headers["HX-Redirect"] = where
    set_toast(request, response, toast)
    return response


def is_htmx(request: Request) -> bool:
    """Whether htmx sent it, and will read the answer."""
    return request.headers.get("hx-request") == "true"


def came_from(request: Request) -> str:
    """The path of the page that a request came from, if it is one of ours."""
    sent = request.headers.get("hx-current-url") or request.headers.get("referer") or ""
    try:
        parts = urlsplit(sent)
    except ValueError:
        return local_path(request, None)
    path = parts.path + (f"?{parts.query}" if parts.query else "")
    return local_path(request, path)


def local_path(request: Request, path: str | None) -> str:
    """A path if it leads to a page of ours, else the overview: nobody is sent elsewhere."""
    root = root_of(request.scope)
    home = link(request, "overview")
    if not path or not path.startswith(root + "/") or path.startswith(("//", "/\\")):
        return home
    if any(ord(c) < 32 or c == "\\" for c in path):
        return home
    return path


def set_toast(request: Request, response: Response, toast: dict[str, str]) -> None:
    """Let the next page say this."""
    text = base64.urlsafe_b64encode(json.dumps(toast).encode()).decode()
    response.set_cookie(
        TOAST_COOKIE,
        text,
        max_age=TOAST_S,
        path=root_of(request.scope) or "/",
        secure=is_secure(request),
        httponly=True,
        samesite="strict",
    )


def _read_toast(request: Request) -> dict[str, str] | None:
    text = request.cookies.get(TOAST_COOKIE)
    if not text:
        return None
    try:
        found = json.loads(base64.urlsafe_b64decode(text.encode()))
        level = found["level"] if found["level"] in ("success", "warning", "error") else "warning"
        return {"text": str(found["text"]), "level": level}
    except (ValueError, KeyError, TypeError):
        return None


# --- errors ---------------------------------------------------------------------------------------


def error_page(request: Request, problem: ProblemDetails) -> Response:
    """What a person sees when it went wrong: the login, a toast, or a page that says so."""
    if problem.status == 401:
        return _to_login(request, problem)
    if is_htmx(request):
        toast = {"text": problem.detail, "level": "error"}
        headers = {"HX-Trigger": json.dumps({"toast": toast}), "HX-Reswap": "none"}
        return Response(status_code=problem.status, headers={**problem.headers, **headers})
    if not _wants_html(request):
        return problem.response(path_of(request.scope))
    actor = getattr(request.state, "actor", None)
    context = {"problem": problem, "now": datetime.now(UTC), "back": came_from(request)}
    response = _render(request, "error.html", problem.status, actor, context)
    response.headers.update(problem.headers)
    return response


def _to_login(request: Request, problem: ProblemDetails) -> Response:
    if is_htmx(request):
        # The page stays, with what was typed into it, and asks for a key itself.
        headers = {"HX-Trigger": json.dumps({"fq:session": {}}), "HX-Reswap": "none"}
        return Response(status_code=401, headers={**problem.headers, **headers})
    if not _wants_html(request):
        return problem.response(path_of(request.scope))
    if request.method not in SAFE_METHODS:
        return RedirectResponse(_login_path(request, came_from(request)), 303)
    if request.headers.get("sec-fetch-site") == "cross-site":
        # The cookie does not travel with a link on another site. A page of ours that loads itself
        # again is no other site, so whoever is logged in gets where the link leads.
        return HTMLResponse(
            '<!doctype html><meta http-equiv="refresh" content="0"><title>…</title>'
        )
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(_login_path(request, path), 303)


def _login_path(request: Request, path: str) -> str:
    """Where to log in, and to go on after that; with the reason, where a session is over."""
    why = ""
    if SESSION_COOKIE in request.cookies:
        why = "&why=expired" if request.method in SAFE_METHODS else "&why=unsaved"
    return f"{link(request, 'login')}?next={quote(path)}{why}"


def _wants_html(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "text/html")
