"""Render pages from templates, with navigation, toasts and error pages."""

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import jinja2
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from fairqueue.access.credentials import Actor
from fairqueue.clock import from_ms
from fairqueue.errors import ConfigurationError, FairQueueError
from fairqueue.web.app_state import SAFE_METHODS, app_state, link, path_of, root_of
from fairqueue.web.auth import SESSION_COOKIE, cookie_settings
from fairqueue.web.dashboard.formatting import FILTERS, FUNCTIONS, query_of, segment
from fairqueue.web.dashboard.icons import icon
from fairqueue.web.missing import missing_of
from fairqueue.web.problems import ProblemDetails

FOLDER = Path(__file__).parent
ASSETS = FOLDER / "assets"  # our own files
STATIC = FOLDER / "static"  # files of libraries, downloaded by `make static`
TOAST_COOKIE = "fairqueue_toast"
TOAST_S = 60  # a toast that no page has shown by then is dropped

# route name, label, icon, live number of the badge, whether visible to an actor of one tenant
NAVIGATION = (
    ("overview", "Overview", "overview", None, True),
    ("schedules", "Schedules", "schedules", None, True),
    ("tenants", "Tenants", "tenants", None, True),
    ("users", "Users", "users", None, True),
    ("runs", "Runs", "runs", "running", True),
    ("failed", "Failed", "failed", "dead", True),
    ("workers", "Workers", "workers", None, False),
    ("partitions", "Partitions", "partitions", None, False),
    ("audit", "Audit", "audit", None, True),
    ("settings", "Settings", "settings", None, False),
)


