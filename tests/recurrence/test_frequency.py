"""How often, in words: what each word means in cron and on the clock, and what is refused."""

import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import InvalidCron
from fairqueue.recurrence import frequency as module
from fairqueue.recurrence.frequency import (
    EVERY_DAY,
    EVERY_HOUR,
    EVERY_MINUTE,
    EVERY_MONTH,
    EVERY_WEEK,
    Frequency,
    as_cron,
    every,
    from_fields,
    symbolic,
)
from fairqueue.recurrence.kinds import compile_recurrence
from fairqueue.recurrence.moments import next_run

PAGE = Path(__file__).parents[2] / "docs" / "frequency.md"

START = datetime(2026, 1, 14, 10, 17, 42, tzinfo=UTC)  # a Wednesday


def first_moments(cron: str, count: int = 3, start: datetime = START) -> list[str]:
    moments = []
    for _ in range(count):
        start = next_run(cron, "UTC", start)
        moments.append(f"{start:%Y-%m-%d %H:%M:%S}")
    return moments


def fires_at(cron: str, moment: datetime) -> bool:
    moment_ms = to_ms(moment, "moment")
    return compile_recurrence(cron, "UTC").latest_ms(moment_ms) == moment_ms


def said(words: str) -> str:
    """The expression of a builder that is written out."""
    return str(eval(words, {"every": every}))


def tried(make: Callable[[], str]) -> tuple[str, str]:
    """The expression, or why it was refused."""
    try:
        return make(), ""
    except InvalidCron as error:
        return "", str(error)


# --- each helper ----------------------------------------------------------------------------------

