"""Intervals, single moments, limits, hashed fields and jitter; previews and words."""

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any

import pytest
import pytz
from hypothesis import given, settings
from hypothesis import strategies as st

from fairqueue.clock import LATEST_MS, from_ms, to_ms
from fairqueue.errors import (
    ConfigurationError,
    InvalidCron,
    InvalidInput,
    InvalidSchedule,
    UnknownTimezone,
)
from fairqueue.recurrence.cron import parse_cron, resolve_hashed
from fairqueue.recurrence.jitter import jitter_ms
from fairqueue.recurrence.kinds import Recurrence, compile_form, compile_recurrence
from fairqueue.recurrence.moments import (
    MAX_RUNS,
    between,
    describe,
    next_run,
    preview,
    previous_run,
)
from fairqueue.recurrence.windows import MAX_CALENDAR_DATES, MAX_DATES, MAX_WINDOWS, Calendars

DAY_MS = 86_400_000
LONDON, NEW_YORK, LORD_HOWE = "Europe/London", "America/New_York", "Australia/Lord_Howe"


def ms(text: str) -> int:
    """A moment in UTC, unless the text has an offset, in milliseconds."""
    moment = datetime.fromisoformat(text)
    return to_ms(moment if moment.tzinfo else moment.replace(tzinfo=UTC), "text")


def shown(recurrence: Recurrence, moments: list[int]) -> list[str]:
    return [f"{from_ms(at).astimezone(recurrence.zone.tzinfo):%m-%d %H:%M %z}" for at in moments]


def walk(recurrence: Recurrence, from_ms: int, until_ms: int) -> Iterator[int]:
    moment = recurrence.next_ms(from_ms - 1)
    while moment is not None and moment < until_ms:
        yield moment
        moment = recurrence.next_ms(moment)


def check_all_agree(recurrence: Recurrence, start: int, end: int) -> list[int]:
    """Every way to list the moments from a start until before an end gives the same."""
    moments = list(walk(recurrence, start, end))
    assert all(a < b for a, b in pairwise(moments))
    assert recurrence.between(start, end, 10**6) == moments
    assert recurrence.between(start, end, 3) == moments[:3]
    assert recurrence.count(start, end, 10**6) == len(moments)
    assert recurrence.count(start, end, 3) == min(3, len(moments))
    backwards, moment = [], recurrence.previous_ms(end)
    while moment is not None and moment >= start:
        backwards.append(moment)
        moment = recurrence.previous_ms(moment)
    assert backwards == moments[::-1]
    for at in moments[:5]:
        assert recurrence.latest_ms(at) == at
        assert recurrence.next_ms(at - 1) == at
    return moments


# --- kinds ----------------------------------------------------------------------------------------


def test_an_interval_is_counted_from_its_anchor_in_both_directions() -> None:
    recurrence = compile_form({"every": 90_000, "anchor": 1_000_000})
    assert recurrence.next_ms(1_000_000) == 1_090_000
    assert recurrence.next_ms(999_999) == 1_000_000
    assert recurrence.previous_ms(1_000_000) == 910_000
    assert recurrence.latest_ms(1_000_000) == 1_000_000
    assert check_all_agree(recurrence, 0, 2_000_000)[:2] == [10_000, 100_000]


def test_an_interval_is_elapsed_time_over_a_change_of_the_clock() -> None:
    recurrence = compile_form(
        {"every": 12 * 3_600_000, "anchor": ms("2024-03-30T09:00"), "timezone": LONDON}
    )
    moments = recurrence.between(ms("2024-03-30T09:00"), ms("2024-04-01T00:00"), 9)
    assert shown(recurrence, moments) == [
        "03-30 09:00 +0000",
        "03-30 21:00 +0000",
        "03-31 10:00 +0100",
        "03-31 22:00 +0100",
    ]


def test_a_century_of_seconds_is_counted_without_counting() -> None:
    start, end = ms("1971-01-01"), ms("2071-01-01")
    seconds = (end - start) // 1000
    assert compile_form({"every": 1000}).count(start, end, 10**12) == seconds
    assert compile_recurrence("* * * * * *", "UTC").count(start, end, 10**12) == seconds
    assert compile_recurrence("* * * * * *", LONDON).count(start, end, 10**12) == seconds
    assert compile_recurrence("0-59 0-59 0-23 * * *", "UTC").count(start, end, 10**12) == seconds


def test_a_single_moment_is_there_once() -> None:
    recurrence = compile_form({"at": 5_500})
    assert recurrence.next_ms(5_499) == 5_500
    assert recurrence.next_ms(5_500) is None
    assert recurrence.latest_ms(5_500) == 5_500
    assert recurrence.latest_ms(5_499) is None
    assert recurrence.previous_ms(5_500) is None
    assert recurrence.count(5_500, 5_501, 9) == 1
    assert recurrence.count(5_501, 9_000, 9) == recurrence.count(0, 5_500, 9) == 0
    assert recurrence.count(0, 9_000, 0) == 0
    check_all_agree(recurrence, 0, 10_000)


