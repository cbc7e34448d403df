"""The users: what each is entitled to and gets, why some wait, and what can be done about it."""

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
from fairqueue.web.dashboard.filters import duration
from fairqueue.web.dashboard.pages.helpers import (
    command,
    now_of,
    options,
    paths,
    query_value,
    segment,
)
from fairqueue.web.dashboard.pages.user_helpers import (
    WINDOWS,
    evenness,
    hint,
    scale_of,
    window_of,
    windows,
)
from fairqueue.web.dashboard.shell import Done, Form, action, page, partial

PAGE = 25  # users on one page
TOP = 8  # users with a colour of their own
DIALOGS = ("limits", "drop", "pause")
# For how many minutes a user may be paused; "" until somebody resumes it.
PAUSES = {
    "": "until somebody resumes them",
    "15": "15 minutes",
    "60": "1 hour",
    "480": "8 hours",
    "1440": "1 day",
    "10080": "1 week",
}
MAX_PAUSE = 366 * 24 * 60  # minutes
LIMITS = ("weight", "max_running", "max_waiting", "rate", "tenant")


def users(request: Request) -> Response:
    """A page of users; where nobody asks for an order and nobody is busy, of all by name."""
    window = window_of(request)
    order = request.query_params.get("order") or None
    found = _list(request, order or "backlog")
    is_quiet = not found and order is None and "cursor" not in request.query_params
    if is_quiet:
        found = _list(request, "name")
        order = "name" if found else None
    minutes = WINDOWS[window][0]
    sees_all = actor_of(request).tenant is None
    view = inspector_of(request).users.overview(minutes) if sees_all else None
    return page(
        request,
        "users.html",
        users=found,
        order=order,
        is_quiet=is_quiet and bool(found),
        is_filtered=any(request.query_params.get(name) for name in ("prefix", "tenant")),
        view=view,
        evenness=evenness(view.jain) if view else None,
        sees_all=sees_all,
        window=window,
        window_label=WINDOWS[window][1],
        windows=windows(),
        hint=lambda info: hint(info, minutes),
        scale=scale_of(found),
        kind=_kind(request),
        segment=segment,
        query_value=query_value,
        command=command("users", "list", *_flags(request, minutes)),
        **paths(request),
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
    """Runs that ended over time, of the users who got most and of all others."""
    series = inspector_of(request).users.shares(WINDOWS[window_of(request)][0], TOP)
    names = [*series.users, *(["others"] if any(series.others) else [])]
    tones = [*tones_of(series.users), "idle"]
    values = [*(series.counts[user] for user in series.users), series.others]
    lines = list(zip(names, tones, values, strict=False))
    if _kind(request) == "runs":
        return chart_document(series.times, lines)
    return chart_document(series.times, _in_percent(series, lines), "%")


def tones_of(users: Sequence[str]) -> list[str]:
    """A colour for each user, the same at each load: it goes by the name, not by the place.

    Of users whose names lead to one colour the first by name has it, and the others a free one.
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
    """Counts as parts of all that ended in the same stretch; nothing where none did."""
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
    """What a dialog asks: the limits to change, or how much would be dropped right now."""
    kind = request.path_params["kind"]
    if kind not in DIALOGS:
        raise HTTPException(404)
    user_id = request.query_params.get("id", "")
    people = inspector_of(request).users
    return partial(
        request,
        f"users_{kind}.html",
        info=people.get(user_id),
        waiting=people.purge(user_id, dry_run=True) if kind == "drop" else 0,
        pauses=PAUSES,
        command=command,
    )


# --- actions --------------------------------------------------------------------------------------


@action
def change(request: Request, form: Form) -> Done:
    """Change what differs from what the form showed: what others changed meanwhile stays."""
    user_id = form.raw("id")
    given = {
        name: value
        for name, value in _limits(form).items()
        if form.raw(name).strip() != form.raw(f"was_{name}")
    }
    if not given:
        return Done(text="Nothing was changed.", level="warning", stay=True)
    inspector_of(request).users.set(user_id, **given)
    told = ", ".join(f"{name.replace('_', ' ')} {_said(value)}" for name, value in given.items())
    return Done(text=f"Changed for {user_id}: {told}.")


def _limits(form: Form) -> dict[str, Any]:
    """What the form has; an empty field takes a limit away. Raises InvalidInput."""
    found: dict[str, Any] = {
        "weight": form.decimal("weight"),
        "max_running": form.integer("max_running"),
        "max_waiting": form.integer("max_waiting"),
        "rate": form.decimal("rate"),
        "tenant": form.text("tenant"),
    }
    if form.has("weight") and found["weight"] is None:
        raise InvalidInput("weight is missing: a number from 0.01 to 1000, as most users 1")
    return {name: value for name, value in found.items() if form.has(name)}


def _said(value: object) -> str:
    if value is None:
        return "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


@action
def pause(request: Request, form: Form) -> Done:
    """Hand out no task of a user, until somebody resumes it or for so many minutes."""
    user_id = form.raw("id")
    minutes = form.integer("minutes")
    if minutes is not None and not 0 < minutes <= MAX_PAUSE:
        raise InvalidInput(f"minutes must be 1 to {MAX_PAUSE}, not {minutes}")
    until = None if minutes is None else now_of(request) + timedelta(minutes=minutes)
    inspector_of(request).users.pause(user_id, note=form.text("note"), until=until)
    how_long = f" for {duration(minutes * 60)}" if minutes else ""
    return Done(text=f"Paused {user_id}{how_long}: no task is handed out. What runs goes on.")


@action
def resume(request: Request, form: Form) -> Done:
    """Hand out the tasks of a user again."""
    user_id = form.raw("id")
    inspector_of(request).users.resume(user_id)
    return Done(text=f"Resumed {user_id}.")


@action
def purge(request: Request, form: Form) -> Done:
    """Drop the backlog of a user."""
    user_id = form.raw("id")
    count = inspector_of(request).users.purge(user_id, dry_run=False)
    return Done(text=f"Dropped {plural(count, 'waiting task')} of {user_id}.")


ROUTES: list[BaseRoute] = [
    Route("/users", users, name="users"),
    Route("/charts/users/shares", shares, name="user_shares"),
    Route("/ask/users/{kind}", ask, name="user_ask"),
    Route("/do/users/set", change, methods=["POST"], name="user_set"),
    Route("/do/users/pause", pause, methods=["POST"], name="user_pause"),
    Route("/do/users/resume", resume, methods=["POST"], name="user_resume"),
    Route("/do/users/purge", purge, methods=["POST"], name="user_purge"),
]
