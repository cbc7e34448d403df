"""Limits of a schedule: a start, an end, windows of the week, and excluded dates.

Limits are given as a dict of JSON values; every key is optional:

    {"start": 1767225600000, "end": 1798761600000,
     "windows": [{"days": [1, 2, 3, 4, 5], "from": "09:00", "to": "17:30"}],
     "exclude": ["2026-12-25"], "calendars": ["bank-holidays"]}

`start` and `from` are included, `end` and `to` are not. The days are 1 (Monday) to 7 (Sunday); a
window over midnight belongs to the day on which it begins. Windows and dates are in the local time
of the schedule, so a change of the clock makes a window longer or shorter, and skips one that lies
inside a gap.
"""

import re
from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import date

from fairqueue.clock import LATEST_MS
from fairqueue.errors import InvalidSchedule, short_repr
from fairqueue.recurrence.zones import Zone
from fairqueue.validation import check_count, check_name

DAY = 86_400
WEEK = 7 * DAY

# More would slow down the search for an open time, and are surely a mistake.
MAX_WINDOWS = 50
# Dates in the limits of one schedule; a calendar is shared, so it may have more.
MAX_DATES = 500
MAX_CALENDAR_DATES = 10_000
MAX_CALENDARS = 20

# The week begins on Monday here, and 1970-01-01 was a Thursday.
_EPOCH_IN_WEEK = 3 * DAY
_EPOCH_ORDINAL = date(1970, 1, 1).toordinal()

_KEYS = ("start", "end", "windows", "exclude", "calendars")
_WINDOW_KEYS = ("days", "from", "to")
_TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d|24:00", re.ASCII)
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)


# Compared by identity: it is a key of caches.
class Calendars:
    """Named sets of dates on which schedules do not run, such as the holidays of a country.

    Never changes; make a new one when the dates do. Raises InvalidSchedule for a bad name or date.
    """

    __slots__ = ("_days",)

    def __init__(self, dates: Mapping[str, Collection[str]]) -> None:
        self._days = {
            check_name(name, "calendar", InvalidSchedule): _read_dates(
                days, f"calendar {name!r}", MAX_CALENDAR_DATES
            )
            for name, days in dates.items()
        }

    def days(self, name: str) -> frozenset[int]:
        """Return the days of a calendar; 1970-01-01 is 0. Raises InvalidSchedule."""
        try:
            return self._days[name]
        except KeyError:
            known = ", ".join(sorted(self._days)) or "none"
            raise InvalidSchedule(f"calendar {name!r} is unknown: known are {known}") from None


NO_CALENDARS = Calendars({})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opening:
    """The times that windows and dates leave open, in whole seconds since 1970, UTC."""

    zone: Zone
    # Parts of the week in seconds since Monday 00:00 local time, sorted and disjoint.
    opens: tuple[int, ...]
    closes: tuple[int, ...]
    # Days without any opening; 1970-01-01 is 0.
    excluded: frozenset[int]

    def next_open(self, moment: int) -> int:
        """Return the first open time at or after this one."""
        # Within a period of the zone, local time is UTC plus a constant.
        starts, offsets = self.zone.starts, self.zone.offsets
        period = self.zone.period(moment)
        while True:
            found = self._next_local(moment + offsets[period]) - offsets[period]
            period += 1
            if period == len(starts) or found < starts[period]:
                return found
            moment = starts[period]

    def last_open(self, moment: int) -> int:
        """Return the last open time at or before this one."""
        starts, offsets = self.zone.starts, self.zone.offsets
        period = self.zone.period(moment)
        while True:
            found = self._last_local(moment + offsets[period]) - offsets[period]
            if found >= starts[period]:
                return found
            moment = starts[period] - 1
            period -= 1

    def open_until(self, moment: int) -> int:
        """Return a later time up to which all is open, if this time is; not always the last."""
        starts, offsets = self.zone.starts, self.zone.offsets
        period = self.zone.period(moment)
        local = moment + offsets[period]
        second = (local + _EPOCH_IN_WEEK) % WEEK
        end = local - second + self.closes[bisect_right(self.closes, second)]
        if self.excluded:
            end = min(end, local - local % DAY + DAY)
        end -= offsets[period]
        return min(end, starts[period + 1]) if period + 1 < len(starts) else end

    # Both searches end: each step moves unless the time is open, and the dates are finite.

    def _next_local(self, local: int) -> int:
        while True:
            day = local // DAY
            if day in self.excluded:
                local = (day + 1) * DAY
                continue
            second = (local + _EPOCH_IN_WEEK) % WEEK
            stretch = bisect_right(self.closes, second)
            if stretch == len(self.closes):
                local += WEEK - second + self.opens[0]
            elif self.opens[stretch] <= second:
                return local
            else:
                local += self.opens[stretch] - second

    def _last_local(self, local: int) -> int:
        while True:
            day = local // DAY
            if day in self.excluded:
                local = day * DAY - 1
                continue
            second = (local + _EPOCH_IN_WEEK) % WEEK
            stretch = bisect_right(self.opens, second) - 1
            if stretch < 0:
                local -= second + WEEK - self.closes[-1] + 1
            elif second < self.closes[stretch]:
                return local
            else:
                local -= second - self.closes[stretch] + 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """The limits of a schedule: fire times in [start_ms, end_ms) that `opening` leaves open."""

    # As given.
    form: Mapping[str, object]
    start_ms: int
    end_ms: int
    # None: always open.
    opening: Opening | None


