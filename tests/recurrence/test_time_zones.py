"""Moments in time zones: tables over real changes of the clock, and a slow oracle for the rest."""

import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import pairwise

import pytest
import pytz
from hypothesis import given, settings
from hypothesis import strategies as st

from fairqueue.clock import LATEST_MS, from_ms, to_ms
from fairqueue.errors import InvalidCron, InvalidInput, UnknownTimezone
from fairqueue.recurrence import kinds as module
from fairqueue.recurrence.kinds import Recurrence, compile_recurrence
from fairqueue.recurrence.moments import next_run, previous_run
from fairqueue.recurrence.zones import find_zone

DAY_MS = 86_400_000


def ms(text: str) -> int:
    """A moment in UTC, in milliseconds."""
    return to_ms(datetime.fromisoformat(text).replace(tzinfo=UTC), "text")


def walk(recurrence: Recurrence, from_ms: int, until_ms: int) -> Iterator[int]:
    moment = recurrence.next_ms(from_ms - 1)
    while moment is not None and moment < until_ms:
        yield moment
        moment = recurrence.next_ms(moment)


def walk_back(recurrence: Recurrence, from_ms: int, until_ms: int) -> Iterator[int]:
    moment = recurrence.latest_ms(until_ms - 1)
    while moment is not None and moment >= from_ms:
        yield moment
        moment = recurrence.latest_ms(moment - 1)


# --- tables ---------------------------------------------------------------------------------------

NEW_YORK, LONDON, DUBLIN = "America/New_York", "Europe/London", "Europe/Dublin"
LORD_HOWE, APIA, CASABLANCA = "Australia/Lord_Howe", "Pacific/Apia", "Africa/Casablanca"

