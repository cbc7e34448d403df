"""Settings: what is in force and what it means, the keys of the API, and what this is made of."""

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
from fairqueue.web.dashboard.filters import duration, number, share
from fairqueue.web.dashboard.pages.helpers import command, posted, read_seconds, seconds_text
from fairqueue.web.dashboard.pages.run_helpers import refused
from fairqueue.web.dashboard.shell import STATIC, Done, Form, action, page

# For how long a new key may hold: as the command line says it, and in words.
LIFETIMES = [("", "never"), ("1d", "in 1 day"), ("30d", "in 30 days"), ("365d", "in 1 year")]


# --- what can be set ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """How a setting is written: for people, in its field, and read from there."""

    shown: Callable[[Any], str]
    typed: Callable[[Any], str]
    read: Callable[[str, str], Any]
    hint: str


def _read_count(text: str, what: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidInput(f"{what} {text!r:.60} is no whole number") from None


def _read_part(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InvalidInput(f"{what} {text!r:.60} is no number: such as 0.5") from None


COUNT = Kind(shown=number, typed=str, read=_read_count, hint="a whole number")
SECONDS = Kind(
    shown=lambda seconds: duration(seconds) if seconds else "0",
    typed=seconds_text,
    read=read_seconds,
    hint="such as 90s, 15m, 12h or 7d",
)
PART = Kind(shown=share, typed=str, read=_read_part, hint="from 0 to 1")
WORD = Kind(shown=str, typed=str, read=lambda text, _: text, hint="tasks or time")

# Of each setting: its kind and what it means.
MEANINGS: dict[str, tuple[Kind, str]] = {
    "max_attempts": (
        COUNT,
        "A task whose worker dies on this attempt goes to the failed ones instead of being offered "
        "again.",
    ),
    "max_waiting": (
        COUNT,
        "How many tasks may wait or be delayed before new ones are refused; 0: any number.",
    ),
    "keep_finished": (
        COUNT,
        "How many succeeded and cancelled runs are kept, about 1 KB each; 0: none.",
    ),
    "keep_finished_for": (SECONDS, "For how long succeeded and cancelled runs are kept."),
    "keep_dead": (COUNT, "How many failed runs are kept; 0: none."),
    "keep_dead_for": (SECONDS, "For how long failed runs are kept."),
    "cost": (
        WORD,
        "What users share: tasks counts each task the same, time counts how long workers hold it.",
    ),
    "critical_share": (
        PART,
        "Largest share of slots that CRITICAL tasks may take ahead of others' turns.",
    ),
    "ageing": (
        SECONDS,
        "Seconds of waiting that outweigh one level of priority; 0: strict priorities. Can be "
        "changed only while no task is queued.",
    ),
    "max_schedules": (COUNT, "How many schedules a user may have; 0: any number."),
    "min_interval": (SECONDS, "How far apart two moments of a new schedule must be at least."),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A setting on the page: its value and its default for people, and as its field takes them."""

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


def settings(request: Request) -> Response:
    """The page. Raises Forbidden for somebody of one tenant: all of this is shared."""
    return _page(request)


def _page(
    request: Request,
    *,
    status: int = 200,
    key_error: str | None = None,
    key_typed: Mapping[str, str] | None = None,
) -> Response:
    inspector = inspector_of(request)
    found = inspector.system.settings()
    state = app_state(request)
    return page(
        request,
        "settings.html",
        status=status,
        rows=rows(found["settings"]),
        limits=inspector.system.limits(),
        keys=_keys(request),
        roles=ROLES,
        lifetimes=LIFETIMES,
        key_error=key_error,
        key_typed=key_typed or {},
        state=state,
        server=inspector.system.redis(),
        versions=vendored(),
        python=platform.python_version(),
        command=command,
    )


def _keys(request: Request) -> list[KeyInfo] | None:
    """The keys, for those who may see them."""
    return inspector_of(request).keys.list() if actor_of(request).may("admin") else None


@lru_cache(maxsize=1)
def vendored() -> dict[str, str]:
    """What the pages are made with, and in which versions."""
    found: dict[str, str] = json.loads((STATIC / "versions.json").read_text(encoding="utf-8"))
    return found


# --- actions --------------------------------------------------------------------------------------


@action
def change(request: Request, form: Form) -> Done:
    """Change one setting; what cannot be used stays in its field, with the reason beside it."""
    name, typed = form.raw("name"), form.raw("value").strip()
    try:
        if name not in MEANINGS:
            raise InvalidInput(f"setting {name!r:.60} is none of {', '.join(MEANINGS)}")
        value = MEANINGS[name][0].read(typed, name)
        inspector_of(request).system.configure(**{name: value})
    except InvalidInput as error:
        return refused(error)
    return Done(text=f"{name} is {typed} from now on.")


@posted
def create_key(request: Request, form: Form) -> Response:
    """Make a key, and show its secret this once: nothing of it is kept, here or in a cache."""
    typed = {name: form.raw(name).strip() for name in ("name", "role", "tenant", "expires_in")}
    try:
        expires_in = (
            read_seconds(typed["expires_in"], "expires_in") if typed["expires_in"] else None
        )
        key = inspector_of(request).keys.create(
            typed["name"], typed["role"], typed["tenant"] or None, expires_in
        )
    except InvalidInput as error:
        return _page(request, status=422, key_error=str(error), key_typed=typed)
    return page(request, "key_made.html", status=201, key=key)


@action
def revoke_key(request: Request, form: Form) -> Done:
    """Take a key back."""
    if inspector_of(request).keys.revoke(form.raw("id")):
        return Done(text="The key is revoked: it, and sessions begun with it, end at once.")
    return Done(text="There is no such key any more.", level="warning")


ROUTES: list[BaseRoute] = [
    Route("/settings", settings, name="settings"),
    Route("/do/settings", change, methods=["POST"], name="settings_change"),
    Route("/do/keys/create", create_key, methods=["POST"], name="key_create"),
    Route("/do/keys/revoke", revoke_key, methods=["POST"], name="key_revoke"),
]
