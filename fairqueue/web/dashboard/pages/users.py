"""The users: their fair and actual shares, why they wait, and actions on them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from zlib import crc32

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput, plural
from fairqueue.models import Page
from fairqueue.stats.users import ShareSeries, UserInfo
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.charts import Line, chart_document
from fairqueue.web.dashboard.formatting import command, duration, options
from fairqueue.web.dashboard.forms import Done, Form, action
from fairqueue.web.dashboard.pages.helpers import now_of
from fairqueue.web.dashboard.pages.user_helpers import (
    WINDOWS,
    evenness,
    hint,
    scale_of,
    window_of,
    windows,
)
from fairqueue.web.dashboard.shell import page, partial

PAGE = 25  # users on one page
TOP = 8  # users with a colour of their own
DIALOGS = ("limits", "purge", "pause")
# For how many minutes a user is paused; "" until resumed.
PAUSES = {
    "": "until resumed",
    "15": "15 minutes",
    "60": "1 hour",
    "480": "8 hours",
    "1440": "1 day",
    "10080": "1 week",
}
MAX_PAUSE = 366 * 24 * 60  # minutes


def users(request: Request) -> Response:
    """A page of users: by default busy ones by backlog, or all by name if nobody is busy."""
    window = window_of(request)
    order = request.query_params.get("order") or None
    found = _list(request, order or "backlog")
    is_quiet = not found and order is None and "cursor" not in request.query_params
    if is_quiet:
        found = _list(request, "name")
        order = "name" if found else None
    minutes = WINDOWS[window][0]
    sees_tenants = actor_of(request).tenant is None
    view = inspector_of(request).users.overview(minutes) if sees_tenants else None
    return page(
        request,
        "users.html",
        users=found,
        order=order,
        is_quiet=is_quiet and bool(found),
        is_filtered=any(request.query_params.get(name) for name in ("prefix", "tenant")),
        view=view,
        evenness=evenness(view.jain) if view else None,
        window=window,
        window_label=WINDOWS[window][1],
        windows=windows(),
        hint=lambda info: hint(info, minutes),
        scale=scale_of(found),
        kind=_kind(request),
        cli=command("users", "list", *_flags(request, minutes)),
    )


def _list(request: Request, order: str) -> Page[UserInfo]:
    given = request.query_params
    return inspector_of(request).users.list(
        order=order,
        prefix=given.get("prefix") or None,
        tenant=given.get("tenant") or None,
        minutes=WINDOWS[window_of(request)][0],
        limit=PAGE,
        cursor=given.get("cursor"),
    )


def _flags(request: Request, minutes: int) -> list[str]:
    given = {name: request.query_params.get(name) for name in ("order", "prefix", "tenant")}
    return options(**given, minutes=minutes)


# --- charts ---------------------------------------------------------------------------------------


def shares(request: Request) -> Response:
    """The ended runs over time of the users with most runs and of all others, for a chart."""
    series = inspector_of(request).users.shares(WINDOWS[window_of(request)][0], TOP)
    shown = [str(user) for user in series.users]
    names = [*shown, *(["others"] if any(series.others) else [])]
    tones = [*tones_of(shown), "idle"]
    values = [*(series.counts[user] for user in series.users), series.others]
    lines = list(zip(names, tones, values, strict=False))
    if _kind(request) == "runs":
        return chart_document(series.times, lines)
    return chart_document(series.times, _in_percent(series, lines), "%")


def tones_of(users: Sequence[str]) -> list[str]:
    """A colour for each user that depends on the name, so that it stays the same.

    If several names lead to one colour, the first by name gets it, and the others a free one.
    """
    wanted = {user: crc32(user.encode("utf-8", "replace")) % TOP for user in users}
    taken: dict[int, str] = {}
    for user in sorted(users):
        taken.setdefault(wanted[user], user)
    found = {user: tone for tone, user in taken.items()}
    free = [tone for tone in range(TOP) if tone not in taken]
    for user in sorted(wanted.keys() - found.keys()):
        found[user] = free.pop(wanted[user] % len(free)) if free else wanted[user]
    return [str(found[user] + 1) for user in users]


def _in_percent(series: ShareSeries, lines: Sequence[Line]) -> list[Line]:
    """Counts as percentages of all runs that ended in the same interval."""
    totals = [
        sum(series.counts[user][i] for user in series.users) + others
        for i, others in enumerate(series.others)
    ]
    return [
        (
            label,
            tone,
            [
                None if not total else 100 * (count or 0) / total
                for count, total in zip(values, totals, strict=True)
            ],
        )
        for label, tone, values in lines
    ]


def _kind(request: Request) -> str:
    return "runs" if request.query_params.get("as") == "runs" else "share"


# --- dialogs --------------------------------------------------------------------------------------


def ask(request: Request) -> Response:
    """A dialog: change limits, cancel waiting tasks, or pause."""
    kind = request.path_params["kind"]
    if kind not in DIALOGS:
        raise HTTPException(404)
    user_id = request.query_params.get("id", "")
    part = inspector_of(request).users
    return partial(
        request,
        f"users_{kind}.html",
        info=part.get(user_id),
        waiting=part.purge(user_id, dry_run=True) if kind == "purge" else 0,
        pauses=PAUSES,
    )


# --- actions --------------------------------------------------------------------------------------


@action
def change(request: Request, form: Form) -> Done:
    """Change the limits that differ from what the form showed, and keep others' changes."""
    user_id = form.raw("id")
    given = {
        name: value
        for name, value in _limits(form).items()
        if form.raw(name).strip() != form.raw(f"was_{name}")
    }
    if not given:
        return Done(text="Nothing was changed.", level="warning", stay=True)
    inspector_of(request).users.set(user_id, **given)
    text = ", ".join(f"{name.replace('_', ' ')} {_said(value)}" for name, value in given.items())
    return Done(text=f"Changed {user_id}: {text}.")


