"""The settings of the queue, the API keys, and the versions in use."""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from fairqueue.access.credentials import ROLES, KeyInfo
from fairqueue.errors import InvalidInput
from fairqueue.models import QueueSettings
from fairqueue.web.app_state import app_state
from fairqueue.web.auth import actor_of, inspector_of
from fairqueue.web.dashboard.formatting import duration, number, seconds_text, share
from fairqueue.web.dashboard.forms import Done, Form, action, posted
from fairqueue.web.dashboard.pages.helpers import read_seconds
from fairqueue.web.dashboard.pages.run_helpers import refused
from fairqueue.web.dashboard.shell import STATIC, page

# Lifetimes of a new key: as the command line takes them, and in words.
LIFETIMES = [("", "never"), ("1d", "in 1 day"), ("30d", "in 30 days"), ("365d", "in 1 year")]


# --- what can be set ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingType:
    """How a setting is shown, written in its field, and parsed from there."""

    shown: Callable[[Any], str]
    typed: Callable[[Any], str]
    read: Callable[[str, str], Any]
    hint: str


def _read_count(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{what} must be a whole number, not {text!r:.60}") from None


def _read_part(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{what} must be a number such as 0.5, not {text!r:.60}") from None


COUNT = SettingType(shown=number, typed=str, read=_read_count, hint="a whole number")
SECONDS = SettingType(
    shown=lambda seconds: duration(seconds) if seconds else "0",
    typed=seconds_text,
    read=read_seconds,
    hint="for example 90s, 15m, 12h or 7d",
)
PART = SettingType(shown=share, typed=str, read=_read_part, hint="from 0 to 1")
WORD = SettingType(shown=str, typed=str, read=lambda text, _: text, hint="tasks or time")

# The type of each setting, and its meaning.
MEANINGS: dict[str, tuple[SettingType, str]] = {
    "max_attempts": (
        COUNT,
        "If a worker dies on this attempt of a task, the task fails instead of being tried again.",
    ),
    "max_waiting": (
        COUNT,
        "New tasks are refused while this many wait or are delayed. 0: no limit.",
    ),
    "keep_finished": (
        COUNT,
        "How many succeeded and cancelled runs are kept, about 1 KB each. 0: none.",
    ),
    "keep_finished_for": (SECONDS, "How long succeeded and cancelled runs are kept."),
    "keep_dead": (COUNT, "How many failed runs are kept. 0: none."),
    "keep_dead_for": (SECONDS, "How long failed runs are kept."),
    "cost": (
        WORD,
        "What fair shares count: tasks (each the same), or time (how long each task runs).",
    ),
    "critical_share": (
        PART,
        "Largest share of slots that CRITICAL tasks may take ahead of other tasks.",
    ),
    "ageing": (
        SECONDS,
        "Waiting this long counts as much as one level of priority. 0: strict priorities. Can only "
        "be changed while no task is queued.",
    ),
    "max_schedules": (COUNT, "How many schedules a user may have. 0: no limit."),
    "min_interval": (SECONDS, "Shortest allowed time between two runs of a new schedule."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A setting on the page: value and default, as shown and as written in the field."""

    name: str
    meaning: str
    hint: str
    value: str
    default: str
    is_changed: bool
    typed: str
    default_typed: str


def rows(settings: Mapping[str, Any]) -> list[Row]:
    """The settings in order."""
    defaults = asdict(QueueSettings())
    return [
        Row(
            name=name,
            meaning=meaning,
            hint=kind.hint,
            value=kind.shown(settings[name]),
            default=kind.shown(defaults[name]),
            is_changed=settings[name] != defaults[name],
            typed=kind.typed(settings[name]),
            default_typed=kind.typed(defaults[name]),
        )
        for name, (kind, meaning) in MEANINGS.items()
    ]


# --- the page -------------------------------------------------------------------------------------


def settings(
    request: Request,
    *,
    status: int = 200,
    key_error: str | None = None,
    key_typed: Mapping[str, str] | None = None,
) -> Response:
    """The page. Raises Forbidden for an actor of one tenant."""
    inspector = inspector_of(request)
    found = inspector.system.settings()
    state = app_state(request)
    return page(
        request,
        "settings.html",
        status=status,
        rows=rows(found["settings"]),
        limits=inspector.system.limits(),
        key_limits=inspector.system.key_limits(),
        keys=_keys(request),
        roles=ROLES,
        lifetimes=LIFETIMES,
        key_error=key_error,
        key_typed=key_typed or {},
        state=state,
        server=inspector.system.redis(),
        versions=vendored(),
        python=platform.python_version(),
    )


def _keys(request: Request) -> list[KeyInfo] | None:
    """The keys, if the actor may see them."""
    return inspector_of(request).keys.list() if actor_of(request).may("admin") else None


@lru_cache(maxsize=1)
def vendored() -> dict[str, str]:
    """The versions of the libraries that the pages use."""
    found: dict[str, str] = json.loads((STATIC / "versions.json").read_text(encoding="utf-8"))
    return found


# --- actions --------------------------------------------------------------------------------------


@action
def change(request: Request, form: Form) -> Done:
    """Change a setting. An invalid value stays in its field, with the reason beside it."""
    name, typed = form.raw("name"), form.raw("value").strip()
    try:
        if name not in MEANINGS:
            raise InvalidInput(f"unknown setting {name!r:.60}: use {', '.join(MEANINGS)}")
        value = MEANINGS[name][0].read(typed, name)
        inspector_of(request).system.configure(**{name: value})
    except InvalidInput as error:
        return refused(error)
    return Done(text=f"{name} is now {typed}.")


@posted
def create_key(request: Request, form: Form) -> Response:
    """Create a key, and show its secret once. It is not stored or cached."""
    typed = {name: form.raw(name).strip() for name in ("name", "role", "tenant", "expires_in")}
    try:
        expires_in = (
            read_seconds(typed["expires_in"], "expires_in") if typed["expires_in"] else None
        )
        key = inspector_of(request).keys.create(
            typed["name"], typed["role"], typed["tenant"] or None, expires_in
        )
    except InvalidInput as error:
        return settings(request, status=422, key_error=str(error), key_typed=typed)
    return page(request, "key_made.html", status=201, key=key)


@action
def revoke_key(request: Request, form: Form) -> Done:
    """Revoke a key."""
    if inspector_of(request).keys.revoke(form.raw("id")):
        return Done(text="The key was revoked, and sessions that used it have ended.")
    return Done(text="The key no longer exists.", level="warning")


ROUTES: list[BaseRoute] = [
    Route("/settings", settings, name="settings"),
    Route("/do/settings", change, methods=["POST"], name="settings_change"),
    Route("/do/keys/create", create_key, methods=["POST"], name="key_create"),
    Route("/do/keys/revoke", revoke_key, methods=["POST"], name="key_revoke"),
]
