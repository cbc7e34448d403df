"""What is stored about one user or tenant, and the state that follows from it."""

import json
import math
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from fairqueue.clock import LATEST_MS, from_ms
from fairqueue.errors import InvalidInput
from fairqueue.link.owners import Owner
from fairqueue.models import UNREADABLE, UserSettings, text_or_none
from fairqueue.queue.records import without_past_pause
from fairqueue.reasons import when
from fairqueue.validation import check_name, check_tenant

AFTER_THE_LAST_MS = 253_402_300_799_000  # "when the previous run ends": lua/lib/delays.lua


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The data of a user or a tenant from which the state is derived. `key`: its name in Redis.

    level: at which it is served among all who share the queue, to compare partitions; clock_level:
    that of its partition's clock, if nothing waited there before.
    """

    key: str
    settings: UserSettings
    backlog: int
    held: int
    running: int
    delayed: int
    delayed_until: datetime | None
    before: int
    schedules: int
    oldest_ms: int
    ended: int
    p50_ms: int
    p95_ms: int
    is_known: bool
    users: int
    limited_until: datetime | None
    now: datetime
    takers: bool
    level: float | None = None
    clock_level: float | None = None

    @classmethod
    def read(cls, key: str, row: list[Any], now_ms: int, *, takers: bool) -> "Facts":
        """Read a row of the script; `takers` says whether any worker takes tasks."""
        backlog, held, running, before = (int(value) for value in row[1:5])
        schedules, oldest_ms, ended, p50_ms, p95_ms, delayed, next_due, known, users = (
            int(value) for value in row[6:15]
        )
        return cls(
            key=key,
            settings=read_settings(row[0], now_ms),
            backlog=backlog,
            held=held,
            running=running,
            delayed=delayed,
            delayed_until=from_ms(next_due) if 0 <= next_due < AFTER_THE_LAST_MS else None,
            before=before,
            schedules=schedules,
            oldest_ms=oldest_ms,
            ended=ended,
            p50_ms=p50_ms,
            p95_ms=p95_ms,
            is_known=bool(known),
            users=users,
            limited_until=_parked_until(row[5], now_ms),
            now=from_ms(now_ms),
            takers=takers,
            level=float(row[15]) if row[15] else None,
            clock_level=float(row[16]) if row[16] else None,
        )

    @property
    def ahead(self) -> int | None:
        """How many are served before; None if it cannot be served now."""
        return None if self.before < 0 else self.before

    @property
    def wanted(self) -> int:
        """The runs that the user wanted in the window: the ended ones and the open ones."""
        return self.backlog + self.running + self.ended

    def fields(
        self,
        window_ms: int,
        ended: int,
        level: float,
        tenant: str | None,
        group: "Facts | None" = None,
    ) -> dict[str, Any]:
        """Return the fields that UserInfo and TenantInfo have in common.

        `ended`: the ended runs of the window. `level`: the fair number of them for a weight of 1.
        `group`: the facts of the tenant of a user, which may hold the user back.
        """
        state, why = self.explain(group)
        return {
            "settings": replace(self.settings, tenant=tenant),
            "backlog": self.backlog,
            "held": self.held,
            "running": self.running,
            "delayed": self.delayed,
            "delayed_until": self.delayed_until,
            "schedules": self.schedules,
            "oldest_wait": _seconds(self.oldest_ms),
            "wait_p50": _seconds(self.p50_ms),
            "wait_p95": _seconds(self.p95_ms),
            "ended": self.ended,
            "received": min(1.0, self.ended / ended) if ended else 0.0,
            "entitled": min(self.wanted, level * self.settings.weight) / (ended or 1),
            "state": state,
            "why": why,
            "parked_until": self.limited_until,
            "window_start": from_ms(window_ms),
            "is_known": self.is_known,
        }

    def explain(self, group: "Facts | None" = None) -> tuple[str, str]:
        """Return the state and its explanation; `group` has the facts of the tenant of a user."""
        waits = f"{self.backlog} {'task waits' if self.backlog == 1 else 'tasks wait'}"
        bars = [each for each in (self._bar(), group and _of_tenant(group._bar())) if each]
        bars.sort(key=lambda bar: bar[0] != "paused")  # a pause lasts longest
        if bars and (self.backlog or bars[0][0] == "paused"):
            state, why = bars[0]
            return state, f"{why}; {waits}" if self.backlog else why
        if not self.backlog:
            if not self.running:
                return "idle", self._later() or "no task waits"
            return "served", f"has {self.running} running; {self._later() or 'no task waits'}"
        if self.running:
            return "served", f"has {self.running} running; {waits}"
        return "waiting", f"{waits}{self._for_what()}"

    def _bar(self) -> tuple[str, str] | None:
        """Return the state and the reason if the settings let no task start now."""
        most, rate = self.settings.max_running, self.settings.rate
        if self.settings.paused:
            return "paused", self._pause()
        if most is not None and self.running >= most:
            return "capped", f"has {self.running} of {most} running (max_running)"
        if rate is not None and self.limited_until is not None:
            at = when(self.limited_until, self.now)
            return "rate limited", f"rate of {rate:g}/s reached, next at {at}"
        return None

    def _pause(self) -> str:
        """Describe the pause: by whom, since when, until when and why."""
        settings, text = self.settings, f"paused by {self.settings.paused_by or 'an operator'}"
        if settings.paused_at is not None:
            text += f" since {when(settings.paused_at, self.now)}"
        if settings.paused_until is not None:
            text += f" until {when(settings.paused_until, self.now)}"
        return text + (f": {settings.pause_note}" if settings.pause_note else "")

    def _later(self) -> str:
        """Describe the delayed tasks; "" if there are none."""
        if not self.delayed:
            return ""
        are = "1 task is" if self.delayed == 1 else f"{self.delayed} tasks are"
        first = self.delayed_until
        return f"{are} delayed" + (f", the first until {when(first, self.now)}" if first else "")

    def _for_what(self) -> str:
        if not self.takers:
            return "; no worker is alive"
        if self.held == self.backlog:
            return " because of limits on their names or keys"
        if self.before < 0:
            return ""  # parked, until the next claim looks at the user again
        owner = Owner.of_key(self.key)
        what = "tenant" if owner.is_tenant else "user"
        within = " in its tenant" if owner.tenant is not None and not owner.is_tenant else ""
        if self.before == 0:
            return f"; this {what} is next{within}"
        are = f"{what} is" if self.before == 1 else f"{what}s are"
        return f"; {self.before} {are} ahead{within}"


def _of_tenant(bar: tuple[str, str] | None) -> tuple[str, str] | None:
    """Say of the reason why a tenant cannot be served that it is not the user's own."""
    if bar is None:
        return None
    state, why = bar
    whose = {"paused": "its tenant is", "capped": "its tenant"}.get(state, "its tenant's")
    return state, f"{whose} {why}"