def _limits(form: Form) -> dict[str, Any]:
    """The limits in the form; an empty field removes a limit. Raises InvalidInput."""
    found: dict[str, Any] = {
        "weight": form.decimal("weight"),
        "max_running": form.integer("max_running"),
        "max_waiting": form.integer("max_waiting"),
        "rate": form.decimal("rate"),
    }
    if form.has("weight") and found["weight"] is None:
        raise InvalidInput("weight is required: a number from 0.01 to 1000, by default 1")
    return {name: value for name, value in found.items() if form.has(name)}


def _said(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


@action
def pause(request: Request, form: Form) -> Done:
    """Pause a user until resumed, or for some minutes."""
    user_id = form.raw("id")
    minutes = form.integer("minutes")
    if minutes is not None and not 0 < minutes <= MAX_PAUSE:
        raise InvalidInput(f"minutes must be 1 to {MAX_PAUSE}, not {minutes}")
    until = None if minutes is None else now_of(request) + timedelta(minutes=minutes)
    inspector_of(request).users.pause(user_id, note=form.text("note"), until=until)
    how_long = f" for {duration(minutes * 60)}" if minutes else ""
    return Done(text=f"Paused {user_id}{how_long}. Running tasks continue.")


@action
def resume(request: Request, form: Form) -> Done:
    """Resume a user."""
    user_id = form.raw("id")
    inspector_of(request).users.resume(user_id)
    return Done(text=f"Resumed {user_id}.")


@action
def purge(request: Request, form: Form) -> Done:
    """Cancel the waiting tasks of a user."""
    user_id = form.raw("id")
    count = inspector_of(request).users.purge(user_id, dry_run=False)
    return Done(text=f"Cancelled {plural(count, 'waiting task')} of {user_id}.")


ROUTES: list[BaseRoute] = [
    Route("/users", users, name="users"),
    Route("/charts/users/shares", shares, name="user_shares"),
    Route("/ask/users/{kind}", ask, name="user_ask"),
    Route("/do/users/set", change, methods=["POST"], name="user_set"),
    Route("/do/users/pause", pause, methods=["POST"], name="user_pause"),
    Route("/do/users/resume", resume, methods=["POST"], name="user_resume"),
    Route("/do/users/purge", purge, methods=["POST"], name="user_purge"),
]
