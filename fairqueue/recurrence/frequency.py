"""Frequencies without cron syntax; each becomes one cron expression.

There are names (`EVERY_DAY`), dictionaries of fields (`from_fields`) and a fluent builder
(`every().five_minutes.hours(range(9, 18)).weekdays`). `as_cron` accepts any of them.

Cron fires if the day of the month *or* the day of the week matches. Here all fields must match, so
two restricted day fields are refused if cron cannot express "both".
"""

import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from fairqueue.errors import InvalidCron, short_repr
from fairqueue.recurrence.cron import DAY, MAX_LENGTH, parse_cron, resolve_hashed
from fairqueue.validation import check_count

EVERY_MINUTE = "* * * * *"
EVERY_HOUR = "1 * * * *"  # at minute 1
EVERY_DAY = "10 2 * * *"  # at 02:10
EVERY_WEEK = "20 6 * * 1"  # on Mondays at 06:20
EVERY_MONTH = "30 1 1 * *"  # on the first at 01:30

SYMBOLIC: Mapping[str, str] = {
    "EVERY_MINUTE": EVERY_MINUTE,
    "EVERY_HOUR": EVERY_HOUR,
    "EVERY_DAY": EVERY_DAY,
    "EVERY_WEEK": EVERY_WEEK,
    "EVERY_MONTH": EVERY_MONTH,
}

# Places in an expression of six fields.
_SECONDS, _MINUTES, _HOURS, _DAYS, _MONTHS, _WEEKDAYS = range(6)
_NAMES = ("seconds", "minutes", "hours", "days", "months", "days of the week")
_BOUNDS = ((0, 59), (0, 59), (0, 23), (1, 31), (1, 12), (0, 7))

_FIELDS = {
    "seconds": _SECONDS,
    "minutes": _MINUTES,
    "hours": _HOURS,
    "mday": _DAYS,
    "mon": _MONTHS,
    "wday": _WEEKDAYS,
}
FIELD_NAMES = frozenset((*_FIELDS, "day", "year"))
# Fields that may only be '*', with what to use instead.
_IDLE_FIELDS = {
    "day": "use mday for the day of the month, or wday for the day of the week",
    "year": "cron has no years; give the schedule a start and an end",
}

# The days of a month that are its first, second ... such weekday.
_WEEKS = {n: frozenset(range(7 * n - 6, min(7 * n, 31) + 1)) for n in range(1, 6)}
_ALL_DAYS = frozenset(range(1, 32))
_ALL_WEEKDAYS = frozenset(range(7))
_FIRST_SUNDAY = 3  # 1970-01-04, in days since 1970-01-01

_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?", re.ASCII)
_STEP = re.compile(r"\*/(\d+)", re.ASCII)

_COLLECTIONS = (list, tuple, set, frozenset, range)
Values = int | Sequence[int] | AbstractSet[int]
FieldValue = int | str | Sequence[int | str] | AbstractSet[int]


# --- names ----------------------------------------------------------------------------------------


def symbolic(name: str) -> str:
    """Return the cron expression of a name such as `EVERY_DAY`. Raises InvalidCron for others."""
    if isinstance(name, str) and name in SYMBOLIC:
        return SYMBOLIC[name]
    raise InvalidCron(f"{short_repr(name)} is not one of {', '.join(SYMBOLIC)}")


# --- dictionaries of fields -----------------------------------------------------------------------