# The helper of Job2, ours, its cron text, and the first moments after START.
# fmt: off
HELPERS = [
    ("everySecond()", "every().second", "* * * * * *",
     ["2026-01-14 10:17:43", "2026-01-14 10:17:44", "2026-01-14 10:17:45"]),
    ("everyTwoSeconds()", "every().two_seconds", "*/2 * * * * *",
     ["2026-01-14 10:17:44", "2026-01-14 10:17:46", "2026-01-14 10:17:48"]),
    ("everyFiveSeconds()", "every().five_seconds", "*/5 * * * * *",
     ["2026-01-14 10:17:45", "2026-01-14 10:17:50", "2026-01-14 10:17:55"]),
    ("everyTenSeconds()", "every().ten_seconds", "*/10 * * * * *",
     ["2026-01-14 10:17:50", "2026-01-14 10:18:00", "2026-01-14 10:18:10"]),
    ("everyFifteenSeconds()", "every().fifteen_seconds", "*/15 * * * * *",
     ["2026-01-14 10:17:45", "2026-01-14 10:18:00", "2026-01-14 10:18:15"]),
    ("everyTwentySeconds()", "every().twenty_seconds", "*/20 * * * * *",
     ["2026-01-14 10:18:00", "2026-01-14 10:18:20", "2026-01-14 10:18:40"]),
    ("everyThirtySeconds()", "every().thirty_seconds", "*/30 * * * * *",
     ["2026-01-14 10:18:00", "2026-01-14 10:18:30", "2026-01-14 10:19:00"]),
    ("everyMinute()", "every().minute", "* * * * *",
     ["2026-01-14 10:18:00", "2026-01-14 10:19:00", "2026-01-14 10:20:00"]),
    ("everyTwoMinutes()", "every().two_minutes", "*/2 * * * *",
     ["2026-01-14 10:18:00", "2026-01-14 10:20:00", "2026-01-14 10:22:00"]),
    ("everyThreeMinutes()", "every().three_minutes", "*/3 * * * *",
     ["2026-01-14 10:18:00", "2026-01-14 10:21:00", "2026-01-14 10:24:00"]),
    ("everyFourMinutes()", "every().four_minutes", "*/4 * * * *",
     ["2026-01-14 10:20:00", "2026-01-14 10:24:00", "2026-01-14 10:28:00"]),
    ("everyFiveMinutes()", "every().five_minutes", "*/5 * * * *",
     ["2026-01-14 10:20:00", "2026-01-14 10:25:00", "2026-01-14 10:30:00"]),
    ("everyTenMinutes()", "every().ten_minutes", "*/10 * * * *",
     ["2026-01-14 10:20:00", "2026-01-14 10:30:00", "2026-01-14 10:40:00"]),
    ("everyFifteenMinutes()", "every().fifteen_minutes", "*/15 * * * *",
     ["2026-01-14 10:30:00", "2026-01-14 10:45:00", "2026-01-14 11:00:00"]),
    ("everyTwentyMinutes()", "every().twenty_minutes", "*/20 * * * *",
     ["2026-01-14 10:20:00", "2026-01-14 10:40:00", "2026-01-14 11:00:00"]),
    ("everyThirtyMinutes()", "every().thirty_minutes", "*/30 * * * *",
     ["2026-01-14 10:30:00", "2026-01-14 11:00:00", "2026-01-14 11:30:00"]),
    ("everyHour()", "every().hour", "0 * * * *",
     ["2026-01-14 11:00:00", "2026-01-14 12:00:00", "2026-01-14 13:00:00"]),
    ("hourly()", "every().hourly", "0 * * * *",
     ["2026-01-14 11:00:00", "2026-01-14 12:00:00", "2026-01-14 13:00:00"]),
    ("hourlyAt(17)", "every().hourly_at(17)", "17 * * * *",
     ["2026-01-14 11:17:00", "2026-01-14 12:17:00", "2026-01-14 13:17:00"]),
    ("everyOddHour()", "every().odd_hour", "0 1-23/2 * * *",
     ["2026-01-14 11:00:00", "2026-01-14 13:00:00", "2026-01-14 15:00:00"]),
    ("everyTwoHours()", "every().two_hours", "0 */2 * * *",
     ["2026-01-14 12:00:00", "2026-01-14 14:00:00", "2026-01-14 16:00:00"]),
    ("everyThreeHours()", "every().three_hours", "0 */3 * * *",
     ["2026-01-14 12:00:00", "2026-01-14 15:00:00", "2026-01-14 18:00:00"]),
    ("everyFourHours()", "every().four_hours", "0 */4 * * *",
     ["2026-01-14 12:00:00", "2026-01-14 16:00:00", "2026-01-14 20:00:00"]),
    ("everySixHours()", "every().six_hours", "0 */6 * * *",
     ["2026-01-14 12:00:00", "2026-01-14 18:00:00", "2026-01-15 00:00:00"]),
    ("everyEightHours()", "every().eight_hours", "0 */8 * * *",
     ["2026-01-14 16:00:00", "2026-01-15 00:00:00", "2026-01-15 08:00:00"]),
    ("everyTwelveHours()", "every().twelve_hours", "0 */12 * * *",
     ["2026-01-14 12:00:00", "2026-01-15 00:00:00", "2026-01-15 12:00:00"]),
    ("everyDay()", "every().day", "0 0 * * *",
     ["2026-01-15 00:00:00", "2026-01-16 00:00:00", "2026-01-17 00:00:00"]),
    ("daily()", "every().daily", "0 0 * * *",
     ["2026-01-15 00:00:00", "2026-01-16 00:00:00", "2026-01-17 00:00:00"]),
    ("dailyAt('13:00')", 'every().daily_at("13:00")', "0 13 * * *",
     ["2026-01-14 13:00:00", "2026-01-15 13:00:00", "2026-01-16 13:00:00"]),
    ("twiceDaily(1, 13)", "every().twice_daily(1, 13)", "0 1,13 * * *",
     ["2026-01-14 13:00:00", "2026-01-15 01:00:00", "2026-01-15 13:00:00"]),
    ("twiceDailyAt(1, 13, 15)", "every().twice_daily(1, 13, 15)", "15 1,13 * * *",
     ["2026-01-14 13:15:00", "2026-01-15 01:15:00", "2026-01-15 13:15:00"]),
    ("weekly()", "every().weekly", "0 0 * * 0",
     ["2026-01-18 00:00:00", "2026-01-25 00:00:00", "2026-02-01 00:00:00"]),
    ("weeklyOn(1, '8:00')", 'every().weekly_on(1, "8:00")', "0 8 * * 1",
     ["2026-01-19 08:00:00", "2026-01-26 08:00:00", "2026-02-02 08:00:00"]),
    ("monthly()", "every().monthly", "0 0 1 * *",
     ["2026-02-01 00:00:00", "2026-03-01 00:00:00", "2026-04-01 00:00:00"]),
    ("monthlyOn(4, '15:00')", 'every().monthly_on(4, "15:00")', "0 15 4 * *",
     ["2026-02-04 15:00:00", "2026-03-04 15:00:00", "2026-04-04 15:00:00"]),
    ("twiceMonthly(1, 16, '13:00')", 'every().twice_monthly(1, 16, "13:00")', "0 13 1,16 * *",
     ["2026-01-16 13:00:00", "2026-02-01 13:00:00", "2026-02-16 13:00:00"]),
    ("lastDayOfMonth('15:00')", 'every().last_day_of_month.at("15:00")', "0 15 L * *",
     ["2026-01-31 15:00:00", "2026-02-28 15:00:00", "2026-03-31 15:00:00"]),
    ("quarterly()", "every().quarterly", "0 0 1 */3 *",
     ["2026-04-01 00:00:00", "2026-07-01 00:00:00", "2026-10-01 00:00:00"]),
    ("quarterlyOn(4, '14:00')", 'every().quarterly_on(4, "14:00")', "0 14 4 */3 *",
     ["2026-04-04 14:00:00", "2026-07-04 14:00:00", "2026-10-04 14:00:00"]),
    ("yearly()", "every().yearly", "0 0 1 1 *",
     ["2027-01-01 00:00:00", "2028-01-01 00:00:00", "2029-01-01 00:00:00"]),
    ("yearlyOn(6, 1, '17:00')", 'every().yearly_on(6, 1, "17:00")', "0 17 1 6 *",
     ["2026-06-01 17:00:00", "2027-06-01 17:00:00", "2028-06-01 17:00:00"]),
    ("weekdays()", "every().weekdays", "0 0 * * 1-5",
     ["2026-01-15 00:00:00", "2026-01-16 00:00:00", "2026-01-19 00:00:00"]),
    ("weekends()", "every().weekends", "0 0 * * 0,6",
     ["2026-01-17 00:00:00", "2026-01-18 00:00:00", "2026-01-24 00:00:00"]),
    ("mondays()", "every().mondays", "0 0 * * 1",
     ["2026-01-19 00:00:00", "2026-01-26 00:00:00", "2026-02-02 00:00:00"]),
    ("tuesdays()", "every().tuesdays", "0 0 * * 2",
     ["2026-01-20 00:00:00", "2026-01-27 00:00:00", "2026-02-03 00:00:00"]),
    ("wednesdays()", "every().wednesdays", "0 0 * * 3",
     ["2026-01-21 00:00:00", "2026-01-28 00:00:00", "2026-02-04 00:00:00"]),
    ("thursdays()", "every().thursdays", "0 0 * * 4",
     ["2026-01-15 00:00:00", "2026-01-22 00:00:00", "2026-01-29 00:00:00"]),
    ("fridays()", "every().fridays", "0 0 * * 5",
     ["2026-01-16 00:00:00", "2026-01-23 00:00:00", "2026-01-30 00:00:00"]),
    ("saturdays()", "every().saturdays", "0 0 * * 6",
     ["2026-01-17 00:00:00", "2026-01-24 00:00:00", "2026-01-31 00:00:00"]),
    ("sundays()", "every().sundays", "0 0 * * 0",
     ["2026-01-18 00:00:00", "2026-01-25 00:00:00", "2026-02-01 00:00:00"]),
    ("seconds([0, 30])", "every().minute.seconds(0, 30)", "0,30 * * * * *",
     ["2026-01-14 10:18:00", "2026-01-14 10:18:30", "2026-01-14 10:19:00"]),
    ("minutes([5, 35])", "every().hourly.minutes(5, 35)", "5,35 * * * *",
     ["2026-01-14 10:35:00", "2026-01-14 11:05:00", "2026-01-14 11:35:00"]),
    ("hours([9, 12, 15, 18])", "every().daily.hours(9, 12, 15, 18)", "0 9,12,15,18 * * *",
     ["2026-01-14 12:00:00", "2026-01-14 15:00:00", "2026-01-14 18:00:00"]),
    ("days([1, 15])", "every().daily.days(1, 15)", "0 0 1,15 * *",
     ["2026-01-15 00:00:00", "2026-02-01 00:00:00", "2026-02-15 00:00:00"]),
    ("months([1, 7])", "every().monthly.months(1, 7)", "0 0 1 1,7 *",
     ["2026-07-01 00:00:00", "2027-01-01 00:00:00", "2027-07-01 00:00:00"]),
    ("daily()->hours(9)->days([1, 15])->months([1, 7])",
     "every().daily.hours(9).days(1, 15).months(1, 7)", "0 9 1,15 1,7 *",
     ["2026-01-15 09:00:00", "2026-07-01 09:00:00", "2026-07-15 09:00:00"]),
    ("everyFiveMinutes()->hours([9, …, 17])->weekdays()",
     "every().five_minutes.hours(range(9, 18)).weekdays", "*/5 9-17 * * 1-5",
     ["2026-01-14 10:20:00", "2026-01-14 10:25:00", "2026-01-14 10:30:00"]),
]
# fmt: on


