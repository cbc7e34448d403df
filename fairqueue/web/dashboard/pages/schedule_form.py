"""The form of a schedule: to make one, to change it, to copy it, with a preview while one types."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial as bind
from typing import Any

import pytz
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from fairqueue.errors import (
    FairQueueError,
    Forbidden,
    InvalidCron,
    InvalidInput,
    ScheduleConflict,
    ScheduleQuota,
    StaleVersion,
    UnknownSchedule,
    UnknownTimezone,
    UnknownUser,
)
from fairqueue.inspection.masking import MASK
from fairqueue.inspection.views import Preview, ScheduleView
from fairqueue.models import ScheduledTask
from fairqueue.validation import Priority
from fairqueue.web.app_state import app_state, link
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.pages.helpers import (
    command,
    json_text,
    local_text,
    now_of,
    posted,
    read_local,
    read_seconds,
    seconds_text,
    segment,
    utc_text,
    wall,
)
from fairqueue.web.dashboard.pages.schedule import MISFIRES, OVERLAPS, PRIORITIES
from fairqueue.web.dashboard.shell import Form, navigation, page, partial, set_toast
from fairqueue.web.problems import problem_of

KINDS = ("cron_expr", "every", "at")
LIMITS = ("start", "end", "windows", "exclude")
RULE = (*KINDS, "timezone", *LIMITS)
PREVIEWED = 5  # runs

Texts = dict[str, str]

# What a form has before anything is typed; a field that is emptied gets it as well.
USUAL: Texts = {
    "name": "default",
    "timezone": "UTC",
    "priority": str(int(Priority.NORMAL)),
    "misfire": "fire_once",
    "catch_up": "1d",
    "max_catch_up": "100",
    "jitter": "0s",
    "overlap": "allow",
    "payload": "{}",
    "metadata": "{}",
}


BACKOFF_JITTERS = {
    "": "As usual: a backoff is taken at its word",
    "none": "None",
    "full": "Full: each delay is drawn between 0 and itself",
}


# --- fields: from what is typed, and back ---------------------------------------------------------


def _text(text: str, zone: str, name: str) -> str:
    return text


def _whole(text: str, zone: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{name} {text!r:.60} is no whole number") from None


def _number(text: str, zone: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{name} {text!r:.60} is not a number") from None


def _seconds(text: str, zone: str, name: str) -> float:
    return read_seconds(text, name)


def _local(text: str, zone: str, name: str) -> datetime | None:
    return read_local(text, zone, name)


def _backoff(text: str, zone: str, name: str) -> float | list[float]:
    parts = [read_seconds(part.strip(), name) for part in text.split(",")]
    return parts if len(parts) > 1 else parts[0]


def _json(text: str, zone: str, name: str, kind: type = dict) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} is no JSON: {error}") from None
    if not isinstance(found, kind):
        example = '{"day": "2026-03-05"}' if kind is dict else '[{"from": "09:00", "to": "17:30"}]'
        raise InvalidInput(f"{name} is no JSON {'object' if kind is dict else 'list'}: {example}")
    return found


def _dates(text: str, zone: str, name: str) -> list[str]:
    return text.replace(",", " ").split()


READERS: dict[str, Callable[[str, str, str], Any]] = {
    "title": _text,
    "description": _text,
    "name": _text,
    "user_id": _text,
    "tenant": _text,
    "priority": _whole,
    "cron_expr": _text,
    "every": _seconds,
    "at": _local,
    "timezone": _text,
    "start": _local,
    "end": _local,
    "windows": bind(_json, kind=list),
    "exclude": _dates,
    "max_runs": _whole,
    "misfire": _text,
    "catch_up": _seconds,
    "max_catch_up": _whole,
    "jitter": _seconds,
    "overlap": _text,
    "retries": _whole,
    "backoff": _backoff,
    "backoff_cap": _seconds,
    "backoff_multiplier": _number,
    "backoff_jitter": _text,
    "timeout": _seconds,
    "max_failures": _whole,
    "payload": _json,
    "metadata": _json,
}
NAMES = ("schedule_id", "kind", *READERS)


def texts_of(it: ScheduledTask) -> Texts:
    """A schedule as its form shows it."""
    kind = "every" if it.every is not None else "at" if it.at is not None else "cron_expr"
    backoff = it.backoff if isinstance(it.backoff, list) else [it.backoff]
    return {
        "schedule_id": it.schedule_id,
        "title": it.title or "",
        "description": it.description or "",
        "name": it.name,
        "user_id": it.user_id,
        "tenant": it.tenant or "",
        "priority": str(int(it.priority)),
        "kind": kind,
        "cron_expr": it.cron_expr if kind == "cron_expr" else "",
        "every": seconds_text(it.every.total_seconds()) if it.every is not None else "",
        "at": local_text(it.at, it.timezone),
        "timezone": it.timezone,
        "start": local_text(it.start, it.timezone),
        "end": local_text(it.end, it.timezone),
        "windows": _json_text(it.windows),
        "exclude": ", ".join(it.exclude or ()),
        "max_runs": _number_text(it.max_runs),
        "misfire": it.misfire,
        "catch_up": seconds_text(it.catch_up),
        "max_catch_up": str(it.max_catch_up),
        "jitter": seconds_text(it.jitter),
        "overlap": it.overlap,
        "retries": _number_text(it.retries),
        "backoff": ", ".join(seconds_text(each) for each in backoff),
        "backoff_cap": seconds_text(it.backoff_cap),
        "backoff_multiplier": _number_text(it.backoff_multiplier),
        "backoff_jitter": it.backoff_jitter or "",
        "timeout": seconds_text(it.timeout),
        "max_failures": _number_text(it.max_failures),
        "payload": _json_text(it.payload, indent=2),
        "metadata": _json_text(it.metadata, indent=2),
    }


def _json_text(value: Any, indent: int | None = None) -> str:
    return "" if value is None else json_text(value, indent)


def _number_text(value: float | None) -> str:
    return "" if value is None else str(value).removesuffix(".0")


def typed_in(form: Form) -> Texts:
    """What was typed, field by field; line ends as Python has them."""
    texts = {name: form.raw(name).replace("\r\n", "\n").strip() for name in NAMES}
    return texts if texts["kind"] in KINDS else texts | {"kind": "cron_expr"}


@dataclass(slots=True)
class Reading:
    """What was typed, read: values, and what is wrong, by field."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def read(texts: Texts, names: Any) -> Reading:
    """The values of some fields. None for one that is empty and has no usual value."""
    found = Reading()
    for name in names:
        text = texts.get(name) or USUAL.get(name, "")
        try:
            zone = texts.get("timezone") or "UTC"
            found.values[name] = READERS[name](text, zone, name) if text else None
        except UnknownTimezone:
            continue  # the zone's own field says so
        except InvalidInput as error:
            found.errors[name] = str(error)
    return found