# zone, expression, from and until (UTC), and the moments as the wall clock shows them.
TABLE = [
    # New York, spring: 02:00 EST is 03:00 EDT, 07:00 UTC.
    (NEW_YORK, "30 2 * * *", "2024-03-09T12:00", "2024-03-12T00:00",
     ["03-10 03:00:00 -0400", "03-11 02:30:00 -0400"]),
    (NEW_YORK, "0,30 2 * * *", "2024-03-10T00:00", "2024-03-11T00:00", ["03-10 03:00:00 -0400"]),
    (NEW_YORK, "30 2,3 * * *", "2024-03-10T00:00", "2024-03-11T00:00",
     ["03-10 03:00:00 -0400", "03-10 03:30:00 -0400"]),
    (NEW_YORK, "0 2,3 * * *", "2024-03-10T00:00", "2024-03-11T00:00", ["03-10 03:00:00 -0400"]),
    (NEW_YORK, "0-59/15 2 * * *", "2024-03-10T00:00", "2024-03-11T00:00", ["03-10 03:00:00 -0400"]),
    (NEW_YORK, "15 30 2 * * *", "2024-03-10T00:00", "2024-03-11T00:00", ["03-10 03:00:00 -0400"]),
    (NEW_YORK, "*/15 * * * *", "2024-03-10T06:30", "2024-03-10T07:30",
     ["03-10 01:30:00 -0500", "03-10 01:45:00 -0500", "03-10 03:00:00 -0400",
      "03-10 03:15:00 -0400"]),
    (NEW_YORK, "30 * * * *", "2024-03-10T06:00", "2024-03-10T08:00",
     ["03-10 01:30:00 -0500", "03-10 03:30:00 -0400"]),
    (NEW_YORK, "* 2 * * *", "2024-03-10T00:00", "2024-03-11T00:00", []),
    (NEW_YORK, "*/20 30 2 * * *", "2024-03-10T00:00", "2024-03-11T00:00", []),
    (NEW_YORK, "*/30 59 1 * * *", "2024-03-10T00:00", "2024-03-11T00:00",
     ["03-10 01:59:00 -0500", "03-10 01:59:30 -0500"]),
    (NEW_YORK, "30 2 10 * *", "2024-02-11T00:00", "2024-04-01T00:00", ["03-10 03:00:00 -0400"]),
    # New York, autumn: 02:00 EDT is 01:00 EST, 06:00 UTC.
    (NEW_YORK, "30 1 * * *", "2024-11-02T12:00", "2024-11-05T00:00",
     ["11-03 01:30:00 -0400", "11-04 01:30:00 -0500"]),
    (NEW_YORK, "0 1,2 * * *", "2024-11-03T00:00", "2024-11-04T00:00",
     ["11-03 01:00:00 -0400", "11-03 02:00:00 -0500"]),
    (NEW_YORK, "45 59 1 * * *", "2024-11-03T00:00", "2024-11-04T00:00", ["11-03 01:59:45 -0400"]),
    (NEW_YORK, "*/30 * * * *", "2024-11-03T05:00", "2024-11-03T07:30",
     ["11-03 01:00:00 -0400", "11-03 01:30:00 -0400", "11-03 01:00:00 -0500",
      "11-03 01:30:00 -0500", "11-03 02:00:00 -0500"]),
    (NEW_YORK, "*/30 1 * * *", "2024-11-03T00:00", "2024-11-04T00:00",
     ["11-03 01:00:00 -0400", "11-03 01:30:00 -0400", "11-03 01:00:00 -0500",
      "11-03 01:30:00 -0500"]),
    (NEW_YORK, "*/30 0 1 * * *", "2024-11-03T00:00", "2024-11-04T00:00",
     ["11-03 01:00:00 -0400", "11-03 01:00:30 -0400", "11-03 01:00:00 -0500",
      "11-03 01:00:30 -0500"]),
    # London: 01:00 GMT is 02:00 BST, and 02:00 BST is 01:00 GMT, both at 01:00 UTC.
    (LONDON, "30 1 * * *", "2024-03-30T12:00", "2024-04-01T12:00",
     ["03-31 02:00:00 +0100", "04-01 01:30:00 +0100"]),
    (LONDON, "30 * * * *", "2024-03-31T00:00", "2024-03-31T02:00",
     ["03-31 00:30:00 +0000", "03-31 02:30:00 +0100"]),
    (LONDON, "30 1 * * *", "2024-10-26T12:00", "2024-10-28T12:00",
     ["10-27 01:30:00 +0100", "10-28 01:30:00 +0000"]),
    (LONDON, "30 * * * *", "2024-10-27T00:00", "2024-10-27T02:00",
     ["10-27 01:30:00 +0100", "10-27 01:30:00 +0000"]),
    # Dublin has the same clock, but the tz database calls its winter time the exception.
    (DUBLIN, "30 1 * * *", "2024-03-30T12:00", "2024-04-01T12:00",
     ["03-31 02:00:00 +0100", "04-01 01:30:00 +0100"]),
    (DUBLIN, "30 1 * * *", "2024-10-26T12:00", "2024-10-28T12:00",
     ["10-27 01:30:00 +0100", "10-28 01:30:00 +0000"]),
    (DUBLIN, "30 * * * *", "2024-10-27T00:00", "2024-10-27T02:00",
     ["10-27 01:30:00 +0100", "10-27 01:30:00 +0000"]),
    # Lord Howe moves by half an hour: 02:00 is 02:30 in October, 02:00 is 01:30 in April.
    (LORD_HOWE, "15 2 * * *", "2024-10-05T12:00", "2024-10-07T00:00",
     ["10-06 02:30:00 +1100", "10-07 02:15:00 +1100"]),
    (LORD_HOWE, "15,30 2 * * *", "2024-10-05T12:00", "2024-10-06T12:00", ["10-06 02:30:00 +1100"]),
    (LORD_HOWE, "*/15 * * * *", "2024-10-05T15:00", "2024-10-05T16:00",
     ["10-06 01:30:00 +1030", "10-06 01:45:00 +1030", "10-06 02:30:00 +1100",
      "10-06 02:45:00 +1100"]),
    (LORD_HOWE, "45 1 * * *", "2024-04-05T15:30", "2024-04-08T00:00",
     ["04-07 01:45:00 +1100", "04-08 01:45:00 +1030"]),
    (LORD_HOWE, "45 * * * *", "2024-04-06T14:00", "2024-04-06T16:00",
     ["04-07 01:45:00 +1100", "04-07 01:45:00 +1030"]),
    # Apia had no 30 December 2011: the 29th ended at 10:00 UTC, and the 31st began.
    (APIA, "0 9 * * *", "2011-12-29T00:00", "2012-01-01T00:00",
     ["12-29 09:00:00 -1000", "12-31 00:00:00 +1400", "12-31 09:00:00 +1400",
      "01-01 09:00:00 +1400"]),
    (APIA, "0 0 * * *", "2011-12-29T00:00", "2012-01-01T00:00",
     ["12-29 00:00:00 -1000", "12-31 00:00:00 +1400", "01-01 00:00:00 +1400"]),
    (APIA, "0 9-17 30 12 *", "2011-12-01T00:00", "2012-02-01T00:00", ["12-31 00:00:00 +1400"]),
    (APIA, "30 0 9 * * FRI", "2011-12-28T00:00", "2012-01-07T00:00",
     ["12-31 00:00:00 +1400", "01-06 09:00:30 +1400"]),
    (APIA, "0 */12 * * *", "2011-12-29T12:00", "2011-12-31T00:00",
     ["12-29 12:00:00 -1000", "12-31 00:00:00 +1400", "12-31 12:00:00 +1400"]),
    (APIA, "* * 30 12 *", "2011-12-01T00:00", "2012-02-01T00:00", []),
    # Casablanca, Ramadan 2024: back an hour at 03:00 on 10 March, on again at 02:00 on 14 April.
    (CASABLANCA, "30 2 * * *", "2024-03-09T12:00", "2024-03-11T12:00",
     ["03-10 02:30:00 +0100", "03-11 02:30:00 +0000"]),
    (CASABLANCA, "30 * * * *", "2024-03-10T01:00", "2024-03-10T03:00",
     ["03-10 02:30:00 +0100", "03-10 02:30:00 +0000"]),
    (CASABLANCA, "30 2 * * *", "2024-04-13T12:00", "2024-04-15T12:00",
     ["04-14 03:00:00 +0100", "04-15 02:30:00 +0100"]),
    (CASABLANCA, "30 * * * *", "2024-04-14T01:00", "2024-04-14T03:00",
     ["04-14 01:30:00 +0000", "04-14 03:30:00 +0100"]),
    # Zones whose clock never moves.
    ("UTC", "30 2 * * *", "2024-03-10T00:00", "2024-03-12T00:00",
     ["03-10 02:30:00 +0000", "03-11 02:30:00 +0000"]),
    ("Asia/Kolkata", "30 2 * * *", "2024-03-10T00:00", "2024-03-12T00:00",
     ["03-11 02:30:00 +0530", "03-12 02:30:00 +0530"]),
    ("Asia/Kolkata", "*/30 * * * *", "2024-03-10T00:00", "2024-03-10T01:00",
     ["03-10 05:30:00 +0530", "03-10 06:00:00 +0530"]),
    ("Asia/Tokyo", "15 0 9 * * MON", "2024-03-10T00:00", "2024-03-18T00:00",
     ["03-11 09:00:15 +0900"]),
    ("Etc/GMT+5", "0 0 1 * *", "2024-02-15T00:00", "2024-03-15T00:00", ["03-01 00:00:00 -0500"]),
    # After 2037 pytz has no summer time any more: 09:00 in July is winter time.
    (NEW_YORK, "0 9 1 7 *", "2037-01-01T00:00", "2039-01-01T00:00",
     ["07-01 09:00:00 -0400", "07-01 09:00:00 -0500"]),
]  # fmt: skip


