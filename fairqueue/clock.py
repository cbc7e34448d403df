"""Where the time comes from: the Redis server, unless somebody passes a clock in.

Times inside FairQueue are whole milliseconds since 1970, UTC. Scripts read the clock of the server
(`None` here), so that the clocks of clients are never compared with each other. A test passes a
`ManualClock` and moves it.
"""

import threading
from datetime import UTC, datetime, timedelta
from typing import Protocol

from fairqueue.errors import InvalidInput, shown

# 9999-12-31: later than this a datetime cannot say.
LATEST_MS = 253_402_300_799_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """Anything that says what time it is."""

    def now_ms(self) -> int:
        """Milliseconds since 1970, UTC."""


class ManualClock:
    """A clock that stands still until it is told to move. Safe to share between threads."""

    def __init__(self, start: datetime | float = 1_700_000_000.0) -> None:
        self._now_ms = to_ms(start, "start")
        self._lock = threading.Lock()

    def now_ms(self) -> int:
        """Milliseconds since 1970, UTC."""
        return self._now_ms

    def now(self) -> datetime:
        """The same as an aware datetime in UTC."""
        return from_ms(self._now_ms)

    def advance(self, seconds: float | timedelta) -> None:
        """Move by so many seconds; negative moves back."""
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        with self._lock:
            self._now_ms += round(seconds * 1000)

    def set(self, moment: datetime | float) -> None:
        """Jump to a moment."""
        with self._lock:
            self._now_ms = to_ms(moment, "moment")


def to_ms(moment: object, what: str, error: type[InvalidInput] = InvalidInput) -> int:
    """An aware datetime or seconds since 1970, as milliseconds.

    Raises `error`, naming `what`, for a naive datetime and for what is no time at all.
    """
    if isinstance(moment, datetime):
        if moment.tzinfo is None or moment.utcoffset() is None:
            raise error(
                f"{what} {moment.isoformat()!r} has no time zone: pass an aware datetime, such as "
                "datetime.now(UTC), or seconds since 1970"
            )
        delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
        return (delta.days * 86_400 + delta.seconds) * 1000 + delta.microseconds // 1000
    if isinstance(moment, bool) or not isinstance(moment, int | float):
        raise error(
            f"{what} {shown(moment)} is no time: pass an aware datetime or seconds since 1970"
        )
    # False for NaN too; a whole number of any length can be compared, and not made a float.
    if not 0 <= moment * 1000 <= LATEST_MS:
        raise error(
            f"{what} {shown(moment)} is no time between 1970 and 9999, in seconds since 1970"
        )
    return round(moment * 1000)


def read_ms(moment: object, what: str, error: type[InvalidInput] = InvalidInput) -> int:
    """As `to_ms`; takes a text in ISO 8601 with an offset, too, such as 2026-03-05T09:00:00Z."""
    if not isinstance(moment, str):
        return to_ms(moment, what, error)
    try:
        read = datetime.fromisoformat(moment)
    except ValueError:
        read = None
    if read is None or read.utcoffset() is None:
        raise error(
            f"{what} {shown(moment)} is not a moment: write it as 2026-03-05T09:00:00+01:00, with "
            "the offset from UTC"
        )
    return to_ms(read, what, error)


def from_ms(moment_ms: int) -> datetime:
    """Milliseconds since 1970 as an aware datetime in UTC, exact to the millisecond."""
    return _EPOCH + timedelta(milliseconds=moment_ms)