@pytest.mark.parametrize(("job2", "words", "cron", "moments"), HELPERS)
def test_a_helper_has_exact_times(job2: str, words: str, cron: str, moments: list[str]) -> None:
    assert said(words) == cron
    assert first_moments(cron) == moments


def test_the_page_lists_these_helpers() -> None:
    rows = re.findall(r"^\| `(.+?)` \| `(every.+?)` \| `(.+?)` \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == [row[:3] for row in HELPERS]


def test_each_word_without_arguments_is_a_helper_in_the_list() -> None:
    words = {
        name
        for name, value in vars(Frequency).items()
        if isinstance(value, module._Frequent | module._On)
    }
    listed = set(re.findall(r"every\(\)\.(\w+)", " ".join(row[1] for row in HELPERS)))
    assert words - listed == {"week", "month", "quarter", "year"}


@pytest.mark.parametrize(
    ("noun", "adverb"),
    [("hour", "hourly"), ("day", "daily"), ("week", "weekly"), ("month", "monthly"),
     ("quarter", "quarterly"), ("year", "yearly")],
)  # fmt: skip
def test_nouns_and_adverbs_mean_the_same(noun: str, adverb: str) -> None:
    assert said(f"every().{noun}") == said(f"every().{adverb}")


@pytest.mark.parametrize(
    ("text", "cron"),
    [
        ("every().twice_daily()", "0 1,13 * * *"),
        ("every().weekly_on(1)", "0 0 * * 1"),
        ("every().monthly_on()", "0 0 1 * *"),
        ("every().twice_monthly()", "0 0 1,16 * *"),
        ("every().quarterly_on()", "0 0 1 */3 *"),
        ("every().yearly_on()", "0 0 1 1 *"),
    ],
)
def test_what_is_left_out_is_the_first_hour_or_day(text: str, cron: str) -> None:
    assert said(text) == cron


def test_a_word_may_be_written_as_a_call() -> None:
    called = every().five_minutes().weekdays().hours(9)
    assert called == every().five_minutes.weekdays.hours(9)
    assert called.cron == str(called) == "*/5 9 * * 1-5"


@pytest.mark.parametrize(
    ("words", "cron"),
    [
        # one argument of every()
        ("every(seconds=1)", "* * * * * *"),
        ("every(seconds=12)", "*/12 * * * * *"),
        ("every(minutes=1)", "* * * * *"),
        ("every(minutes=6).weekdays", "*/6 * * * 1-5"),
        ("every(hours=8)", "0 */8 * * *"),
        ("every(days=1).at('07:00')", "0 7 * * *"),
        ("every(weeks=1).mondays", "0 0 * * 1"),
        ("every(months=2)", "0 0 1 */2 *"),
        ("every(years=1)", "0 0 1 1 *"),
        # without a frequency, what is finer than all that is named is at its start
        ("every().seconds(0, 20)", "0,20 * * * * *"),
        ("every().minutes(30)", "30 * * * *"),
        ("every().hours(9, 17)", "0 9,17 * * *"),
        ("every().hours(9, 17).weekends", "0 9,17 * * 0,6"),
        ("every().days(15)", "0 0 15 * *"),
        ("every().days(1, 15).months(3)", "0 0 1,15 3 *"),
        ("every().months(3)", "0 0 1 3 *"),
        ("every().mondays.months(3)", "0 0 * 3 1"),
        ("every().at('09:30')", "30 9 * * *"),
        ("every().at('09:30').seconds(15)", "15 30 9 * * *"),
        # narrowing
        ("every().second.minutes(0)", "* 0 * * * *"),
        ("every().five_minutes.seconds(30)", "30 */5 * * * *"),
        ("every().hourly.hours(9, 17)", "0 9,17 * * *"),
        ("every().weekly.at('08:00').fridays", "0 8 * * 5"),
        ("every().day.months(12)", "0 0 * 12 *"),
        ("every().month.days(10).at('06:00:30')", "30 0 6 10 * *"),
        ("every().day.at('09:00', '17:00')", "0 9,17 * * *"),
        ("every().day.at('9:00', '9:30', '17:00', '17:30')", "0,30 9,17 * * *"),
        # days of the week add up
        ("every().mondays.wednesdays.fridays", "0 0 * * 1,3,5"),
        ("every().weekdays.saturdays", "0 0 * * 1-6"),
        ("every().weekdays.weekends", "0 0 * * *"),
        ("every().weekly_on([1, 7])", "0 0 * * 0,1"),
        # numbers as they come
        ("every().hours([17, 9])", "0 9,17 * * *"),
        ("every().hours(11, 9, 10)", "0 9-11 * * *"),
        ("every().hours({9, 10}, range(12, 16))", "0 9,10,12-15 * * *"),
        ("every().hours(range(24)).minutes(0)", "0 * * * *"),
        ("every().days(range(1, 32)).mondays", "0 0 * * 1"),
        # days of the month and of the week, where cron can require both
        ("every().days(range(1, 8)).mondays.at('09:00')", "0 9 * * 1#1"),
        ("every().days(range(8, 22)).tuesdays.fridays", "0 0 * * 2#2,5#2,2#3,5#3"),
        ("every().days(29, 30, 31).sundays", "0 0 * * 0#5"),
        ("every().weekly.days(range(1, 8))", "0 0 * * 0#1"),
    ],
)
def test_words_combine(words: str, cron: str) -> None:
    assert said(words) == cron


def test_a_frequency_is_never_changed() -> None:
    weekdays = every().five_minutes.weekdays
    weekdays.hours(9)
    assert weekdays.cron == "*/5 * * * 1-5"
    with pytest.raises(FrozenInstanceError):
        weekdays._base = None  # type: ignore[misc]


def test_a_frequency_shows_what_it_says_even_before_it_says_enough() -> None:
    assert repr(every()) == "<Frequency not set>"
    assert repr(every(minutes=5).hours(range(9, 18)).mondays) == (
        "<Frequency every(minutes=5), hours 9-17, days of the week 1>"
    )


# --- what the builder refuses ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        # contradictions, in either order
        ("every().hourly.daily", "hourly and daily contradict each other"),
        ("every(minutes=5).hourly", r"every\(minutes=5\) and hourly contradict"),
        ("every().daily_at('09:00').weekly", "daily and weekly contradict"),
        ("every().hourly.at('09:30')", r"hourly and at\(\) contradict each other"),
        ("every().at('09:30').hourly", r"hourly and at\(\) contradict each other"),
        ("every().minute.at('09:30')", r"minute and at\(\) contradict each other"),
        ("every().five_minutes.minutes(0)", "five_minutes already sets the minutes: leave out 0"),
        ("every().minutes(0, 30).five_minutes", "five_minutes already sets the minutes"),
        ("every().odd_hour.hours(8)", "odd_hour already sets the hours"),
        ("every().quarterly.months(2)", "quarterly already sets the months"),
        ("every().last_day_of_month.days(5)", "last_day_of_month already sets the days"),
        ("every().hours(9).hours(17)", "hours are set twice, first to 9"),
        ("every().hours(9).at('10:00')", "hours are set twice, first to 9"),
        ("every().twice_daily(9, 9)", "hours 9 is given twice"),
        ("every().weekly_on([0, 7])", "days of the week 7 is given twice"),
        # out of range, or no numbers
        ("every().seconds(60)", "seconds must be a whole number from 0 to 59, not 60"),
        ("every().minutes(61)", "minutes must be a whole number from 0 to 59, not 61"),
        ("every().hours(24)", "hours must be a whole number from 0 to 23, not 24"),
        ("every().hours(-1)", "hours must be a whole number from 0 to 23, not -1"),
        ("every().hours(range(10**30))", "hours must be a whole number .*, not 24"),
        ("every().days(0)", "days must be a whole number from 1 to 31, not 0"),
        ("every().months(13)", "months must be a whole number from 1 to 12, not 13"),
        ("every().weekly_on(8)", "days of the week must be a whole number from 0 to 7, not 8"),
        ("every().hours('9-17')", "hours must be a whole number .*, not '9-17'"),
        ("every().hours(True)", "hours must be a whole number .*, not True"),
        ("every().hours(9.0)", "hours must be a whole number .*, not 9.0"),
        ("every().hours([[9]])", r"hours must be a whole number .*, not \[9\]"),
        ("every().hours(None)", "hours must be a whole number .*, not None"),
        # nothing named
        ("every()", r"every\(\) needs a frequency: write every\(\)\.day"),
        ("every().hours()", "hours must have at least one value from 0 to 23"),
        ("every().days([])", "days must have at least one value from 1 to 31"),
        ("every().day.at()", r"at\(\) needs a time"),
        # times
        ("every().day.at('24:00')", "a time of day must be .* not '24:00'"),
        ("every().day.at('09:60')", "a time of day must be .* not '09:60'"),
        ("every().day.at('09:00:60')", "a time of day must be .* not '09:00:60'"),
        (
            "every().day.at('9')",
            "a time of day must be '00:00' to '23:59', or with seconds, not '9'",
        ),
        ("every().day.at('9:00 pm')", "a time of day must be .* not '9:00 pm'"),
        ("every().day.at('٠٩:00')", "a time of day must be"),
        ("every().day.at(9)", "a time of day must be .* not 9"),
        ("every().day.at('09:00', '17:30')", "is more than one cron expression"),
        # days that cron would make an "or" of, and days that never come
        ("every().monthly.fridays", "day of month '1' and day of week '5' cannot both"),
        ("every().days(range(1, 9)).mondays", "day of month '1-8' and day of week '1' cannot both"),
        ("every().last_day_of_month.fridays", "day of month 'L' and day of week '5' cannot both"),
        ("every().days(31).months(2, 4)", "'0 0 31 2,4 \\*' never fires"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: str, message: str) -> None:
    with pytest.raises(InvalidCron, match=message):
        said(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("every(seconds=45)", r"every=timedelta\(seconds=45\); cron allows 1, 2, 3, 4, 5, 6"),
        ("every(minutes=7)", r"every 7 minutes cannot .* every=timedelta\(minutes=7\)"),
        ("every(minutes=60)", r"every=timedelta\(minutes=60\)"),
        ("every(minutes=90)", r"every=timedelta\(minutes=90\)"),
        ("every(hours=5)", r"every=timedelta\(hours=5\); cron allows 1, 2, 3, 4, 6, 8, 12"),
        ("every(days=2)", r"every=timedelta\(days=2\); cron allows 1$"),
        ("every(weeks=2)", r"every=timedelta\(weeks=2\)"),
        ("every(months=5)", r"name them with months\(...\); cron allows 1, 2, 3, 4, 6"),
        ("every(years=2)", "every 2 years cannot .* one-time schedules"),
        ("every(minutes=0)", "every minutes must be a whole number from 1 to .*, not 0"),
        ("every(minutes=2.5)", "every minutes must be a whole number .*, not 2.5"),
        (
            "every(hours=1, minutes=30)",
            r"must have one unit, not minutes and hours: .* every=timedelta\(...\)",
        ),
    ],
)
def test_a_step_that_cron_cannot_take_is_refused_with_what_can(words: str, message: str) -> None:
    with pytest.raises(InvalidCron, match=message):
        said(words)