@pytest.mark.parametrize(("zone", "cron_expr", "start", "end", "expected"), TABLE)
def test_the_moments_around_a_change_of_the_clock_are_those_of_the_table(
    zone: str, cron_expr: str, start: str, end: str, expected: list[str]
) -> None:
    recurrence = compile_recurrence(cron_expr, zone)
    found = list(walk(recurrence, ms(start), ms(end)))
    tz = pytz.timezone(zone)
    assert [f"{from_ms(at).astimezone(tz):%m-%d %H:%M:%S %z}" for at in found] == expected
    assert list(walk_back(recurrence, ms(start), ms(end))) == found[::-1]


def test_each_day_has_one_fire_of_a_fixed_time_in_every_zone_of_the_world() -> None:
    start, end = ms("2024-01-01T00:00"), ms("2025-01-01T00:00")
    for zone in pytz.common_timezones:
        for cron_expr in ("30 2 * * *", "0 0 * * *"):
            moments = list(walk(compile_recurrence(cron_expr, zone), start, end))
            assert len(moments) == 366, (zone, cron_expr)
            assert all(b > a for a, b in pairwise(moments))


# --- the slow oracle ------------------------------------------------------------------------------

WINDOWS = [
    (NEW_YORK, "2024-03-09T12:00"),
    (NEW_YORK, "2024-11-02T12:00"),
    (LONDON, "2024-03-30T12:00"),
    (DUBLIN, "2024-10-26T12:00"),
    (LORD_HOWE, "2024-04-06T00:00"),
    (LORD_HOWE, "2024-10-05T00:00"),
    (APIA, "2011-12-29T12:00"),
    ("Pacific/Kwajalein", "1993-08-20T00:00"),
    (CASABLANCA, "2024-03-09T12:00"),
    ("Africa/El_Aaiun", "2025-04-05T12:00"),
    ("Asia/Pyongyang", "2018-05-04T00:00"),
    ("America/Caracas", "2007-12-08T18:00"),
    ("Antarctica/Troll", "2024-03-30T12:00"),
    ("Africa/Monrovia", "1972-01-06T12:00"),
    ("Asia/Kolkata", "2024-03-01T00:00"),
    ("UTC", "2024-02-28T12:00"),
]
LENGTH = timedelta(days=2)
# Before the window, and longer than any gap in it, so that the oracle sees both sides of each.
LEAD = timedelta(days=3)