@pytest.mark.parametrize("form", [{"every": 7001, "anchor": 3}, {"at": 0}, {"cron": "* * * * * *"}])
def test_there_is_nothing_before_1970_or_after_9999(form: dict[str, Any]) -> None:
    recurrence = compile_form(form)
    first, last = recurrence.next_ms(-(10**20)), recurrence.latest_ms(10**20)
    assert first is not None
    assert last is not None
    assert 0 <= first <= last <= LATEST_MS
    assert recurrence.next_ms(LATEST_MS) is None
    assert recurrence.latest_ms(-1) is None
    assert recurrence.count(-(10**20), first + 1, 5) == 1
    assert recurrence.count(last, 10**20, 5) == 1
    assert recurrence.count(last + 1, 10**20, 5) == 0


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.integers(1000, 10**10), st.integers(0, LATEST_MS), st.integers(0, 10**13), st.integers(0, 40)
)
def test_an_interval_fires_once_each_time(every: int, anchor: int, start: int, number: int) -> None:
    recurrence = compile_form({"every": every, "anchor": anchor})
    moments = check_all_agree(recurrence, start, start + number * every)
    assert len(moments) == number
    assert all(b - a == every for a, b in pairwise(moments))
    assert all((at - anchor) % every == 0 for at in moments)


# --- forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        {"cron": "0 9 * * 1-5", "timezone": LONDON},
        {"every": 5000, "anchor": 7},
        {"at": 99},
        {"every": 5000, "limits": {"exclude": ["2026-12-25"], "start": 5}},
    ],
)
def test_the_same_form_is_the_same_recurrence_and_survives_json(form: dict[str, Any]) -> None:
    assert compile_form(json.loads(json.dumps(form))) is compile_form(form)


def test_a_form_of_cron_is_the_recurrence_of_its_two_texts() -> None:
    assert compile_form({"cron": "5 4 * * *", "timezone": LONDON}) is compile_recurrence(
        "5 4 * * *", LONDON
    )
    assert compile_form({"cron": "5 4 * * *"}) is compile_recurrence("5 4 * * *", "UTC")


BAD_FORMS = [
    (None, InvalidSchedule, "a rule must be a dict with one of cron, every, at, not None"),
    ("0 9 * * *", InvalidSchedule, "a rule must be a dict"),
    ({}, InvalidSchedule, "one of cron, every, at, not none"),
    ({"at": 5, "every": 5000}, InvalidSchedule, "not every and at"),
    ({"at": 5, "anchor": 5}, InvalidSchedule, "unknown 'anchor' in a rule with 'at'"),
    ({"cron": "* * * * *", "tz": "UTC"}, InvalidSchedule, "unknown 'tz' in a rule with 'cron'"),
    ({"cron": "61 * * * *"}, InvalidCron, "minute must be 0 to 59, not 61"),
    (
        {"cron": None},
        InvalidCron,
        "must be a string such as '0 9 * * 1-5', not None",
    ),
    ({"cron": ["*"]}, InvalidCron, "a cron expression must be a string"),
    ({"cron": "H * * * *"}, InvalidCron, "chosen by a hash of the schedule's id"),
    (
        {"cron": "* * * * *", "timezone": None},
        UnknownTimezone,
        "'UTC', not None",
    ),
    ({"every": 5000, "timezone": "Mars"}, UnknownTimezone, "'Mars' is not in the tz database"),
    ({"at": 5, "timezone": 7}, UnknownTimezone, "timezone must be a name"),
    ({"every": 999}, InvalidSchedule, "milliseconds) must be a whole number from 1000 to"),
    ({"every": 1000.0}, InvalidSchedule, "not 1000.0"),
    ({"every": True}, InvalidSchedule, "True"),
    ({"every": 10**14}, InvalidSchedule, "100000000000000"),
    ({"every": 5000, "anchor": -1}, InvalidSchedule, "not -1"),
    ({"every": 5000, "anchor": 5.0}, InvalidSchedule, "not 5.0"),
    ({"at": LATEST_MS + 1}, InvalidSchedule, "not 253402300799001"),
    ({"at": "tomorrow"}, InvalidSchedule, "not 'tomorrow'"),
]


@pytest.mark.parametrize(("form", "error", "message"), BAD_FORMS)
def test_a_bad_form_names_the_value(form: Any, error: type[Exception], message: str) -> None:
    compile_form({"every": 1000})  # a cache must not let 1000.0 pass for 1000
    with pytest.raises(error, match=re.escape(message)):
        compile_form(form)


# --- limits ---------------------------------------------------------------------------------------


def limited(form: dict[str, Any], known: Calendars | None = None, /, **limits: Any) -> Recurrence:
    full = form | {"limits": limits}
    return compile_form(full) if known is None else compile_form(full, calendars=known)


def hourly(zone: str = "UTC") -> dict[str, Any]:
    return {"cron": "0 * * * *", "timezone": zone}


def test_a_start_belongs_to_what_is_allowed_and_an_end_does_not() -> None:
    start, end = ms("2026-01-01T05:00"), ms("2026-01-01T08:00")
    recurrence = limited(hourly(), start=start, end=end)
    moments = check_all_agree(recurrence, 0, ms("2027-01-01"))
    assert shown(recurrence, moments) == [f"01-01 0{hour}:00 +0000" for hour in (5, 6, 7)]
    assert recurrence.next_ms(moments[-1]) is None
    assert recurrence.latest_ms(LATEST_MS) == moments[-1]
    assert recurrence.latest_ms(start - 1) is None


