"""The fire times ("moments") of a rule: a cron expression, an interval or a single time.

A rule is stored as a form, a dict of JSON values:

    {"cron": "0 9 * * 1-5", "timezone": "Europe/London"}
    {"every": 90000, "anchor": 1767225600000}    milliseconds; fires at anchor + k * every
    {"at": 1767225600000}

Each may have `limits` (see `windows.py`). `timezone` is UTC by default; for an interval or a single
time it applies to the limits and to how times are shown.

Where a zone changes its offset, the rules of Debian's cron apply:

- An expression whose second, minute or hour field begins with `*` follows elapsed time. It fires
  whenever the wall clock shows a matching time: in both passes of an overlap, never in a gap.
- Any other expression names fixed times. Each matching local time fires once, when the wall clock
  shows it first; one inside a gap fires at the end of the gap. Local times that fall on the same
  moment fire once.

Intervals follow elapsed time too. pytz has no daylight saving time after 2037: later times use the
last known offset.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

from fairqueue.clock import LATEST_MS
from fairqueue.errors import InvalidSchedule, short_repr
from fairqueue.recurrence.cron import HORIZON_YEARS, Cron, parse_cron, resolve_hashed
from fairqueue.recurrence.windows import NO_CALENDARS, Calendars, Limits, read_limits
from fairqueue.recurrence.zones import Zone, find_zone
from fairqueue.validation import check_count

# Cached entries. A large installation (hundreds of expressions in dozens of zones, all due at one
# moment) has some thousands of pairs; beyond these numbers the oldest are computed again.
_RECURRENCES_KEPT = 16_384
_MOMENTS_KEPT = 65_536
# These can be large: up to 20 kB with a year of dates.
_LIMITED_KEPT = 4096
# A shorter interval is a loop rather than a schedule.
SMALLEST_STEP_MS = 1000
# A hundred years.
LARGEST_STEP_MS = 3_155_760_000_000
# Tries of a search through limits: tens of milliseconds. Each try skips all fire times up to the
# next opening, so 10,000 tries are one a day for 27 years, or 24 a day for one year.
_MAX_TRIES = 10_000
_HORIZON_MS = HORIZON_YEARS * 366 * 86_400_000
_LATEST = LATEST_MS // 1000
_KINDS = ("cron", "every", "at")
_KEYS = {
    "cron": {"cron", "timezone", "limits"},
    "every": {"every", "anchor", "timezone", "limits"},
    "at": {"at", "timezone", "limits"},
}


class Recurrence(ABC):
    """The fire times of one rule, in milliseconds since 1970, UTC; none before 1970 or after 9999.

    Immutable, so it can be shared between threads.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def zone(self) -> Zone:
        """The zone in which its times are shown."""

    @abstractmethod
    def next_ms(self, after_ms: int) -> int | None:
        """Return the first fire time after this one, or None if there is none for nine years."""

    @abstractmethod
    def latest_ms(self, at_ms: int) -> int | None:
        """Return the last fire time up to this one, or None if there is none for nine years."""

    @abstractmethod
    def count(self, from_ms: int, until_ms: int, cap: int) -> int:
        """Count the fire times in [from_ms, until_ms), up to `cap`."""

    def previous_ms(self, before_ms: int) -> int | None:
        """Return the last fire time before this one, or None if there is none for nine years."""
        return self.latest_ms(before_ms - 1)

    def between(self, from_ms: int, until_ms: int, limit: int) -> list[int]:
        """Return up to `limit` fire times in [from_ms, until_ms), in order."""
        return list(islice(self._walk(from_ms, until_ms), max(limit, 0)))

    def _walk(self, from_ms: int, until_ms: int) -> Iterator[int]:
        moment = self._find_next_ms(from_ms - 1)
        while moment is not None and moment < until_ms:
            yield moment
            moment = self._find_next_ms(moment)

    def _find_next_ms(self, after_ms: int) -> int | None:
        """Do as `next_ms`, without filling the shared cache with many times."""
        return self.next_ms(after_ms)


