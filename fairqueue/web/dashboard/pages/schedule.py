"""One schedule: its rule, next and last runs, and actions on it."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import InvalidInput, UnknownSchedule, plural
from fairqueue.flow_options import DEFAULT_POOL
from fairqueue.inspection.views import DayCount, ScheduleView
from fairqueue.models import ScheduledTask
from fairqueue.schedules.fields import FIELDS
from fairqueue.schedules.outcomes import FireTime
from fairqueue.validation import Priority
from fairqueue.web.app_state import link
from fairqueue.web.auth import inspector_of
from fairqueue.web.dashboard.formatting import local_text, segment, wall
from fairqueue.web.dashboard.forms import Done, Form, action
from fairqueue.web.dashboard.pages.helpers import now_of, read_local
from fairqueue.web.dashboard.shell import page, partial

NEXT = 5  # next runs that are shown
AHEAD = timedelta(days=3660)  # how far ahead to look for them
RUNS = 20  # last runs
CHANGES = 20
LINES = 100  # of the log
DAYS = 30  # of the chart
STRETCHES = 30  # missed and skipped stretches that are shown
MAX_MOMENTS = 1000  # fire times that are examined for them
# The longest period with at most that many fire times is examined.
SPANS = (
    (timedelta(days=30), "30 days"),
    (timedelta(days=7), "7 days"),
    (timedelta(days=1), "day"),
    (timedelta(hours=12), "12 hours"),
    (timedelta(hours=1), "hour"),
    (timedelta(minutes=10), "10 minutes"),
)
NOT_RUN = ("skipped", "backfilled", "unknown")
BACKFILL_DAYS = 1  # default range of the form

# --- the page -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Consecutive fire times that did not run, for one reason."""

    outcome: str
    reason: str | None
    first: datetime
    last: datetime
    count: int


def schedule(request: Request) -> Response:
    """The page of a schedule."""
    schedule_id = request.path_params["id"]
    inspector = inspector_of(request)
    if schedule_id == "new" and inspector.schedules.find(schedule_id) is None:
        return RedirectResponse(link(request, "schedule_new"))  # people type it
    view = inspector.schedules.get(schedule_id)
    now = now_of(request)
    zone = view.schedule.timezone
    days = inspector.schedules.history_chart(schedule_id, DAYS)
    return page(
        request,
        "schedule.html",
        view=view,
        it=view.schedule,
        policies=policies(view.schedule),
        upcoming=upcoming(request, schedule_id, now),
        warnings=_warnings(request, view.schedule, now),
        days=days,
        bars=bars(days),
        runs=inspector.runs.list(schedule_id=schedule_id, limit=RUNS),
        changes=inspector.schedules.changes(schedule_id, CHANGES),
        advice=advice(view),
        backfill_from=local_text(now - timedelta(days=BACKFILL_DAYS), zone)[:16],
        backfill_until=local_text(now, zone)[:16],
        priorities=FIELDS["priority"].choices.items(),
    )


def upcoming(request: Request, schedule_id: str, now: datetime) -> Sequence[FireTime]:
    """The next fire times of a schedule."""
    try:
        return inspector_of(request).schedules.moments(schedule_id, now, now + AHEAD, NEXT)
    except InvalidInput:  # the rule can no longer be read; `advice` says so
        return []


def _warnings(request: Request, it: ScheduledTask, now: datetime) -> list[str]:
    """Effects of clock changes on the next runs of a cron expression."""
    if not it.cron_expr:
        return []
    try:
        return (
            inspector_of(request)
            .schedules.preview(
                it.cron_expr,
                timezone=it.timezone,
                count=NEXT,
                after=now,
                schedule_id=it.schedule_id,
                start=it.start,
                end=it.end,
                windows=it.windows,
                exclude=it.exclude,
            )
            .warnings
        )
    except InvalidInput:
        return []


def advice(view: ScheduleView) -> str | None:
    """What to do about a schedule that the scheduler has disabled."""
    reason = view.schedule.disabled_reason
    if reason is None:
        return None
    if view.state == "completed":
        return "To run it again, set a later end or more runs, and resume it."
    if "failures in a row" in reason:
        return "Find the cause in the last failed run, fix it, and resume the schedule."
    return "Edit the field that the reason names, or resume the schedule."


def policies(it: ScheduledTask) -> list[tuple[str, str]]:
    """The settings of a schedule in words: names and values, without those that are not set."""
    found: list[tuple[str, str | None]] = [
        ("Priority", f"{int(it.priority)}, {it.priority.name.replace('_', ' ').lower()}"),
        ("If the scheduler was down", _misfire(it)),
        ("If still running", FIELDS["overlap"].choices.get(it.overlap, it.overlap)),
        ("Jitter", f"up to {it.jitter:g} s" if it.jitter else None),
        ("Retries", _or_handlers(it.retries)),
        ("Backoff", _or_handlers(_backoff(it))),
        ("Time-out", _or_handlers(_seconds(it.timeout))),
        ("Pause after failures", _failures(it)),
        ("Stop after", plural(it.max_runs, "run") if it.max_runs else None),
        ("Pool", it.pool if it.pool != DEFAULT_POOL else None),
        ("Keys with limits", ", ".join(it.limit_keys) if it.limit_keys else None),
        ("Unique key", _unique(it)),
        ("Expires", f"if it has not started after {it.expires:g} s" if it.expires else None),
        ("Cost", f"{it.cost:g}" if it.cost is not None else None),
        ("Windows", _windows(it.windows)),
        ("Not on", ", ".join(it.exclude) if it.exclude else None),
    ]
    return [(name, value) for name, value in found if value is not None]