def read_limits(
    form: Mapping[str, object], zone: Zone, calendars: Calendars = NO_CALENDARS
) -> Limits:
    """Read limits. Raises InvalidSchedule naming the value."""
    if not isinstance(form, Mapping):
        raise InvalidSchedule(
            f"limits must be a dict with keys of {', '.join(_KEYS)}, not {short_repr(form)}"
        )
    _check_keys(form, _KEYS, "limits")
    start_ms = check_count(form.get("start", 0), "start", InvalidSchedule, most=LATEST_MS)
    # One later than the last possible time, which is included by default.
    end_ms = LATEST_MS + 1
    if "end" in form:
        end_ms = check_count(form["end"], "end", InvalidSchedule, most=LATEST_MS)
    if start_ms >= end_ms:
        raise InvalidSchedule(f"end must be after start ({start_ms}), not {end_ms}")
    return Limits(
        form=form,
        start_ms=start_ms,
        end_ms=end_ms,
        opening=_read_opening(form, zone, calendars),
    )


def check_windows(windows: object) -> None:
    """Raise InvalidSchedule for an empty window. A stored one is accepted, and always open."""
    if isinstance(windows, Collection) and not isinstance(windows, str | Mapping):
        for number, window in enumerate(windows):
            if isinstance(window, Mapping) and not window:
                raise InvalidSchedule(
                    f"windows[{number}] must have days, from or to: {{}} limits nothing"
                )


def _read_opening(form: Mapping[str, object], zone: Zone, calendars: Calendars) -> Opening | None:
    stretches = [(0, WEEK)]
    if "windows" in form:
        windows = _read_list(form["windows"], "windows", MAX_WINDOWS)
        stretches = _merge(
            stretch
            for number, window in enumerate(windows)
            for stretch in _read_window(window, f"windows[{number}]")
        )
    excluded = _read_dates(form.get("exclude", ()), "exclude", MAX_DATES)
    for name in _read_list(form.get("calendars", ()), "calendars", MAX_CALENDARS, least=0):
        excluded |= calendars.days(check_name(name, "calendar", InvalidSchedule))
    if stretches == [(0, WEEK)] and not excluded:
        return None
    return Opening(
        zone=zone,
        opens=tuple(start for start, _ in stretches),
        closes=tuple(end for _, end in stretches),
        excluded=excluded,
    )


def _read_window(window: object, what: str) -> list[tuple[int, int]]:
    """Return the parts of the week that a window opens."""
    if not isinstance(window, Mapping):
        keys = ", ".join(_WINDOW_KEYS)
        raise InvalidSchedule(
            f"{what} must be a dict with keys of {keys}, not {short_repr(window)}"
        )
    _check_keys(window, _WINDOW_KEYS, what)
    days = _read_list(window.get("days", [1, 2, 3, 4, 5, 6, 7]), f"{what}.days", 7)
    start = _read_time(window.get("from", "00:00"), f"{what}.from")
    end = _read_time(window.get("to", "24:00"), f"{what}.to")
    if start in (end, DAY):
        raise InvalidSchedule(
            f"{what} must not be empty, from {window.get('from')!r} to {window.get('to')!r}: for a "
            "whole day write 00:00 to 24:00"
        )
    found = []
    for day in days:
        first = (check_count(day, f"{what}.days", InvalidSchedule, least=1, most=7) - 1) * DAY
        if start < end:
            found.append((first + start, first + end))
        else:
            found.append((first + start, first + DAY))
            after = (first + DAY) % WEEK
            found.append((after, after + end))
    return found


def _merge(stretches: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sort stretches, merge those that touch or overlap, and drop empty ones."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(stretches):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        elif start < end:
            merged.append((start, end))
    return merged


def _read_time(value: object, what: str) -> int:
    if not isinstance(value, str) or not _TIME.fullmatch(value):
        raise InvalidSchedule(
            f"{what} must be a time of day such as '09:00', up to '24:00', not {short_repr(value)}"
        )
    return int(value[:2]) * 3600 + int(value[3:]) * 60


def _read_dates(values: object, what: str, most: int) -> frozenset[int]:
    return frozenset(_read_date(value, what) for value in _read_list(values, what, most, least=0))


def _read_date(value: object, what: str) -> int:
    if isinstance(value, str) and _DATE.fullmatch(value):
        try:
            return date.fromisoformat(value).toordinal() - _EPOCH_ORDINAL
        except ValueError:
            pass
    raise InvalidSchedule(f"{what} must be dates such as '2026-12-25', not {short_repr(value)}")


def _read_list(values: object, what: str, most: int, *, least: int = 1) -> Collection[object]:
    if isinstance(values, str) or not isinstance(values, Collection) or isinstance(values, Mapping):
        raise InvalidSchedule(f"{what} must be a list, not {short_repr(values)}")
    if not least <= len(values) <= most:
        raise InvalidSchedule(f"{what} must have {least} to {most} items, not {len(values)}")
    return values


def _check_keys(form: Mapping[str, object], known: tuple[str, ...], what: str) -> None:
    for key in form:
        if key not in known:
            raise InvalidSchedule(
                f"{what}: unknown {short_repr(key)}; known are {', '.join(known)}"
            )
