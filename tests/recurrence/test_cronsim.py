"""Next runs against the package cronsim, which follows Debian's cron, with each difference listed.

cronsim is given the transitions of pytz, so that both know the same zones. It walks from hour to
hour; where that goes wrong, `differs` says so before it is asked, since it may not come back.
"""

import random
from datetime import UTC, datetime
from functools import cache
from zoneinfo import ZoneInfo

import pytest
import pytz
from cronsim import CronSim, CronSimError

from fairqueue.clock import from_ms
from fairqueue.errors import InvalidCron
from fairqueue.recurrence.kinds import CronRecurrence, compile_recurrence
from fairqueue.recurrence.zones import Zone

DAY = 86_400

# Whole hours, half hours, midnights, whole days, Ramadan, changes of standard time, and none.
ZONES = (
    "Africa/Cairo",
    "Africa/Casablanca",
    "America/Caracas",
    "America/Havana",
    "America/New_York",
    "America/Santiago",
    "America/Sao_Paulo",
    "America/St_Johns",
    "Antarctica/Troll",
    "Asia/Beirut",
    "Asia/Gaza",
    "Asia/Kathmandu",
    "Asia/Pyongyang",
    "Asia/Tehran",
    "Asia/Tokyo",
    "Atlantic/Azores",
    "Australia/Lord_Howe",
    "Europe/Dublin",
    "Europe/London",
    "Pacific/Apia",
    "Pacific/Auckland",
    "Pacific/Chatham",
    "UTC",
)
# zoneinfo has summer time after 2037, pytz has not: a difference of their data, not of the rules.
FIRST = int(datetime(1990, 1, 1, tzinfo=UTC).timestamp())
LAST = int(datetime(2036, 1, 1, tzinfo=UTC).timestamp())


@cache
def zone_of_cronsim(name: str) -> ZoneInfo:
    with pytz.open_resource(name) as file:  # type: ignore[attr-defined]
        return ZoneInfo.from_file(file, key=name)


def next_of_cronsim(cron_expr: str, zone: str, after: int) -> int | None:
    start = datetime.fromtimestamp(after, UTC).astimezone(zone_of_cronsim(zone))
    try:
        return int(next(CronSim(cron_expr, start)).timestamp())
    except StopIteration:
        return None


# --- the differences ------------------------------------------------------------------------------

SECOND_PASS = (
    "cronsim forgets which pass of an overlap it was asked in. In the second, it answers a time of "
    "the first, which is past; we answer the first that is later."
)
HOUR_STEPS = (
    "cronsim follows elapsed time in steps of an hour from a full hour or from midnight. Where the "
    "clock changes by half an hour, not at a full hour, or across midnight, it misses the full "
    "hours after that, or goes in circles. We fire whenever the clock shows a matching time."
)
SIX_FIELDS = (
    "cronsim lets every expression with seconds follow elapsed time. We have one rule for both: "
    "without a * at the beginning of second, minute or hour, the times are fixed."
)

# expression, zone, after, our next, cronsim's next (all as the wall clock shows it), and why.
DIFFERENCES = [
    ("30 1 * * *", "America/New_York", "2024-11-03T01:10:00-05:00",
     "2024-11-04T01:30:00-05:00", "2024-11-03T01:30:00-04:00", SECOND_PASS),
    ("32,28 1-4 * * *", "Africa/Casablanca", "2012-09-30T02:22:34+00:00",
     "2012-09-30T03:28:00+00:00", "2012-09-30T02:28:00+01:00", SECOND_PASS),
    ("* 4-9/2 * * *", "Australia/Lord_Howe", "2024-04-06T12:14:47+11:00",
     "2024-04-07T04:00:00+10:30", "2024-04-07T04:30:00+10:30", HOUR_STEPS),
    ("*/7 3 * * *", "Pacific/Chatham", "2011-09-25T01:51:19+12:45",
     "2011-09-25T03:49:00+13:45", "2011-09-26T03:00:00+13:45", HOUR_STEPS),
    ("*/44 1-4 * * */4", "America/Havana", "2016-03-12T23:25:34-05:00",
     "2016-03-13T01:00:00-04:00", "2016-03-13T02:00:00-04:00", HOUR_STEPS),
    ("0 30 2 * * *", "America/New_York", "2024-03-10T00:00:00-05:00",
     "2024-03-10T03:00:00-04:00", "2024-03-11T02:30:00-04:00", SIX_FIELDS),
    ("0 30 1 * * *", "America/New_York", "2024-11-03T01:30:00-04:00",
     "2024-11-04T01:30:00-05:00", "2024-11-03T01:30:00-05:00", SIX_FIELDS),
]  # fmt: skip


@pytest.mark.parametrize(("cron_expr", "zone", "after", "ours", "theirs", "why"), DIFFERENCES)
def test_each_difference_is_one_that_is_meant(
    cron_expr: str, zone: str, after: str, ours: str, theirs: str, why: str
) -> None:
    recurrence, start = compile_recurrence(cron_expr, zone), datetime.fromisoformat(after)
    at = int(start.timestamp())
    found = recurrence.next_ms(at * 1000)
    assert found is not None
    assert from_ms(found).astimezone(zone_of_cronsim(zone)).isoformat() == ours
    answer = next_of_cronsim(cron_expr, zone, at)
    assert answer is not None
    assert datetime.fromtimestamp(answer, zone_of_cronsim(zone)).isoformat() == theirs
    assert differs(recurrence, at, len(cron_expr.split())) == why