# Windows, from and until (UTC), zone, and the moments of an hourly schedule.
# 2026-06-01 is a Monday.
OPENINGS = [
    ([{"days": [1, 2], "from": "09:00", "to": "11:00"}], "2026-06-01", "2026-06-09", "UTC",
     ["06-01 09", "06-01 10", "06-02 09", "06-02 10", "06-08 09", "06-08 10"]),
    ([{"from": "22:30", "to": "01:30"}], "2026-06-01T12:00", "2026-06-02T12:00", "UTC",
     ["06-01 23", "06-02 00", "06-02 01"]),
    # The days of a window over midnight are those on which it begins, also over the week's end.
    ([{"days": [7], "from": "22:00", "to": "02:00"}], "2026-06-01", "2026-06-09", "UTC",
     ["06-01 00", "06-01 01", "06-07 22", "06-07 23", "06-08 00", "06-08 01"]),
    ([{"days": [7], "from": "23:00", "to": "00:00"}], "2026-06-01", "2026-06-09", "UTC",
     ["06-07 23"]),
    # Several are a union, whether they overlap, touch or neither.
    ([{"from": "08:00", "to": "10:00"}, {"from": "09:00", "to": "11:00"},
      {"from": "11:00", "to": "12:00"}, {"from": "20:00", "to": "21:00"}],
     "2026-06-01", "2026-06-02", "UTC", ["06-01 08", "06-01 09", "06-01 10", "06-01 11",
                                         "06-01 20"]),
    ([{"days": [3], "to": "02:00"}], "2026-06-01", "2026-06-09", "UTC", ["06-03 00", "06-03 01"]),
    ([{"days": [3], "from": "22:00", "to": "24:00"}], "2026-06-01", "2026-06-09", "UTC",
     ["06-03 22", "06-03 23"]),
    # The zone's own hours and days.
    ([{"days": [1], "from": "00:00", "to": "02:00"}], "2026-05-31", "2026-06-02", "Asia/Tokyo",
     ["06-01 00", "06-01 01"]),
    # A window in a gap is not there, and one in an overlap is there twice.
    ([{"from": "01:00", "to": "02:00"}], "2024-03-30T12:00", "2024-04-01T12:00", LONDON,
     ["04-01 01"]),
    ([{"from": "00:00", "to": "03:00"}], "2024-03-30T12:00", "2024-03-31T12:00", LONDON,
     ["03-31 00", "03-31 02"]),
    ([{"from": "01:00", "to": "02:00"}], "2024-10-26T12:00", "2024-10-27T12:00", LONDON,
     ["10-27 01", "10-27 01"]),
]  # fmt: skip


@pytest.mark.parametrize(("windows", "start", "end", "zone", "expected"), OPENINGS)
def test_the_moments_in_windows_are_those_of_the_table(
    windows: list[dict[str, Any]], start: str, end: str, zone: str, expected: list[str]
) -> None:
    recurrence = limited(hourly(zone), windows=windows)
    moments = check_all_agree(recurrence, ms(start), ms(end))
    assert [text[:8] for text in shown(recurrence, moments)] == expected


def test_a_run_that_a_gap_moved_is_where_the_clock_shows_it() -> None:
    daily = {"cron": "30 2 * * *", "timezone": NEW_YORK}
    start, end = ms("2024-03-10T00:00"), ms("2024-03-11T00:00")
    inside = limited(daily, windows=[{"from": "02:00", "to": "03:00"}])
    after = limited(daily, windows=[{"from": "03:00", "to": "04:00"}])
    assert inside.between(start, end, 9) == []
    assert shown(after, after.between(start, end, 9)) == ["03-10 03:00 -0400"]


def test_excluded_dates_are_dates_of_the_zone() -> None:
    recurrence = limited(hourly("Asia/Tokyo"), exclude=["2026-12-25", "2026-12-26"])
    moments = check_all_agree(recurrence, ms("2026-12-24T13:00"), ms("2026-12-26T17:00"))
    assert shown(recurrence, moments) == [
        "12-24 22:00 +0900",
        "12-24 23:00 +0900",
        "12-27 00:00 +0900",
        "12-27 01:00 +0900",
    ]


def test_calendars_exclude_their_dates_and_a_new_one_holds_at_once() -> None:
    daily = {"cron": "0 9 * * *"}
    first = Calendars({"uk": ["2026-12-25"], "de": ["2026-12-26"], "us": ["2026-12-27"]})
    second = Calendars({"uk": ["2026-12-24"], "de": []})
    found = []
    for known in (first, second):
        recurrence = limited(daily, known, calendars=["uk", "de"])
        moments = check_all_agree(recurrence, ms("2026-12-24"), ms("2026-12-28"))
        found.append([text[:5] for text in shown(recurrence, moments)])
    assert found == [["12-24", "12-27"], ["12-25", "12-26", "12-27"]]
    with pytest.raises(InvalidSchedule, match="calendar 'fr' is unknown: known are de, uk"):
        limited(daily, second, calendars=["fr"])
    with pytest.raises(InvalidSchedule, match="calendar 'uk' is unknown: known are none"):
        limited(daily, calendars=["uk"])