@cache
def clock_readings(
    zone: str, start: str, lead: timedelta, length: timedelta, step: int
) -> list[tuple[int, datetime]]:
    """Every step of real time, with what the wall clock shows."""
    tz, first = pytz.timezone(zone), datetime.fromisoformat(start).replace(tzinfo=UTC) - lead
    count = int((lead + length).total_seconds()) // step
    moments = (first + timedelta(seconds=step * i) for i in range(count))
    return [(to_ms(at, "at"), at.astimezone(tz).replace(tzinfo=None)) for at in moments]


Matches = Callable[[datetime], bool]


def elapsed_moments(readings: list[tuple[int, datetime]], matches: Matches) -> set[int]:
    """It fires whenever the wall clock shows a matching time."""
    return {at for at, shown in readings if matches(shown)}


def fixed_moments(readings: list[tuple[int, datetime]], matches: Matches, step: int) -> set[int]:
    """Each matching local time fires when first shown; if never shown, when the clock is past."""
    first_shown: dict[datetime, int] = {}
    for at, shown in readings:
        first_shown.setdefault(shown, at)
    found, local, last = set(), readings[0][1], max(first_shown)
    skipped: list[datetime] = []
    while local <= last:
        if matches(local):
            if local in first_shown:
                found.add(first_shown[local])
            else:
                skipped.append(local)
        local += timedelta(seconds=step)
    for local in skipped:
        found.add(next(at for at, shown in readings if shown > local))
    return found