def _unique(it: ScheduledTask) -> str | None:
    if it.unique is None:
        return None
    if isinstance(it.unique_for, str):
        scope = FIELDS["unique_for"].choices.get(it.unique_for, it.unique_for)
    else:
        scope = f"for {it.unique_for:g} s"
    return f"{it.unique}, {scope}; then {FIELDS['on_duplicate'].choices[it.on_duplicate]}"


def _misfire(it: ScheduledTask) -> str:
    text = FIELDS["misfire"].choices.get(it.misfire, it.misfire)
    if it.misfire == "fire_all":
        return f"{text} of the last {it.catch_up:g} s, at most {it.max_catch_up}"
    return text


def _failures(it: ScheduledTask) -> str | None:
    if it.max_failures is None:
        return None
    return f"{it.max_failures} in a row; now {it.failures_in_a_row}"


def _or_handlers(value: object) -> str:
    return "set by its handler" if value is None else str(value)


def _seconds(value: float | list[float] | None) -> str | None:
    if value is None:
        return None
    listed = value if isinstance(value, list) else [value]
    return ", ".join(f"{each:g} s" for each in listed)


def _backoff(it: ScheduledTask) -> str | None:
    """The delays before retries, in words."""
    parts = [
        _seconds(it.backoff),
        None if it.backoff_multiplier is None else f"times {it.backoff_multiplier:g}",
        None if it.backoff_cap is None else f"up to {it.backoff_cap:g} s",
        None if it.backoff_jitter is None else f"jitter {it.backoff_jitter}",
    ]
    return "; ".join(part for part in parts if part is not None) or None


def _windows(windows: Sequence[dict[str, Any]] | None) -> str | None:
    if windows is None:
        return None
    names = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
    found = []
    for each in windows:
        days = ", ".join(names[day - 1] for day in each.get("days", [])) or "every day"
        found.append(f"{days} {each.get('from', '00:00')} to {each.get('to', '24:00')}")
    return "; ".join(found)


# --- the chart ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A day of the chart: successes above the line, failures below."""

    x: float
    up: float
    down: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """The chart: the line is at `line`, a bar is `width` wide."""

    height: int
    line: float
    width: float
    days: list[Bar]
    most_up: int
    most_down: int


def bars(days: Sequence[DayCount], height: int = 120, pitch: float = 20.0) -> Bars:
    """The bars of the chart, with one scale for both directions."""
    bad = [day.failed + day.timed_out + day.expired for day in days]
    most_up, most_down = max(day.succeeded for day in days), max(bad)
    room = height - 8
    scale = room / max(1, most_up + most_down)
    # A single run must be visible beside thousands.
    sizes = [
        (_size(day.succeeded, scale), _size(many, scale))
        for day, many in zip(days, bad, strict=True)
    ]
    return Bars(
        height=height,
        line=min(room - 4.0, 4 + most_up * scale) if most_down else height - 4.0,
        width=pitch - 5,
        days=[
            Bar(x=number * pitch + 2.5, up=up, down=down, text=_day_text(day))
            for number, (day, (up, down)) in enumerate(zip(days, sizes, strict=True))
        ],
        most_up=most_up,
        most_down=most_down,
    )


def _size(many: int, scale: float) -> float:
    return max(3.0, many * scale) if many else 0.0


def _day_text(day: DayCount) -> str:
    counts = (
        (day.succeeded, "succeeded"),
        (day.failed, "failed"),
        (day.timed_out, "timed out"),
        (day.cancelled, "cancelled"),
        (day.expired, "expired"),
    )
    text = ", ".join(f"{many:,} {what}" for many, what in counts if many)
    return f"{day.day:%a %d %b}: {text or 'no runs'}"


# --- parts that are loaded later, because they read more ------------------------------------------


def logs(request: Request) -> Response:
    """The last log lines of its runs."""
    lines = inspector_of(request).schedules.logs(_id(request), LINES)
    return partial(request, "schedule_logs.html", lines=lines)


def moments(request: Request) -> Response:
    """The fire times that did not run, newest first."""
    schedule_id, now = _id(request), now_of(request)
    schedules = inspector_of(request).schedules
    for span, name in SPANS:
        period, found = name, schedules.moments(schedule_id, now - span, now, MAX_MOMENTS)
        if found.cursor is None:
            break
    listed = stretches(found)
    return partial(
        request,
        "schedule_moments.html",
        stretches=listed[:STRETCHES],
        more=len(listed) > STRETCHES,
        period=period,
    )