# --- whatever the builder makes -------------------------------------------------------------------

BASES = [name for name, value in vars(Frequency).items() if isinstance(value, module._Frequent)]
RANGES = {
    "seconds": (range(60), lambda t: t.second),
    "minutes": (range(60), lambda t: t.minute),
    "hours": (range(24), lambda t: t.hour),
    "days": (range(1, 32), lambda t: t.day),
    "months": (range(1, 13), lambda t: t.month),
}  # type: dict[str, tuple[range, Callable[[datetime], int]]]
WEEKDAYS = {"weekdays": range(5), "weekends": range(5, 7), "sundays": range(6, 7)}


def subsets(of: range) -> st.SearchStrategy[set[int]]:
    return st.one_of(
        st.sets(st.sampled_from(of), min_size=1, max_size=6),
        st.integers(of[0], of[-1]).map(lambda n: set(range(n, of[-1] + 1))),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    base=st.none() | st.sampled_from(BASES),
    named=st.fixed_dictionaries({}, optional={n: subsets(of) for n, (of, _) in RANGES.items()}),
    weekdays=st.none() | st.sampled_from(sorted(WEEKDAYS)),
    start=st.datetimes(datetime(2000, 1, 1), datetime(2037, 1, 1), timezones=st.just(UTC)),
)
def test_whatever_the_builder_makes_compiles_and_fires_only_when_all_that_is_named_matches(
    base: str | None, named: dict[str, set[int]], weekdays: str | None, start: datetime
) -> None:
    # A word that contradicts those before it is left out; what is left may still be refused whole.
    frequency = every() if base is None else getattr(every(), base)
    if weekdays:
        frequency = getattr(frequency, weekdays)
    for name, numbers in list(named.items()):
        try:
            frequency = getattr(frequency, name)(numbers)
        except InvalidCron:
            del named[name]
    cron, reason = tried(lambda: frequency.cron)
    assert cron or re.search(r"cannot both|never fires|needs a frequency|characters", reason)
    if not cron:
        return
    moment_ms = compile_recurrence(cron, "UTC").next_ms(to_ms(start, "start"))
    if moment_ms is None:  # a fifth Monday in February may be further away than is looked
        return
    moment = from_ms(moment_ms)
    for name, numbers in named.items():
        assert RANGES[name][1](moment) in numbers
    if weekdays:
        assert moment.weekday() in WEEKDAYS[weekdays]