@st.composite
def fields(draw: st.DrawFn, low: int, high: int, often: int) -> tuple[str, frozenset[int]]:
    """One field as a text, and what it means."""
    everything = frozenset(range(low, high + 1))
    kind = draw(st.sampled_from(["*", "step", "list", "range"]))
    if kind == "*":
        return "*", everything
    if kind == "step":
        step = draw(st.integers(1, often))
        return f"*/{step}", frozenset(range(low, high + 1, step))
    if kind == "range":
        first = draw(st.integers(low, high - 1))
        last, step = draw(st.integers(first + 1, high)), draw(st.integers(1, often))
        return f"{first}-{last}/{step}", frozenset(range(first, last + 1, step))
    values = draw(st.frozensets(st.integers(low, high), min_size=1, max_size=4))
    return ",".join(map(str, sorted(values))), values


Meaning = tuple[str, frozenset[int]]


def day_matches(at: datetime, day: Meaning, month: Meaning, weekday: Meaning) -> bool:
    by_month, by_week = at.day in day[1], at.isoweekday() % 7 in weekday[1]
    stars = day[0].startswith("*") or weekday[0].startswith("*")
    both = by_month and by_week if stars else by_month or by_week
    return at.month in month[1] and both


HOURS = fields(0, 23, 12)
# Mostly unrestricted, so that the window of two days has moments in it.
DAYS = st.one_of(st.just(("*", frozenset(range(1, 32)))), fields(1, 31, 3))
MONTHS = st.one_of(st.just(("*", frozenset(range(1, 13)))), fields(1, 12, 2))
WEEKDAYS = st.one_of(st.just(("*", frozenset(range(7)))), fields(0, 6, 3))


def check_against(
    recurrence: Recurrence, expected: set[int], start: str, length: timedelta
) -> None:
    from_ms, until_ms = ms(start), ms(start) + int(length.total_seconds() * 1000)
    wanted = sorted(at for at in expected if from_ms <= at < until_ms)
    assert list(walk(recurrence, from_ms, until_ms)) == wanted
    assert list(walk_back(recurrence, from_ms, until_ms)) == wanted[::-1]
    assert recurrence.count(from_ms, until_ms, 1_000_000) == len(wanted)
    assert recurrence.count(from_ms, until_ms, 3) == min(3, len(wanted))


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.sampled_from(WINDOWS), fields(0, 59, 30), HOURS, DAYS, MONTHS, WEEKDAYS)
def test_the_moments_are_those_of_a_walk_through_every_minute(
    window: tuple[str, str],
    minute: Meaning,
    hour: Meaning,
    day: Meaning,
    month: Meaning,
    weekday: Meaning,
) -> None:
    zone, start = window
    try:
        recurrence = compile_recurrence(
            f"{minute[0]} {hour[0]} {day[0]} {month[0]} {weekday[0]}", zone
        )
    except InvalidCron as error:
        if "can never fire" not in str(error):
            raise
        return

    def matches(at: datetime) -> bool:
        return (
            at.second == 0
            and at.minute in minute[1]
            and at.hour in hour[1]
            and day_matches(at, day, month, weekday)
        )

    # Monrovia left an offset of 44 minutes and 30 seconds.
    step = 30 if zone == "Africa/Monrovia" else 60
    readings = clock_readings(zone, start, LEAD, LENGTH, step)
    if minute[0].startswith("*") or hour[0].startswith("*"):
        expected = elapsed_moments(readings, matches)
    else:
        expected = fixed_moments(readings, matches, step)
    check_against(recurrence, expected, start, LENGTH)


