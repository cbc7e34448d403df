"""Descriptions of schedules in words, and of the effects of clock changes.

Cron expressions are described by the package cron-descriptor in some thirty languages. All other
words are English.
"""

import importlib
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.errors import ConfigurationError, InvalidInput
from fairqueue.recurrence.cron import LAST, Field, read_fields
from fairqueue.recurrence.zones import Zone

_UNITS_MS = (
    ("day", 86_400_000),
    ("hour", 3_600_000),
    ("minute", 60_000),
    ("second", 1000),
    ("millisecond", 1),
)
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_LOCALE = re.compile(r"[a-z]{2}_[A-Z]{2}", re.ASCII)
_LEADING_ZEROS = re.compile(r"\b0+(?=\d)")

# Dates that are listed; the others are only counted.
_DATES_LISTED = 5


def cron_words(cron_expr: str, locale: str) -> str:
    """Describe an expression in a language such as 'en_US'.

    Raises InvalidCron, InvalidInput for an unknown language, and ConfigurationError if the package
    cron-descriptor is not installed.
    """
    fields = read_fields(cron_expr)
    describe = _Descriptor(locale)
    *times, (_, day_of_month), month, (_, day_of_week) = fields
    head, tail = [_plain(text) for text, _ in times], _plain(month[0])
    sentences = [
        describe.sentence(head, on_month, tail, on_week)
        for on_month, on_week in _day_pairs(fields[3][0], day_of_month, fields[5][0], day_of_week)
    ]
    return "; ".join([sentences[0], *(text[:1].lower() + text[1:] for text in sentences[1:])])


class _Descriptor:
    """cron-descriptor, called so that it avoids what it describes wrongly.

    It describes both day fields as alternatives even if `*/2` makes them conditions, has no "or"
    between a day and a range of weekdays, and cannot describe a list of numbered weekdays. So it is
    called for one day field at a time.
    """

    def __init__(self, locale: str) -> None:
        self._package = _cron_descriptor()
        _check_locale(locale, self._package)
        self._options = self._package.Options(locale_code=locale, use_24hour_time_format=True)

    def sentence(self, times: Sequence[str], on_month: str, month: str, on_week: str) -> str:
        """Describe a rule that fires at these times on days that match both day fields."""
        if "*" in (on_month, on_week):
            return self._ask(*times, on_month, month, on_week)
        # The part that weekdays add to a sentence without days.
        plain, weekly = self._ask(*times, "*", "*", "*"), self._ask(*times, "*", "*", on_week)
        return self._ask(*times, on_month, month, "*") + weekly.removeprefix(plain)

    def _ask(self, *fields: str) -> str:
        descriptor = self._package.ExpressionDescriptor(" ".join(fields), self._options)
        return str(descriptor.get_description())


def _day_pairs(
    month_text: str, day_of_month: Field, week_text: str, day_of_week: Field
) -> list[tuple[str, str]]:
    """Return the two day fields as alternatives, in each of which both must match."""
    on_month, on_week = _days_of_month(month_text, day_of_month), _weekdays(week_text, day_of_week)
    if day_of_month.star or day_of_week.star:
        return [(month, week) for month in on_month for week in on_week]
    if "*" in (*on_month, *on_week):
        return [("*", "*")]
    return [(month, "*") for month in on_month] + [("*", week) for week in on_week]


def _days_of_month(text: str, field: Field) -> list[str]:
    if len(field.values) == 31:
        return ["*"]
    items = _plain(text).split(",")
    if field.last_day and len(items) > 1:
        return [",".join(item for item in items if item != "l"), "L"]
    return [text.upper() if field.last_day else _plain(text)]


def _weekdays(text: str, field: Field) -> list[str]:
    if field.nth:
        return [
            f"{day}L" if number == LAST else f"{day}#{number}" for day, number in sorted(field.nth)
        ]
    if len(field.values) == 7:
        return ["*"]
    if "/" in text:
        # cron-descriptor would describe a step within the week as one over weeks.
        return [",".join(map(str, field.values))]
    return [_plain(text)]


def _plain(text: str) -> str:
    """Remove leading zeros and duplicate items, which cron-descriptor would repeat."""
    return ",".join(dict.fromkeys(_LEADING_ZEROS.sub("", text).replace("?", "*").split(",")))


