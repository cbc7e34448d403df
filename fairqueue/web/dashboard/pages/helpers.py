"""Parse what people type on pages: times and durations."""

import re
from datetime import UTC, datetime

from starlette.requests import Request

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidInput
from fairqueue.recurrence.zones import find_zone
from fairqueue.web.auth import inspector_of

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d|w)", re.ASCII)
MAX_DURATION = 60  # characters
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - of wall clocks


def now_of(request: Request) -> datetime:
    """The time of the queue."""
    return from_ms(inspector_of(request).queue.link.now_ms())


def read_local(text: str | None, timezone: str, what: str) -> datetime | None:
    """Parse the value of an input of type datetime-local, in a time zone.

    A time that occurs twice is the first; a time that is skipped is the end of the gap. Raises
    InvalidInput, UnknownTimezone.
    """
    if not text:
        return None
    try:
        wall = datetime.fromisoformat(text)
        if wall.tzinfo is not None:
            return wall.astimezone(UTC)
        seconds = find_zone(timezone).first_reach(int((wall - _EPOCH).total_seconds()))
        return from_ms(seconds * 1000)
    except (ValueError, OverflowError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(
            f"{what} must be a time such as 2026-03-05T09:00, not {text!r:.60}"
        ) from None


def read_seconds(text: str, what: str) -> float:
    """Parse a duration such as `90`, `1.5h` or `1h 30m`. Raises InvalidInput."""
    # A longer text would take long to search.
    compact = text.replace(" ", "") if len(text) <= MAX_DURATION else ""
    try:
        return float(compact)
    except ValueError:
        parts = _PART.findall(compact)
    if not parts or "".join(number + unit for number, unit in parts) != compact:
        raise InvalidInput(
            f"{what} must be a duration such as 90 (seconds), 15m or 1h30m, not {text!r:.60}"
        )
    return sum(float(number) * _UNITS[unit] for number, unit in parts)
