"""Clocks, and conversions between datetimes and milliseconds.

Times inside FairQueue are whole milliseconds since 1970, UTC. Without a clock, scripts read the
clock of the Redis server, so the clocks of clients are never compared. Tests pass a `ManualClock`.
"""

import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Protocol
from weakref import WeakSet

from fairqueue.errors import InvalidInput, shown

# 9999-12-31, the last day that a datetime can represent.
LATEST_MS = 253_402_300_799_000
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Clock(Protocol):
    """A source of the current time."""

    def now_ms(self) -> int:
        """Return milliseconds since 1970, UTC."""


class ManualClock:
    """A clock that moves only by `advance` and `set`. Safe to share between threads."""

    def __init__(self, start: datetime | float = 1_700_000_000.0) -> None:
        self._now_ms = to_ms(start, "start")
        self._lock = threading.Lock()
        _manual_clocks.add(self)

    def now_ms(self) -> int:
        """Return milliseconds since 1970, UTC."""
        return self._now_ms

    def now(self) -> datetime:
        """Return the current time as an aware datetime in UTC."""
        return from_ms(self._now_ms)

    def advance(self, seconds: float | timedelta) -> None:
        """Move by this many seconds; a negative number moves back."""
        if isinstance(seconds, timedelta):
            seconds = seconds.total_seconds()
        with self._lock:
            self._now_ms += round(seconds * 1000)

    def set(self, moment: datetime | float) -> None:
        """Set the time."""
        with self._lock:
            self._now_ms = to_ms(moment, "moment")


_manual_clocks: WeakSet[ManualClock] = WeakSet()


def is_past(moment_ms: int) -> bool:
    """Return whether a time is past on the clock of this machine, and on every manual clock.

    For checks of input only: the clock of the queue decides when something happens.
    """
    now_ms = time.time_ns() // 1_000_000
    return all(moment_ms <= now for now in (now_ms, *(c.now_ms() for c in list(_manual_clocks))))


def to_ms(moment: object, what: str, error: type[InvalidInput] = InvalidInput) -> int:
    """Convert an aware datetime or seconds since 1970 to milliseconds.

    Raises `error`, naming `what`, for a naive datetime and for any other value.
    """
    if isinstance(moment, datetime):
        if moment.tzinfo is None or moment.utcoffset() is None:
            raise error(
                f"{what} must be a datetime with a time zone, such as datetime.now(UTC), or "
                f"seconds since 1970, not {moment.isoformat()!r}"
            )
        delta = moment - _EPOCH
        return (delta.days * 86_400 + delta.seconds) * 1000 + delta.microseconds // 1000
    if isinstance(moment, bool) or not isinstance(moment, int | float):
        raise error(
            f"{what} must be a datetime with a time zone or seconds since 1970, not {shown(moment)}"
        )
    # False for NaN too. Compared first: a huge int can be compared, but not made a float.
    if not 0 <= moment * 1000 <= LATEST_MS:
        raise error(
            f"{what} must be a time between 1970 and 9999 in seconds since 1970, "
            f"not {shown(moment)}"
        )
    return round(moment * 1000)


def read_ms(moment: object, what: str, error: type[InvalidInput] = InvalidInput) -> int:
    """Convert as `to_ms` does; also accept ISO 8601 with an offset: "2026-03-05T09:00:00Z"."""
    if not isinstance(moment, str):
        return to_ms(moment, what, error)
    try:
        read = datetime.fromisoformat(moment)
    except ValueError:
        read = None
    if read is None or read.utcoffset() is None:
        raise error(
            f"{what} must be a time with an offset from UTC, such as 2026-03-05T09:00:00+01:00, "
            f"not {shown(moment)}"
        )
    return to_ms(read, what, error)


def from_ms(moment_ms: int) -> datetime:
    """Convert milliseconds since 1970 to an aware datetime in UTC, exact to the millisecond."""
    return _EPOCH + timedelta(milliseconds=moment_ms)
