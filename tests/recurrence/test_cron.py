"""The compiled matcher against croniter, and a table of what is read how."""

import random
from datetime import UTC, datetime, timedelta
from importlib.metadata import version

import pytest
from croniter import croniter

from fairqueue.errors import InvalidCron
from fairqueue.recurrence.cron import HORIZON_YEARS, MAX_LENGTH, parse_cron

EPOCH = datetime(1970, 1, 1)


def local(year: int, month: int, day: int, hour: int = 0, minute: int = 0, second: int = 0) -> int:
    return int((datetime(year, month, day, hour, minute, second) - EPOCH).total_seconds())


def show(seconds: int | None) -> str | None:
    return None if seconds is None else (EPOCH + timedelta(seconds=seconds)).isoformat(" ")


def first_moments(cron_expr: str, after: int, number: int) -> list[str | None]:
    cron, found = parse_cron(cron_expr), []
    for _ in range(number):
        moment = cron.next_after(after)
        found.append(show(moment))
        assert moment is not None
        after = moment
    return found


# --- against croniter -----------------------------------------------------------------------------


class Expressions:
    """Random expressions of every form that both we and croniter read alike."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def item(self, low: int, high: int, names: tuple[str, ...] = ()) -> str:
        pick = self.random
        a, b = sorted(pick.sample(range(low, high + 1), 2))
        first, last = str(a), str(b)
        if names and pick.random() < 0.5:
            first, last = names[a - low], names[b - low]
        size = high - low + 1
        return pick.choice(
            [
                first,
                f"{first}-{last}",
                f"{first}-{last}/{pick.randint(1, size)}",
                f"{a}/{pick.randint(1, size)}",
            ]
        )

    def field(self, low: int, high: int, star: float, names: tuple[str, ...] = ()) -> str:
        if self.random.random() < star:
            return "*"
        items = [self.item(low, high, names) for _ in range(self.random.choice([1, 1, 1, 2, 3]))]
        # A star only at the beginning: one further on means to croniter, but not to Debian's cron,
        # that a field with all values is a star as well. The table below has it.
        if self.random.random() < 0.3:
            items[0] = f"*/{self.random.randint(1, high - low + 1)}"
        return ",".join(items)

    def make(self) -> tuple[str, str]:
        """The expression as we read it, and as croniter does: seconds first, seconds last."""
        months = (
            "JAN",
            "Feb",
            "mar",
            "APR",
            "MAY",
            "JUN",
            "JUL",
            "AUG",
            "SEP",
            "OCT",
            "NOV",
            "DEC",
        )
        days = ("SUN", "Mon", "tue", "WED", "THU", "FRI", "SAT")
        fields = [
            self.field(0, 59, 0.2),
            self.field(0, 23, 0.3),
            self.field(1, 31, 0.5),
            self.field(1, 12, 0.6, months),
            self.field(0, 6, 0.5, days),
        ]
        ours = theirs = " ".join(fields)
        if self.random.random() < 0.4:
            seconds = self.field(0, 59, 0.1)
            ours, theirs = f"{seconds} {ours}", f"{theirs} {seconds}"
        return ours, theirs

    def moment(self) -> datetime:
        start, end = datetime(1972, 1, 1), datetime(2150, 1, 1)
        return start + timedelta(seconds=self.random.randrange(int((end - start).total_seconds())))


@pytest.mark.skipif(
    version("croniter").startswith("6.0"), reason="croniter 6.0 passes over 1 March after a step"
)
@pytest.mark.parametrize("seed", range(6))
def test_the_matcher_finds_what_croniter_finds_forwards_and_backwards(seed: int) -> None:
    expressions, compared = Expressions(seed), 0
    while compared < 500:
        ours, theirs = expressions.make()
        try:
            cron = parse_cron(ours)
        except InvalidCron as error:
            if "never fires" not in str(error):
                raise
            continue
        start = expressions.moment()
        at = int((start - EPOCH).total_seconds())
        reference = croniter(
            theirs,
            start,
            ret_type=datetime,
            implement_cron_bug=True,
            max_years_between_matches=HORIZON_YEARS,
        )
        try:
            later, earlier = (
                reference.get_next(start_time=start),
                reference.get_prev(start_time=start),
            )
        except ValueError:
            # No match for years, or a union of which one half is impossible (31 February or a
            # Sunday), which croniter cannot do: the table below has it.
            continue
        assert show(cron.next_after(at)) == later.isoformat(" "), (ours, start)
        assert show(cron.latest_until(at - 1)) == earlier.isoformat(" "), (ours, start)
        compared += 1


@pytest.mark.parametrize(
    "cron_expr",
    ["30 6 L * *", "0 0 1,15,L * *", "0 9 * * 5#2", "0 9 * * MON#1,MON#3", "0 9 * * L5"],
)
def test_last_days_and_numbered_weekdays_are_those_of_croniter(cron_expr: str) -> None:
    cron, moment = parse_cron(cron_expr), datetime(2023, 11, 20, 12, 30)
    reference = croniter(cron_expr, moment, ret_type=datetime)
    at = int((moment - EPOCH).total_seconds())
    for _ in range(60):
        later = cron.next_after(at)
        assert show(later) == reference.get_next().isoformat(" ")
        assert later is not None
        assert cron.latest_until(later) == later
        before = cron.latest_until(later - 1)
        assert before is None or before <= at
        at = later


def test_every_weekday_range_that_ends_on_sunday_counts_its_steps_from_its_start() -> None:
    for end in ("7", "0", "SUN"):
        for first in range(1, 7):
            for step in range(1, 8):
                expected = {day % 7 for day in range(first, 8, step)}
                cron, found, at = (
                    parse_cron(f"0 0 * * {first}-{end}/{step}"),
                    set(),
                    local(2024, 1, 6),
                )
                while (moment := cron.next_after(at)) is not None and moment < local(2024, 1, 14):
                    found.add((EPOCH + timedelta(seconds=moment)).isoweekday() % 7)
                    at = moment
                assert found == expected, (first, end, step)


# --- what is read how -----------------------------------------------------------------------------

# 2024-01-01 was a Monday.
READ = [
    ("0 9 * * 1-5", ["2024-01-01 09:00:00", "2024-01-02 09:00:00"]),
    ("  0   9 * * 1-5  ", ["2024-01-01 09:00:00"]),
    ("00 09 01 01 *", ["2024-01-01 09:00:00", "2025-01-01 09:00:00"]),
    ("30 0 9 * * *", ["2024-01-01 09:00:30", "2024-01-02 09:00:30"]),
    ("*/20 * * * * *", ["2024-01-01 00:00:00", "2024-01-01 00:00:20"]),
    ("0 0 * * 0", ["2024-01-07 00:00:00"]),
    ("0 0 * * 7", ["2024-01-07 00:00:00"]),
    ("0 0 0 * * 7", ["2024-01-07 00:00:00"]),
    ("0 0 * * 7#2", ["2024-01-14 00:00:00", "2024-02-11 00:00:00"]),
    ("0 0 * * 0-7", ["2024-01-01 00:00:00", "2024-01-02 00:00:00"]),
    ("0 0 * * SAT-SUN", ["2024-01-06 00:00:00", "2024-01-07 00:00:00", "2024-01-13 00:00:00"]),
    ("0 0 * * 6-0", ["2024-01-06 00:00:00", "2024-01-07 00:00:00", "2024-01-13 00:00:00"]),
    ("0 0 * * 7-1", ["2024-01-01 00:00:00", "2024-01-07 00:00:00", "2024-01-08 00:00:00"]),
    ("0 0 0 * * fri-Mon", ["2024-01-01 00:00:00", "2024-01-05 00:00:00", "2024-01-06 00:00:00"]),
    # A range past the end goes on from the start.
    ("0 22-1 * * *", ["2024-01-01 00:00:00", "2024-01-01 01:00:00", "2024-01-01 22:00:00"]),
    ("0 0 1 NOV-JAN *", ["2024-01-01 00:00:00", "2024-11-01 00:00:00", "2024-12-01 00:00:00"]),
    ("0 0 1 jul *", ["2024-07-01 00:00:00"]),
    ("0 0 ? * ?", ["2024-01-01 00:00:00", "2024-01-02 00:00:00"]),
    ("0 0 ? * MON", ["2024-01-01 00:00:00", "2024-01-08 00:00:00"]),
    ("0 0 15 * ?", ["2024-01-15 00:00:00", "2024-02-15 00:00:00"]),
    # A start with a step goes on until the end of the field.
    ("10/25 * * * *", ["2024-01-01 00:10:00", "2024-01-01 00:35:00", "2024-01-01 01:10:00"]),
    ("50/15 * * * *", ["2024-01-01 00:50:00", "2024-01-01 01:50:00"]),
    # A step of the whole field is its first value.
    ("*/60 * * * *", ["2024-01-01 00:00:00", "2024-01-01 01:00:00"]),
    ("5,5,5 0 1 1 *", ["2024-01-01 00:05:00", "2025-01-01 00:05:00"]),
    # Both restricted: a union. croniter finds no 31 February and gives up on the Sundays as well.
    ("0 0 3 * 2", ["2024-01-02 00:00:00", "2024-01-03 00:00:00", "2024-01-09 00:00:00"]),
    ("0 0 31 2 0", ["2024-02-04 00:00:00", "2024-02-11 00:00:00"]),
    # With numbered weekdays as well, where croniter forgets the day of month.
    ("0 0 10 * 1#1", ["2024-01-01 00:00:00", "2024-01-10 00:00:00", "2024-02-05 00:00:00"]),
    ("0 0 L * 1#1", ["2024-01-01 00:00:00", "2024-01-31 00:00:00", "2024-02-05 00:00:00"]),
    # A field that begins with * makes an intersection, as in Debian's cron: odd Tuesdays.
    ("0 0 */2 * 2", ["2024-01-09 00:00:00", "2024-01-23 00:00:00", "2024-02-13 00:00:00"]),
    ("0 0 2 * */2", ["2024-01-02 00:00:00", "2024-03-02 00:00:00", "2024-04-02 00:00:00"]),
    ("0 0 1-31/2 * 2", ["2024-01-01 00:00:00", "2024-01-02 00:00:00", "2024-01-03 00:00:00"]),
    ("0 0 5,*/10 * 0-6", ["2024-01-01 00:00:00", "2024-01-02 00:00:00", "2024-01-03 00:00:00"]),
    ("0 0 31 4,5 *", ["2024-05-31 00:00:00", "2025-05-31 00:00:00"]),
    ("@hourly", ["2024-01-01 00:00:00", "2024-01-01 01:00:00"]),
    ("@daily", ["2024-01-01 00:00:00", "2024-01-02 00:00:00"]),
    (" @Midnight ", ["2024-01-01 00:00:00", "2024-01-02 00:00:00"]),
    ("@weekly", ["2024-01-07 00:00:00", "2024-01-14 00:00:00"]),
    ("@MONTHLY", ["2024-01-01 00:00:00", "2024-02-01 00:00:00"]),
    ("@yearly", ["2024-01-01 00:00:00", "2025-01-01 00:00:00"]),
    ("@annually", ["2024-01-01 00:00:00", "2025-01-01 00:00:00"]),
]


@pytest.mark.parametrize(("cron_expr", "expected"), READ)
def test_an_expression_is_read_as_the_table_says(cron_expr: str, expected: list[str]) -> None:
    assert first_moments(cron_expr, local(2024, 1, 1) - 1, len(expected)) == expected


@pytest.mark.parametrize(
    ("cron_expr", "wildcard"),
    [
        ("* * * * *", True),
        ("30 * * * *", True),
        ("* 2 * * *", True),
        ("*/15 2 * * *", True),
        ("0 */2 * * *", True),
        ("* 0 2 * * *", True),
        ("*/5,7 2 * * *", True),
        ("@hourly", True),
        ("30 2 * * *", False),
        ("0-59 2 * * *", False),
        ("0-59/15 0-23 * * *", False),
        ("7,*/5 2 * * *", False),
        ("0 30 2 * * *", False),
        ("@daily", False),
    ],
)
def test_a_wildcard_is_a_time_field_that_begins_with_a_star(cron_expr: str, wildcard: bool) -> None:
    assert parse_cron(cron_expr).wildcard is wildcard


REFUSED = [
    ("61 * * * *", "minute must be 0 to 59, not 61"),
    ("60 * * * *", "minute must be 0 to 59, not 60"),
    ("60 * * * * *", "second must be 0 to 59, not 60"),
    ("* 24 * * *", "hour must be 0 to 23, not 24"),
    ("0 0 0 * *", "day of month must be 1 to 31, not 0"),
    ("0 0 32 * *", "day of month must be 1 to 31, not 32"),
    ("0 0 * 0 *", "month must be 1 to 12, not 0"),
    ("0 0 * 13 *", "month must be 1 to 12, not 13"),
    ("0 0 * * 8", "day of week must be 0 to 7, not 8"),
    ("5-61 * * * *", "minute must be 0 to 59, not 61"),
    # croniter: every 15 minutes; every minute; 22, 2 and 5 o'clock; minute 0.
    ("59/15 * * * *", "no step fits after 59; write 59, or */15"),
    ("0 23/2 * * *", "no step fits after 23"),
    ("0 0 * * 7/2", "no step fits after 7"),
    ("5-5 * * * *", "range '5-5' has one value"),
    ("0 0 * * 7-SUN", "range '7-sun' has one value"),
    ("0 0 * JAN-JAN *", "range 'jan-jan' has one value"),
    ("0 22-6/3 * * *", "range '22-6/3' has a step and wraps around"),
    ("*/100 * * * *", "the step must be 1 to 60, not 100"),
    ("0 0 * * */8", "the step must be 1 to 7, not 8"),
    ("*/0 * * * *", "the step must be 1 to 60, not 0"),
    ("*/-5 * * * *", "minute '*/-5' is invalid"),
    (", * * * *", "minute has an empty item"),
    ("1,,2 * * * *", "minute has an empty item"),
    ("1, * * * *", "minute has an empty item"),
    ("5,* * * * *", "'*' already includes every value"),
    ("0 0 *,5 * 1", "'*' already includes every value"),
    ("-5 * * * *", "minute '-5' is invalid"),
    ("5- * * * *", "minute '5-' is invalid"),
    ("1-2-3 * * * *", "minute '1-2-3' is invalid"),
    ("1/2/3 * * * *", "minute '1/2/3' is invalid"),
    ("1.5 * * * *", "minute '1.5' is invalid"),
    ("1_0 * * * *", "minute '1_0' is invalid"),
    ("0x5 * * * *", "minute '0x5' is invalid"),
    ("** * * * *", "minute '**' is invalid"),
    ("JAN * * * *", "minute 'jan' is invalid"),
    ("0 0 * MON *", "month 'mon' is invalid"),
    ("0 0 * * JAN", "day of week 'jan' is invalid: write numbers from 0 to 7, or SUN, MON"),
    ("0 0 * * MONDAY", "day of week 'monday' is invalid"),
    ("? * * * *", "minute must not be '?'"),
    ("0 0 ?/2 * *", "day of month '?/2' is invalid"),
    ("0 0 * ? *", "month must not be '?'"),
    ("R * * * *", "random values are not supported"),
    ("0 R(2-5) * * *", "random values are not supported"),
    ("R/15 * * * *", "random values are not supported"),
    ("H * * * *", "chosen by a hash of the schedule's id, which is unknown"),
    ("H(0-29)/10 * * * *", "pass it as the seed"),
    ("0 0 15W * *", "the nearest weekday (W) is not supported"),
    ("0 0 15-L * *", "day of month 'l' is invalid"),
    ("0 L * * *", "hour 'l' is invalid"),
    ("0 0 * * L", "day of week 'l' is invalid"),
    ("0 0 * * L9", "day of week must be 0 to 7, not 9"),
    ("0 0 * * 5#6", "the number must be #1 to #5"),
    ("0 0 * * 5#0", "the number must be #1 to #5"),
    ("0 0 * * 9#1", "day of week must be 0 to 7, not 9"),
    ("0 0 * * 1,5#2", "mixes weekdays with numbered ones"),
    ("0 0 5#2 * *", "day of month '5#2' is invalid"),
    ("0 0 30 2 *", "never fires"),
    ("0 0 31 4,6 *", "never fires"),
    ("0 0 30,31 FEB ?", "never fires"),
    ("0 0 31 2 */2", "never fires"),
    ("0 0 30-31 2 *", "never fires"),
    ("", "has 0 fields"),
    ("   ", "has 0 fields"),
    ("nonsense", "has 1 field: cron has 5"),
    ("* * * *", "has 4 fields: cron has 5"),
    ("* * * * * * *", "has 7 fields (years are not supported)"),
    ("* * * * * * * *", "has 8 fields"),
    ("@reboot", "do not fire at a reboot"),
    ("@every 5m", "is not one of @hourly, @daily"),
    ("@", "is not one of @hourly, @daily"),
    ("0 9 * * *\n", "not printable ASCII"),
    ("0\t9 * * *", "not printable ASCII"),
    ("0 9 * * \x00", "not printable ASCII"),
    ("٣ 9 * * *", "not printable ASCII"),
    ("0\u00a09 * * *", "not printable ASCII"),
    ("1," * MAX_LENGTH + "1 * * * *", f"must have at most {MAX_LENGTH} characters"),
    ("9" * (MAX_LENGTH - 8) + " * * * *", "must be 0 to 59"),
]


@pytest.mark.parametrize(("cron_expr", "message"), REFUSED)
def test_a_bad_expression_is_refused_with_the_reason(cron_expr: str, message: str) -> None:
    with pytest.raises(InvalidCron) as refused:
        parse_cron(cron_expr)
    assert message in str(refused.value)
    assert repr(cron_expr)[:60] in str(refused.value)


@pytest.mark.parametrize("cron_expr", [None, 5, b"* * * * *", ["* * * * *"], {}, object(), 1.5])
def test_what_is_no_string_is_refused(cron_expr: object) -> None:
    with pytest.raises(InvalidCron, match="must be a string such as"):
        parse_cron(cron_expr)  # type: ignore[arg-type]


def test_an_expression_of_the_greatest_length_is_read() -> None:
    cron_expr = "5" + ",5" * ((MAX_LENGTH - 9) // 2) + " * * * *"
    assert MAX_LENGTH - 2 < len(cron_expr) <= MAX_LENGTH
    assert first_moments(cron_expr, local(2024, 1, 1), 1) == ["2024-01-01 00:05:00"]


# --- the far ends ---------------------------------------------------------------------------------


def test_the_29th_of_february_is_found_across_a_century_without_a_leap_year() -> None:
    assert first_moments("0 0 29 2 *", local(2096, 2, 28), 3) == [
        "2096-02-29 00:00:00",
        "2104-02-29 00:00:00",
        "2108-02-29 00:00:00",
    ]
    assert show(parse_cron("0 0 29 2 *").latest_until(local(2104, 2, 28))) == "2096-02-29 00:00:00"


def test_what_is_rarer_than_the_horizon_is_not_found() -> None:
    cron = parse_cron("0 0 * 2 MON#5")
    assert cron.next_after(local(2024, 1, 1)) is None
    assert show(cron.next_after(local(2040, 1, 1))) == "2044-02-29 00:00:00"
    assert cron.latest_until(local(2060, 1, 1)) is None
    assert show(cron.latest_until(local(2050, 1, 1))) == "2044-02-29 00:00:00"


@pytest.mark.parametrize("cron_expr", ["* * * * *", "0 0 1 1 *", "0 0 * * 1", "59 59 23 31 12 *"])
def test_there_is_nothing_after_the_year_9999(cron_expr: str) -> None:
    end = local(9999, 12, 31, 23, 59, 59)
    cron = parse_cron(cron_expr)
    assert cron.next_after(end) is None
    assert cron.next_after(end * 1000) is None
    latest = cron.latest_until(end * 1000)
    assert latest == cron.latest_until(end)
    assert latest is not None
    assert datetime.fromtimestamp(latest, UTC).year == 9999