def changed(before: Texts, after: Texts) -> list[str]:
    """The fields whose texts differ; of the rules only the chosen one counts.

    In another zone, the same text of a time means another moment.
    """
    names = [
        name
        for name in READERS
        if name not in KINDS and (after[name] or USUAL.get(name, "")) != before[name]
    ]
    kind = after["kind"]
    if kind != before["kind"] or after[kind] != before[kind]:
        names.append(kind)
    if "timezone" in names:
        moments = [name for name in ("start", "end") if after[name]]
        moments += ["at"] if kind == "at" else []
        names += [name for name in moments if name not in names]
    return names


def field_of(error: FairQueueError) -> str:
    """The field that an error of the library is about, by its kind or its first word."""
    by_kind: tuple[tuple[type[FairQueueError], str], ...] = (
        (InvalidCron, "cron_expr"),
        (UnknownTimezone, "timezone"),
        (UnknownUser, "user_id"),
        (ScheduleConflict, "schedule_id"),
    )
    for kind, name in by_kind:
        if isinstance(error, kind):
            return name
    first = str(error).split(" ", 1)[0].partition("[")[0].partition(".")[0].rstrip(":")
    return first if first in NAMES else ""


# --- pages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a form is for: `new`, `edit` or `copy`; of an existing one, its view."""

    kind: str
    view: ScheduleView | None = None

    @property
    def title(self) -> str:
        """The head of the page."""
        name = "" if self.view is None else self.view.schedule.label
        return {"new": "New schedule", "edit": f"Edit {name}", "copy": f"Copy of {name}"}[self.kind]

    @property
    def command(self) -> str:
        """The command line that does the like."""
        if self.view is None:
            return command("schedules", "add", "0 9 * * 1-5", "--user", "alice", "--name", "report")
        own = self.view.schedule.schedule_id
        if self.kind == "copy":
            return command("schedules", "copy", "--id", "NEW_ID", ids=[own])
        return command("schedules", "update", "--cron", "0 9 * * 1-5", ids=[own])