def test_milliseconds_of_an_interval_stay_inside_their_window() -> None:
    recurrence = limited({"every": 1500, "anchor": 500}, windows=[{"from": "09:00", "to": "09:01"}])
    moments = check_all_agree(recurrence, ms("2026-06-01"), ms("2026-06-03"))
    assert len(moments) == 80
    assert all(9 * 3_600_000 <= at % DAY_MS < 9 * 3_600_000 + 60_000 for at in moments)


def test_a_single_moment_outside_its_limits_is_no_moment() -> None:
    at = ms("2026-12-25T09:00")
    assert limited({"at": at}, exclude=["2026-12-25"]).next_ms(0) is None
    assert limited({"at": at}, exclude=["2026-12-24"]).next_ms(0) == at
    assert limited({"at": at}, end=at).latest_ms(at) is None


@pytest.mark.parametrize(
    "form",
    [
        {"cron": "0 3 * * *"},
        {"cron": "* * 3 * * *", "timezone": NEW_YORK},
        {"every": 3_600_000, "anchor": 1_800_000},
    ],
)
def test_a_search_that_finds_nothing_ends(form: dict[str, Any]) -> None:
    windows = [{"from": f"{hour:02}:00", "to": f"{hour:02}:15"} for hour in (9, 11, 13)]
    recurrence = limited(form, windows=windows)
    at = ms("2026-01-01T00:00")
    assert recurrence.next_ms(at) is None
    assert recurrence.latest_ms(at) is None
    assert recurrence.count(0, LATEST_MS, 100) == 0
    with pytest.raises(InvalidSchedule, match="does not fire after 2026-01-01"):
        next_run(recurrence, None, from_ms(at))


def test_every_second_with_a_minute_a_year_is_found() -> None:
    recurrence = limited(
        {"cron": "* * * 1 1 *"}, windows=[{"days": [1], "from": "09:00", "to": "09:01"}]
    )
    # 1 January is a Monday in 2029 for the first time after 2024.
    assert recurrence.next_ms(ms("2024-01-02")) == ms("2029-01-01T09:00")
    assert recurrence.previous_ms(ms("2029-01-01")) == ms("2024-01-01T09:00:59")
    assert recurrence.count(ms("2024-01-01"), ms("2030-01-01"), 1000) == 120


BAD_LIMITS: list[tuple[Any, str]] = [
    (None, "calendars, not None"),
    ([], "calendars, not []"),
    ({"begin": 5}, "limits: unknown 'begin'; known are start, end"),
    ({"start": -1}, "not -1"),
    ({"start": 1.5}, "not 1.5"),
    ({"end": "2026"}, "not '2026'"),
    ({"start": 9, "end": 9}, "end must be after start (9), not 9"),
    ({"windows": []}, "windows must have 1 to 50 items, not 0"),
    ({"windows": {}}, "windows must be a list, not {}"),
    ({"windows": [{}] * (MAX_WINDOWS + 1)}, "windows must have 1 to 50 items, not 51"),
    ({"windows": ["09:00"]}, "windows[0] must be a dict with keys of days, from, to, not '09:00'"),
    ({"windows": [{}, {"day": 1}]}, "windows[1]: unknown 'day'; known are days, from, to"),
    ({"windows": [{"days": []}]}, "windows[0].days must have 1 to 7 items, not 0"),
    ({"windows": [{"days": [0]}]}, "windows[0].days must be a whole number from 1 to 7, not 0"),
    ({"windows": [{"days": ["MON"]}]}, "not 'MON'"),
    ({"windows": [{"days": 5}]}, "windows[0].days must be a list, not 5"),
    ({"windows": [{"from": "9:00"}]}, "windows[0].from must be a time of day such as"),
    ({"windows": [{"to": "24:01"}]}, "not '24:01'"),
    ({"windows": [{"to": 17}]}, "not 17"),
    ({"windows": [{"from": "09:00", "to": "09:00"}]}, "must not be empty, from '09:00' to '09:00'"),
    ({"windows": [{"from": "24:00", "to": "09:00"}]}, "must not be empty"),
    ({"exclude": "2026-12-25"}, "exclude must be a list, not '2026-12-25'"),
    ({"exclude": ["2026-02-30"]}, "exclude must be dates such as '2026-12-25', not '2026-02-30'"),
    ({"exclude": ["20261225"]}, "not '20261225'"),
    ({"exclude": ["2026-W52-5"]}, "exclude must be dates"),
    ({"exclude": [20261225]}, "not 20261225"),
    ({"exclude": ["2026-12-25"] * (MAX_DATES + 1)}, "exclude must have 0 to 500 items, not 501"),
    ({"calendars": "uk"}, "calendars must be a list, not 'uk'"),
    ({"calendars": [""]}, "calendar must be a string of 1 to 200 characters"),
    ({"start": {1}}, "cannot be written as JSON"),
]


@pytest.mark.parametrize(("limits", "message"), BAD_LIMITS)
def test_bad_limits_are_refused_with_the_value(limits: Any, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=re.escape(message)):
        compile_form({"every": 5000, "limits": limits})