# Two hours before and after a change of at most one hour.
SHORT_WINDOWS = [
    (NEW_YORK, "2024-03-10T05:00"),
    (NEW_YORK, "2024-11-03T04:00"),
    (LORD_HOWE, "2024-04-06T13:00"),
    (LORD_HOWE, "2024-10-05T13:30"),
]
SHORT_LEAD, SHORT_LENGTH = timedelta(hours=2), timedelta(hours=4)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(SHORT_WINDOWS), fields(0, 59, 30), fields(0, 59, 30), fields(0, 4, 3))
def test_the_moments_with_seconds_are_those_of_a_walk_through_every_second(
    window: tuple[str, str], second: Meaning, minute: Meaning, hour: Meaning
) -> None:
    zone, start = window
    # As a list, since `*` would be more hours than these.
    hours = ",".join(map(str, sorted(hour[1])))
    recurrence = compile_recurrence(f"{second[0]} {minute[0]} {hours} * * *", zone)

    def matches(at: datetime) -> bool:
        return at.second in second[1] and at.minute in minute[1] and at.hour in hour[1]

    readings = clock_readings(zone, start, SHORT_LEAD, SHORT_LENGTH, 1)
    if second[0].startswith("*") or minute[0].startswith("*"):
        expected = elapsed_moments(readings, matches)
    else:
        expected = fixed_moments(readings, matches, 1)
    check_against(recurrence, expected, start, SHORT_LENGTH)


# --- properties -----------------------------------------------------------------------------------