# Compared by identity, which `compile_recurrence` preserves: a key of caches must hash fast.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CronRecurrence(Recurrence):
    """The fire times of one expression in one zone. Made by `compile_recurrence`."""

    cron_expr: str
    timezone: str
    _cron: Cron = field(repr=False)
    _zone: Zone = field(repr=False)

    @property
    def zone(self) -> Zone:
        """The zone of the expression."""
        return self._zone

    @property
    def elapsed(self) -> bool:
        """Whether it follows elapsed time, not fixed times, where the clock changes."""
        return self._cron.wildcard

    def next_ms(self, after_ms: int) -> int | None:
        """Return the first fire time after this one, or None if there is none for nine years."""
        return _next_ms(self, after_ms // 1000)

    def latest_ms(self, at_ms: int) -> int | None:
        """Return the last fire time up to this one, or None if there is none for nine years."""
        return _latest_ms(self, at_ms // 1000)

    def count(self, from_ms: int, until_ms: int, cap: int) -> int:
        """Count the fire times in [from_ms, until_ms), up to `cap`.

        Takes microseconds for each month and each change of the clock, not for each fire.
        """
        after = max((from_ms - 1) // 1000, -1)
        last = min((until_ms - 1) // 1000, _LATEST)
        counted, starts = 0, self._zone.starts
        while after < last and counted < cap:
            period = self._zone.period(after + 1)
            end = last if period + 1 == len(starts) else min(last, starts[period + 1] - 1)
            counted += self._count_in_period(period, after, end, cap - counted)
            after = end
        return max(min(counted, cap), 0)

    def skipped_local(self, moment_ms: int) -> int | None:
        """Return the first local time, in seconds, in a gap that this fire replaces, or None."""
        gap = None if self.elapsed or moment_ms % 1000 else self._zone.gap(moment_ms // 1000)
        if gap is None:
            return None
        local = self._cron.next_after(gap[0] - 1)
        return local if local is not None and local < gap[1] else None

    def _find_next_ms(self, after_ms: int) -> int | None:
        moment = self._next(after_ms // 1000)
        return None if moment is None else moment * 1000

    def _next(self, after: int) -> int | None:
        after = max(after, -1)
        moment = self._next_elapsed(after) if self._cron.wildcard else self._next_fixed(after)
        return None if moment is None or moment > _LATEST else moment

    def _latest(self, at: int) -> int | None:
        if at < 0:
            return None
        at = min(at, _LATEST)
        moment = self._latest_elapsed(at) if self._cron.wildcard else self._latest_fixed(at)
        return None if moment is None or moment < 0 else moment

    def _count_in_period(self, period: int, after: int, until: int, cap: int) -> int:
        """Count the fire times in (after, until], both in this period."""
        zone = self._zone
        if self._cron.wildcard:
            offset = zone.offsets[period]
            return self._cron.count(after + offset, until + offset, cap)
        first, last = zone.furthest_local(after), zone.furthest_local(until)
        gap = zone.gap(after + 1)
        if gap is None:
            return self._cron.count(first, last, cap)
        # All times inside the gap, and the one at its end, are one fire.
        taken = self._cron.count(gap[0] - 1, gap[1], gap[1] - gap[0] + 1)
        return min(taken, 1) + self._cron.count(gap[1], last, cap)

    # Fixed times. A local time has fired if the wall clock has shown it or a later one. So the next
    # fire is the first match after the furthest local time shown.

    def _next_fixed(self, after: int) -> int | None:
        local = self._cron.next_after(self._zone.furthest_local(after))
        return None if local is None else self._zone.first_reach(local)

    def _latest_fixed(self, at: int) -> int | None:
        local = self._cron.latest_until(self._zone.furthest_local(at))
        return None if local is None else self._zone.first_reach(local)

    # Elapsed time. Within a period of the zone, local time is UTC plus a constant, so search one
    # period after the other.

    def _next_elapsed(self, after: int) -> int | None:
        starts, offsets = self._zone.starts, self._zone.offsets
        period = self._zone.period(after)
        while True:
            local = self._cron.next_after(after + offsets[period])
            if local is None:
                return None
            moment = local - offsets[period]
            period += 1
            if period == len(starts) or moment < starts[period]:
                return moment
            after = starts[period] - 1

    def _latest_elapsed(self, at: int) -> int | None:
        starts, offsets = self._zone.starts, self._zone.offsets
        period = self._zone.period(at)
        while True:
            local = self._cron.latest_until(at + offsets[period])
            if local is None:
                return None
            moment = local - offsets[period]
            if moment >= starts[period]:
                return moment
            at = starts[period] - 1
            period -= 1


@lru_cache(maxsize=_MOMENTS_KEPT)
def _next_ms(recurrence: CronRecurrence, after: int) -> int | None:
    moment = recurrence._next(after)
    return None if moment is None else moment * 1000


@lru_cache(maxsize=_MOMENTS_KEPT)
def _latest_ms(recurrence: CronRecurrence, at: int) -> int | None:
    moment = recurrence._latest(at)
    return None if moment is None else moment * 1000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IntervalRecurrence(Recurrence):
    """Fire times at equal distances of elapsed time, without drift.

    The anchor is one of them, not the first: the limits have a start.
    """

    every_ms: int
    anchor_ms: int
    _zone: Zone = field(repr=False)

    @property
    def zone(self) -> Zone:
        """The zone in which its moments are shown."""
        return self._zone

    def next_ms(self, after_ms: int) -> int | None:
        """Return the first fire time after this one, or None after the year 9999."""
        after_ms = max(after_ms, -1)
        moment = after_ms + self.every_ms - (after_ms - self.anchor_ms) % self.every_ms
        return moment if moment <= LATEST_MS else None

    def latest_ms(self, at_ms: int) -> int | None:
        """Return the last fire time up to this one, or None before 1970."""
        at_ms = min(at_ms, LATEST_MS)
        moment = at_ms - (at_ms - self.anchor_ms) % self.every_ms
        return moment if moment >= 0 else None

    def count(self, from_ms: int, until_ms: int, cap: int) -> int:
        """Count the fire times in [from_ms, until_ms), up to `cap`."""
        before = (max(from_ms, 0) - 1 - self.anchor_ms) // self.every_ms
        last = (min(until_ms - 1, LATEST_MS) - self.anchor_ms) // self.every_ms
        return max(min(last - before, cap), 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OnceRecurrence(Recurrence):
    """A single fire time."""

    at_ms: int
    _zone: Zone = field(repr=False)

    @property
    def zone(self) -> Zone:
        """The zone in which its time is shown."""
        return self._zone

    def next_ms(self, after_ms: int) -> int | None:
        """Return the fire time if it is after this one."""
        return self.at_ms if self.at_ms > after_ms else None

    def latest_ms(self, at_ms: int) -> int | None:
        """Return the fire time if it is at or before this one."""
        return self.at_ms if self.at_ms <= at_ms else None

    def count(self, from_ms: int, until_ms: int, cap: int) -> int:
        """Return 1 or 0."""
        return max(min(int(from_ms <= self.at_ms < until_ms), cap), 0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LimitedRecurrence(Recurrence):
    """The fire times of another recurrence that its limits allow.

    A search gives up after nine years or 10,000 tries.
    """

    inner: Recurrence
    limits: Limits = field(repr=False)

    @property
    def zone(self) -> Zone:
        """The zone of windows and dates."""
        return self.inner.zone

    def next_ms(self, after_ms: int) -> int | None:
        """Return the first fire time after this one, or None if there is none for nine years."""
        return _limited_next_ms(self, after_ms)

    def latest_ms(self, at_ms: int) -> int | None:
        """Return the last fire time up to this one, or None if there is none for nine years."""
        return _limited_latest_ms(self, at_ms)

    def count(self, from_ms: int, until_ms: int, cap: int) -> int:
        """Count the fire times in [from_ms, until_ms), up to `cap`.

        Takes some microseconds for each open stretch of time with a fire.
        """
        from_ms = max(from_ms, self.limits.start_ms)
        until_ms = min(until_ms, self.limits.end_ms)
        opening, counted = self.limits.opening, 0
        if opening is None:
            return self.inner.count(from_ms, until_ms, cap)
        while counted < cap:
            moment = self._find_next_ms(from_ms - 1)
            if moment is None or moment >= until_ms:
                break
            from_ms = opening.open_until(moment // 1000) * 1000
            counted += self.inner.count(moment, min(from_ms, until_ms), cap - counted)
        return max(min(counted, cap), 0)

    def _find_next_ms(self, after_ms: int) -> int | None:
        after_ms = max(after_ms, self.limits.start_ms - 1)
        give_up_ms, opening = after_ms + _HORIZON_MS, self.limits.opening
        for _ in range(_MAX_TRIES):
            moment = self.inner._find_next_ms(after_ms)
            if moment is None or moment >= self.limits.end_ms:
                return None
            open_at = moment // 1000 if opening is None else opening.next_open(moment // 1000)
            if open_at == moment // 1000:
                return moment
            if moment > give_up_ms:
                return None
            after_ms = open_at * 1000 - 1
        return None

    def _find_latest_ms(self, at_ms: int) -> int | None:
        at_ms = min(at_ms, self.limits.end_ms - 1)
        give_up_ms, opening = at_ms - _HORIZON_MS, self.limits.opening
        for _ in range(_MAX_TRIES):
            moment = self.inner.latest_ms(at_ms)
            if moment is None or moment < self.limits.start_ms:
                return None
            open_at = moment // 1000 if opening is None else opening.last_open(moment // 1000)
            if open_at == moment // 1000:
                return moment
            if moment < give_up_ms:
                return None
            at_ms = open_at * 1000 + 999
        return None


@lru_cache(maxsize=_MOMENTS_KEPT)
def _limited_next_ms(recurrence: LimitedRecurrence, after_ms: int) -> int | None:
    return recurrence._find_next_ms(after_ms)


@lru_cache(maxsize=_MOMENTS_KEPT)
def _limited_latest_ms(recurrence: LimitedRecurrence, at_ms: int) -> int | None:
    return recurrence._find_latest_ms(at_ms)


@lru_cache(maxsize=_RECURRENCES_KEPT)
def _compiled(cron_expr: str, timezone: str) -> CronRecurrence:
    return CronRecurrence(
        cron_expr=cron_expr,
        timezone=timezone,
        _cron=parse_cron(cron_expr),
        _zone=find_zone(timezone),
    )


def compile_recurrence(cron_expr: str, timezone: str) -> CronRecurrence:
    """Return the recurrence of an expression in a zone; the same object for the same arguments.

    Raises InvalidCron and UnknownTimezone. Thread-safe; results are cached.
    """
    try:
        return _compiled(cron_expr, timezone)
    except TypeError:
        # An unhashable argument cannot be looked up in the cache: raise the error for its type.
        parse_cron(cron_expr)
        find_zone(timezone)
        raise


def compile_form(
    form: Mapping[str, Any], *, seed: str | None = None, calendars: Calendars = NO_CALENDARS
) -> Recurrence:
    """Return the recurrence of a stored form; the same object for the same form.

    `seed`, such as the id of the schedule, decides the values of `H` in an expression; `calendars`
    has the calendars of the limits. Raises InvalidSchedule, InvalidCron or UnknownTimezone naming
    the value. Thread-safe; results are cached.
    """
    kind = _kind(form)
    timezone = form.get("timezone", "UTC")
    recurrence: Recurrence
    if kind == "cron":
        cron_expr = form["cron"]
        if seed is not None:
            cron_expr = resolve_hashed(cron_expr, seed)
        recurrence = compile_recurrence(cron_expr, timezone)
    else:
        find_zone(timezone)
        recurrence = _compile_interval(form) if kind == "every" else _compile_once(form)
    if "limits" not in form:
        return recurrence
    return _compile_limited(recurrence, form["limits"], calendars)


def _kind(form: Mapping[str, Any]) -> str:
    if not isinstance(form, Mapping):
        raise InvalidSchedule(
            f"a rule must be a dict with one of {', '.join(_KINDS)}, not {short_repr(form)}"
        )
    given = [kind for kind in _KINDS if kind in form]
    if len(given) != 1:
        raise InvalidSchedule(
            f"a rule must have one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none'}"
        )
    known = _KEYS[given[0]]
    for key in form:
        if key not in known:
            raise InvalidSchedule(
                f"unknown {short_repr(key)} in a rule with {given[0]!r}: known are "
                f"{', '.join(sorted(known))}"
            )
    return given[0]


def _compile_interval(form: Mapping[str, Any]) -> Recurrence:
    every_ms = check_count(
        form["every"],
        "every (in milliseconds)",
        InvalidSchedule,
        least=SMALLEST_STEP_MS,
        most=LARGEST_STEP_MS,
    )
    anchor_ms = check_count(form.get("anchor", 0), "anchor", InvalidSchedule, most=LATEST_MS)
    return _interval(every_ms, anchor_ms, str(form.get("timezone", "UTC")))


def _compile_once(form: Mapping[str, Any]) -> Recurrence:
    at_ms = check_count(form["at"], "at", InvalidSchedule, most=LATEST_MS)
    return _once(at_ms, str(form.get("timezone", "UTC")))


def _compile_limited(inner: Recurrence, form: object, calendars: Calendars) -> Recurrence:
    try:
        text = json.dumps(form, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidSchedule(
            f"limits {short_repr(form)} cannot be written as JSON: {error}"
        ) from None
    return _limited(inner, text, calendars)


@lru_cache(maxsize=_RECURRENCES_KEPT)
def _interval(every_ms: int, anchor_ms: int, timezone: str) -> IntervalRecurrence:
    return IntervalRecurrence(every_ms=every_ms, anchor_ms=anchor_ms, _zone=find_zone(timezone))


@lru_cache(maxsize=_RECURRENCES_KEPT)
def _once(at_ms: int, timezone: str) -> OnceRecurrence:
    return OnceRecurrence(at_ms=at_ms, _zone=find_zone(timezone))


@lru_cache(maxsize=_LIMITED_KEPT)
def _limited(inner: Recurrence, text: str, calendars: Calendars) -> LimitedRecurrence:
    limits = read_limits(json.loads(text), inner.zone, calendars)
    return LimitedRecurrence(inner=inner, limits=limits)