@pytest.mark.parametrize(
    ("dates", "message"),
    [
        ({"": []}, "calendar must be a string of 1 to 200 characters"),
        (
            {"uk": ["Christmas"]},
            "calendar 'uk' must be dates such as '2026-12-25'",
        ),
        (
            {"uk": ["2026-12-25"] * (MAX_CALENDAR_DATES + 1)},
            "must have 0 to 10000 items",
        ),
    ],
)
def test_bad_calendars_are_refused_with_the_value(dates: Any, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=re.escape(message)):
        Calendars(dates)


TIMES = st.integers(0, 95).map(lambda quarter: f"{quarter // 4:02}:{quarter % 4 * 15:02}")
WINDOWS = st.fixed_dictionaries(
    {"days": st.lists(st.integers(1, 7), min_size=1, max_size=7), "from": TIMES, "to": TIMES}
).filter(lambda window: window["from"] != window["to"])
CHANGES = [
    (LONDON, "2024-03-29T00:00"),
    (LONDON, "2024-10-25T00:00"),
    (NEW_YORK, "2024-03-08T00:00"),
    (LORD_HOWE, "2024-04-05T00:00"),
    (LORD_HOWE, "2024-10-04T00:00"),
    ("Pacific/Apia", "2011-12-28T00:00"),
    ("America/Havana", "2024-03-09T00:00"),
    ("UTC", "2024-02-27T00:00"),
]
FORMS: list[dict[str, Any]] = [
    {"cron": "*/15 * * * *"},
    {"cron": "7 */2 * * *"},
    {"cron": "0,30 1,2,3 * * *"},
    {"every": 1_700_000, "anchor": 123_456},
]


def is_allowed(at: datetime, windows: list[dict[str, Any]], exclude: list[str]) -> bool:
    """The slow way: what the wall clock shows, compared as texts."""
    if f"{at:%Y-%m-%d}" in exclude:
        return False
    time, today, yesterday = f"{at:%H:%M}", at.isoweekday(), (at - timedelta(days=1)).isoweekday()
    for window in windows:
        first, last, days = window["from"], window["to"], window["days"]
        if first < last:
            if today in days and first <= time < last:
                return True
        elif (today in days and time >= first) or (yesterday in days and time < last):
            return True
    return False


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from(CHANGES),
    st.sampled_from(FORMS),
    st.lists(WINDOWS, min_size=1, max_size=3),
    st.lists(st.integers(0, 6), max_size=2),
)
def test_limited_moments_are_those_of_the_rule_that_the_clock_allows(
    change: tuple[str, str], form: dict[str, Any], windows: list[dict[str, Any]], days: list[int]
) -> None:
    zone, start = change
    begin, end = ms(start), ms(start) + 6 * DAY_MS
    exclude = [f"{from_ms(begin) + timedelta(days=day):%Y-%m-%d}" for day in days]
    rule = compile_form(form | {"timezone": zone})
    tz = pytz.timezone(zone)
    expected = [
        at
        for at in walk(rule, begin, end)
        if is_allowed(from_ms(at).astimezone(tz).replace(tzinfo=None), windows, exclude)
    ]
    recurrence = limited(form | {"timezone": zone}, windows=windows, exclude=exclude)
    assert check_all_agree(recurrence, begin, end) == expected


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.sampled_from([*FORMS, {"cron": "0 0 29 2 *"}, {"at": ms("2024-05-05")}]),
    st.sampled_from([None, {"windows": [{"days": [1, 4], "from": "21:00", "to": "05:00"}]}]),
    st.sampled_from(pytz.common_timezones),
    st.integers(ms("1990-01-01"), ms("2060-01-01")),
)
def test_next_and_previous_leave_nothing_out(
    form: dict[str, Any], limits: dict[str, Any] | None, zone: str, at: int
) -> None:
    form = form | {"timezone": zone} | ({} if limits is None else {"limits": limits})
    recurrence = compile_form(form)
    following, before = recurrence.next_ms(at), recurrence.previous_ms(at)
    if following is not None:
        assert following > at
        back = recurrence.previous_ms(following)
        assert back is None or back <= at
    if before is not None:
        assert before < at
        forth = recurrence.next_ms(before)
        assert forth is None or forth >= at
        if following is not None:
            # None: further away than the nine years that a search looks.
            assert forth in (None, at, following)


# --- hashed fields --------------------------------------------------------------------------------

SEEDS = [f"schedule-{number}" for number in range(400)]

# expression, and what it may become.
HASHED = [
    ("H * * * *", r"([0-9]|[1-5][0-9]) \* \* \* \*"),
    ("H H * * *", r"\d+ \d+ \* \* \*"),
    ("H/15 * * * *", r"([0-9]|1[0-4])-59/15 \* \* \* \*"),
    ("H(0-29) * * * *", r"[12]?[0-9] \* \* \* \*"),
    ("H(0-29)/10 * * * *", r"[0-9]-29/10 \* \* \* \*"),
    ("0 0 H * *", r"0 0 ([1-9]|1[0-9]|2[0-8]) \* \*"),
    ("0 0 H/10 * *", r"0 0 ([1-9]|10)-28/10 \* \*"),
    ("0 0 1 H *", r"0 0 1 ([1-9]|1[0-2]) \*"),
    ("0 0 * * H", r"0 0 \* \* [0-6]"),
    ("0 H(8-16) * * H(MON-FRI)", r"0 ([89]|1[0-6]) \* \* [1-5]"),
    ("H 0 3 * * *", r"[1-5]?[0-9] 0 3 \* \* \*"),
    ("H/40 * * * *", r"[0-3]?[0-9](-59/40)? \* \* \* \*"),
    ("H(0-29),45 * * * THU", r"[12]?[0-9],45 \* \* \* thu"),
]


