"""The schedules: a list that is fit for many, and what is done to all that match."""

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
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.pages.helpers import (
    brief,
    command,
    options,
    paths,
    posted,
    rule_text,
    segment,
)
from fairqueue.web.dashboard.shell import Done, Form, action, page, partial
from fairqueue.web.problems import problem_of

PAGE = 25  # schedules on one page
# Fields of the filter form, and what the Inspector calls them. None is called `contains`: a field
# of that name hides a method of its form that scripts rely on.
FIELDS: dict[str, Literal["user_id", "name", "name_prefix", "contains", "tenant"]] = {
    "user_id": "user_id",
    "name": "name",
    "name_prefix": "name_prefix",
    "text": "contains",
    "tenant": "tenant",
}
STATUSES = {"active": True, "paused": False}
ERRORS_TOLD = 3  # of a bulk action, in its toast; the audit log has the counts

MOST_SUMMARY = 600  # characters: a toast travels in a cookie
MOST_COMMAND = 500  # characters of a command line that is worth showing

# Of each bulk action: what it does in words, and what was done.
BULK = {
    "pause": ("Pause", "They fire no more until they are resumed.", "paused"),
    "resume": (
        "Resume",
        "They go on from now; what passed meanwhile is not made up for.",
        "resumed",
    ),
    "trigger": ("Trigger", "Each has one run now, in addition to its schedule.", "triggered"),
    "remove": ("Delete", "Runs that they have had stay. This cannot be undone.", "deleted"),
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
        status=200 if problem is None else problem.status,
        views=found,
        problem=problem,
        is_filtered=bool(filters),
        told_filters=[name for name in (*FIELDS, "status") if request.query_params.get(name)],
        is_whole=found.cursor is None and "cursor" not in request.query_params,
        sees_tenants=actor_of(request).tenant is None,
        segment=segment,
        rule_text=rule_text,
        brief=brief,
        command=command("schedules", "list", *_flags(filters)),
        **paths(request),
    )


def filters_of(given: Mapping[str, str]) -> ScheduleFilters:
    """The filters of a query, as the Inspector takes them. Raises InvalidInput."""
    found: ScheduleFilters = {}
    for field, name in FIELDS.items():
        text = given.get(field, "").strip()
        if text:
            found[name] = text
    status = given.get("status", "")
    if status:
        if status not in STATUSES:
            raise InvalidInput(f"status {status!r:.60} is neither active nor paused")
        found["is_active"] = STATUSES[status]
    return found


def _flags(filters: ScheduleFilters) -> list[str]:
    given: dict[str, Any] = dict(filters)
    is_active = given.pop("is_active", None)
    user_id = given.pop("user_id", None)
    told = options(user=user_id, **given)
    if is_active is not None:
        told.append("--active" if is_active else "--inactive")
    return told


# --- many at once ---------------------------------------------------------------------------------


def count(request: Request) -> Response:
    """How many match, as a number: what `all that match` means."""
    found = inspector_of(request).schedules.count(**filters_of(request.query_params))
    return HTMLResponse(f"{found:,}")


@posted
def ask(request: Request, form: Form) -> Response:
    """What a bulk action would be done to, counted; the dialog that asks for it."""
    kind = _kind(request)
    chosen = _chosen(form)
    result = inspector_of(request).schedules.bulk(kind, dry_run=True, **chosen)
    verb, about, _ = BULK[kind]
    ids, filters = chosen.get("ids"), _told_filters(form)
    flags = [] if ids is not None else _flags(filters_of(filters)) or ["--all"]
    told = command("schedules", kind, *flags, ids=ids or ())
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
        command=told if len(told) < MOST_COMMAND else None,
    )


@action
def bulk(request: Request, form: Form) -> Done:
    """Do it, and say how it went."""
    kind = _kind(request)
    note = form.text("note") if kind in ("pause", "resume") else None
    chosen = _chosen(form)
    result = inspector_of(request).schedules.bulk(kind, dry_run=False, note=note, **chosen)
    return Done(text=_summary(result), level=_level(result))


def _kind(request: Request) -> str:
    kind: str = request.path_params["kind"]
    if kind not in BULK:
        raise HTTPException(404)
    return kind


def _chosen(form: Form) -> dict[str, Any]:
    """What is meant, as `bulk` takes it. Raises InvalidInput where that is not clear."""
    if form.has("all"):
        return dict(filters_of(_told_filters(form)))
    ids = form.every("id")
    if not ids:
        raise InvalidInput("nothing is selected: tick rows, or all that match")
    return {"ids": ids}


def _told_filters(form: Form) -> dict[str, str]:
    given = {field: form.text(field) for field in (*FIELDS, "status")}
    return {name: value for name, value in given.items() if value is not None}


def _summary(result: BulkResult) -> str:
    done = BULK[result.action][2]
    parts = [f"{plural(result.done, 'schedule')} {done}"]
    counts = (("failed", result.failed), ("gone meanwhile", result.gone), ("left", result.left))
    parts += [f"{many:,} {what}" for what, many in counts if many]
    text = ", ".join(parts)
    errors = list(result.errors.items())[:ERRORS_TOLD]
    text += "".join(f" · {schedule_id}: {error}" for schedule_id, error in errors)
    return text if len(text) <= MOST_SUMMARY else text[:MOST_SUMMARY] + "…"


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
