"""Change and read settings: of users, of task names and of the queue."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from fairqueue.clock import from_ms, read_ms
from fairqueue.errors import ConfigurationError, shown
from fairqueue.link.operation import Argument, Ask, Call, Now, Operation, operation, steps
from fairqueue.models import UNREADABLE, HandlerLimits, QueueSettings, UserSettings, new_id
from fairqueue.queue.base import UNSET, QueueBase
from fairqueue.queue.records import handler_limits, user_settings
from fairqueue.validation import (
    MAX_NOTE_LENGTH,
    check_count,
    check_name,
    check_number,
    check_seconds,
    check_tenant,
)

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 1000.0
MOST_SLOTS = 1000  # at most this many leases are examined when all slots of a name seem taken


class SettingsOperations(QueueBase):
    """The part of a queue that keeps settings."""

    @operation
    def set_user(
        self,
        user_id: str,
        *,
        weight: float = UNSET,
        max_running: int | None = UNSET,
        max_waiting: int | None = UNSET,
        rate: float | None = UNSET,
        paused: bool = UNSET,
        tenant: str | None = UNSET,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> Operation[UserSettings]:
        """Change the given settings of a user, at once and also for tasks that already wait.

        weight: share of service, 0.01 to 1000. max_running: tasks at a time. max_waiting: tasks
        that may wait for a worker, not counting delayed ones. rate: tasks per second. None removes
        a limit. paused: no task is handed out; with True, `note` says why, `by` who wants it, and
        `until` (an aware datetime or seconds since 1970) when the pause ends by itself. tenant: the
        group that the user belongs to from now on, None for no group; stored tasks and schedules
        of the user do not change. Raises InvalidTask for a bad user id and ConfigurationError for a
        bad value.
        """
        check_name(user_id, "user_id")
        given = {
            "weight": weight,
            "max_running": max_running,
            "max_waiting": max_waiting,
            "rate": rate,
            "paused": paused,
            "tenant": tenant,
        }
        change: dict[str, Any] = {
            field: _USER_CHECKS[field](value)
            for field, value in given.items()
            if value is not UNSET
        }
        change |= check_pause(paused, note, by, until)
        if (until_ms := change.get("paused_until")) is not None and until_ms <= (yield Now()):
            raise ConfigurationError(f"until {from_ms(until_ms).isoformat()} is in the past")
        text = yield from self._call(
            Call("set_user", op=new_id(), user=user_id, change=json.dumps(change))
        )
        return user_settings(text, (yield Now()))

    @operation
    def pause_user(
        self,
        user_id: str,
        *,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> Operation[UserSettings]:
        """Hand out no task of a user until resumed, or until a given time; see `set_user`."""
        return (
            yield from steps(self.set_user)(user_id, paused=True, note=note, by=by, until=until)
        )

    @operation
    def resume_user(self, user_id: str) -> Operation[UserSettings]:
        """Hand out the tasks of a user again; see `set_user`."""
        return (yield from steps(self.set_user)(user_id, paused=False))

    @operation
    def get_user(self, user_id: str) -> Operation[UserSettings]:
        """The settings of a user; the defaults if none were set."""
        check_name(user_id, "user_id")
        text, tenant = yield Ask(
            ("HGET", self.keys["users"], user_id), ("HGET", self.keys["tenants"], user_id)
        )
        settings = user_settings(text or b"{}", (yield Now()))
        return replace(settings, tenant=_tenant(tenant))

    @operation
    def tenant_of(self, user_id: str) -> Operation[str | None]:
        """The tenant that a user belongs to, or None.

        It is the one that `set_user` has set, or else the first one that a task or schedule of the
        user named.
        """
        check_name(user_id, "user_id")
        return _tenant((yield Ask(("HGET", self.keys["tenants"], user_id)))[0])

    @operation
    def set_limits(
        self,
        name: str,
        *,
        slots: int | None = None,
        rate: float | None = None,
        timeout: float | None = None,
    ) -> Operation[None]:
        """Limit all tasks of a name over all workers, from now on; see HandlerLimits.

        Takes precedence over the limits that workers declare for their handlers. A limit that is
        not given does not apply; with none at all, the limits that the next worker declares apply
        again. Raises ConfigurationError for a bad value.
        """
        check_name(name, "name", ConfigurationError)
        limits = check_limits(slots, rate, timeout)
        text = json.dumps({**limits, "by": "operator"}) if limits else ""
        yield from self._call(Call("set_limits", op=new_id(), task_name=name, limits=text))

    @operation
    def get_limits(self) -> Operation[dict[str, HandlerLimits]]:
        """The limits in force, by name of the tasks."""
        stored = (yield Ask(("HGETALL", self.keys["limits"])))[0]
        return {
            name.decode("utf-8", "replace"): handler_limits(text)
            for name, text in zip(stored[::2], stored[1::2], strict=True)
        }

    @operation
    def configure(
        self,
        *,
        max_attempts: int = UNSET,
        max_waiting: int = UNSET,
        keep_finished: int = UNSET,
        keep_finished_for: float | timedelta = UNSET,
        keep_dead: int = UNSET,
        keep_dead_for: float | timedelta = UNSET,
        cost: str = UNSET,
        critical_share: float = UNSET,
        ageing: float | timedelta = UNSET,
        max_schedules: int = UNSET,
        min_interval: float | timedelta = UNSET,
    ) -> Operation[QueueSettings]:
        """Change the given settings of the queue, for all its processes; see QueueSettings.

        Raises ConfigurationError for a bad value, and for `ageing` while tasks are queued.
        """
        given = {
            "max_attempts": max_attempts,
            "max_waiting": max_waiting,
            "keep_finished": keep_finished,
            "keep_dead": keep_dead,
            "max_schedules": max_schedules,
            "keep_finished_for": keep_finished_for,
            "keep_dead_for": keep_dead_for,
            "ageing": ageing,
            "min_interval": min_interval,
            "cost": cost,
            "critical_share": critical_share,
        }
        rest: list[Argument] = []
        for name, value in given.items():
            if value is not UNSET:
                rest += _stored_setting(name, value)
        if (yield from self._call(Call("configure", op=new_id(), rest=rest))) == b"not_empty":
            raise ConfigurationError(
                f"ageing {ageing!r} can be set only while no task is queued: the rank of a task is "
                "computed when it is pushed"
            )
        return (yield from steps(self.settings)())

    @operation
    def settings(self) -> Operation[QueueSettings]:
        """The current settings of the queue."""
        stored = (yield Ask(("HGETALL", self.keys["settings"])))[0]
        values = asdict(QueueSettings())
        for field, value in zip(stored[::2], stored[1::2], strict=True):
            name, text = field.decode("utf-8", "replace"), value.decode("utf-8", "replace")
            in_ms = name.endswith("_ms")
            if in_ms:
                plain = name.removesuffix("_ms")
                name = plain + "_for" if plain + "_for" in values else plain
            if name in values:
                with suppress(*UNREADABLE):  # then the default is shown
                    values[name] = _setting(text, values[name], in_ms)
        return QueueSettings(**values)


def _optional(check: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda value: None if value is None else check(value)


def _check_weight(value: object) -> float:
    return check_number(value, "weight", ConfigurationError, least=LEAST_WEIGHT, most=MOST_WEIGHT)


def _check_rate(value: object) -> float:
    return check_number(value, "rate", ConfigurationError, least=0.001, most=1e6)


def _check_most(name: str) -> Callable[[Any], object]:
    return _optional(lambda value: check_count(value, name, ConfigurationError, least=1))


def _check_paused(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigurationError(f"paused must be True or False, not {shown(value)}")
    return value


# How each setting of a user is checked; the result is stored.
_USER_CHECKS: dict[str, Callable[[Any], object]] = {
    "weight": _check_weight,
    "max_running": _check_most("max_running"),
    "max_waiting": _check_most("max_waiting"),
    "rate": _optional(_check_rate),
    "paused": _check_paused,
    "tenant": _optional(lambda value: check_tenant(value, ConfigurationError)),
}


def check_pause(paused: object, note: Any, by: Any, until: Any) -> dict[str, object]:
    """The details of a pause, as they are stored. Raises ConfigurationError."""
    if paused is not True:
        if (note, by, until) != (None, None, None):
            raise ConfigurationError("note, by and until are for a pause: pass paused=True")
        return {}
    if by is not None:
        check_name(by, "by", ConfigurationError)
    if note is not None and (not isinstance(note, str) or len(note) > MAX_NOTE_LENGTH):
        raise ConfigurationError(
            f"note must be a string of at most {MAX_NOTE_LENGTH} characters, not {shown(note)}"
        )
    until_ms = None if until is None else read_ms(until, "until", ConfigurationError)
    return {"pause_note": note, "paused_by": by, "paused_until": until_ms}


# Settings of the queue that are counts, with the least that each may be.
_COUNTS = {
    "max_attempts": 1,
    "max_waiting": 0,
    "keep_finished": 0,
    "keep_dead": 0,
    "max_schedules": 0,
}


def _stored_setting(name: str, value: Any) -> tuple[str, Argument]:
    """A setting of the queue as it is stored: field and value. Raises ConfigurationError."""
    if name in _COUNTS:
        return name, check_count(value, name, ConfigurationError, least=_COUNTS[name])
    if name == "cost":
        if value not in ("tasks", "time"):
            raise ConfigurationError(f"cost must be 'tasks' or 'time', not {shown(value)}")
        return name, value
    if name == "critical_share":
        return name, repr(check_number(value, name, ConfigurationError, least=0.0, most=1.0))
    seconds = check_seconds(value, name, ConfigurationError)
    return name.removesuffix("_for") + "_ms", round(seconds * 1000)


def _setting(text: str, default: Any, in_ms: bool) -> Any:
    if isinstance(default, str):
        return text
    value = int(text) / 1000 if in_ms else type(default)(text)
    if not math.isfinite(value):  # OverflowError for a whole number that is too long
        raise ValueError(f"{value} is not finite")
    return value


def check_limits(slots: object, rate: object, timeout: object) -> dict[str, float]:
    """Limits of a handler as they are stored. Raises ConfigurationError naming the value."""
    limits: dict[str, float] = {}
    if slots is not None and check_count(slots, "slots", ConfigurationError, most=MOST_SLOTS):
        limits["slots"] = slots  # type: ignore[assignment]
    if rate is not None:
        limits["rate"] = _check_rate(rate)
    if timeout is not None:
        seconds = check_seconds(timeout, "timeout", ConfigurationError, least=0.001)
        limits["timeout_ms"] = round(seconds * 1000)
    return limits


def _tenant(name: bytes | None) -> str | None:
    return None if name is None else name.decode("utf-8", "replace")