@pytest.mark.parametrize(("cron_expr", "pattern"), HASHED)
def test_a_hashed_field_becomes_plain_by_the_seed(cron_expr: str, pattern: str) -> None:
    resolved = [resolve_hashed(cron_expr, seed) for seed in SEEDS]
    assert resolved == [resolve_hashed(cron_expr.lower(), seed) for seed in SEEDS]
    assert [text for text in resolved if not re.fullmatch(pattern, text)] == []
    for text in set(resolved):
        parse_cron(text)
    assert len(set(resolved)) > 3


def test_hashed_values_are_spread_over_the_field_and_fields_are_independent() -> None:
    pairs = [resolve_hashed("H H * * *", seed).split()[:2] for seed in SEEDS]
    minutes, hours = Counter(pair[0] for pair in pairs), Counter(pair[1] for pair in pairs)
    assert len(minutes) == 60
    assert len(hours) == 24
    assert max(minutes.values()) < 25
    assert len({tuple(pair) for pair in pairs}) > 300


def test_what_a_seed_decides_stays_the_same_between_releases() -> None:
    assert resolve_hashed("H H H H H H", "a") == "21 5 17 3 10 2"
    assert resolve_hashed("H(0-29)/10 H * * *", "nightly") == "4-29/10 18 * * *"


@pytest.mark.parametrize("cron_expr", ["0 9 * * THU", "@monthly", "  0  9 * * 1 ", "*/5 * * * * *"])
def test_an_expression_without_a_hashed_field_stays_as_it_is(cron_expr: str) -> None:
    assert resolve_hashed(cron_expr, "a") == cron_expr


@pytest.mark.parametrize(
    ("cron_expr", "message"),
    [
        ("H(5-5) * * * *", "minute 'h(5-5)': a range must end after its begin"),
        ("H(9-5) * * * *", "a range must end after its begin"),
        ("H(9) * * * *", "minute 'h(9)' is invalid: write H, H/2, H(0-59) or H(0-59)/2"),
        ("H(0-60) * * * *", "minute must be 0 to 59, not 60"),
        ("H/0 * * * *", "the step must be 1 to 60, not 0"),
        ("H(0-9)/11 * * * *", "the step must be 1 to 10, not 11"),
        ("0 0 H/29 * *", "the step must be 1 to 28, not 29"),
        ("H-30 * * * *", "minute 'h-30' is invalid: write H, H/2"),
        ("R * * * *", "random values are not supported"),
        ("H H * * * * *", "has 7 fields"),
        ("H 0 30 2 *", "never fires"),
        (None, "a cron expression must be a string"),
    ],
)
def test_a_bad_hashed_expression_is_refused_with_the_reason(cron_expr: str, message: str) -> None:
    with pytest.raises(InvalidCron, match=re.escape(message)):
        resolve_hashed(cron_expr, "a")


def test_a_form_is_hashed_by_the_seed_that_it_is_compiled_with() -> None:
    form = {"cron": "H H * * *", "timezone": LONDON}
    assert compile_form(form, seed="a") is compile_recurrence(
        resolve_hashed("H H * * *", "a"), LONDON
    )
    assert compile_form({"cron": "0 9 * * *"}, seed="a") is compile_form({"cron": "0 9 * * *"})
    with pytest.raises(InvalidCron, match="the seed must be a string, not 7"):
        compile_form(form, seed=7)  # type: ignore[arg-type]


# --- jitter ---------------------------------------------------------------------------------------


@settings(deadline=None, derandomize=True)
@given(
    st.text(max_size=20),
    st.integers(0, LATEST_MS),
    st.integers(0, 10**9),
    st.none() | st.integers(1, 10**10),
)
def test_jitter_is_the_same_each_time_within_its_bound_and_before_the_next_moment(
    seed: str, moment: int, most: int, gap: int | None
) -> None:
    following = None if gap is None else moment + gap
    jitter = jitter_ms(seed, moment, most, following)
    assert jitter == jitter_ms(seed, moment, most, following)
    assert 0 <= jitter <= most
    assert following is None or moment + jitter < following


def test_jitter_is_spread_evenly_over_schedules_and_over_moments() -> None:
    for draws in (
        [jitter_ms(f"schedule-{n}", 5000, 9, None) for n in range(5000)],
        [jitter_ms("schedule", n * 1000, 9, None) for n in range(5000)],
        [jitter_ms("schedule", n * 1000, 99, n * 1000 + 10) for n in range(5000)],
    ):
        counts = Counter(draws)
        assert sorted(counts) == list(range(10))
        assert all(400 < count < 600 for count in counts.values())


# --- datetimes in, datetimes out ------------------------------------------------------------------