def from_fields(fields: Mapping[str, FieldValue]) -> str:
    """Return the cron expression that fires when all fields match.

    Fields: `minutes`, `hours`, `mday` (day of the month), `wday` (day of the week, 0 is Sunday),
    `mon` and `seconds`. A value is a number, a list of numbers, or a field of a cron expression:
    '*', '*/15', '9-17', '1,3,5', 'mon-fri'. '*/n' means the multiples of n, for days and months
    too. A field that is left out always matches; `seconds` is 0 by default.

    Raises InvalidCron with the field and its value.
    """
    if not isinstance(fields, Mapping) or not fields:
        raise InvalidCron(
            f"fields must be a dict such as {{'minutes': 0, 'hours': 9}}, not {short_repr(fields)}"
        )
    texts = ["0", "*", "*", "*", "*", "*"]
    for name, value in fields.items():
        if name in _IDLE_FIELDS:
            if value != "*":
                raise InvalidCron(
                    f"{name} must be '*', not {short_repr(value)}: {_IDLE_FIELDS[name]}"
                )
        elif name in _FIELDS:
            texts[_FIELDS[name]] = _field(name, value)
        else:
            known = ", ".join([*_FIELDS, *_IDLE_FIELDS])
            raise InvalidCron(f"unknown field {short_repr(name)}: known are {known}")
    return _join(texts)


def _field(name: str, value: object) -> str:
    if isinstance(value, str):
        return _field_text(name, value)
    place = _FIELDS[name]
    if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
        items = (i if isinstance(i, str) else str(_check_number(name, place, i)) for i in value)
        return _field_text(name, ",".join(items))
    if isinstance(value, (int, *_COLLECTIONS)):
        return _write(place, _numbers(name, place, value))
    raise InvalidCron(
        f"{name} must be a number, a list of numbers, or a string such as '*', '*/2', '1-5' or "
        f"'1,3,5', not {short_repr(value)}"
    )


def _field_text(name: str, value: str) -> str:
    """Return a field in cron syntax, checked."""
    if len(value) > MAX_LENGTH:
        raise InvalidCron(
            f"{name} must have at most {MAX_LENGTH} characters, not {len(value)}: "
            f"{short_repr(value)}"
        )
    text = re.sub(r"\s*([,-])\s*", r"\1", value.strip()).lower()
    if len(text.split()) != 1:
        raise InvalidCron(f"{name} must be one value such as '*', '1-5' or '1,3', not {value!r}")
    alone = ["*"] * 6
    alone[_FIELDS[name]] = text
    expression = " ".join(alone)
    try:
        parse_cron(expression)
    except InvalidCron as error:
        reason = str(error).removeprefix(f"{expression!r}: ")
        raise InvalidCron(f"{name} {value!r} is invalid: {reason}") from None
    return ",".join(_multiples(_FIELDS[name], item) for item in text.split(","))


def _multiples(place: int, item: str) -> str:
    """Return an item in which '*/n' means the multiples of n: cron counts days from 1."""
    low, high = _BOUNDS[place]
    match = _STEP.fullmatch(item)
    if low == 0 or match is None or (step := int(match[1])) == 1:
        return item
    return f"{step}-{high}/{step}" if 2 * step <= high else str(step)


# --- the builder ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Base:
    """The frequency of a builder: six fields, of which some may be narrowed."""

    name: str
    fields: tuple[str, ...]

    def fixes(self, place: int) -> bool:
        """Return whether the field defines this frequency, so that it cannot be replaced."""
        return "/" in self.fields[place] or self.fields[place] == "L"

    @property
    def is_daily_at_most(self) -> bool:
        return self.fields[_HOURS] == "0"


class _Frequent:
    """An attribute that sets the frequency."""

    def __init__(self, cron: str) -> None:
        self._fields = tuple(cron.split())

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: "Frequency | None", owner: type) -> "Frequency":
        frequency = instance or Frequency()
        return frequency._based(_Base(name=self._name, fields=self._fields))