def check_owner(owner: Owner) -> Owner:
    """Raises InvalidInput for a bad user id or tenant."""
    check_name(owner.user_id, "user_id")
    if owner.tenant is not None:
        check_tenant(owner.tenant, InvalidInput)
    return owner


def check_sharer(owner: Owner) -> Owner:
    """Raises InvalidInput for a bad user or tenant; a tenant as a whole is fine."""
    if owner.is_tenant:
        check_tenant(owner.tenant, InvalidInput)
        return owner
    return check_owner(owner)


def valid_key(name: bytes) -> str | None:
    """Return the name in Redis of an owner or a tenant; None if it is not a valid one."""
    try:
        return check_sharer(Owner.of_key(name.decode())).key
    except ValueError:  # not UTF-8, or InvalidInput
        return None


def _seconds(ms: int) -> float | None:
    return None if ms < 0 else ms / 1000


def _parked_until(score: bytes, now_ms: int) -> datetime | None:
    """Return the future time at which a parked user is examined again, or None."""
    try:
        until_ms = int(float(score))
        return from_ms(until_ms) if until_ms > now_ms else None
    except (ValueError, OverflowError):  # empty, +inf, or beyond the year 9999
        return None


def read_settings(text: bytes, now_ms: int) -> UserSettings:
    """Read the settings of a user. A damaged record means the defaults, as it does for claims."""
    try:
        stored = json.loads(text or b"{}")
        settings = UserSettings(
            weight=_positive(stored.get("weight")) or 1.0,
            rate=_positive(stored.get("rate")),
            paused=stored.get("paused") is True,
            paused_at=_moment(stored.get("paused_at")),
            paused_by=text_or_none(stored.get("paused_by")),
            pause_note=text_or_none(stored.get("pause_note")),
            paused_until=_moment(stored.get("paused_until")),
            max_running=_whole(stored.get("max_running")),
            max_waiting=_whole(stored.get("max_waiting")),
        )
        return without_past_pause(settings, now_ms)
    except UNREADABLE:
        return UserSettings()


def _moment(value: object) -> datetime | None:
    ms = _positive(value)
    return None if ms is None or ms > LATEST_MS else from_ms(int(ms))


def _whole(value: object) -> int | None:
    number = _positive(value)
    return None if number is None else int(number)


def _positive(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 < value < math.inf else None
