"""Time zones as tables of integers: the offset from each second on."""

from bisect import bisect_right
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from functools import lru_cache

import pytz
from pytz.tzinfo import DstTzInfo

from fairqueue.errors import UnknownTimezone, short_repr

# More than the tz database has names, so that each zone is read once.
_ZONES_KEPT = 1024

# The start of a zone's first period: earlier than any moment that is asked about.
_BEGINNING = -(10**15)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Zone:
    """A zone as a list of periods, each with one offset. All numbers are whole seconds.

    pytz has no daylight saving time after 2037: from then on a zone keeps its last offset, nearly
    always its winter time.
    """

    name: str
    tzinfo: tzinfo
    # The moment (since 1970, UTC) at which each period begins.
    starts: tuple[int, ...]
    # Local time minus UTC in each period.
    offsets: tuple[int, ...]
    # For each period but the last: a local second that the wall clock has not shown yet when the
    # period ends, while it has shown, or skipped, all earlier ones.
    reached: tuple[int, ...]

    def period(self, moment: int) -> int:
        """Return the index of the period that contains a time."""
        return bisect_right(self.starts, moment) - 1

    def furthest_local(self, moment: int) -> int:
        """Return the latest local time that the wall clock has shown up to a moment.

        In the second pass of an overlap this is the end of the first pass.
        """
        period = self.period(moment)
        local = moment + self.offsets[period]
        return max(local, self.reached[period - 1] - 1) if period else local

    def first_reach(self, local: int) -> int:
        """Return the first moment at which the wall clock shows this local time or a later one.

        For a time in an overlap this is its first pass, for one in a gap the end of the gap.
        """
        period = bisect_right(self.reached, local)
        return max(self.starts[period], local - self.offsets[period])

    def gap(self, moment: int) -> tuple[int, int] | None:
        """Return the local times [begin, end) that the wall clock skips at this moment, or None."""
        period = self.period(moment)
        if not period or self.starts[period] != moment:
            return None
        begin, end = self.reached[period - 1], moment + self.offsets[period]
        return (begin, end) if begin < end else None

    def showing(self, moment: int) -> int:
        """Return which pass of its local time a moment is: 1 or 2, or 0 if there is only one."""
        period = self.period(moment)
        local = moment + self.offsets[period]
        if period and local < self.reached[period - 1]:
            return 2
        following = period + 1
        again = (
            following < len(self.starts)
            and local >= self.starts[following] + self.offsets[following]
        )
        return 1 if again else 0


def find_zone(name: str) -> Zone:
    """Return the zone with this name, spelled as in the tz database. Zones are cached.

    Raises UnknownTimezone. Names are case-sensitive, although pytz accepts any case, so that every
    other program knows a stored name too.
    """
    if not isinstance(name, str) or name not in pytz.all_timezones_set:
        raise UnknownTimezone(_explain(name))
    return _zone(name)


@lru_cache(maxsize=_ZONES_KEPT)
def _zone(name: str) -> Zone:
    zone = pytz.timezone(name)
    starts, offsets = [_BEGINNING], [0]
    for start, offset in _transitions(zone):
        if start <= 0:
            # Nothing is asked about the time before 1970.
            offsets[0] = offset
        elif offset != offsets[-1]:
            starts.append(start)
            offsets.append(offset)
    reached: list[int] = []
    for end, offset in zip(starts[1:], offsets, strict=False):
        reached.append(max(end + offset, reached[-1] if reached else end + offset))
    return Zone(
        name=name,
        tzinfo=zone,
        starts=tuple(starts),
        offsets=tuple(offsets),
        reached=tuple(reached),
    )


def _transitions(zone: pytz.BaseTzInfo) -> list[tuple[int, int]]:
    """Return (moment, offset from then on) in seconds, sorted; the first is before 1970."""
    if not isinstance(zone, DstTzInfo):
        offset = zone.utcoffset(datetime(2000, 1, 1))  # noqa: DTZ001
        return [(0, _seconds(offset or timedelta(0)))]
    # pytz has no public way to ask for its transitions. These two lists are what a pytz zone
    # consists of: its own fromutc() is a bisection of them. Should a release rename them, this
    # fails at the first use of a zone; a test compares the table with the public methods.
    moments: list[datetime] = zone._utc_transition_times  # type: ignore[attr-defined]
    infos: list[tuple[timedelta, timedelta, str]] = zone._transition_info  # type: ignore[attr-defined]
    epoch = datetime(1970, 1, 1)  # noqa: DTZ001
    return [
        (_seconds(moment - epoch), _seconds(info[0]))
        for moment, info in zip(moments, infos, strict=True)
    ]


def _seconds(delta: timedelta) -> int:
    return delta.days * 86_400 + delta.seconds


def _explain(name: object) -> str:
    if not isinstance(name, str):
        return f"timezone must be a name such as 'Europe/London' or 'UTC', not {short_repr(name)}"
    for known in pytz.all_timezones:
        if known.lower() == name.lower():
            return f"timezone {name!r} is not in the tz database: write {known!r}"
    return f"timezone {name[:60]!r} is not in the tz database: use names such as 'Europe/London'"