def _cron_descriptor() -> Any:
    try:
        return importlib.import_module("cron_descriptor")
    except ImportError:
        raise ConfigurationError(
            "cron-descriptor, which describes cron expressions, is not installed: "
            "pip install 'fairqueue[cli]'"
        ) from None


def _check_locale(locale: str, package: ModuleType) -> None:
    """Check a locale. The package would use English for unknown ones, and any text in a path."""
    folder = Path(str(package.__file__)).parent / "locale"
    if not isinstance(locale, str) or not (
        _LOCALE.fullmatch(locale) and (folder / f"{locale}.mo").is_file()
    ):
        known = ", ".join(sorted(file.stem for file in folder.glob("*.mo")))
        raise InvalidInput(f"locale {locale!r:.60} is unknown: known are {known}")


def interval_words(every_ms: int, anchor_ms: int, zone: Zone) -> str:
    """Describe an interval."""
    return f"Every {_duration(every_ms)}, counted from {_moment(anchor_ms, zone)}"


def once_words(at_ms: int, zone: Zone) -> str:
    """Describe a single fire time."""
    return f"Once, at {_moment(at_ms, zone)}"


def limits_words(form: Mapping[str, Any], zone: Zone) -> list[str]:
    """Describe each limit of checked limits."""
    words = []
    if "start" in form:
        words.append(f"from {_moment(form['start'], zone)} on")
    if "end" in form:
        words.append(f"before {_moment(form['end'], zone)}")
    if "windows" in form:
        words.append("only " + ", and ".join(map(_window, form["windows"])))
    if form.get("exclude"):
        dates = sorted(set(form["exclude"]))
        more = len(dates) - _DATES_LISTED
        named = dates[:_DATES_LISTED] + ([f"{more} more dates"] if more > 0 else [])
        words.append(f"not on {_listed(named)}")
    if form.get("calendars"):
        words.append(f"not on the dates of {_listed(form['calendars'])}")
    return words


def gap_words(zone: Zone, moment: int, skipped: int) -> str:
    """Say that a run is at the end of a gap, because its local time is inside it."""
    begin, end = zone.gap(moment) or (skipped, skipped)
    return (
        f"{_clock(skipped)} is skipped, as the clock goes from {_clock(begin)} to {_clock(end)}: "
        "runs at the end of the gap"
    )


def overlap_words(zone: Zone, moment: int, *, only: bool) -> str:
    """Say that the local time of a run occurs twice, and at which of the two it runs."""
    local = _clock(moment + zone.offsets[zone.period(moment)])
    which = "second" if zone.showing(moment) == 2 else "first"
    once = ", and only then" if only else ""
    return f"{local} occurs twice, as the clock goes back: runs the {which} time{once}"


def offset_words(offset: int) -> str:
    """Format an offset from UTC, given in seconds, as '+01:00'."""
    sign, rest = "-" if offset < 0 else "+", abs(offset)
    seconds = f":{rest % 60:02}" if rest % 60 else ""
    return f"{sign}{rest // 3600:02}:{rest // 60 % 60:02}{seconds}"


def _clock(local: int) -> str:
    shown = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=local)
    return f"{shown:%H:%M:%S}" if shown.second else f"{shown:%H:%M}"


def _moment(moment_ms: int, zone: Zone) -> str:
    return from_ms(moment_ms).astimezone(zone.tzinfo).isoformat(" ")


def _duration(duration_ms: int) -> str:
    parts = []
    for unit, size in _UNITS_MS:
        number, duration_ms = divmod(duration_ms, size)
        if number:
            parts.append(f"{number} {unit}{'s' if number > 1 else ''}")
    # "Every hour" instead of "every 1 hour".
    return parts[0].removeprefix("1 ") if len(parts) == 1 else " ".join(parts)


def _window(window: Mapping[str, Any]) -> str:
    hours = f"{window.get('from', '00:00')} to {window.get('to', '24:00')}"
    days = sorted(set(window.get("days", range(1, 8))))
    return hours if len(days) == 7 else f"{_listed(_DAYS[day - 1] for day in days)} {hours}"


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
