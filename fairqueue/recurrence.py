"""When a schedule fires: the moments of a cron expression in a time zone.

The rule where a zone changes its offset is Debian cron's:

- An expression whose second, minute or hour field begins with `*` follows elapsed time. It fires
  whenever the wall clock shows a matching time: in both passes of an overlap, never in a gap.
- Any other is at fixed times. Each matching local time is one fire, at the first moment at which
  the wall clock shows it; one that a gap skips fires at the end of the gap. Local times that land
  on the same moment are one fire.

pytz knows no daylight saving time after 2037, so later moments are those of the last known offset.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache

from fairqueue.clock import LATEST_MS, from_ms, to_ms
from fairqueue.cron import HORIZON_YEARS, Cron, parse_cron
from fairqueue.errors import InvalidCron
from fairqueue.zones import Zone, find_zone

# Entries kept. A full house (hundreds of expressions in dozens of zones, due at one moment) is some
# thousands of pairs with one moment each; beyond these numbers the oldest are computed again.
_RECURRENCES_KEPT = 16_384
_MOMENTS_KEPT = 65_536

_LATEST = LATEST_MS // 1000


# Compared by identity, which `compile_recurrence` keeps: it is a key of caches, and must hash fast.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recurrence:
    """The moments of one expression in one zone, in milliseconds since 1970, UTC.

    Made by `compile_recurrence`. Never changes, so it can be shared between threads. There are no
    moments before 1970 or after 9999, and none is looked for further away than nine years.
    """

    cron_expr: str
    timezone: str
    _cron: Cron
    _zone: Zone

    def next_ms(self, after_ms: int) -> int | None:
        """The first moment strictly after, or None when there is none within nine years."""
        return _next_ms(self, after_ms // 1000)

    def latest_ms(self, at_ms: int) -> int | None:
        """The latest moment at or before, or None when there is none within nine years."""
        return _latest_ms(self, at_ms // 1000)

    def count(self, from_ms: int, until_ms: int, cap: int) -> int:
        """How many moments there are from `from_ms` until before `until_ms`; `cap` if more.

        Takes a few microseconds for each moment, so the cap is also the bound on the time.
        """
        counted = 0
        moment = self._next((from_ms - 1) // 1000)
        while counted < cap and moment is not None and moment * 1000 < until_ms:
            counted += 1
            moment = self._next(moment)
        return counted

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

    # Fixed times. A local time has fired by a moment exactly if the wall clock has shown it, or a
    # later one, by then. So what fires next is the first match beyond the furthest time shown.

    def _next_fixed(self, after: int) -> int | None:
        local = self._cron.next_after(self._zone.furthest_local(after))
        return None if local is None else self._zone.first_reach(local)

    def _latest_fixed(self, at: int) -> int | None:
        local = self._cron.latest_until(self._zone.furthest_local(at))
        return None if local is None else self._zone.first_reach(local)

    # Elapsed time. In each period of the zone local and elapsed time run alike, so look into one
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
def _next_ms(recurrence: Recurrence, after: int) -> int | None:
    moment = recurrence._next(after)
    return None if moment is None else moment * 1000


@lru_cache(maxsize=_MOMENTS_KEPT)
def _latest_ms(recurrence: Recurrence, at: int) -> int | None:
    moment = recurrence._latest(at)
    return None if moment is None else moment * 1000


@lru_cache(maxsize=_RECURRENCES_KEPT)
def _compiled(cron_expr: str, timezone: str) -> Recurrence:
    return Recurrence(
        cron_expr=cron_expr,
        timezone=timezone,
        _cron=parse_cron(cron_expr),
        _zone=find_zone(timezone),
    )


def compile_recurrence(cron_expr: str, timezone: str) -> Recurrence:
    """The recurrence of an expression in a zone; the same object for the same two texts.

    Raises InvalidCron and UnknownTimezone. Thread-safe; compiled ones are kept.
    """
    try:
        return _compiled(cron_expr, timezone)
    except TypeError:
        # A list or the like cannot be looked up in a cache; say what it should have been.
        parse_cron(cron_expr)
        find_zone(timezone)
        raise


def next_run(cron_expr: str, timezone: str, after: datetime) -> datetime:
    """The first moment strictly after an aware datetime, as an aware datetime in the zone.

    Raises InvalidCron (also when there is no such moment within nine years), UnknownTimezone, and
    InvalidInput for a naive datetime.
    """
    recurrence = compile_recurrence(cron_expr, timezone)
    moment_ms = recurrence.next_ms(to_ms(after, "after"))
    if moment_ms is None:
        raise InvalidCron(
            f"{cron_expr!r} has no moment within {HORIZON_YEARS} years after {after}, or none "
            "before the year 10000: choose days that come more often"
        )
    return from_ms(moment_ms).astimezone(recurrence._zone.tzinfo)


def previous_run(cron_expr: str, timezone: str, at: datetime) -> datetime | None:
    """The latest moment at or before an aware datetime, as an aware datetime in the zone.

    None when there is none within nine years, or since 1970. Raises InvalidCron, UnknownTimezone,
    and InvalidInput for a naive datetime.
    """
    recurrence = compile_recurrence(cron_expr, timezone)
    moment_ms = recurrence.latest_ms(to_ms(at, "at"))
    return None if moment_ms is None else from_ms(moment_ms).astimezone(recurrence._zone.tzinfo)