# --- templates ------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def environment() -> jinja2.Environment:
    """The template environment. All values are escaped; an undefined name is an error."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(FILTERS)
    found.globals.update({function.__name__: function for function in FUNCTIONS})
    found.globals.update(
        icon=icon,
        link=_link,
        user_link=_user_link,
        run_link=_run_link,
        asset=_asset,
        query=_query,
        may=_may,
        version=_version(),
    )
    return found


@jinja2.pass_context
def _link(context: jinja2.runtime.Context, name: str, **parameters: Any) -> str:
    return link(context["request"], name, **parameters)


def user_link(request: Request, user_id: str, tenant: str | None, **given: str | None) -> str:
    """The path of the page of a user; an actor of one tenant needs no tenant in it."""
    actor: Actor | None = getattr(request.state, "actor", None)
    is_own = actor is not None and actor.tenant is not None
    query = query_of(tenant=None if is_own else tenant, **given)
    path = f"{root_of(request.scope)}/users/{segment(user_id)}"
    return f"{path}?{query}" if query else path


@jinja2.pass_context
def _user_link(
    context: jinja2.runtime.Context, user_id: str, tenant: str | None = None, **given: str | None
) -> str:
    return user_link(context["request"], user_id, tenant, **given)


def run_path(request: Request, task_id: str, tenant: str | None) -> str:
    """The path of the page of a run; with its tenant if others may use the same id."""
    path = f"{root_of(request.scope)}/runs/{segment(task_id)}"
    actor: Actor | None = getattr(request.state, "actor", None)
    is_own = actor is not None and actor.tenant is not None
    if tenant is None or is_own or not has_partitions(request):
        return path
    return f"{path}?{query_of(tenant=tenant)}"


@jinja2.pass_context
def _run_link(context: jinja2.runtime.Context, task_id: str, tenant: str | None = None) -> str:
    return run_path(context["request"], task_id, tenant)


@jinja2.pass_context
def _asset(context: jinja2.runtime.Context, name: str) -> str:
    """The URL of a file with a digest of its content, so that it can be cached forever."""
    return f"{link(context['request'], 'static', path=name)}?v={_digest(name)}"


@jinja2.pass_context
def _query(context: jinja2.runtime.Context, **changes: object) -> str:
    """The query string of this page with some values changed; None removes a value."""
    kept = [(k, v) for k, v in context["request"].query_params.multi_items() if k not in changes]
    added = [(name, str(value)) for name, value in changes.items() if value is not None]
    return "?" + urlencode(kept + added)


@jinja2.pass_context
def _may(context: jinja2.runtime.Context, role: str) -> bool:
    """Whether to show what needs this role. The Inspector checks again when it is used."""
    actor: Actor | None = context["actor"]
    return actor is not None and actor.may(role) and not context["read_only"]


@lru_cache(maxsize=100)
def _digest(name: str) -> str:
    return sha256(find_file(name).read_bytes()).hexdigest()[:12]


def find_file(name: str) -> Path:
    """The path of an asset or a library file."""
    ours = ASSETS / name
    return ours if ours.exists() else STATIC / name


def check_files() -> None:
    """Raises ConfigurationError if the library files are not installed."""
    if not (STATIC / "versions.json").exists():
        raise ConfigurationError(
            "the files of the dashboard are missing: run `make static` in a checkout, install the "
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
    """An entry of the navigation; `badge` is the live number beside it."""

    label: str
    icon: str
    path: str
    is_current: bool
    badge: str | None


def page(request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
    """Render a page from a template that extends base.html. Call it in a thread.

    A `problem` in the context sets the status.
    """
    problem = context.get("problem")
    if isinstance(problem, ProblemDetails):
        status = problem.status
    response = partial(request, template, status=status, **context)
    if TOAST_COOKIE in request.cookies:
        response.delete_cookie(TOAST_COOKIE, path=root_of(request.scope) or "/")
    return response


def partial(request: Request, template: str, *, status: int = 200, **context: Any) -> Response:
    """Render a part of a page, for htmx."""
    return _render(request, template, status, {"now": _now(request), **context})


def _render(request: Request, template: str, status: int, context: dict[str, Any]) -> HTMLResponse:
    state, root = app_state(request), root_of(request.scope)
    actor: Actor | None = getattr(request.state, "actor", None)
    shared = {
        "request": request,
        "actor": actor,
        "sees_tenants": actor is None or actor.tenant is None,
        "read_only": state.read_only,
        "has_login": state.auth,
        "navigation": navigation(request, actor),
        "queue_name": state.inspector.queue.name,
        "toast": _read_toast(request),
        "missing": _missing(request, actor),
        # For links in lists: to look up a route for each of them takes long.
        "schedule_path": f"{root}/schedules/",
        "tenant_path": f"{root}/tenants/",
        "run_path": f"{root}/runs/",
    }
    text = environment().get_template(template).render(shared | context)
    # Stored text may contain characters that UTF-8 cannot hold.
    return HTMLResponse(text.encode("utf-8", "replace"), status)


def _missing(request: Request, actor: Actor | None) -> str:
    link = app_state(request).inspector.queue.link
    return missing_of(request, link, with_nodes=actor is not None and actor.tenant is None)


def _now(request: Request) -> datetime:
    """The time of the queue, which times on a page are compared with."""
    try:
        return from_ms(app_state(request).inspector.queue.link.now_ms())
    except FairQueueError:
        return datetime.now(UTC)


def navigation(request: Request, actor: Actor | None) -> list[NavigationItem]:
    """The pages that an actor can visit."""
    here, root = path_of(request.scope), root_of(request.scope)
    found = []
    for name, label, icon_name, badge, for_tenants in NAVIGATION:
        if actor is None or (actor.tenant is not None and not for_tenants):
            continue
        if name == "tenants" and not has_tenants(request):
            continue
        path = link(request, name)
        if name == "partitions" and not has_partitions(request) and here != "/partitions":
            continue
        if name == "tenants" and actor.tenant is not None:
            path, label = f"{path}/{segment(actor.tenant)}", "Tenant"
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


def has_partitions(request: Request) -> bool:
    """Whether the queue has several partitions."""
    return app_state(request).inspector.queue.partitions > 1


def has_tenants(request: Request) -> bool:
    """Whether the queue has tenants. Asked at most once per second; False without Redis."""
    state = app_state(request)

    def ask() -> bool:
        try:
            return state.inspector.tenants.exist()
        except FairQueueError:
            return False

    return state.cache.get("has_tenants", ask)


# --- where to go next -----------------------------------------------------------------------------


def is_htmx(request: Request) -> bool:
    """Whether htmx sent the request and will read the response."""
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
    """A path if it leads to a page of ours, else the overview: no redirects to other sites."""
    root = root_of(request.scope)
    home = link(request, "overview")
    if not path or not path.startswith(root + "/") or path.startswith(("//", "/\\")):
        return home
    if any(ord(c) < 32 or c == "\\" for c in path):
        return home
    return path


def set_toast(request: Request, response: Response, toast: dict[str, str]) -> None:
    """Show a toast on the next page."""
    text = base64.urlsafe_b64encode(json.dumps(toast).encode()).decode()
    response.set_cookie(TOAST_COOKIE, text, max_age=TOAST_S, **cookie_settings(request))


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
    """The response to a failed request: the login, a toast or an error page."""
    if problem.status == 401:
        return _to_login(request, problem)
    if is_htmx(request):
        return _trigger(problem, {"toast": {"text": problem.detail, "level": "error"}})
    if not _wants_html(request):
        return problem.response(path_of(request.scope))
    context = {"problem": problem, "now": datetime.now(UTC), "back": came_from(request)}
    response = _render(request, "error.html", problem.status, context)
    response.headers.update(problem.headers)
    return response


def _trigger(problem: ProblemDetails, events: dict[str, Any]) -> Response:
    """A response that leaves the page as it is and triggers events in it."""
    headers = {"HX-Trigger": json.dumps(events), "HX-Reswap": "none"}
    return Response(status_code=problem.status, headers={**problem.headers, **headers})


def _to_login(request: Request, problem: ProblemDetails) -> Response:
    if is_htmx(request):
        # The page keeps what was typed, and asks for a key itself.
        return _trigger(problem, {"fq:session": {}})
    if not _wants_html(request):
        return problem.response(path_of(request.scope))
    if request.method not in SAFE_METHODS:
        return RedirectResponse(_login_path(request, came_from(request)), 303)
    if request.headers.get("sec-fetch-site") == "cross-site":
        # The cookie is not sent with a link from another site. A page of ours that reloads itself
        # is not cross-site, so a user who is logged in gets to the page.
        return HTMLResponse(
            '<!doctype html><meta http-equiv="refresh" content="0"><title>…</title>'
        )
    path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    return RedirectResponse(_login_path(request, path), 303)


def _login_path(request: Request, path: str) -> str:
    """The path of the login, which leads to `path`; with the reason if a session has ended."""
    why = ""
    if SESSION_COOKIE in request.cookies:
        why = "&why=expired" if request.method in SAFE_METHODS else "&why=unsaved"
    return f"{link(request, 'login')}?next={quote(path)}{why}"


def _wants_html(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "text/html")