# --- names ----------------------------------------------------------------------------------------

# The name, its cron text, the fields of yii2-scheduler, and the first moments after START.
# fmt: off
SYMBOLS = [
    ("EVERY_MINUTE", EVERY_MINUTE, {"minutes": "*"},
     ["2026-01-14 10:18:00", "2026-01-14 10:19:00", "2026-01-14 10:20:00"]),
    ("EVERY_HOUR", EVERY_HOUR, {"minutes": 1, "hours": "*"},
     ["2026-01-14 11:01:00", "2026-01-14 12:01:00", "2026-01-14 13:01:00"]),
    ("EVERY_DAY", EVERY_DAY, {"minutes": 10, "hours": 2, "day": "*"},
     ["2026-01-15 02:10:00", "2026-01-16 02:10:00", "2026-01-17 02:10:00"]),
    ("EVERY_WEEK", EVERY_WEEK, {"minutes": 20, "hours": 6, "wday": 1},
     ["2026-01-19 06:20:00", "2026-01-26 06:20:00", "2026-02-02 06:20:00"]),
    ("EVERY_MONTH", EVERY_MONTH, {"minutes": 30, "hours": 1, "mday": 1},
     ["2026-02-01 01:30:00", "2026-03-01 01:30:00", "2026-04-01 01:30:00"]),
]
# fmt: on


