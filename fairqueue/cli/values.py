"""Parse command-line values: times, durations, priorities, payloads, NAME=VALUE pairs."""

import json
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fairqueue.validation import Priority

if TYPE_CHECKING:
    Kind = click.ParamType[Any]
else:
    Kind = click.ParamType  # not generic in all versions of click

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w)", re.ASCII)
_NUMBER = re.compile(r"\d+(?:\.\d+)?", re.ASCII)
_MAX_SECONDS = 3_155_760_000.0  # a hundred years, so that date arithmetic does not overflow


def read_duration(text: str) -> float | None:
    """The seconds of a text such as `90`, `1.5h` or `1h30m`; None if it is not a duration."""
    if _NUMBER.fullmatch(text):
        return min(float(text), _MAX_SECONDS)
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        return None
    return min(sum(float(number) * _UNITS[unit] for number, unit in parts), _MAX_SECONDS)


def lacks_unit(text: str) -> bool:
    """Whether a text is a number other than 0 without a unit."""
    return bool(_NUMBER.fullmatch(text)) and float(text) != 0


class Duration(Kind):
    """A duration in seconds; with `unit`, a number without a unit is refused."""

    name = "duration"

    def __init__(self, *, unit: bool = False) -> None:
        self._unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Seconds. Fails naming the value."""
        seconds = read_duration(value) if isinstance(value, str) else value
        if seconds is None:
            self.fail(f"{value!r} is not a duration such as 90 (seconds), 2h or 1h30m", param, ctx)
        if self._unit and isinstance(value, str) and lacks_unit(value):
            example = f"{value}d, {value}h or {value}s"
            self.fail(f"{value!r} needs a unit, for example {example}", param, ctx)
        return seconds


class Time(Kind):
    """A time: ISO 8601 (UTC if it has no offset), `now`, or relative to now.

    Without a sign, `2h` is two hours ago if `back`, else in two hours.
    """

    name = "time"

    def __init__(self, *, back: bool) -> None:
        self._back = back

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """An aware datetime. Fails naming the value."""
        if isinstance(value, datetime):
            return value
        found = self._relative(value) or _iso(value)
        if found is None:
            self.fail(
                f"{value!r} is not a time such as 2026-03-05T09:00:00+01:00, 2026-03-05, now, 2h, "
                "-1d or +30m",
                param,
                ctx,
            )
        return found

    def _relative(self, text: str) -> datetime | None:
        now = datetime.now(UTC)
        if text == "now":
            return now
        sign = text[:1]
        # A number without a unit could be a year: it is not a distance.
        seconds = None if _NUMBER.fullmatch(text) else read_duration(text.lstrip("+-"))
        if seconds is None or text[1:2] in ("+", "-"):
            return None
        goes_back = sign == "-" or (sign != "+" and self._back)
        try:
            return now + timedelta(seconds=-seconds if goes_back else seconds)
        except OverflowError:
            return None


def _iso(text: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return None
    return found if found.tzinfo is not None else found.replace(tzinfo=UTC)


class Deadline(Kind):
    """A duration from the push, or a time."""

    name = "duration|time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Seconds, or an aware datetime. Fails naming the value."""
        seconds = read_duration(value) if isinstance(value, str) else None
        return FUTURE.convert(value, param, ctx) if seconds is None else seconds


class Period(Kind):
    """One of some words, or a duration."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words
        self.name = "|".join((*words, "duration"))

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word, or seconds. Fails naming the value."""
        if not isinstance(value, str) or value in self._words:
            return value
        seconds = read_duration(value)
        if seconds is None:
            words = ", ".join(self._words)
            self.fail(f"{value!r} must be {words} or a duration such as 2h", param, ctx)
        return seconds


class PriorityName(Kind):
    """A priority by number or name."""

    name = "priority"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """A Priority. Fails naming the value."""
        if isinstance(value, Priority):
            return value
        by_name = {each.name: each for each in Priority} | {str(int(p)): p for p in Priority}
        found = by_name.get(str(value).upper().replace("-", "_"))
        if found is None:
            names = ", ".join(f"{int(each)} {each.name}" for each in Priority)
            self.fail(f"{value!r} is not a priority: use one of {names}", param, ctx)
        return found


DURATION, WITH_UNIT = Duration(), Duration(unit=True)
PAST, FUTURE = Time(back=True), Time(back=False)
PRIORITY, DEADLINE = PriorityName(), Deadline()


def read_object(given: Sequence[str], what: str) -> dict[str, Any] | None:
    """A JSON object from JSON texts, `@file` names and `key=value` pairs, merged in order.

    None if nothing is given. Raises UsageError naming the text that cannot be read.
    """
    if not given:
        return None
    found: dict[str, Any] = {}
    for text in given:
        found |= _read_part(text, what)
    return found


def _read_part(text: str, what: str) -> dict[str, Any]:
    if text.startswith("@"):
        return _parse_object(_read_file(text[1:], what), what)
    if text.lstrip().startswith("{"):
        return _parse_object(text, what)
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"{what} {text!r} must be a JSON object, @FILE or KEY=VALUE")
    return {name: json_or_text(value)}


def _read_file(path: str, what: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read()
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{what} @{path} cannot be read: {error}") from None


def _parse_object(text: str, what: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise click.UsageError(f"{what} {text!r:.60} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{what} {text!r:.60} must be a JSON object")
    return found


def json_or_text(text: str) -> Any:
    """The value of a JSON text, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_pairs(given: Sequence[str], what: str) -> dict[str, str]:
    """Parse NAME=VALUE pairs. Raises UsageError naming a text that is not a pair."""
    found = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise click.UsageError(f"{what} {text!r} must be NAME=VALUE")
        found[name] = value
    return found