EXPRESSIONS = st.sampled_from(
    (
        "* * * * *",
        "*/7 * * * * *",
        "30 2 * * *",
        "15 30 1 * * *",
        "0 0 29 2 *",
        "0 */6 * * *",
        "0 9 * * 1-5",
        "59 23 L * *",
        "0 12 * * 5#2",
        "0-59/20 0,1,2,3 * * *",
        "* * 1 1 *",
    )
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    EXPRESSIONS,
    st.sampled_from(pytz.all_timezones),
    st.integers(ms("1980-01-01T00:00"), ms("2080-01-01T00:00")),
)
def test_next_is_strictly_later_with_nothing_between(cron_expr: str, zone: str, after: int) -> None:
    recurrence = compile_recurrence(cron_expr, zone)
    moment = recurrence.next_ms(after)
    assert moment is not None
    assert moment > after
    assert recurrence.latest_ms(moment) == moment
    assert recurrence.next_ms(moment - 1) == moment
    before = recurrence.latest_ms(moment - 1)
    assert before is not None
    assert before <= after
    assert recurrence.latest_ms(after) == before
    assert recurrence.next_ms(before) == moment


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(pytz.all_timezones), st.integers(0, ms("2060-01-01T00:00") // 1000))
def test_the_table_of_a_zone_has_the_offsets_that_pytz_tells(zone: str, moment: int) -> None:
    table = find_zone(zone)
    offset = from_ms(moment * 1000).astimezone(pytz.timezone(zone)).utcoffset()
    assert timedelta(seconds=table.offsets[table.period(moment)]) == offset


# --- milliseconds, ends and counts ----------------------------------------------------------------


def test_milliseconds_between_two_seconds_are_before_the_next_one() -> None:
    recurrence = compile_recurrence("* * * * * *", "UTC")
    assert [recurrence.next_ms(at) for at in (4999, 5000, 5001, 5999)] == [5000, 6000, 6000, 6000]
    assert [recurrence.latest_ms(at) for at in (4999, 5000, 5001)] == [4000, 5000, 5000]


@pytest.mark.parametrize(
    ("from_ms", "until_ms", "cap", "expected"),
    [
        (5000, 8000, 100, 3),
        (5001, 8000, 100, 2),
        (5000, 8001, 100, 4),
        (5000, 5000, 100, 0),
        (5000, 5001, 100, 1),
        (8000, 5000, 100, 0),
        (0, DAY_MS, 100, 100),
        (0, DAY_MS, 0, 0),
        (-5000, 2000, 100, 2),
        (LATEST_MS, LATEST_MS + DAY_MS, 100, 1),
    ],
)
def test_a_count_excludes_its_end(from_ms: int, until_ms: int, cap: int, expected: int) -> None:
    assert compile_recurrence("* * * * * *", "UTC").count(from_ms, until_ms, cap) == expected


@pytest.mark.parametrize("zone", ["UTC", NEW_YORK, "Asia/Tokyo", "Pacific/Kiritimati"])
@pytest.mark.parametrize("cron_expr", ["* * * * *", "0 9 * * *", "0 0 29 2 *", "0 0 1 1 *"])
def test_there_are_no_moments_before_1970_or_after_9999(cron_expr: str, zone: str) -> None:
    recurrence = compile_recurrence(cron_expr, zone)
    first = recurrence.next_ms(-(10**15))
    assert first is not None
    assert first >= 0
    assert recurrence.latest_ms(first - 1) is None
    assert recurrence.latest_ms(-1) is None
    assert recurrence.next_ms(LATEST_MS) is None
    assert recurrence.next_ms(10**20) is None
    last = recurrence.latest_ms(10**20)
    assert last is not None
    assert ms("9995-12-31T00:00") < last <= LATEST_MS


@pytest.mark.parametrize("zone", ["UTC", NEW_YORK, "Asia/Tokyo", "Pacific/Kiritimati"])
def test_the_last_run_of_all_can_be_shown_in_its_zone(zone: str) -> None:
    latest = previous_run("* * * * *", zone, datetime.max.replace(tzinfo=UTC) - timedelta(days=1))
    assert latest is not None
    while (
        following := compile_recurrence("0 * * * *", zone).next_ms(to_ms(latest, ""))
    ) is not None:
        latest = next_run("0 * * * *", zone, latest)
        assert to_ms(latest, "latest") == following
    assert latest.year == 9999


def test_the_29th_of_february_is_eight_years_away_around_2100() -> None:
    recurrence = compile_recurrence("0 0 29 2 *", NEW_YORK)
    assert [
        f"{from_ms(at):%Y-%m-%d %H}" for at in walk(recurrence, ms("2092-01-01"), ms("2109-01-01"))
    ] == ["2092-02-29 05", "2096-02-29 05", "2104-02-29 05", "2108-02-29 05"]


# --- datetimes in, datetimes out ------------------------------------------------------------------


def test_next_run_answers_in_the_zone_with_its_offset() -> None:
    after = datetime(2024, 3, 29, 18, tzinfo=UTC)
    friday = next_run("0 9 * * *", LONDON, after)
    assert friday.isoformat() == "2024-03-30T09:00:00+00:00"
    sunday = next_run("0 9 * * *", LONDON, friday)
    assert sunday.isoformat() == "2024-03-31T09:00:00+01:00"
    assert sunday.tzname() == "BST"


def test_previous_run_answers_the_moment_itself_or_the_one_before() -> None:
    at = datetime(2024, 7, 1, 8, tzinfo=UTC)
    assert previous_run("0 9 * * *", LONDON, at) == at
    before = previous_run("0 9 * * *", LONDON, at - timedelta(microseconds=1))
    assert before is not None
    assert before.isoformat() == "2024-06-30T09:00:00+01:00"
    assert previous_run("0 9 1 1 *", LONDON, datetime(1970, 1, 1, tzinfo=UTC)) is None


def test_the_zone_of_the_datetime_passed_in_does_not_matter() -> None:
    tokyo = pytz.timezone("Asia/Tokyo").localize(datetime(2024, 3, 11, 1))
    assert next_run("0 9 * * *", LONDON, tokyo) == datetime(2024, 3, 11, 9, tzinfo=UTC)


def test_a_naive_datetime_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"after must be a datetime with a time zone.*'2024-03"):
        next_run("0 9 * * *", LONDON, datetime(2024, 3, 11))
    with pytest.raises(InvalidInput, match=r"at must be a datetime with a time zone.*'2024-03-11"):
        previous_run("0 9 * * *", LONDON, datetime(2024, 3, 11))


