"""Change and read settings: of users, tenants, task names, keys and of the queue."""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any

from fairqueue.clock import from_ms, read_ms
from fairqueue.errors import ConfigurationError, shown
from fairqueue.link.operation import Argument, Ask, At, Call, Now, Operation, operation, steps
from fairqueue.link.owners import Owner
from fairqueue.link.partitions import at_any, at_owner, everywhere, over_all, whole
from fairqueue.models import (
    UNREADABLE,
    HandlerLimits,
    KeyLimits,
    QueueSettings,
    UserSettings,
    new_id,
)
from fairqueue.queue.base import UNSET
from fairqueue.queue.moving import MOVED_AT_ONCE, move_between
from fairqueue.queue.records import handler_limits, key_limits, user_settings
from fairqueue.queue.waiting_room import shared_out
from fairqueue.queue.whole_settings import WholeSettings
from fairqueue.validation import (
    MAX_NOTE_LENGTH,
    check_count,
    check_name,
    check_number,
    check_one_of,
    check_seconds,
    check_tenant,
)

LEAST_WEIGHT, MOST_WEIGHT = 0.01, 1000.0
_KEY, _PREFIXES = "\x03", b"\x04"  # fields of limits: of a key; the prefixes of patterns
MOST_SLOTS = 1000  # at most this many leases are examined when all slots of a name seem taken