@pytest.mark.parametrize(("name", "cron", "fields", "moments"), SYMBOLS)
def test_a_name_has_its_exact_times(
    name: str, cron: str, fields: dict[str, Any], moments: list[str]
) -> None:
    assert symbolic(name) == as_cron(name) == as_cron(cron) == cron == from_fields(fields)
    assert first_moments(cron) == moments


@pytest.mark.parametrize("name", ["EVERY_YEAR", "every_day", "EVERY_DAY ", "", None, ["EVERY_DAY"]])
def test_a_name_that_is_none_is_refused_with_those_that_are(name: Any) -> None:
    with pytest.raises(InvalidCron, match="is not one of EVERY_MINUTE, EVERY_HOUR, EVERY_DAY"):
        symbolic(name)


# --- dictionaries of fields -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "cron"),
    [
        ({"minutes": "*/15", "hours": "9-17", "wday": "1-5"}, "*/15 9-17 * * 1-5"),
        ({"minutes": 0, "hours": 2}, "0 2 * * *"),
        ({"hours": 2}, "* 2 * * *"),
        ({"minutes": " 5 ", "wday": "1, 3 ,5", "hours": "9 - 17"}, "5 9-17 * * 1,3,5"),
        ({"minutes": "5", "mday": 15, "mon": 6, "day": "*", "year": "*"}, "5 * 15 6 *"),
        ({"seconds": 0, "minutes": 0}, "0 * * * *"),
        ({"seconds": "*/10"}, "*/10 * * * * *"),
        ({"hours": [9, 17], "minutes": (0,)}, "0 9,17 * * *"),
        ({"hours": range(9, 18), "minutes": {30, 0}}, "0,30 9-17 * * *"),
        ({"wday": "MON-FRI", "mon": "jan,jul"}, "* * * jan,jul mon-fri"),
        ({"wday": ["mon", "fri", 3]}, "* * * * mon,fri,3"),
        ({"wday": 7}, "* * * * 0"),
        ({"hours": "22-6"}, "* 22-6 * * *"),
        ({"mday": "L"}, "* * l * *"),
        # '*/n' are the multiples of n, which cron would count from the first day or month
        ({"mday": "*/5"}, "* * 5-31/5 * *"),
        ({"mday": "*/15"}, "* * 15-31/15 * *"),
        ({"mday": "*/20"}, "* * 20 * *"),
        ({"mday": "*/1"}, "* * */1 * *"),
        ({"mon": "*/3"}, "* * * 3-12/3 *"),
        # both days must match
        ({"mday": "1-7", "wday": 1}, "* * * * 1#1"),
        ({"mday": "1-31", "wday": 1}, "* * * * 1"),
        ({"mday": 13, "wday": "0-6"}, "* * 13 * *"),
        ({"mday": 13, "wday": "*/2"}, "* * 13 * */2"),
    ],
)
def test_fields_become_cron(fields: dict[str, Any], cron: str) -> None:
    assert from_fields(fields) == as_cron(fields) == cron


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, r"fields must be a dict such as {'minutes': 0, 'hours': 9}, not {}"),
        ([("minutes", 0)], "fields must be a dict"),
        ({"minute": 0}, "unknown field 'minute': known are seconds, minutes, hours, mday, mon"),
        ({0: 0}, "unknown field 0"),
        ({"minutes": 60}, "minutes must be a whole number from 0 to 59, not 60"),
        ({"hours": "24"}, "hours '24' is invalid: hour must be 0 to 23, not 24"),
        ({"hours": "9-25"}, "hours '9-25' is invalid: hour must be 0 to 23, not 25"),
        ({"mday": 0}, "mday must be a whole number from 1 to 31, not 0"),
        ({"mday": "*/40"}, r"mday '\*/40' is invalid: .* must be 1 to 31"),
        ({"mon": "13"}, "mon '13' is invalid: month must be 1 to 12"),
        ({"wday": "someday"}, "wday 'someday' is invalid: .* or SUN, MON"),
        ({"wday": ["mon", 9]}, "wday must be a whole number from 0 to 7, not 9"),
        ({"wday": ["mon", None]}, "wday must be a whole number from 0 to 7, not None"),
        ({"minutes": "*/0"}, r"minutes '\*/0' is invalid: .* must be 1 to 60"),
        ({"minutes": "*,5"}, r"minutes '\*,5' is invalid: .* already includes every value"),
        ({"minutes": ""}, "minutes must be one value .* not ''"),
        ({"minutes": "1 2"}, "minutes must be one value .* not '1 2'"),
        ({"minutes": "1," * 200}, "minutes must have at most 256 characters, .*'1,1,"),
        ({"minutes": "٥"}, "minutes '٥' is invalid"),
        ({"minutes": []}, "minutes must have at least one value from 0 to 59"),
        ({"minutes": None}, "minutes must be a number, a list of numbers, or a string .* not None"),
        ({"minutes": 1.5}, "minutes must be a number, .* not 1.5"),
        ({"minutes": True}, "minutes must be a whole number .*, not True"),
        ({"minutes": b"5"}, "minutes must be a number, .* not b'5'"),
        ({"year": 2027}, r"year must be '\*', not 2027: cron has no years"),
        ({"day": 5}, r"day must be '\*', not 5: use mday"),
        ({"mday": 13, "wday": 5}, "day of month '13' and day of week '5' cannot both be required"),
        ({"mday": "L", "wday": 5}, "day of month 'l' and day of week '5' cannot both be required"),
        ({"mday": "29,30,L", "wday": 5}, "day of month '29,30,l' and day of week '5' cannot both"),
        ({"mday": 13, "wday": "5#2"}, "day of month '13' and day of week '5#2' cannot both"),
        ({"mday": 30, "mon": 2}, r"'\* \* 30 2 \*' never fires"),
    ],
)
def test_fields_that_cannot_be_used_are_refused(fields: Any, message: str) -> None:
    with pytest.raises(InvalidCron, match=message):
        from_fields(fields)