def test_every_function_takes_an_expression_a_form_or_a_recurrence() -> None:
    after, until = datetime(2026, 6, 1, tzinfo=UTC), datetime(2026, 6, 3, tzinfo=UTC)
    form = {"cron": "0 9 * * *", "timezone": LONDON}
    specs: list[tuple[Any, str | None]] = [
        ("0 9 * * *", LONDON),
        (form, None),
        (compile_form(form), None),
    ]
    for spec, zone in specs:
        assert next_run(spec, zone, after).isoformat() == "2026-06-01T09:00:00+01:00"
        found = previous_run(spec, zone, after)
        assert found is not None
        assert found.isoformat() == "2026-05-31T09:00:00+01:00"
        assert [at.day for at in between(spec, zone, after, until)] == [1, 2]
        assert [run.local.day for run in preview(spec, 2, after, timezone=zone)] == [1, 2]
        assert describe(spec, zone) == "At 09:00 (Europe/London)"


def test_between_includes_its_start_and_excludes_its_end_to_the_microsecond() -> None:
    start, tick = datetime(2026, 6, 1, tzinfo=UTC), timedelta(microseconds=1)
    second = timedelta(seconds=1)

    def found(first: datetime, last: datetime) -> int:
        return len(between("* * * * * *", "UTC", first, last))

    assert found(start, start + 3 * second) == 3
    assert found(start + tick, start + 3 * second) == 2
    assert found(start, start + 3 * second + tick) == 4
    assert found(start, start) == 0
    assert len(between("* * * * * *", "UTC", start, start + 99 * second, 7)) == 7


def test_bad_arguments_are_refused_with_the_value() -> None:
    now = datetime(2026, 6, 1, tzinfo=UTC)
    with pytest.raises(InvalidInput, match=r"limit must .*not 0"):
        between("* * * * *", "UTC", now, now, 0)
    with pytest.raises(InvalidInput, match=r"limit must .*not 10001"):
        between("* * * * *", "UTC", now, now, MAX_RUNS + 1)
    with pytest.raises(InvalidInput, match=r"n must .*not True"):
        preview("* * * * *", True, now)
    with pytest.raises(
        InvalidInput, match=r"end must be a datetime with a time zone.*'2026-06-01T"
    ):
        between("* * * * *", "UTC", now, datetime(2026, 6, 1))
    with pytest.raises(InvalidSchedule, match="timezone must be None for a form"):
        next_run({"at": 5}, "UTC", now)
    with pytest.raises(InvalidSchedule, match="does not fire after 2026"):
        next_run({"at": 5}, None, now)
    with pytest.raises(UnknownTimezone, match="'UTC', not None"):
        between("* * * * *", None, now, now)


def preview_of(cron_expr: str, zone: str, after: str, n: int) -> list[tuple[str, str, bool, str]]:
    runs = preview(cron_expr, n, from_ms(ms(after)), timezone=zone)
    for run in runs:
        assert run.utc == run.local
        assert run.utc.utcoffset() == timedelta(0)
        assert run.local.isoformat().endswith(run.offset)
    return [
        (f"{run.local:%m-%d %H:%M} {run.offset}", run.shift, run.offset_changed, run.note)
        for run in runs
    ]


def test_a_preview_says_where_a_gap_moves_a_run() -> None:
    assert preview_of("30 2 * * *", NEW_YORK, "2024-03-09T00:00", 3) == [
        ("03-09 02:30 -05:00", "", False, ""),
        (
            "03-10 03:00 -04:00",
            "gap",
            True,
            "02:30 is skipped, as the clock goes from 02:00 to 03:00: runs at the end of the gap; "
            "UTC-04:00, after UTC-05:00 before",
        ),
        ("03-11 02:30 -04:00", "", False, ""),
    ]


def test_a_preview_says_which_of_two_a_run_in_an_overlap_is() -> None:
    twice = "01:30 occurs twice, as the clock goes back: runs the"
    assert preview_of("30 1 * * *", NEW_YORK, "2024-11-03T00:00", 2) == [
        ("11-03 01:30 -04:00", "first", False, f"{twice} first time, and only then"),
        ("11-04 01:30 -05:00", "", True, "UTC-05:00, after UTC-04:00 before"),
    ]
    assert preview_of("30 * * * *", NEW_YORK, "2024-11-03T05:00", 3) == [
        ("11-03 01:30 -04:00", "first", False, f"{twice} first time"),
        (
            "11-03 01:30 -05:00",
            "second",
            True,
            f"{twice} second time; UTC-05:00, after UTC-04:00 before",
        ),
        ("11-03 02:30 -05:00", "", False, ""),
    ]


def test_a_preview_has_no_gap_where_nothing_was_skipped() -> None:
    assert [run[1:3] for run in preview_of("0 3 * * *", NEW_YORK, "2024-03-10T00:00", 1)] == [
        ("", True)
    ]
    assert [run[1:3] for run in preview_of("0 * * * *", NEW_YORK, "2024-03-10T06:30", 1)] == [
        ("", True)
    ]


def test_a_preview_sees_through_limits_and_ends_with_the_last_run() -> None:
    form = {
        "cron": "30 1 * * *",
        "timezone": LONDON,
        "limits": {"end": ms("2024-03-31T12:00"), "exclude": ["2024-03-30"]},
    }
    runs = preview(form, 5, from_ms(ms("2024-03-29T00:00")))
    assert [(f"{run.local:%d %H:%M}", run.shift) for run in runs] == [
        ("29 01:30", ""),
        ("31 02:00", "gap"),
    ]
    assert preview(form, 5, from_ms(ms("2025-01-01"))) == []
    once = preview({"at": ms("2024-10-27T01:30"), "timezone": LONDON}, 5, from_ms(0))
    assert [run.shift for run in once] == ["second"]


