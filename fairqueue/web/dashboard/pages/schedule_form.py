"""The form that adds, changes or copies a schedule, with a preview of the rule."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
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
from fairqueue.schedules.fields import (
    FIELDS,
    FLOW,
    FORM_GROUPS,
    KINDS,
    LIMITS,
    NARROWING,
    REQUIRED,
    TABLE,
    ScheduleField,
)
from fairqueue.web.app_state import app_state, link
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.formatting import (
    command,
    json_text,
    local_text,
    seconds_text,
    segment,
    utc_text,
    wall,
)
from fairqueue.web.dashboard.forms import Form, posted
from fairqueue.web.dashboard.pages.helpers import now_of, read_local, read_seconds
from fairqueue.web.dashboard.shell import navigation, page, partial, set_toast
from fairqueue.web.problems import problem_of

PREVIEWED = 5  # runs
KIND_LABELS = {"cron_expr": "Cron expression", "every": "Interval", "at": "Once"}
GROUPS = {
    group: sorted((f for f in TABLE if f.group == group), key=lambda f: f.place)
    for group in FORM_GROUPS
}
FOLDED = (LIMITS, FLOW)  # shown when they are opened, or have a value
SHOWN = [each for group in GROUPS.values() for each in group]
RULE = [each.name for each in SHOWN if each.replans and each.group in ("rule", "limits")]
NAMES = ("schedule_id", "kind", *(each.name for each in SHOWN))

Texts = dict[str, str]


# --- fields: from what is typed, and back ---------------------------------------------------------


def _integer(text: str, zone: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{name} must be a whole number, not {text!r:.60}") from None


def _number(text: str, zone: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{name} must be a number, not {text!r:.60}") from None


def _as_typed(text: str, zone: str, name: str) -> str:
    return text


def _backoff(text: str, zone: str, name: str) -> float | list[float]:
    parts = [read_seconds(part.strip(), name) for part in text.split(",")]
    return parts if len(parts) > 1 else parts[0]


def _json(text: str, zone: str, name: str, kind: type = dict) -> Any:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{name} is not JSON: {error}") from None
    if not isinstance(found, kind):
        example = '{"day": "2026-03-05"}' if kind is dict else '[{"from": "09:00", "to": "17:30"}]'
        what = "object" if kind is dict else "list"
        raise InvalidInput(f"{name} must be a JSON {what}, such as {example}")
    return found


def _texts(text: str, zone: str, name: str) -> list[str]:
    if text.startswith("["):
        return list(_json(text, zone, name, list))
    return [part.strip() for part in text.split(",")]


def _is_plain(texts: list[str]) -> bool:
    """Whether texts can be read again when they are joined with commas."""
    return not any("," in text or text.startswith("[") or text != text.strip() for text in texts)


def _period(text: str, zone: str, name: str) -> str | float:
    choices = FIELDS[name].choices
    try:
        return text if text in choices else read_seconds(text, name)
    except InvalidInput:
        raise InvalidInput(
            f"{name} must be {', '.join(choices)} or a duration such as 15m, not {text!r:.60}"
        ) from None


# By kind of field: how to read what is typed (with the zone and the name of the field), and how to
# show a value (with the zone).
_READERS: dict[str, Callable[[str, str, str], Any]] = {
    "integer": _integer,
    "priority": _integer,
    "number": _number,
    "time": read_local,
    "duration": lambda text, zone, name: read_seconds(text, name),
    "seconds": lambda text, zone, name: read_seconds(text, name),
    "backoff": _backoff,
    "windows": bind(_json, kind=list),
    "dates": lambda text, zone, name: text.replace(",", " ").split(),
    "texts": _texts,
    "period": _period,
    "object": _json,
    "flag": lambda text, zone, name: text == "true",
}
_WRITERS: dict[str, Callable[[Any, str], str]] = {
    "priority": lambda value, zone: str(int(value)),
    "integer": lambda value, zone: str(value),
    "number": lambda value, zone: str(value).removesuffix(".0"),
    "time": local_text,
    "duration": lambda value, zone: seconds_text(
        value.total_seconds() if isinstance(value, timedelta) else value
    ),
    "seconds": lambda value, zone: seconds_text(value),
    "backoff": lambda value, zone: ", ".join(
        seconds_text(each) for each in (value if isinstance(value, list) else [value])
    ),
    "windows": lambda value, zone: json_text(value),
    "dates": lambda value, zone: ", ".join(value),
    "texts": lambda value, zone: ", ".join(value) if _is_plain(value) else json_text(value),
    "period": lambda value, zone: value if isinstance(value, str) else seconds_text(value),
    "object": lambda value, zone: json_text(value, 2),
    "flag": lambda value, zone: "true" if value else "false",
}


def _text_of(each: ScheduleField, value: Any, zone: str = "UTC") -> str:
    """Return a value as the form shows it."""
    if value is None:
        return ""
    return _WRITERS[each.kind](value, zone) if each.kind in _WRITERS else str(value)


# What a new form has; a field that is emptied gets it as well.
USUAL: Texts = {
    each.name: _text_of(each, each.to_user(each.default))
    for each in SHOWN
    if each.default not in (None, REQUIRED)
}


def texts_of(it: ScheduledTask) -> Texts:
    """Return a schedule as its form shows it."""
    kind = "every" if it.every is not None else "at" if it.at is not None else "cron_expr"
    texts = {each.name: _text_of(each, getattr(it, each.name), it.timezone) for each in SHOWN}
    return texts | {"schedule_id": it.schedule_id, "kind": kind}


def typed_in(form: Form) -> Texts:
    """Return the texts of the form by field, with line ends as in Python."""
    texts = {name: form.raw(name).replace("\r\n", "\n").strip() for name in NAMES}
    # A browser does not send a box that is not ticked.
    texts |= {each.name: texts[each.name] or "false" for each in SHOWN if each.kind == "flag"}
    return texts if texts["kind"] in KINDS else texts | {"kind": "cron_expr"}


@dataclass(slots=True)
class Reading:
    """The values of a form, and the errors, by field."""

    values: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)


def read(texts: Texts, names: Any) -> Reading:
    """Read some fields; None for a field that is empty and has no default."""
    found = Reading()
    for name in names:
        text = texts.get(name) or USUAL.get(name, "")
        try:
            zone = texts.get("timezone") or "UTC"
            read_text = _READERS.get(FIELDS[name].kind, _as_typed)
            found.values[name] = read_text(text, zone, name) if text else None
        except UnknownTimezone:
            continue  # the zone's own field says so
        except InvalidInput as error:
            found.errors[name] = str(error)
    return found


def changed(before: Texts, after: Texts) -> list[str]:
    """Return the fields whose texts differ; of the rules only the chosen one counts.

    In another zone, the same text of a time means another moment.
    """
    names = [
        name
        for name in (each.name for each in SHOWN)
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
    """Return the field that an error is about, by its class or its first word."""
    by_kind: tuple[tuple[type[FairQueueError], str], ...] = (
        (InvalidCron, "cron_expr"),
        (UnknownTimezone, "timezone"),
        (UnknownUser, "user_id"),
        (ScheduleConflict, "schedule_id"),
    )
    for kind, name in by_kind:
        if isinstance(error, kind):
            return name
    text = str(error).removeprefix("a key of ")  # of limit_keys
    first = text.split(" ", 1)[0].partition("[")[0].partition(".")[0].rstrip(":")
    return first if first in NAMES else ""


# --- pages ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The purpose of a form: `new`, `edit` or `copy`, with the view of an existing schedule."""

    kind: str
    view: ScheduleView | None = None

    @property
    def title(self) -> str:
        """The title of the page."""
        name = "" if self.view is None else self.view.schedule.label
        return {"new": "New schedule", "edit": f"Edit {name}", "copy": f"Copy of {name}"}[self.kind]

    @property
    def command(self) -> str:
        """A command that does the same."""
        if self.view is None:
            return command("schedules", "add", "0 9 * * 1-5", "--user", "alice", "--name", "report")
        own = self.view.schedule.schedule_id
        if self.kind == "copy":
            return command("schedules", "copy", "--id", "NEW_ID", ids=[own])
        return command("schedules", "update", "--cron", "0 9 * * 1-5", ids=[own])


