"""The local times of a cron expression, in whole seconds, without a time zone.

Local times are integers: seconds since 1970-01-01 00:00 on the wall clock. croniter expands each
field. The search through the calendar is our own: croniter makes only 4,000 searches a second, and
thousands of schedules can be due at one moment.
"""

import calendar
import datetime
import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from croniter import CroniterError, croniter

from fairqueue.errors import InvalidCron, plural, short_repr

DAY = 86_400

# Longer texts are refused; the longest useful expression is far shorter.
MAX_LENGTH = 256

# How far a search goes, in years. 29 February can be eight years away (2096 to 2104). Rarer days,
# such as a fifth Monday in February, count as "never" if they are further away.
HORIZON_YEARS = 9
_HORIZON_MONTHS = HORIZON_YEARS * 12 + 1

# Cached entries. Most installations have a few hundred fields and expressions; each takes about
# 1 kB, a day rule up to 8 kB.
_FIELDS_KEPT = 4096
_DAY_RULES_KEPT = 1024
_EXPRESSIONS_KEPT = 4096

_EPOCH_ORDINAL = datetime.date(1970, 1, 1).toordinal()
_LAST_DAY = datetime.date.max.toordinal() - _EPOCH_ORDINAL
_MONTH_LENGTHS = (0, 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
# 1970-01-01 was a Thursday; cron's week begins with Sunday, 0.
_EPOCH_WEEKDAY = 4

_NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}

_ITEM = re.compile(r"(?:\*|(?P<low>\w+)(?:-(?P<high>\w+))?)(?:/(?P<step>\d+))?", re.ASCII)
_NTH_WEEKDAY = re.compile(r"(?P<day>\w+)#(?P<nth>\d+)|l(?P<last>\d+)", re.ASCII)
_HASHED = re.compile(r"h(?:\((?P<low>\w+)-(?P<high>\w+)\))?(?:/(?P<step>\d+))?", re.ASCII)
_RANDOM_OR_HASHED = re.compile(r"[rh](\(.*\))?(/.*)?", re.ASCII)
_NEAREST_WEEKDAY = re.compile(r"\d+w|w\d+|lw", re.ASCII)

# In `Field.nth`: the last such weekday of the month.
LAST = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Column:
    """One of the six places of an expression."""

    name: str
    low: int
    high: int
    # Where croniter's five-field form has it. Seconds are expanded as minutes, which have the same
    # values: croniter's own six-field form has them last, and refuses 7 as Sunday.
    index: int
    # The number of different values: 0 and 7 are the same day of the week.
    size: int
    # The last value that `H` chooses: a day that every month has; 0 for Sunday, not 7.
    last_hashed: int
    names: Mapping[str, int] = field(default_factory=dict)


# Not calendar.month_abbr, which depends on the locale of the process.
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH_NAMES = {name: number for number, name in enumerate(_MONTHS, start=1)}
_DAY_NAMES = {"sun": 0, "mon": 1, "tue": 2, "wed": 3, "thu": 4, "fri": 5, "sat": 6}
_SECOND = _Column(name="second", low=0, high=59, size=60, last_hashed=59, index=0)
_MINUTE = _Column(name="minute", low=0, high=59, size=60, last_hashed=59, index=0)
_HOUR = _Column(name="hour", low=0, high=23, size=24, last_hashed=23, index=1)
_DAY_OF_MONTH = _Column(name="day of month", low=1, high=31, size=31, last_hashed=28, index=2)
_MONTH = _Column(name="month", low=1, high=12, size=12, last_hashed=12, index=3, names=_MONTH_NAMES)
_DAY_OF_WEEK = _Column(
    name="day of week", low=0, high=7, size=7, last_hashed=6, index=4, names=_DAY_NAMES
)
_COLUMNS = (_SECOND, _MINUTE, _HOUR, _DAY_OF_MONTH, _MONTH, _DAY_OF_WEEK)