def new(request: Request) -> Response:
    """An empty form; fields may be given in the query."""
    _check_role(request)
    given = {name: request.query_params.get(name, "") for name in NAMES}
    texts = {**dict.fromkeys(NAMES, ""), **USUAL, "kind": "cron_expr"}
    return _form_page(request, Task(kind="new"), texts | {k: v for k, v in given.items() if v})


def edit(request: Request) -> Response:
    """The form of a schedule."""
    _check_role(request)
    task, it = _existing(request, "edit", request.query_params.get("id"))
    return _form_page(request, task, texts_of(it))


def copy(request: Request) -> Response:
    """The form of a schedule like another."""
    _check_role(request)
    task, it = _existing(request, "copy", request.query_params.get("id"))
    return _form_page(request, task, texts_of(it) | {"schedule_id": ""})


def _existing(request: Request, kind: str, schedule_id: str | None) -> tuple[Task, ScheduledTask]:
    if not schedule_id:
        raise UnknownSchedule("there is no schedule without an id")
    view = inspector_of(request).schedules.get(schedule_id)
    return Task(kind=kind, view=view), view.schedule


def _check_role(request: Request) -> None:
    """A form that cannot be saved is not shown. Raises Forbidden."""
    actor = actor_of(request)
    if not actor.may("admin") or app_state(request).read_only:
        raise Forbidden(f"{actor.name!r} cannot change schedules here: that takes the role admin")


def _form_page(
    request: Request,
    task: Task,
    texts: Texts,
    *,
    status: int = 200,
    errors: Mapping[str, str] | None = None,
    stored: Mapping[str, str] | None = None,
) -> Response:
    """The form with what was typed; `stored` has what others have made of it meanwhile."""
    items = navigation(request, actor_of(request))
    return page(
        request,
        "schedule_form.html",
        status=status,
        navigation=[replace(item, is_current=item.icon == "schedules") for item in items],
        task=task,
        view=task.view,
        texts=texts,
        errors=errors or {},
        stored=stored or {},
        first_wrong=next((name for name in NAMES if name in (errors or {})), None),
        zones=pytz.common_timezones,
        priorities=PRIORITIES,
        misfires=list(MISFIRES.items()),
        overlaps=list(OVERLAPS.items()),
        backoff_jitters=list(BACKOFF_JITTERS.items()),
        sees_tenants=actor_of(request).tenant is None,
        back=_path(request, task.view.schedule.schedule_id)
        if task.view
        else link(request, "schedules"),
    )


def _path(request: Request, schedule_id: str) -> str:
    return f"{link(request, 'schedules')}/{segment(schedule_id)}"


# --- saving ---------------------------------------------------------------------------------------


@posted
def save_new(request: Request, form: Form) -> Response:
    """Store what was typed as a new schedule."""
    texts = typed_in(form)
    empty = {**dict.fromkeys(NAMES, ""), **USUAL}

    def act(values: dict[str, Any]) -> str:
        new_id = texts["schedule_id"] or None
        return inspector_of(request).schedules.add(schedule_id=new_id, **values)

    return _save(request, Task(kind="new"), texts, empty, act, "Added")


@posted
def save_edit(request: Request, form: Form) -> Response:
    """Change what was typed otherwise, if nobody else has changed the schedule meanwhile."""
    task, it = _existing(request, "edit", form.text("id"))

    def act(values: dict[str, Any]) -> str:
        if values:
            etag = form.text("etag")
            inspector_of(request).schedules.update(it.schedule_id, values, if_match=etag)
        return it.schedule_id

    return _save(request, task, typed_in(form), texts_of(it), act, "Saved")