def differs(recurrence: CronRecurrence, after: int, fields: int) -> str | None:
    """Why cronsim must not be asked about what comes next; None if both have to agree."""
    zone = recurrence.zone
    found = recurrence.next_ms(after * 1000)
    until = after + DAY if found is None else found // 1000
    near = [
        period
        for period in range(1, len(zone.starts))
        if after - 2 * DAY < zone.starts[period] < until + 2 * DAY
    ]
    if recurrence.elapsed:
        return HOUR_STEPS if any(is_uneven(zone, period) for period in near) else None
    if fields == 6:
        return SIX_FIELDS if near else None
    return SECOND_PASS if zone.showing(after) == 2 else None


def is_uneven(zone: Zone, period: int) -> bool:
    """Whether the clock changes other than from one full hour of a day to another."""
    before, after = (zone.starts[period] + zone.offsets[period - i] for i in (1, 0))
    whole = before % 3600 == 0 and after % 3600 == 0
    low, high = sorted((before, after))
    return not whole or low % DAY == 0 or low // DAY != high // DAY


# expression, whether we read it, whether cronsim does, and why.
SYNTAX = [
    ("0 22-1 * * *", True, False, "we let a range go past the end, as croniter does"),
    ("0 0 * * SAT-SUN", True, False, "the weekend is a range past the end for cronsim"),
    ("0 0 ? * MON", True, False, "Quartz' way to say that a day field does not matter"),
    ("@daily", True, False, "cronsim reads no names"),
    ("0 0 * * L5", True, False, "the last Friday is L5 for croniter and us, 5L for cronsim"),
    ("0 0 * * 5L", False, True, "the last Friday is L5 for croniter and us, 5L for cronsim"),
    ("0 0 LW * *", False, True, "the last working day is an extension of cronsim"),
    ("*/100 * * * *", False, True, "minute 0 for cronsim, which is surely not what was meant"),
    ("59/15 * * * *", False, True, "minute 59 for cronsim, which is surely not what was meant"),
    ("5-5 * * * *", False, True, "croniter would read every minute, so it is refused"),
    ("*,5 * * * *", False, True, "a list with more than every value is a mistake"),
    ("0 0 * * 1,5#2", False, True, "croniter cannot mix numbered weekdays with others"),
    ("H * * * *", False, False, "needs a seed"),
    ("R * * * *", False, False, "would change with every look"),
]  # fmt: skip


@pytest.mark.parametrize(("cron_expr", "ours", "theirs", "why"), SYNTAX)
def test_each_expression_that_only_one_of_us_reads_is_one_that_is_meant(
    cron_expr: str, ours: bool, theirs: bool, why: str
) -> None:
    def reads_it() -> bool:
        try:
            compile_recurrence(cron_expr, "UTC")
        except InvalidCron:
            return False
        return True

    def cronsim_reads_it() -> bool:
        try:
            CronSim(cron_expr, datetime(2024, 1, 1, tzinfo=UTC))
        except CronSimError:
            return False
        return True

    assert (reads_it(), cronsim_reads_it()) == (ours, theirs), why


# --- everything else is the same ------------------------------------------------------------------


class Cases:
    """Random expressions, zones and moments, most of them near a change of the clock."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def item(self, low: int, high: int) -> str:
        pick = self.random
        a, b = sorted(pick.sample(range(low, high + 1), 2))
        step = pick.randint(1, high - low + 1)
        return pick.choice([f"{a}", f"{a}", f"{a}-{b}", f"{a}-{b}/{step}"])

    def field(self, low: int, high: int, star: float) -> str:
        chance = self.random.random()
        if chance < star:
            return "*"
        if chance < star + 0.15:
            return f"*/{self.random.randint(1, high - low + 1)}"
        number = self.random.choice([1, 1, 1, 2, 3])
        return ",".join(self.item(low, high) for _ in range(number))

    def expression(self) -> str:
        night = self.random.random() < 0.5
        fields = [
            self.field(0, 59, 0.15),
            self.field(0, 4, 0.1) if night else self.field(0, 23, 0.25),
            self.field(1, 31, 0.65),
            self.field(1, 12, 0.75),
            self.field(0, 6, 0.65),
        ]
        if self.random.random() < 0.15:
            fields.insert(0, self.field(0, 59, 0.1))
        return " ".join(fields)

    def moment(self, zone: Zone) -> int:
        changes = [start for start in zone.starts if FIRST < start < LAST]
        if changes and self.random.random() < 0.85:
            width = self.random.choice([5000, 100_000])
            return self.random.choice(changes) + self.random.randint(-width, width)
        return self.random.randrange(FIRST, LAST)


@pytest.mark.parametrize("seed", range(4))
def test_the_next_run_is_that_of_cronsim(seed: int) -> None:
    cases, compared, set_aside = Cases(seed), 0, 0
    while compared < 3000:
        cron_expr, zone = cases.expression(), cases.random.choice(ZONES)
        try:
            recurrence = compile_recurrence(cron_expr, zone)
        except InvalidCron as error:
            if "can never fire" not in str(error):
                raise
            continue
        after = cases.moment(recurrence.zone)
        if differs(recurrence, after, len(cron_expr.split())):
            set_aside += 1
            continue
        found = recurrence.next_ms(after * 1000)
        ours = None if found is None else found // 1000
        assert ours == next_of_cronsim(cron_expr, zone, after), (cron_expr, zone, after)
        compared += 1
    # The differences stay exceptions, although most moments are near a change.
    assert set_aside < compared