class _On:
    """An attribute that adds days of the week."""

    def __init__(self, *days: int) -> None:
        self._days = frozenset(days)

    def __get__(self, instance: "Frequency | None", owner: type) -> "Frequency":
        frequency = instance or Frequency()
        named = frequency._named[_WEEKDAYS] or frozenset()
        return frequency._with(_WEEKDAYS, named | self._days)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Frequency:
    """A frequency in words. Made by `every`; immutable: each word returns a new one.

    Words without arguments are attributes, and may be called too: `every().five_minutes` is
    `every().five_minutes()`. `cron` and `str()` return the expression. All words raise InvalidCron
    for values out of range and for contradictions.
    """

    _base: _Base | None = None
    _named: tuple[frozenset[int] | None, ...] = (None,) * 6
    # `at` was called, so the frequency must be at most daily.
    _timed: bool = False

    second = _Frequent("* * * * * *")
    two_seconds = _Frequent("*/2 * * * * *")
    five_seconds = _Frequent("*/5 * * * * *")
    ten_seconds = _Frequent("*/10 * * * * *")
    fifteen_seconds = _Frequent("*/15 * * * * *")
    twenty_seconds = _Frequent("*/20 * * * * *")
    thirty_seconds = _Frequent("*/30 * * * * *")

    minute = _Frequent("0 * * * * *")
    two_minutes = _Frequent("0 */2 * * * *")
    three_minutes = _Frequent("0 */3 * * * *")
    four_minutes = _Frequent("0 */4 * * * *")
    five_minutes = _Frequent("0 */5 * * * *")
    ten_minutes = _Frequent("0 */10 * * * *")
    fifteen_minutes = _Frequent("0 */15 * * * *")
    twenty_minutes = _Frequent("0 */20 * * * *")
    thirty_minutes = _Frequent("0 */30 * * * *")

    hour = _Frequent("0 0 * * * *")
    hourly = _Frequent("0 0 * * * *")
    odd_hour = _Frequent("0 0 1-23/2 * * *")
    two_hours = _Frequent("0 0 */2 * * *")
    three_hours = _Frequent("0 0 */3 * * *")
    four_hours = _Frequent("0 0 */4 * * *")
    six_hours = _Frequent("0 0 */6 * * *")
    eight_hours = _Frequent("0 0 */8 * * *")
    twelve_hours = _Frequent("0 0 */12 * * *")

    day = _Frequent("0 0 0 * * *")
    daily = _Frequent("0 0 0 * * *")
    week = _Frequent("0 0 0 * * 0")
    weekly = _Frequent("0 0 0 * * 0")
    month = _Frequent("0 0 0 1 * *")
    monthly = _Frequent("0 0 0 1 * *")
    last_day_of_month = _Frequent("0 0 0 L * *")
    quarter = _Frequent("0 0 0 1 */3 *")
    quarterly = _Frequent("0 0 0 1 */3 *")
    year = _Frequent("0 0 0 1 1 *")
    yearly = _Frequent("0 0 0 1 1 *")

    weekdays = _On(1, 2, 3, 4, 5)
    weekends = _On(0, 6)
    mondays = _On(1)
    tuesdays = _On(2)
    wednesdays = _On(3)
    thursdays = _On(4)
    fridays = _On(5)
    saturdays = _On(6)
    sundays = _On(0)

    def __post_init__(self) -> None:
        base = self._base
        if base is None:
            return
        if self._timed and not base.is_daily_at_most:
            raise InvalidCron(
                f"{base.name} and at() contradict each other: at() is for day, week, month, "
                "quarter and year; hours() and minutes() narrow the others"
            )
        for place, numbers in enumerate(self._named):
            if numbers is not None and base.fixes(place):
                raise InvalidCron(
                    f"{base.name} already sets the {_NAMES[place]}: leave out "
                    f"{_write(place, numbers)}, or use only those {_NAMES[place]}"
                )

    def __call__(self) -> "Frequency":
        """Return the same frequency, so that words may be written as calls."""
        return self

    def __str__(self) -> str:
        return self.cron

    def __repr__(self) -> str:
        parts = [] if self._base is None else [self._base.name]
        parts += [
            f"{_NAMES[place]} {_write(place, numbers)}"
            for place, numbers in enumerate(self._named)
            if numbers is not None
        ]
        return f"<Frequency {', '.join(parts) or 'not set'}>"

    @property
    def cron(self) -> str:
        """The cron expression. Raises InvalidCron if nothing is set, or it never fires."""
        fields = _implied(self._named) if self._base is None else self._base.fields
        return _join(
            [
                text if numbers is None else _write(place, numbers)
                for place, (text, numbers) in enumerate(zip(fields, self._named, strict=True))
            ]
        )

    # Constraints: each accepts numbers, or lists, sets and ranges of numbers.

    def seconds(self, *values: Values) -> "Frequency":
        """Only at these seconds of a minute."""
        return self._narrowed(_SECONDS, *values)

    def minutes(self, *values: Values) -> "Frequency":
        """Only at these minutes of an hour."""
        return self._narrowed(_MINUTES, *values)

    def hours(self, *values: Values) -> "Frequency":
        """Only at these hours of a day: `hours(9, 17)` is two, `hours(range(9, 18))` is nine."""
        return self._narrowed(_HOURS, *values)

    def days(self, *values: Values) -> "Frequency":
        """Only on these days of a month."""
        return self._narrowed(_DAYS, *values)

    def months(self, *values: Values) -> "Frequency":
        """Only in these months."""
        return self._narrowed(_MONTHS, *values)

    def at(self, *times: str) -> "Frequency":
        """At times of the day such as '09:30' or '09:30:15'.

        Several times must be all combinations of their hours and minutes, because cron combines
        each hour with each minute.
        """
        read = {_read_time(time) for time in times}
        if not read:
            raise InvalidCron("at() needs a time such as '09:30'")
        hours, minutes, seconds = (frozenset(part) for part in zip(*read, strict=True))
        if len(hours) * len(minutes) * len(seconds) != len(read):
            raise InvalidCron(
                f"at({', '.join(map(repr, times))}) is more than one cron expression, because cron "
                "combines each hour with each minute: make a schedule for each time"
            )
        frequency = self._narrowed(_HOURS, hours)._narrowed(_MINUTES, minutes)
        if seconds != {0}:
            frequency = frequency._narrowed(_SECONDS, seconds)
        return replace(frequency, _timed=True)

    # Frequencies that take arguments.

    def hourly_at(self, *minutes: Values) -> "Frequency":
        """Each hour at these minutes."""
        return self.hourly.minutes(*minutes)

    def daily_at(self, *times: str) -> "Frequency":
        """Each day at these times."""
        return self.daily.at(*times)

    def twice_daily(self, first: int = 1, second: int = 13, minute: int = 0) -> "Frequency":
        """Each day at two hours, at the same minute of each."""
        return self.daily.hours(first, second).minutes(minute)

    def weekly_on(self, days: Values, time: str = "00:00") -> "Frequency":
        """Each week on these days, 0 is Sunday."""
        return self.weekly._narrowed(_WEEKDAYS, days).at(time)

    def monthly_on(self, days: Values = 1, time: str = "00:00") -> "Frequency":
        """Each month on these days; months without such a day are skipped."""
        return self.monthly.days(days).at(time)

    def twice_monthly(self, first: int = 1, second: int = 16, time: str = "00:00") -> "Frequency":
        """Each month on two days."""
        return self.monthly.days(first, second).at(time)

    def quarterly_on(self, day: int = 1, time: str = "00:00") -> "Frequency":
        """In January, April, July and October on this day."""
        return self.quarterly.days(day).at(time)

    def yearly_on(self, month: int = 1, day: int = 1, time: str = "00:00") -> "Frequency":
        """Each year in this month on this day."""
        return self.yearly.months(month).days(day).at(time)

    def _based(self, base: _Base) -> "Frequency":
        if self._base is not None:
            raise InvalidCron(
                f"{self._base.name} and {base.name} contradict each other: choose one frequency, "
                "and narrow it with hours(), weekdays and the like"
            )
        return replace(self, _base=base)

    def _narrowed(self, place: int, *values: object) -> "Frequency":
        named = self._named[place]
        if named is not None:
            raise InvalidCron(
                f"{_NAMES[place]} are set twice, first to {_write(place, named)}: "
                "pass all of them at once"
            )
        return self._with(place, _numbers(_NAMES[place], place, *values))

    def _with(self, place: int, numbers: frozenset[int]) -> "Frequency":
        return replace(self, _named=(*self._named[:place], numbers, *self._named[place + 1 :]))


