"""The schedules: a list with filters, and actions on many of them."""

from collections.abc import Mapping
from typing import Any, Literal

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput, plural
from fairqueue.inspection.views import ScheduleView
from fairqueue.models import Page
from fairqueue.schedules.bulk import BulkResult
from fairqueue.schedules.search import ScheduleFilters
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.formatting import command, options
from fairqueue.web.dashboard.forms import Done, Form, action, posted
from fairqueue.web.dashboard.shell import page, partial
from fairqueue.web.problems import problem_of

PAGE = 25  # schedules on one page
# Fields of the filter form, and their names in the Inspector. A form field called `contains` would
# hide a method of the form element that scripts use.
FIELDS: dict[str, Literal["user_id", "name", "name_prefix", "contains", "tenant"]] = {
    "user_id": "user_id",
    "name": "name",
    "name_prefix": "name_prefix",
    "text": "contains",
    "tenant": "tenant",
}
STATUSES = {"active": True, "paused": False}
ERRORS_SHOWN = 3  # in the toast of a bulk action; the audit log has the counts
MAX_SUMMARY = 600  # characters: a toast is stored in a cookie
MAX_COMMAND = 500  # characters of a command line that is worth showing

# The verb of each bulk action, what it does, and what was done.
BULK = {
    "pause": ("Pause", "They do not fire until they are resumed.", "paused"),
    "resume": ("Resume", "They fire again from now on. Missed runs are not made up.", "resumed"),
    "trigger": ("Trigger", "Each runs once now, in addition to its schedule.", "triggered"),
    "remove": ("Delete", "Their past runs stay. This cannot be undone.", "deleted"),
}


# --- the list -------------------------------------------------------------------------------------


def schedules(request: Request) -> Response:
    """A page of the schedules that match."""
    problem, found = None, Page[ScheduleView]([], None)
    filters: ScheduleFilters = {}
    try:
        filters = filters_of(request.query_params)
        cursor = request.query_params.get("cursor")
        found = inspector_of(request).schedules.list(limit=PAGE, cursor=cursor, **filters)
    except InvalidInput as error:
        problem = problem_of(error)
    return page(
        request,
        "schedules.html",
        views=found,
        problem=problem,
        is_filtered=bool(filters),
        given_filters=[name for name in (*FIELDS, "status") if request.query_params.get(name)],
        is_whole=found.cursor is None and "cursor" not in request.query_params,
        cli=command("schedules", "list", *_flags(filters)),
    )


def filters_of(given: Mapping[str, str]) -> ScheduleFilters:
    """The filters of a query for the Inspector. Raises InvalidInput."""
    found: ScheduleFilters = {}
    for field, name in FIELDS.items():
        text = given.get(field, "").strip()
        if text:
            found[name] = text
    status = given.get("status", "")
    if status:
        if status not in STATUSES:
            raise InvalidInput(f"status must be active or paused, not {status!r:.60}")
        found["is_active"] = STATUSES[status]
    return found


def _flags(filters: ScheduleFilters) -> list[str]:
    given: dict[str, Any] = dict(filters)
    is_active = given.pop("is_active", None)
    found = options(user=given.pop("user_id", None), **given)
    if is_active is not None:
        found.append("--active" if is_active else "--inactive")
    return found


# --- many at once ---------------------------------------------------------------------------------


def count(request: Request) -> Response:
    """The number of schedules that match."""
    found = inspector_of(request).schedules.count(**filters_of(request.query_params))
    return HTMLResponse(f"{found:,}")


@posted
def ask(request: Request, form: Form) -> Response:
    """Count the schedules that an action would change, and ask for confirmation."""
    kind = _kind(request)
    chosen = _chosen(form)
    result = inspector_of(request).schedules.bulk(kind, dry_run=True, **chosen)
    verb, about, _ = BULK[kind]
    ids, filters = chosen.get("ids"), _given_filters(form)
    flags = [] if ids is not None else _flags(filters_of(filters)) or ["--all"]
    cli = command("schedules", kind, *flags, ids=ids or ())
    return partial(
        request,
        "schedules_ask.html",
        kind=kind,
        verb=verb,
        about=about,
        matched=result.matched,
        ids=ids or [],
        filters=filters,
        is_all=ids is None,
        cli=cli if len(cli) < MAX_COMMAND else None,
    )


@action
def bulk(request: Request, form: Form) -> Done:
    """Act on the selected schedules."""
    kind = _kind(request)
    note = form.text("note") if kind in ("pause", "resume") else None
    result = inspector_of(request).schedules.bulk(kind, dry_run=False, note=note, **_chosen(form))
    return Done(text=_summary(result), level=_level(result))


def _kind(request: Request) -> str:
    kind: str = request.path_params["kind"]
    if kind not in BULK:
        raise HTTPException(404)
    return kind


def _chosen(form: Form) -> dict[str, Any]:
    """The selection as arguments of `bulk`. Raises InvalidInput if nothing is selected."""
    if form.has("all"):
        return dict(filters_of(_given_filters(form)))
    ids = form.every("id")
    if not ids:
        raise InvalidInput("nothing is selected: tick rows, or all that match")
    return {"ids": ids}


def _given_filters(form: Form) -> dict[str, str]:
    given = {field: form.text(field) for field in (*FIELDS, "status")}
    return {name: value for name, value in given.items() if value is not None}


def _summary(result: BulkResult) -> str:
    parts = [f"{plural(result.done, 'schedule')} {BULK[result.action][2]}"]
    counts = {"failed": result.failed, "gone meanwhile": result.gone, "not tried": result.left}
    parts += [f"{many:,} {what}" for what, many in counts.items() if many]
    text = ", ".join(parts)
    errors = list(result.errors.items())[:ERRORS_SHOWN]
    text += "".join(f" · {schedule_id}: {error}" for schedule_id, error in errors)
    return text if len(text) <= MAX_SUMMARY else text[:MAX_SUMMARY] + "…"


def _level(result: BulkResult) -> str:
    if not (result.failed or result.left):
        return "success"
    return "warning" if result.done else "error"


ROUTES: list[BaseRoute] = [
    Route("/schedules", schedules, name="schedules"),
    Route("/do/schedules/count", count, name="schedules_count"),
    Route("/do/schedules/ask/{kind}", ask, methods=["POST"], name="schedules_ask"),
    Route("/do/schedules/bulk/{kind}", bulk, methods=["POST"], name="schedules_bulk"),
]