class SettingsOperations(WholeSettings):
    """The part of a queue that keeps settings."""

    @operation
    @at_owner
    def set_user(
        self,
        user_id: str,
        *,
        tenant: str | None = None,
        weight: float = UNSET,
        max_running: int | None = UNSET,
        max_waiting: int | None = UNSET,
        rate: float | None = UNSET,
        paused: bool = UNSET,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> Operation[UserSettings]:
        """Change the given settings of a user, at once and also for tasks that already wait.

        tenant: whose user; None for the user without a tenant. A user id that several tenants use
        is a user of each. weight: share of service, 0.01 to 1000. max_running: tasks at a time.
        max_waiting: tasks that may wait for a worker, not counting delayed ones. rate: tasks per
        second, or units of cost. None removes a limit. paused: no task is handed out; with True,
        `note` says why, `by` who wants it, and `until` (an aware datetime or seconds since 1970)
        when the pause ends by itself. Raises InvalidTask for a bad user id and ConfigurationError
        for a bad value.
        """
        check_name(user_id, "user_id")
        given = _given(weight, max_running, max_waiting, rate, paused)
        change = given | check_pause(paused, note, by, until)
        return (yield from self._set(_owner(user_id, tenant), change))

    @operation
    @at_owner
    def set_tenant(
        self,
        tenant: str,
        *,
        weight: float = UNSET,
        max_running: int | None = UNSET,
        max_waiting: int | None = UNSET,
        rate: float | None = UNSET,
        paused: bool = UNSET,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> Operation[UserSettings]:
        """Change the given settings of a tenant; see `set_user`.

        The weight is its share among the tenants and the users without one; the limits hold for all
        its users together. Raises ConfigurationError naming the value.
        """
        check_tenant(tenant, ConfigurationError)
        given = _given(weight, max_running, max_waiting, rate, paused)
        change = given | check_pause(paused, note, by, until)
        return (yield from self._set(Owner.whole(tenant), change))

    def _set(self, owner: Owner, change: dict[str, Any]) -> Operation[UserSettings]:
        """Change the settings of a user or a tenant."""
        if (until_ms := change.get("paused_until")) is not None and until_ms <= (yield Now()):
            raise ConfigurationError(f"until {from_ms(until_ms).isoformat()} is in the past")
        text = yield from self._call(
            Call(
                "set_user",
                op=new_id(),
                owner=owner.key,
                user=owner.user_id,
                tenant=owner.tenant or "",
                change=json.dumps(change),
            )
        )
        return replace(user_settings(text, (yield Now())), tenant=owner.tenant)

    @operation
    @at_owner
    def pause_user(
        self,
        user_id: str,
        *,
        tenant: str | None = None,
        note: str | None = None,
        by: str | None = None,
        until: datetime | float | None = None,
    ) -> Operation[UserSettings]:
        """Hand out no task of a user until resumed, or until a given time; see `set_user`."""
        pause: dict[str, Any] = {"paused": True, "note": note, "by": by, "until": until}
        return (yield from steps(self.set_user)(user_id, tenant=tenant, **pause))

    @operation
    @at_owner
    def resume_user(self, user_id: str, *, tenant: str | None = None) -> Operation[UserSettings]:
        """Hand out the tasks of a user again; see `set_user`."""
        return (yield from steps(self.set_user)(user_id, tenant=tenant, paused=False))

    @operation
    @at_owner
    def get_user(self, user_id: str, *, tenant: str | None = None) -> Operation[UserSettings]:
        """The settings of a user, or of a user of a tenant; the defaults if none were set."""
        check_name(user_id, "user_id")
        return (yield from self._get(_owner(user_id, tenant)))

    @operation
    @at_owner
    def get_tenant(self, tenant: str) -> Operation[UserSettings]:
        """The settings of a tenant; the defaults if none were set."""
        check_tenant(tenant, ConfigurationError)
        return (yield from self._get(Owner.whole(tenant)))

    def _get(self, owner: Owner) -> Operation[UserSettings]:
        users = self.keys["users"]
        own, plain, known = yield Ask(
            ("HGET", users, owner.key),
            ("HGET", users, owner.user_id),
            ("HGET", self.keys["tenants"], owner.user_id),
        )
        text = own
        # As `inherited` in lua/lib/rings.lua.
        if text is None and owner.tenant is not None and known == owner.tenant.encode():
            text = plain
        return replace(user_settings(text or b"{}", (yield Now())), tenant=owner.tenant)

    @operation
    @whole
    def move_user(
        self, user_id: str, to: str | None, *, tenant: str | None = None
    ) -> Operation[int]:
        """Move a user to another tenant, or to none; return how many waiting tasks were moved.

        to: the other tenant; tenant: the one that the user is of now. Waiting and delayed tasks
        keep their ids, places and times and belong to the other tenant from then on; running ones
        stay until they end. The settings move, unless the user has some there. Schedules do not:
        change them with `update_schedule(tenant=)`. Each task is moved in one step, a few hundred
        at a time: if the call fails, repeat it. Where the other tenant is in another partition, a
        task is out of reach for a moment on its way, and some stay: those whose id another task has
        there, and buffered ones of a schedule until the run before them has ended. Raises
        InvalidTask or ConfigurationError.
        """
        check_name(user_id, "user_id")
        before, after = _owner(user_id, tenant), _owner(user_id, to)
        if before == after:
            raise ConfigurationError(f"user {user_id!r} must move to another tenant, not {to!r}")
        home, target = self.part_of(user_id, tenant), self.part_of(user_id, to)
        if home is not target:
            moved: int = yield from move_between(home.link, target.link, user_id, tenant, to)
            return moved
        if home is not self:
            count: int = yield At(home.link, steps(home.move_user)(user_id, to, tenant=tenant))
            return count
        moved = 0
        while True:
            count = yield from self._call(
                Call(
                    "move_user",
                    op=new_id(),
                    user=user_id,
                    tenant=tenant or "",
                    to=to or "",
                    limit=MOVED_AT_ONCE,
                )
            )
            moved += int(count)
            if not count:
                return moved

    @operation
    @over_all(lambda found: sorted({tenant for each in found for tenant in each}))
    def tenants_of(self, user_id: str) -> Operation[list[str]]:
        """The tenants that have a user of this id, in order: those that named it so far."""
        check_name(user_id, "user_id")
        members, known = yield Ask(
            ("ZRANGEBYLEX", self.keys["user_tenants"], f"[{user_id}\0", f"({user_id}\1"),
            ("HGET", self.keys["tenants"], user_id),  # of versions with layout 1
        )
        found = {member.partition(b"\0")[2] for member in members} | ({known} if known else set())
        return sorted(tenant.decode("utf-8", "replace") for tenant in found)

    @operation
    @whole
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
        yield from self._limit(name, {**limits, "by": "operator"} if limits else {})

    @operation
    @at_any
    def get_limits(self) -> Operation[dict[str, HandlerLimits]]:
        """The limits in force, by name of the tasks."""
        stored = (yield Ask(("HGETALL", self.keys["limits"])))[0]
        return {
            name.decode("utf-8", "replace"): handler_limits(text)
            for name, text in zip(stored[::2], stored[1::2], strict=True)
            if name[:1] not in (_KEY.encode(), _PREFIXES)
        }

    @operation
    @whole
    def set_limit(
        self,
        key: str,
        *,
        slots: int | None = None,
        rate: float | None = None,
        ordered: bool = False,
        through_retries: bool = False,
        scope: str = "queue",
    ) -> Operation[None]:
        """Limit tasks with a key in `limit_keys`, over all workers, from now on; see KeyLimits.

        key: one key; or its beginning and `*`, as in "account:*", for all keys that begin so, each
        with slots of its own. The limits of a key itself win over those of patterns, longer
        patterns over shorter ones. Without slots and rate, the limit is removed. In a queue with
        partitions, there is an order only within each tenant: `ordered` needs scope="tenant".
        Raises ConfigurationError naming the value, and nothing is stored.
        """
        check_limited_key(key)
        limits = check_key_limits(slots, rate, ordered, through_retries, scope)
        if ordered and scope == "queue" and self.link.parts:
            raise ConfigurationError(
                f"ordered=True needs scope='tenant' in a queue with {len(self.link.parts)} "
                "partitions: there is no order over several of them"
            )
        yield from self._limit(_KEY + key, limits)

    @operation
    @at_any
    def get_key_limits(self) -> Operation[dict[str, KeyLimits]]:
        """The limits that `set_limit` has set, by key or pattern."""
        stored = (yield Ask(("HGETALL", self.keys["limits"])))[0]
        return {
            name[1:].decode("utf-8", "replace"): key_limits(text)
            for name, text in zip(stored[::2], stored[1::2], strict=True)
            if name[:1] == _KEY.encode()
        }

    def _limit(self, field: str, limits: dict[str, Any]) -> Operation[None]:
        """Store limits, and let all held tasks that may start now come back."""
        text = json.dumps(limits) if limits else ""
        if not (yield from self._change_all(lambda twin: twin._set_limits(field, text))):
            raise ConfigurationError(
                f"the pattern {field[1:]!r} was not stored: a queue can have at most 100 patterns "
                "of keys"
            )

    @operation
    @whole
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
        # Not all partitions change in one step: first see whether all of them could.
        if ageing is not UNSET and self.link.parts:
            current = yield from steps(self.settings)()
            queued = yield from everywhere(self, lambda twin: twin._has_tasks(), strict=True)
            if (
                any(queued)
                and check_seconds(ageing, "ageing", ConfigurationError) != current.ageing
            ):
                raise _not_empty(ageing)
        epoch = new_id()

        def change(twin: Any) -> Operation[bytes]:
            own = list(rest)
            if max_waiting is not UNSET and self.link.parts:
                own += shared_out(max_waiting, self.partitions, twin.keys.partition, epoch)
            word: bytes = yield from twin._configure(own)
            return word

        if (yield from self._change_all(change)) == b"not_empty":
            raise _not_empty(ageing)
        return (yield from steps(self.settings)())

    def _configure(self, rest: list[Argument]) -> Operation[bytes]:
        word: bytes = yield from self._call(Call("configure", op=new_id(), rest=rest))
        return word

    def _has_tasks(self) -> Operation[bool]:
        """Whether any task waits or runs."""
        keys = (self.keys[name] for name in ("backlog", "held", "delayed", "leases"))
        (found,) = yield Ask(("EXISTS", *keys))
        return bool(found)

    @operation
    @at_any
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


def _not_empty(ageing: object) -> ConfigurationError:
    return ConfigurationError(
        f"ageing {ageing!r} can be set only while no task is queued: the rank of a task is "
        "computed when it is pushed"
    )


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


# How each setting of a user or a tenant is checked; the result is stored.
_CHECKS: dict[str, Callable[[Any], object]] = {
    "weight": _check_weight,
    "max_running": _check_most("max_running"),
    "max_waiting": _check_most("max_waiting"),
    "rate": _optional(_check_rate),
    "paused": _check_paused,
}


def _given(*values: Any) -> dict[str, Any]:
    """The settings that were given, checked. `values` are in the order of `_CHECKS`."""
    return {
        name: check(value)
        for (name, check), value in zip(_CHECKS.items(), values, strict=True)
        if value is not UNSET
    }


def _owner(user_id: str, tenant: str | None) -> Owner:
    """Raises ConfigurationError for a bad tenant."""
    if tenant is not None:
        check_tenant(tenant, ConfigurationError)
    return Owner(user_id, tenant)


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


def check_limited_key(key: object) -> str:
    """Check a key, or the beginning of keys and `*`. Raises ConfigurationError."""
    check_name(key, "key", ConfigurationError)
    text = str(key)
    if "*" in text[:-1]:
        raise ConfigurationError(f"key must have '*' only at its end, not {shown(key)}")
    return text


def check_key_limits(
    slots: object, rate: object, ordered: object, through_retries: object, scope: object
) -> dict[str, Any]:
    """Limits of a key as they are stored; {} for none. Raises ConfigurationError."""
    check_one_of(scope, "scope", ("queue", "tenant"), ConfigurationError)
    for name, value in (("ordered", ordered), ("through_retries", through_retries)):
        if not isinstance(value, bool):
            raise ConfigurationError(f"{name} must be True or False, not {shown(value)}")
    if slots is not None:
        check_count(slots, "slots", ConfigurationError, least=1, most=MOST_SLOTS)
    limits: dict[str, Any] = dict(check_limits(slots, rate, None))
    if ordered and "slots" not in limits:
        raise ConfigurationError(
            "ordered=True needs slots, such as slots=1: so many tasks of the key run at a time"
        )
    if through_retries and not ordered:
        raise ConfigurationError("through_retries=True needs ordered=True")
    if not limits:
        return {}
    options = {"ordered": ordered, "through_retries": through_retries}
    limits |= {name: True for name, value in options.items() if value}
    return limits if scope == "queue" else limits | {"scope": "tenant"}