CronLike = str | Frequency | Mapping[str, FieldValue]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """The steps of one unit that cron can express."""

    even: tuple[int, ...]
    cron: str
    uneven: str


def _divisors(size: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, size) if size % n == 0)


_INTERVAL = "use an interval, every=timedelta({unit}={count})"
_STEPS = {
    "seconds": _Step(even=_divisors(60), cron="{} * * * * *", uneven=_INTERVAL),
    "minutes": _Step(even=_divisors(60), cron="0 {} * * * *", uneven=_INTERVAL),
    "hours": _Step(even=_divisors(24), cron="0 0 {} * * *", uneven=_INTERVAL),
    "days": _Step(even=(1,), cron="0 0 0 {} * *", uneven=_INTERVAL),
    "weeks": _Step(even=(1,), cron="0 0 0 * * 0", uneven=_INTERVAL),
    "months": _Step(even=_divisors(12), cron="0 0 0 1 {} *", uneven="name them with months(...)"),
    "years": _Step(even=(1,), cron="0 0 0 1 1 *", uneven="make one-time schedules"),
}


def every(
    *,
    seconds: int | None = None,
    minutes: int | None = None,
    hours: int | None = None,
    days: int | None = None,
    weeks: int | None = None,
    months: int | None = None,
    years: int | None = None,
) -> Frequency:
    """Begin a frequency: `every().day.at("09:30")`, or `every(minutes=5).weekdays`.

    At most one argument. Raises InvalidCron for a step that cron cannot express, such as 7 minutes;
    the message lists those that it can.
    """
    given = {
        "seconds": seconds,
        "minutes": minutes,
        "hours": hours,
        "days": days,
        "weeks": weeks,
        "months": months,
        "years": years,
    }
    counts = {unit: count for unit, count in given.items() if count is not None}
    if len(counts) > 1:
        raise InvalidCron(
            f"every() must have one unit, not {' and '.join(counts)}: use an interval, "
            "every=timedelta(...)"
        )
    for unit, count in counts.items():
        return Frequency(_base=_stepped(unit, count))
    return Frequency()