def matches(pattern: int | str, current: int) -> bool:
    """What a field means in yii2-scheduler, in the order in which it looks."""
    text = str(pattern).strip()
    if text == "*":
        return True
    if text.isdigit():
        return int(text) == current
    if text.startswith("*/"):
        return current % int(text[2:]) == 0
    if "-" in text:
        low, high = text.split("-")
        return int(low) <= current <= int(high)
    return str(current) in [item.strip() for item in text.split(",")]


CURRENT: dict[str, Callable[[datetime], int]] = {
    "minutes": lambda t: t.minute,
    "hours": lambda t: t.hour,
    "mday": lambda t: t.day,
    "wday": lambda t: t.isoweekday() % 7,
    "mon": lambda t: t.month,
}


def patterns(low: int, high: int) -> st.SearchStrategy[int | str]:
    number = st.integers(low, high)
    return st.one_of(
        st.just("*"),
        number,
        st.integers(1, high).map(lambda n: f"*/{n}"),
        st.lists(number, min_size=2, max_size=2, unique=True).map(
            lambda pair: f"{min(pair)}-{max(pair)}"
        ),
        st.lists(number, min_size=2, max_size=5).map(lambda items: ", ".join(map(str, items))),
    )


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "minutes": patterns(0, 59),
            "hours": patterns(0, 23),
            "mday": patterns(1, 31),
            "wday": patterns(0, 6),
            "mon": patterns(1, 12),
        },
    ),
    moments=st.lists(
        st.datetimes(datetime(2000, 1, 1), datetime(2037, 1, 1), timezones=st.just(UTC)),
        min_size=10,
        max_size=10,
    ),
)
def test_fields_mean_the_same_in_yii(fields: dict[str, int | str], moments: list[datetime]) -> None:
    cron, reason = tried(lambda: from_fields(fields))
    assert cron or re.search(r"cannot both|never fires|fields must be", reason)
    if not cron:
        return
    later_ms = compile_recurrence(cron, "UTC").next_ms(to_ms(moments[0], "moment"))
    if later_ms is not None:
        moments.append(from_ms(later_ms))
    for moment in (moment.replace(second=0, microsecond=0) for moment in moments):
        expected = all(matches(pattern, CURRENT[name](moment)) for name, pattern in fields.items())
        assert fires_at(cron, moment) == expected


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "cron"),
    [
        ("0 9 * * 1-5", "0 9 * * 1-5"),
        ("@daily", "@daily"),
        ("EVERY_DAY", "10 2 * * *"),
        (every().day.at("09:30"), "30 9 * * *"),
        ({"minutes": 0, "hours": 2}, "0 2 * * *"),
    ],
)
def test_as_cron_takes_each_of_the_forms(value: object, cron: str) -> None:
    assert as_cron(value) == cron


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "a cron expression must be a string .* not None"),
        (timedelta(minutes=5), "a cron expression must be .* not datetime.timedelta"),
        (every, "a cron expression must be .* not <function every"),
        ("EVERY_CENTURY", "'EVERY_CENTURY' is not one of EVERY_MINUTE"),
        (every(), "needs a frequency"),
        ({}, "fields must be a dict"),
    ],
)
def test_as_cron_refuses_anything_else(value: object, message: str) -> None:
    with pytest.raises(InvalidCron, match=message):
        as_cron(value)


# --- the page -------------------------------------------------------------------------------------

EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_prints_its_comments(example: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(example, {})
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert printed == re.findall(r"^ *print\(.*\)  # (.*)$", example, re.MULTILINE)


def test_the_page_lists_the_names_with_their_expressions() -> None:
    rows = re.findall(r"^\| `(EVERY_\w+)` \| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == list(module.SYMBOLIC.items())