def new(request: Request) -> Response:
    """Show an empty form; the query may fill in fields."""
    _check_role(request)
    given = {name: request.query_params.get(name, "") for name in NAMES}
    texts = {**dict.fromkeys(NAMES, ""), **USUAL, "kind": "cron_expr"}
    return _form_page(request, Task(kind="new"), texts | {k: v for k, v in given.items() if v})


def edit(request: Request) -> Response:
    """Show the form of a schedule."""
    _check_role(request)
    task, it = _existing(request, "edit", request.query_params.get("id"))
    return _form_page(request, task, texts_of(it))


def copy(request: Request) -> Response:
    """Show the form of a copy."""
    _check_role(request)
    task, it = _existing(request, "copy", request.query_params.get("id"))
    return _form_page(request, task, texts_of(it) | {"schedule_id": ""})


def _existing(request: Request, kind: str, schedule_id: str | None) -> tuple[Task, ScheduledTask]:
    if not schedule_id:
        raise UnknownSchedule("there is no schedule without an id")
    view = inspector_of(request).schedules.get(schedule_id)
    return Task(kind=kind, view=view), view.schedule


def _check_role(request: Request) -> None:
    """Raise Forbidden if the form could not be saved."""
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
    """Return the form with its texts; `stored` has values that others have changed meanwhile."""
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
        groups=GROUPS,
        kinds=KIND_LABELS,
        rule_names=RULE,
        opened={
            group: any(
                texts[f.name] != USUAL.get(f.name, "") or f.name in (errors or {})
                for f in GROUPS[group]
            )
            for group in FOLDED
        },
        back=_path(request, task.view.schedule.schedule_id)
        if task.view
        else link(request, "schedules"),
    )