@posted
def save_copy(request: Request, form: Form) -> Response:
    """Store a schedule like another, with what was typed otherwise."""
    task, it = _existing(request, "copy", form.text("id"))
    texts = typed_in(form)

    def act(values: dict[str, Any]) -> str:
        for name in ("payload", "metadata"):
            if name in values and MASK in texts[name]:
                raise InvalidInput(
                    f"{name} has {MASK} for a secret that is not shown: type the secrets, or leave "
                    "it as it was, and they are copied"
                )
        new_id = texts["schedule_id"] or None
        return inspector_of(request).schedules.copy(it.schedule_id, new_id, **values)

    return _save(request, task, texts, texts_of(it), act, "Copied to")


def _save(
    request: Request,
    task: Task,
    texts: Texts,
    before: Texts,
    act: Callable[[dict[str, Any]], str],
    done: str,
) -> Response:
    """Do it, or show the form again with what was typed and what is wrong with it."""
    _check_role(request)
    reading = read(texts, changed(before, texts))
    for name in ("user_id", texts["kind"]):
        if not texts[name]:
            reading.errors[name] = "this is missing: fill it in"
    if reading.errors:
        return _form_page(request, task, texts, status=422, errors=reading.errors)
    try:
        schedule_id = act(reading.values)
    except StaleVersion:
        return _stale_page(request, task, texts, before)
    except (InvalidInput, ScheduleConflict, ScheduleQuota) as error:
        errors = {field_of(error): str(error)}
        return _form_page(request, task, texts, status=problem_of(error).status, errors=errors)
    response = RedirectResponse(_path(request, schedule_id), 303)
    set_toast(request, response, {"text": f"{done} {schedule_id}.", "level": "success"})
    return response


def _stale_page(request: Request, task: Task, texts: Texts, before: Texts) -> Response:
    """What was typed, and beside it what is stored now. Saving again is an informed choice."""
    stored = {name: before[name] or "nothing" for name in changed(before, texts)}
    errors = {
        "": "Somebody has changed this schedule since you opened the form: nothing was saved. What "
        "you typed is kept; where it differs, the stored value stands below the field. Save again "
        "to overwrite it."
    }
    return _form_page(request, task, texts, status=412, errors=errors, stored=stored)


# --- preview --------------------------------------------------------------------------------------


def preview(request: Request) -> Response:
    """What the typed rule means, or what is wrong with it, beside the field that it is about."""
    texts = typed_in(Form(FormData(request.query_params)))
    found, errors = _preview(request, texts)
    zone = texts["timezone"] or "UTC"
    runs = [] if found is None else [(wall(run, zone), utc_text(run)) for run in found.runs]
    return partial(
        request, "schedule_preview.html", found=found, runs=runs, errors=errors, names=RULE
    )


def _preview(request: Request, texts: Texts) -> tuple[Preview | None, dict[str, str]]:
    kind = texts["kind"]
    if not texts[kind]:
        return None, {}
    reading = read(texts, (kind, "timezone", *LIMITS))
    if reading.errors:
        return None, reading.errors
    given = {name: value for name, value in reading.values.items() if value is not None}
    try:
        found = inspector_of(request).schedules.preview(
            given.pop("cron_expr", None),
            count=PREVIEWED,
            after=now_of(request).replace(microsecond=0),
            schedule_id=texts["schedule_id"],
            **given,
        )
    except InvalidInput as error:
        return None, {field_of(error) or kind: str(error)}
    return found, {}


ROUTES: list[BaseRoute] = [
    # Not below /schedules: what follows there is an id.
    Route("/new/schedule", new, methods=["GET"], name="schedule_new"),
    Route("/new/schedule", save_new, methods=["POST"]),
    Route("/do/schedules/edit", edit, methods=["GET"], name="schedule_edit"),
    Route("/do/schedules/edit", save_edit, methods=["POST"]),
    Route("/do/schedules/copy", copy, methods=["GET"], name="schedule_copy"),
    Route("/do/schedules/copy", save_copy, methods=["POST"]),
    Route("/do/schedules/preview", preview, name="schedule_preview"),
]