def _stepped(unit: str, count: int) -> _Base:
    check_count(count, f"every {unit}", InvalidCron, least=1)
    step = _STEPS[unit]
    if count not in step.even:
        can = ", ".join(map(str, step.even))
        instead = step.uneven.format(unit=unit, count=count)
        raise InvalidCron(
            f"every {count} {unit} cannot be written in cron, which restarts with each larger "
            f"unit: {instead}; cron allows {can}"
        )
    fields = step.cron.format("*" if count == 1 else f"*/{count}").split()
    return _Base(name=f"every({unit}={count})", fields=tuple(fields))


def _implied(named: Sequence[frozenset[int] | None]) -> tuple[str, ...]:
    """Return the frequency if none was chosen: units finer than those set are at their start."""
    for place, fields in (
        (_SECONDS, "* * * * * *"),
        (_MINUTES, "0 * * * * *"),
        (_HOURS, "0 0 * * * *"),
        (_WEEKDAYS, "0 0 0 * * *"),
        (_DAYS, "0 0 0 * * *"),
        (_MONTHS, "0 0 0 1 * *"),
    ):
        if named[place] is not None:
            return tuple(fields.split())
    raise InvalidCron(
        "every() needs a frequency: write every().day, every(minutes=5) or every().hours(9, 17)"
    )


def _read_time(time: object) -> tuple[int, int, int]:
    match = _TIME.fullmatch(time) if isinstance(time, str) else None
    if match is not None:
        hour, minute, second = (int(part or 0) for part in match.groups())
        if hour <= 23 and minute <= 59 and second <= 59:
            return hour, minute, second
    raise InvalidCron(
        f"a time of day must be '00:00' to '23:59', or with seconds, not {short_repr(time)}"
    )