def _path(request: Request, schedule_id: str) -> str:
    return f"{link(request, 'schedules')}/{segment(schedule_id)}"


# --- saving ---------------------------------------------------------------------------------------


@posted
def save_new(request: Request, form: Form) -> Response:
    """Add a schedule."""
    texts = typed_in(form)
    empty = {**dict.fromkeys(NAMES, ""), **USUAL}

    def act(values: dict[str, Any]) -> str:
        new_id = texts["schedule_id"] or None
        return inspector_of(request).schedules.add(schedule_id=new_id, **values)

    return _save(request, Task(kind="new"), texts, empty, act, "Added")


@posted
def save_edit(request: Request, form: Form) -> Response:
    """Change the edited fields, unless the schedule was changed meanwhile."""
    task, it = _existing(request, "edit", form.text("id"))

    def act(values: dict[str, Any]) -> str:
        if values:
            etag = form.text("etag")
            inspector_of(request).schedules.update(it.schedule_id, values, if_match=etag)
        return it.schedule_id

    return _save(request, task, typed_in(form), texts_of(it), act, "Saved")


@posted
def save_copy(request: Request, form: Form) -> Response:
    """Add a copy of a schedule, with the edited fields."""
    task, it = _existing(request, "copy", form.text("id"))
    texts = typed_in(form)

    def act(values: dict[str, Any]) -> str:
        for name in ("payload", "metadata"):
            if name in values and MASK in texts[name]:
                raise InvalidInput(
                    f"{name} has {MASK} in place of a hidden secret: enter the secrets, or leave "
                    "the field unchanged to copy them"
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
    """Save the form, or show it again with the errors."""
    _check_role(request)
    if actor_of(request).tenant is not None:
        texts = texts | {"tenant": before["tenant"]}  # its form has no such field
    reading = read(texts, changed(before, texts))
    for name in ("user_id", texts["kind"]):
        if not texts[name]:
            reading.errors[name] = "this field is missing"
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
    """Return the form with the stored values beside the edited ones, to be saved again."""
    stored = {name: before[name] or "nothing" for name in changed(before, texts)}
    errors = {
        "": "This schedule was changed since you opened the form, so nothing was saved. Your input "
        "is kept. Where it differs, the stored value is shown below the field. Save again to "
        "overwrite it."
    }
    return _form_page(request, task, texts, status=412, errors=errors, stored=stored)


# --- preview --------------------------------------------------------------------------------------


def preview(request: Request) -> Response:
    """Return what the rule means, or what is wrong with it, beside the field in question."""
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
    reading = read(texts, (kind, "timezone", *NARROWING))
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