class _BadField(ValueError):
    """One field is invalid; the caller adds the whole expression."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Field:
    """One field, expanded."""

    values: tuple[int, ...]
    # The field begins with `*` (or is `?`).
    star: bool
    # `L`: the last day of the month.
    last_day: bool
    # (weekday, n): the n-th such weekday of the month, or the last one (`LAST`).
    nth: frozenset[tuple[int, int]]


class DayRule:
    """The days that an expression names. Days are numbers: 1970-01-01 is 0."""

    __slots__ = ("_day_of_month", "_day_of_week", "_every_day", "_months", "_shapes")

    def __init__(self, day_of_month: Field, month: Field, day_of_week: Field) -> None:
        self._day_of_month = day_of_month
        self._day_of_week = day_of_week
        self._months = frozenset(month.values)
        self._every_day = (
            len(self._months) == 12
            and len(day_of_month.values) == 31
            and len(day_of_week.values) == 7
            and not day_of_week.nth
        )
        # A month has one of 28 shapes: its length and the weekday of its first day. Threads may
        # compute the same shape at once; they get the same value.
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}

    def first_from(self, day: int) -> int | None:
        """Return the first such day at or after `day`, or None within the horizon."""
        if day > _LAST_DAY:
            return None
        if self._every_day:
            return day
        date = datetime.date.fromordinal(day + _EPOCH_ORDINAL)
        year, month, offset = date.year, date.month, date.day - 1
        first = day - offset
        for _ in range(_HORIZON_MONTHS):
            length = _month_length(year, month)
            if month in self._months:
                days = self._days_of(first, length)
                index = bisect_left(days, offset)
                if index < len(days):
                    return first + days[index]
            first, offset, month = first + length, 0, month + 1
            if month > 12:
                year, month = year + 1, 1
                if year > datetime.MAXYEAR:
                    return None
        return None

    def last_until(self, day: int) -> int | None:
        """Return the last such day at or before `day`, or None within the horizon."""
        day = min(day, _LAST_DAY)
        if self._every_day:
            return day
        date = datetime.date.fromordinal(day + _EPOCH_ORDINAL)
        year, month, offset = date.year, date.month, date.day - 1
        first = day - offset
        for _ in range(_HORIZON_MONTHS):
            if month in self._months:
                days = self._days_of(first, _month_length(year, month))
                index = bisect_right(days, offset)
                if index:
                    return first + days[index - 1]
            year, month = (year, month - 1) if month > 1 else (year - 1, 12)
            first, offset = first - _month_length(year, month), 30
        return None

    def count(self, first: int, end: int, cap: int) -> int:
        """Count such days in [first, end), up to the end of the month that reaches `cap`."""
        end = min(end, _LAST_DAY + 1)
        if first >= end:
            return 0
        if self._every_day:
            return end - first
        date = datetime.date.fromordinal(first + _EPOCH_ORDINAL)
        year, month = date.year, date.month
        start, counted = first - date.day + 1, 0
        while start < end and counted < cap:
            length = _month_length(year, month)
            if month in self._months:
                days = self._days_of(start, length)
                counted += bisect_left(days, end - start) - bisect_left(days, first - start)
            start += length
            year, month = (year, month + 1) if month < 12 else (year + 1, 1)
        return counted

    def is_possible(self) -> bool:
        """Return whether any year has such a day."""
        return self._every_day or any(
            self._days_of(first, 29 if month == 2 else _MONTH_LENGTHS[month])
            for month in self._months
            for first in range(7)
        )

    def _days_of(self, first: int, length: int) -> tuple[int, ...]:
        """Return the days, from 0, of a month that begins on day `first` and has `length` days."""
        weekday = (first + _EPOCH_WEEKDAY) % 7
        days = self._shapes.get((length, weekday))
        if days is None:
            days = tuple(
                day for day in range(length) if self._names(day, length, (weekday + day) % 7)
            )
            self._shapes[length, weekday] = days
        return days

    def _names(self, day: int, length: int, weekday: int) -> bool:
        dom, dow = self._day_of_month, self._day_of_week
        by_month = day + 1 in dom.values or (dom.last_day and day + 1 == length)
        if dow.nth:
            by_week = (weekday, day // 7 + 1) in dow.nth or (
                (weekday, LAST) in dow.nth and day + 7 >= length
            )
        else:
            by_week = weekday in dow.values
        # Two restricted fields are a union, but a field that begins with `*`, even `*/2`, makes
        # them an intersection, as in Vixie's and Debian's cron. croniter agrees only with
        # implement_cron_bug=True; by default it makes a union for `*/2` too.
        if dom.star or dow.star:
            return by_month and by_week
        return by_month or by_week


class Cron:
    """The local times of an expression: a rule for days, and the times of each such day."""

    __slots__ = ("_days", "_first_time", "_hours", "_last_time", "_minutes", "_seconds", "wildcard")

    def __init__(self, second: Field, minute: Field, hour: Field, days: DayRule) -> None:
        self._seconds = second.values
        self._minutes = minute.values
        self._hours = hour.values
        self._days = days
        self._first_time = _time(self._hours[0], self._minutes[0], self._seconds[0])
        self._last_time = _time(self._hours[-1], self._minutes[-1], self._seconds[-1])
        # Debian's distinction: such an expression means an interval, any other a time of day.
        # Five fields imply second 0, which is not a wildcard.
        self.wildcard = second.star or minute.star or hour.star

    def next_after(self, local: int) -> int | None:
        """Return the first local time after `local`, or None within the horizon."""
        day, second = divmod(local + 1, DAY)
        found = self._days.first_from(day)
        if found == day:
            time = self._first_time_from(second)
            if time is not None:
                return day * DAY + time
            found = self._days.first_from(day + 1)
        return None if found is None else found * DAY + self._first_time

    def latest_until(self, local: int) -> int | None:
        """Return the last local time up to `local`, or None within the horizon."""
        day, second = divmod(local, DAY)
        found = self._days.last_until(day)
        if found == day:
            time = self._last_time_until(second)
            if time is not None:
                return day * DAY + time
            found = self._days.last_until(day - 1)
        return None if found is None else found * DAY + self._last_time

    def count(self, after: int, until: int, cap: int) -> int:
        """Count the local times in (after, until], up to `cap`.

        Takes a microsecond for each month, however many times it has.
        """
        if until <= after:
            return 0
        first, first_second = divmod(after + 1, DAY)
        last, last_second = divmod(until + 1, DAY)
        a_day = len(self._hours) * len(self._minutes) * len(self._seconds)
        # Whole days, minus the times before the start of the first, plus those of the last. One
        # more day than the cap needs makes up for the former.
        counted = a_day * self._days.count(first, last, cap // a_day + 2)
        if self._days.first_from(first) == first:
            counted -= self._times_before(first_second)
        if self._days.first_from(last) == last:
            counted += self._times_before(last_second)
        return min(counted, cap)

    def _times_before(self, second_of_day: int) -> int:
        """Count the times of a day before this one."""
        hours, minutes, seconds = self._hours, self._minutes, self._seconds
        hour, rest = divmod(second_of_day, 3600)
        minute, second = divmod(rest, 60)
        h = bisect_left(hours, hour)
        counted = h * len(minutes) * len(seconds)
        if h < len(hours) and hours[h] == hour:
            m = bisect_left(minutes, minute)
            counted += m * len(seconds)
            if m < len(minutes) and minutes[m] == minute:
                counted += bisect_left(seconds, second)
        return counted

    def _first_time_from(self, second_of_day: int) -> int | None:
        """Return the first time of day at or after this one."""
        hours, minutes, seconds = self._hours, self._minutes, self._seconds
        hour, rest = divmod(second_of_day, 3600)
        minute, second = divmod(rest, 60)
        h = bisect_left(hours, hour)
        if h < len(hours) and hours[h] == hour:
            m = bisect_left(minutes, minute)
            if m < len(minutes) and minutes[m] == minute:
                s = bisect_left(seconds, second)
                if s < len(seconds):
                    return _time(hour, minute, seconds[s])
                m += 1
            if m < len(minutes):
                return _time(hour, minutes[m], seconds[0])
            h += 1
        return _time(hours[h], minutes[0], seconds[0]) if h < len(hours) else None

    def _last_time_until(self, second_of_day: int) -> int | None:
        """Return the last time of day at or before this one."""
        hours, minutes, seconds = self._hours, self._minutes, self._seconds
        hour, rest = divmod(second_of_day, 3600)
        minute, second = divmod(rest, 60)
        # Each index is one past its value, so that 0 means none.
        h = bisect_right(hours, hour)
        if h and hours[h - 1] == hour:
            m = bisect_right(minutes, minute)
            if m and minutes[m - 1] == minute:
                s = bisect_right(seconds, second)
                if s:
                    return _time(hour, minute, seconds[s - 1])
                m -= 1
            if m:
                return _time(hour, minutes[m - 1], seconds[-1])
            h -= 1
        return _time(hours[h - 1], minutes[-1], seconds[-1]) if h else None


def parse_cron(cron_expr: str) -> Cron:
    """Parse an expression of 5 fields, of 6 with the seconds first, or a name such as `@daily`.

    Raises InvalidCron if it is invalid or never fires. Parsed expressions are cached.
    """
    if not isinstance(cron_expr, str):
        raise InvalidCron(
            f"a cron expression must be a string such as '0 9 * * 1-5', not {short_repr(cron_expr)}"
        )
    return _parse(cron_expr)


@lru_cache(maxsize=_EXPRESSIONS_KEPT)
def _parse(cron_expr: str) -> Cron:
    second, minute, hour, day_of_month, month, day_of_week = _split(cron_expr)
    try:
        days = _day_rule(day_of_month, month, day_of_week)
        cron = Cron(_expand(_SECOND, second), _expand(_MINUTE, minute), _expand(_HOUR, hour), days)
    except _BadField as bad:
        raise InvalidCron(f"{cron_expr!r}: {bad}") from None
    if not days.is_possible():
        raise InvalidCron(
            f"{cron_expr!r} never fires: month {month!r} has no day with day of month "
            f"{day_of_month!r} and day of week {day_of_week!r}"
        )
    return cron


def _split(cron_expr: str) -> list[str]:
    """Return the six fields in lower case. Raises InvalidCron for another number of fields."""
    if len(cron_expr) > MAX_LENGTH:
        raise InvalidCron(
            f"a cron expression must have at most {MAX_LENGTH} characters, not {len(cron_expr)}: "
            f"{short_repr(cron_expr)}"
        )
    if not (cron_expr.isascii() and cron_expr.isprintable()):
        raise InvalidCron(
            f"{cron_expr!r} contains a character that is not printable ASCII: write digits, names, "
            "and * , - / ? L #, with spaces between the fields"
        )
    text = cron_expr.strip().lower()
    if text.startswith("@"):
        text = _replace_nickname(cron_expr, text)
    fields = text.split()
    if len(fields) == 5:
        return ["0", *fields]
    if len(fields) == 6:
        return fields
    years = " (years are not supported)" if len(fields) == 7 else ""
    raise InvalidCron(
        f"{cron_expr!r} has {plural(len(fields), 'field')}{years}: cron has 5 (minute, hour, day "
        "of month, month, day of week), or 6 with the seconds first"
    )


def resolve_hashed(cron_expr: str, seed: str) -> str:
    """Return the expression with each `H` replaced by a value that the seed determines.

    The seed is, for example, the id of a schedule. `H` is one value of the field, `H/15` every 15th
    from one of the first 15, and `H(0-29)` and `H(0-29)/10` the same within a range. The day of
    month is 1 to 28 unless a range is given. Fields are chosen independently. An expression without
    `H` is returned unchanged. Raises InvalidCron.
    """
    if not isinstance(cron_expr, str) or "h" not in cron_expr.lower():
        parse_cron(cron_expr)
        return cron_expr
    if not isinstance(seed, str):
        raise InvalidCron(f"{cron_expr!r}: the seed must be a string, not {short_repr(seed)}")
    return _resolve(cron_expr, seed)


@lru_cache(maxsize=_EXPRESSIONS_KEPT)
def _resolve(cron_expr: str, seed: str) -> str:
    fields = _split(cron_expr)
    if not any(item.startswith("h") for text in fields for item in text.split(",")):
        parse_cron(cron_expr)
        return cron_expr
    try:
        resolved = " ".join(
            ",".join(
                _choose(column, item, f"{column.name}/{number}/{seed}")
                if item.startswith("h")
                else item
                for number, item in enumerate(text.split(","))
            )
            for column, text in zip(_COLUMNS, fields, strict=True)
        )
    except _BadField as bad:
        raise InvalidCron(f"{cron_expr!r}: {bad}") from None
    if len(cron_expr.split()) == 5:
        resolved = resolved.removeprefix("0 ")
    parse_cron(resolved)
    return resolved


def _choose(column: _Column, item: str, seed: str) -> str:
    """Return the value of an item with `H`."""
    match = _HASHED.fullmatch(item)
    if match is None:
        raise _BadField(
            f"{column.name} {item!r} is invalid: write H, H/2, "
            f"H({column.low}-{column.last_hashed}) or H({column.low}-{column.last_hashed})/2"
        )
    low = column.low if match["low"] is None else _value(column, match["low"])
    high = column.last_hashed if match["high"] is None else _value(column, match["high"])
    if low >= high:
        raise _BadField(f"{column.name} {item!r}: a range must end after its begin")
    step = None if match["step"] is None else int(match["step"])
    size = high - low + 1
    if step is not None and not 1 <= step <= size:
        raise _BadField(f"{column.name} {item!r}: the step must be 1 to {size}, not {step}")
    digest = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    value = low + int.from_bytes(digest, "big") % (step or size)
    if step is None or value + step > high:
        return str(value)
    return f"{value}-{high}/{step}"


def _replace_nickname(cron_expr: str, text: str) -> str:
    if text not in _NICKNAMES:
        why = " (schedules do not fire at a reboot)" if text == "@reboot" else ""
        raise InvalidCron(f"{cron_expr!r} is not one of {', '.join(_NICKNAMES)}{why}")
    return _NICKNAMES[text]


def read_fields(cron_expr: str) -> list[tuple[str, Field]]:
    """Return the six fields, seconds first: each in lower case, and expanded.

    Raises InvalidCron.
    """
    parse_cron(cron_expr)
    texts = _split(cron_expr)
    return [(text, _expand(column, text)) for column, text in zip(_COLUMNS, texts, strict=True)]


# Cached by the text of its three fields: nearly all schedules use a handful (`* * *`, `* * 1-5`).
@lru_cache(maxsize=_DAY_RULES_KEPT)
def _day_rule(day_of_month: str, month: str, day_of_week: str) -> DayRule:
    return DayRule(
        _expand(_DAY_OF_MONTH, day_of_month),
        _expand(_MONTH, month),
        _expand(_DAY_OF_WEEK, day_of_week),
    )


# croniter takes about 100 µs for an expression. Most fields are in the cache already.
@lru_cache(maxsize=_FIELDS_KEPT)
def _expand(column: _Column, text: str) -> Field:
    """Check one field by our rules, then expand it with croniter."""
    if text == "?" and column in (_DAY_OF_MONTH, _DAY_OF_WEEK):
        text = "*"
    _check_field(column, text)
    fields = ["*"] * 5
    fields[column.index] = text
    try:
        expanded, nth = croniter.expand(" ".join(fields))
    except CroniterError as error:
        raise _BadField(f"{column.name} {text!r} is invalid: {error}") from None
    values = expanded[column.index]
    return Field(
        values=(
            tuple(range(column.low, column.low + column.size))
            if "*" in values
            else tuple(sorted(value for value in values if isinstance(value, int)))
        ),
        star=text.startswith("*"),
        last_day="l" in values,
        nth=frozenset(
            (int(weekday), LAST if str(n) == "l" else int(n))
            for weekday, numbers in nth.items()
            for n in numbers
        ),
    )


def _check_field(column: _Column, text: str) -> None:
    """Refuse fields that croniter reads in an unexpected way."""
    items = text.split(",")
    if len(items) > 1 and "*" in items:
        raise _BadField(f"{column.name} {text!r}: '*' already includes every value")
    nth = [column is _DAY_OF_WEEK and _is_nth_weekday(item) for item in items]
    if any(nth) and not all(nth):
        raise _BadField(
            f"{column.name} {text!r} mixes weekdays with numbered ones (# or L): "
            "use one kind, and a second schedule for the other"
        )
    for item, is_nth in zip(items, nth, strict=True):
        if not is_nth and not (item == "l" and column is _DAY_OF_MONTH):
            _check_item(column, item)


def _is_nth_weekday(item: str) -> bool:
    """Return whether an item is `5#2` (the second Friday) or `L5` (the last Friday)."""
    match = _NTH_WEEKDAY.fullmatch(item)
    if match is None:
        return False
    _value(_DAY_OF_WEEK, match["last"] or match["day"])
    if match["nth"] and not 1 <= int(match["nth"]) <= 5:
        raise _BadField(f"day of week {item!r}: the number must be #1 to #5")
    return True


def _check_item(column: _Column, item: str) -> None:
    match = _ITEM.fullmatch(item)
    if match is None:
        raise _BadField(_cannot_read(column, item))
    low, high, step = match["low"], match["high"], match["step"]
    if step is not None and not 1 <= int(step) <= column.size:
        # croniter reads */100 as 0, surely a mistake.
        raise _BadField(f"{column.name} {item!r}: the step must be 1 to {column.size}, not {step}")
    if low is None:
        return
    first = _value(column, low)
    if high is not None:
        _check_range(column, item, first, _value(column, high), step)
    elif step is not None and first >= column.low + column.size - 1:
        # croniter reads 59/15 as */15.
        raise _BadField(
            f"{column.name} {item!r}: no step fits after {low}; write {low}, or */{step}"
        )


def _check_range(column: _Column, item: str, first: int, last: int, step: str | None) -> None:
    if column is _DAY_OF_WEEK:
        if (first, last) == (0, 7):
            return
        # Sunday begins a range as 0 and ends it as 7.
        first, last = first % 7, last or 7
        if first == last % 7:
            last = first
    if first == last:
        # croniter reads 5-5 as every value.
        raise _BadField(
            f"{column.name} range {item!r} has one value: write that value, or * for all"
        )
    if first > last and step is not None:
        # croniter counts the steps wrongly across the end: 22-6/3 gives 22, 2, 5.
        raise _BadField(
            f"{column.name} range {item!r} has a step and wraps around: list the values instead"
        )


def _value(column: _Column, text: str) -> int:
    if text in column.names:
        return column.names[text]
    if not text.isdigit():
        raise _BadField(_cannot_read(column, text))
    number = int(text)
    if not column.low <= number <= column.high:
        raise _BadField(f"{column.name} must be {column.low} to {column.high}, not {number}")
    return number


def _cannot_read(column: _Column, item: str) -> str:
    """Return the message for an item that is not a value, a range or a step."""
    if not item:
        return f"{column.name} has an empty item: write a value between commas"
    if item == "?":
        return f"{column.name} must not be '?', which is only for the day fields: write '*'"
    if _RANDOM_OR_HASHED.fullmatch(item):
        if item[0] == "h":
            return (
                f"{column.name} {item!r} is chosen by a hash of the schedule's id, which is "
                "unknown here: pass it as the seed, or write a number"
            )
        return (
            f"{column.name} {item!r}: random values are not supported, because they would change "
            "each time; write a number, or H, which depends on the schedule's id"
        )
    if _NEAREST_WEEKDAY.fullmatch(item):
        return f"{column.name} {item!r}: the nearest weekday (W) is not supported; write days"
    names = f", or {', '.join(column.names).upper()}" if column.names else ""
    return (
        f"{column.name} {item!r} is invalid: write numbers from {column.low} to {column.high}"
        f"{names}, as in '*', '*/2', '{column.low + 1}', '{column.low + 1}-{column.low + 3}'"
    )


def _time(hour: int, minute: int, second: int) -> int:
    return hour * 3600 + minute * 60 + second


def _month_length(year: int, month: int) -> int:
    return 29 if month == 2 and calendar.isleap(year) else _MONTH_LENGTHS[month]