# --- words ----------------------------------------------------------------------------------------

WORDS: list[tuple[Any, str]] = [
    ("0 9 * * 1-5", "At 09:00, Monday through Friday"),
    ("00 09 01 * ?", "At 09:00, on day 1 of the month"),
    ("30 0 9 * * *", "At 09:00:30"),
    ("*/20 * * * * *", "Every 20 seconds"),
    ("*/15 9-17 * * *", "Every 15 minutes, between 09:00 and 17:59"),
    ("@daily", "At 00:00"),
    ("@hourly", "Every hour"),
    ("@weekly", "At 00:00, only on Sunday"),
    ("0 0 * * 0-7", "At 00:00"),
    ("0 0 L * *", "At 00:00, on the last day of the month"),
    ("0 0 1,15,L * *",
     "At 00:00, on day 1 and 15 of the month; at 00:00, on the last day of the month"),
    ("0 0 * * L5", "At 00:00, on the last Friday of the month"),
    ("0 9 * * MON#1,MON#3",
     "At 09:00, on the first Monday of the month; at 09:00, on the third Monday of the month"),
    ("0 0 * * 1/2", "At 00:00, only on Monday, Wednesday, and Friday"),
    ("0 0 * * SAT-SUN", "At 00:00, Saturday through Sunday"),
    # Two restricted day fields are alternatives, unless one begins with a star.
    ("0 0 15 * 1-5", "At 00:00, on day 15 of the month; at 00:00, Monday through Friday"),
    ("0 0 10 3 1#1",
     "At 00:00, on day 10 of the month, only in March; "
     "at 00:00, on the first Monday of the month, only in March"),
    ("0 0 */2 * 2", "At 00:00, every 2 days, only on Tuesday"),
    ("0 0 5 * 0-6", "At 00:00"),
    ({"cron": "0 9 * * *", "timezone": LONDON}, "At 09:00 (Europe/London)"),
    ({"every": 3_600_000}, "Every hour, counted from 1970-01-01 00:00:00+00:00"),
    ({"every": 5_400_000, "anchor": 0},
     "Every 1 hour 30 minutes, counted from 1970-01-01 00:00:00+00:00"),
    ({"every": 172_800_000, "anchor": 0, "timezone": "Asia/Tokyo"},
     "Every 2 days, counted from 1970-01-01 09:00:00+09:00"),
    ({"at": ms("2026-06-01T08:00"), "timezone": LONDON}, "Once, at 2026-06-01 09:00:00+01:00"),
    (
        {
            "cron": "0 * * * *",
            "limits": {
                "start": 0,
                "end": ms("2027-01-01"),
                "windows": [{"days": [5, 1], "from": "09:00", "to": "17:30"}, {"from": "22:00"}],
                "exclude": ["2026-12-26", "2026-12-25"],
            },
        },
        "Every hour (UTC); from 1970-01-01 00:00:00+00:00 on; before 2027-01-01 00:00:00+00:00; "
        "only Monday and Friday 09:00 to 17:30, and 22:00 to 24:00; "
        "not on 2026-12-25 and 2026-12-26",
    ),
    (
        {"every": 1000, "limits": {"exclude": [f"2026-01-0{day}" for day in range(1, 9)]}},
        "Every second, counted from 1970-01-01 00:00:00+00:00; not on 2026-01-01, 2026-01-02, "
        "2026-01-03, 2026-01-04, 2026-01-05 and 3 more dates",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "words"), WORDS)
def test_a_schedule_is_described_in_plain_words(spec: Any, words: str) -> None:
    assert describe(spec) == words


def test_a_hashed_expression_is_described_as_what_it_became() -> None:
    assert describe(compile_form({"cron": "H H * * *"}, seed="a")) == "At 17:05 (UTC)"
    with pytest.raises(InvalidCron, match="pass it as the seed"):
        describe("H H * * *")


def test_calendars_are_named_in_words() -> None:
    recurrence = limited({"at": 0}, Calendars({"uk": [], "de": []}), calendars=["uk", "de"])
    assert describe(recurrence) == (
        "Once, at 1970-01-01 00:00:00+00:00; not on the dates of uk and de"
    )


def test_an_expression_is_described_in_the_language_that_is_asked_for() -> None:
    assert describe("*/5 * * * *", locale="de_DE") == "Alle 5 Minuten"
    for locale in ("xx_XX", "de", "../../etc/passwd", "", None):
        with pytest.raises(InvalidInput, match=r"is unknown: known are .*de_DE.*en_US"):
            describe("*/5 * * * *", locale=locale)  # type: ignore[arg-type]


def test_every_expression_that_is_read_has_words() -> None:
    for seed in SEEDS:
        text = resolve_hashed("H/20 H(0-20)/6 H H(1-5)/2 H", seed)
        assert describe(text).startswith("Every 20 minutes")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cron_descriptor", None)
    with pytest.raises(ConfigurationError, match=re.escape("pip install 'fairqueue[cli]'")):
        describe("* * * * *")
    assert describe({"at": 0}).startswith("Once")