def test_next_run_says_when_there_is_none_for_years() -> None:
    with pytest.raises(InvalidCron, match="does not fire within 9 years after 2024-03-11"):
        next_run("0 0 * 2 MON#5", LONDON, datetime(2024, 3, 11, tzinfo=UTC))
    with pytest.raises(InvalidCron, match="before the year 10000"):
        next_run("0 0 * * *", LONDON, datetime(9999, 12, 31, 12, tzinfo=UTC))


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zone", "message"),
    [
        ("Mars/Olympus", "'Mars/Olympus' is not in the tz database: use names such as"),
        ("", "'' is not in the tz database"),
        (" UTC", "' UTC' is not in the tz database"),
        ("../UTC", "'../UTC' is not in the tz database"),
        ("/etc/localtime", "'/etc/localtime' is not in the tz database"),
        ("Europe/../UTC", "is not in the tz database"),
        ("Europe/London\x00", "is not in the tz database"),
        ("Europe/Lóndon", "is not in the tz database"),
        ("+02:00", "is not in the tz database"),
        ("Europe", "is not in the tz database"),
        # Case counts, and the message has the right one.
        ("europe/london", "write 'Europe/London'"),
        ("utc", "write 'UTC'"),
        ("x" * 100_000, "is not in the tz database"),
        (None, "timezone must be a name such as 'Europe/London' or 'UTC', not None"),
        (5, "timezone must be a name"),
        (b"UTC", "timezone must be a name"),
        (["UTC"], "timezone must be a name"),
        (UTC, "timezone must be a name"),
    ],
)
def test_an_unknown_zone_is_refused(zone: str, message: str) -> None:
    for call in (
        lambda: compile_recurrence("* * * * *", zone),
        lambda: next_run("* * * * *", zone, datetime(2024, 1, 1, tzinfo=UTC)),
    ):
        with pytest.raises(UnknownTimezone, match=re.escape(message)) as refused:
            call()
        assert len(str(refused.value)) < 300


@pytest.mark.parametrize("cron_expr", ["61 * * * *", "", "0 0 30 2 *", None, 5, ["* * * * *"]])
def test_a_bad_expression_is_refused_by_every_function(cron_expr: str) -> None:
    now = datetime(2024, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidCron):
        compile_recurrence(cron_expr, "UTC")
    with pytest.raises(InvalidCron):
        next_run(cron_expr, "UTC", now)
    with pytest.raises(InvalidCron):
        previous_run(cron_expr, "UTC", now)


# --- sharing --------------------------------------------------------------------------------------


def test_ten_thousand_schedules_with_one_expression_are_one_computation() -> None:
    at = ms("2024-05-05T05:05")
    before = module._next_ms.cache_info()
    answers = {compile_recurrence("7 7 7 * *", LONDON).next_ms(at) for _ in range(10_000)}
    after = module._next_ms.cache_info()
    assert answers == {ms("2024-05-07T06:07")}
    assert after.misses - before.misses == 1
    assert after.hits - before.hits == 9_999


def test_the_same_texts_are_the_same_recurrence_and_other_zones_share_the_expression() -> None:
    london, dublin = (compile_recurrence("8 8 8 * *", zone) for zone in (LONDON, DUBLIN))
    assert compile_recurrence("8 8 8 * *", LONDON) is london
    assert (london.cron_expr, london.timezone) == ("8 8 8 * *", LONDON)
    assert london is not dublin
    assert london._cron is dublin._cron
    assert london._zone is compile_recurrence("9 9 9 * *", LONDON)._zone


def test_every_cache_is_bounded() -> None:
    for cached in (module._next_ms, module._latest_ms, module._compiled):
        assert cached.cache_info().maxsize


def test_a_recurrence_cannot_be_changed() -> None:
    recurrence = compile_recurrence("8 8 8 * *", LONDON)
    with pytest.raises(FrozenInstanceError):
        recurrence.timezone = "UTC"  # type: ignore[misc]


def test_threads_that_share_a_recurrence_all_get_the_right_moments() -> None:
    start, end = ms("2031-01-01T00:00"), ms("2033-01-01T00:00")
    answers: list[list[int]] = []
    barrier = threading.Barrier(8)

    def run() -> None:
        barrier.wait(timeout=10)
        answers.append(list(walk(compile_recurrence("3 3 */3 * 1-5", LONDON), start, end)))

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(answers) == 8
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][::-1] == list(
        walk_back(compile_recurrence("3 3 */3 * 1-5", LONDON), start, end)
    )