def stretches(found: Sequence[FireTime]) -> list[Stretch]:
    """The fire times that did not run, grouped by reason; newest first."""
    listed = []
    for (outcome, reason), group in groupby(found, key=lambda each: (each.outcome, each.reason)):
        own = list(group)
        if outcome in NOT_RUN:
            listed.append(
                Stretch(
                    outcome=outcome,
                    reason=reason,
                    first=own[0].at,
                    last=own[-1].at,
                    count=len(own),
                )
            )
    return listed[::-1]


def _id(request: Request) -> str:
    found = request.query_params.get("id")
    if not found:
        raise UnknownSchedule("the id of the schedule is missing")
    return found


# --- actions --------------------------------------------------------------------------------------


def _here(request: Request, schedule_id: str) -> str:
    return link(request, "schedules") + "/" + segment(schedule_id)


@action
def pause(request: Request, form: Form) -> Done:
    """Pause a schedule until it is resumed, or until a time."""
    schedule_id = form.need("id")
    schedules = inspector_of(request).schedules
    zone = schedules.get(schedule_id).schedule.timezone
    until = read_local(form.text("until"), zone, "until")
    schedules.pause(schedule_id, note=form.text("note"), until=until)
    end = f" until {wall(until, zone)}" if until else ""
    return Done(text=f"Paused {schedule_id}{end}.", to=_here(request, schedule_id))


@action
def resume(request: Request, form: Form) -> Done:
    """Resume a schedule from now on."""
    schedule_id = form.need("id")
    inspector_of(request).schedules.resume(schedule_id, note=form.text("note"))
    return Done(text=f"Resumed {schedule_id}.", to=_here(request, schedule_id))


@action
def trigger(request: Request, form: Form) -> Done:
    """Run a schedule now."""
    schedule_id = form.need("id")
    payload = form.payload('{"day": "2026-03-05"}')
    task_id = inspector_of(request).schedules.trigger(schedule_id, payload=payload)
    return Done(
        text=f"Triggered: run {task_id} is waiting for a worker.", to=_here(request, schedule_id)
    )


@action
def remove(request: Request, form: Form) -> Done:
    """Delete a schedule, unless it was changed since the page was loaded."""
    schedule_id = form.need("id")
    inspector_of(request).schedules.remove(schedule_id, if_match=form.text("etag"))
    return Done(text=f"Deleted {schedule_id}.", to=link(request, "schedules"))


# --- backfill -------------------------------------------------------------------------------------


def count_backfill(request: Request) -> Response:
    """The number of runs that a backfill would create, or what is wrong with the range."""
    given = request.query_params
    schedule_id = _id(request)
    schedules = inspector_of(request).schedules
    zone = schedules.get(schedule_id).schedule.timezone
    context: dict[str, Any] = {"problem": None, "report": None}
    try:
        start, end = _range(given.get("start"), given.get("end"), zone)
        unknown_too = "unknown_too" in given
        context["report"] = schedules.backfill(schedule_id, start, end, unknown_too=unknown_too)
        context |= {"start": start.isoformat(), "end": end.isoformat(), "unknown_too": unknown_too}
    except InvalidInput as error:
        context["problem"] = str(error)
    context |= {"id": schedule_id, "priority": given.get("priority", "1")}
    return partial(request, "schedule_backfill.html", **context)


@action
def backfill(request: Request, form: Form) -> Done:
    """Create the runs of a backfill."""
    schedule_id = form.need("id")
    start, end = _range(form.need("start"), form.need("end"), "UTC")
    report = inspector_of(request).schedules.backfill(
        schedule_id,
        start,
        end,
        dry_run=False,
        priority=form.integer("priority") or int(Priority.VERY_LOW),
        unknown_too=form.has("unknown_too"),
    )
    text = f"Backfilled {schedule_id}: {plural(report.filled, 'run')} created."
    return Done(text=text, to=_here(request, schedule_id))


def _range(start: str | None, end: str | None, zone: str) -> tuple[datetime, datetime]:
    begin, until = read_local(start, zone, "from"), read_local(end, zone, "until")
    if begin is None or until is None:
        raise InvalidInput("fill in the start and the end of the range")
    return begin.astimezone(UTC), until.astimezone(UTC)


ROUTES: list[BaseRoute] = [
    Route("/do/schedules/logs", logs, name="schedule_logs"),
    Route("/do/schedules/moments", moments, name="schedule_moments"),
    Route("/do/schedules/pause", pause, methods=["POST"], name="schedule_pause"),
    Route("/do/schedules/resume", resume, methods=["POST"], name="schedule_resume"),
    Route("/do/schedules/trigger", trigger, methods=["POST"], name="schedule_trigger"),
    Route("/do/schedules/remove", remove, methods=["POST"], name="schedule_remove"),
    Route("/do/schedules/count-backfill", count_backfill, name="schedule_count_backfill"),
    Route("/do/schedules/backfill", backfill, methods=["POST"], name="schedule_backfill"),
    Route("/schedules/{id:path}", schedule, name="schedule"),
]