# --- all of them ----------------------------------------------------------------------------------


def as_cron(value: object) -> str:
    """Return the cron expression of an expression, a name, a `Frequency` or a dict of fields.

    An expression is checked and returned unchanged, with each `H`. Raises InvalidCron for any other
    value, or if cron cannot express it.
    """
    if isinstance(value, Frequency):
        return value.cron
    if isinstance(value, Mapping):
        return from_fields(value)
    if not isinstance(value, str):
        raise InvalidCron(
            "a cron expression must be a string such as '0 9 * * 1-5', every().day.at('09:00'), or "
            f"a dict such as {{'minutes': 0, 'hours': 9}}, not {short_repr(value)}"
        )
    if value.upper().startswith("EVERY_"):
        return symbolic(value)
    resolve_hashed(value, "")
    return value


def _numbers(what: str, place: int, *values: object) -> frozenset[int]:
    """Return the numbers in values that are numbers or collections of numbers."""
    found: set[int] = set()
    for value in values:
        # One by one, so that the first bad number ends a range of any length.
        for item in value if isinstance(value, _COLLECTIONS) else (value,):
            number = _check_number(what, place, item)
            if number in found:
                raise InvalidCron(f"{what} {item} is given twice")
            found.add(number)
    if not found:
        low, high = _BOUNDS[place]
        raise InvalidCron(f"{what} must have at least one value from {low} to {high}")
    return frozenset(found)


def _check_number(what: str, place: int, value: object) -> int:
    low, high = _BOUNDS[place]
    number = check_count(value, what, InvalidCron, least=low, most=high)
    return number % 7 if place == _WEEKDAYS else int(number)


def _write(place: int, numbers: AbstractSet[int]) -> str:
    """Return the field of these numbers: '*' for all, and ranges for three or more in a row.

    Never '*/n', which means something else where the clock changes.
    """
    low, high = _BOUNDS[place]
    if len(numbers) == (7 if place == _WEEKDAYS else high - low + 1):
        return "*"
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs
    )


def _join(texts: Sequence[str]) -> str:
    """Return one checked expression of six fields that must all match; five if the second is 0."""
    second, minute, hour, day, month, weekday = texts
    day, weekday = _both_days(day, weekday)
    fields = [minute, hour, day, month, weekday]
    expression = " ".join(fields if second == "0" else [second, *fields])
    parse_cron(expression)
    return expression


def _both_days(day: str, weekday: str) -> tuple[str, str]:
    """Return the day fields such that cron requires both, not either. Raises InvalidCron."""
    if day[0] in "*?" or weekday[0] in "*?":
        return day, weekday
    if not ("l" in day.lower() or "#" in weekday or "l" in weekday):
        # Expand both with cron, in a January and in a week of 1970.
        days = {n + 1 for n in _days_of(f"0 0 {day} 1 *", 0, 31)}
        weekdays = {n - _FIRST_SUNDAY for n in _days_of(f"0 0 * * {weekday}", _FIRST_SUNDAY, 7)}
        if days == _ALL_DAYS:
            return "*", weekday
        if weekdays == _ALL_WEEKDAYS:
            return day, "*"
        weeks = [n for n, week in _WEEKS.items() if week <= days]
        if days == frozenset().union(*(_WEEKS[n] for n in weeks)):
            return "*", ",".join(f"{d}#{n}" for n in weeks for d in sorted(weekdays))
    raise InvalidCron(
        f"day of month {day!r} and day of week {weekday!r} cannot both be required, because cron "
        "fires on either: use one of them, or whole weeks (days 1-7 and Mondays are the first "
        "Monday); for either, write the cron expression"
    )


def _days_of(expression: str, first: int, count: int) -> list[int]:
    """Return the days in [first, first + count) of an expression that fires at midnight."""
    cron = parse_cron(expression)
    days = []
    moment = cron.next_after(first * DAY - 1)
    while moment is not None and moment < (first + count) * DAY:
        days.append(moment // DAY)
        moment = cron.next_after(moment)
    return days
