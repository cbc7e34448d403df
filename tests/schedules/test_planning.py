"""What a schedule fires at a moment, and when it acts next: tables and properties of `plan`."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from helpers.schedules import ms
from hypothesis import given, settings
from hypothesis import strategies as st

from fairqueue.recurrence.kinds import compile_form
from fairqueue.schedules.fields import FIELDS
from fairqueue.schedules.planning import (
    MISFIRE_GRACE_MS,
    MISSED_CAP,
    Decision,
    Rules,
    due_ms,
    plan,
    stretch,
)

MISFIRES = list(FIELDS["misfire"].choices)
SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
NINE = ms(datetime(2026, 3, 5, 9, tzinfo=UTC))
HOURLY: dict[str, Any] = {"cron": "0 * * * *"}
DAILY: dict[str, Any] = {"cron": "0 9 * * *"}


def rules(form: dict[str, Any], **fields: Any) -> Rules:
    """Rules of a schedule with a form."""
    return Rules(schedule_id="s", recurrence=compile_form(form, seed="s"), **fields)


def step(
    moment: int | None,
    following: int | None,
    missed: int = 0,
    note: tuple[int, int, str] | None = None,
) -> Decision:
    """A step without jitter; the note is of first moment, last moment and reason."""
    text = "" if note is None else stretch(note[0], note[1], missed, note[2])
    return Decision(moment_ms=moment, next_ms=following, due_ms=following, missed=missed, note=text)


# what, form, rules, how late, the step
TABLE: list[tuple[str, dict[str, Any], dict[str, Any], int, Decision]] = [
    ("on time", HOURLY, {}, 0, step(NINE, NINE + HOUR)),
    ("within the hour", HOURLY, {}, HOUR - 1, step(NINE, NINE + HOUR)),
    (
        "the next has come as well",
        HOURLY,
        {},
        HOUR,
        step(NINE + HOUR, NINE + 2 * HOUR, 1, (NINE, NINE, "missed")),
    ),
    (
        "half a day late",
        HOURLY,
        {},
        12 * HOUR + MINUTE,
        step(NINE + 12 * HOUR, NINE + 13 * HOUR, 12, (NINE, NINE + 11 * HOUR, "missed")),
    ),
    ("once, a year late", {"at": NINE}, {}, 365 * DAY, step(NINE, None)),
    ("skip: a minute late", HOURLY, {"misfire": "skip"}, MISFIRE_GRACE_MS, step(NINE, NINE + HOUR)),
    (
        "skip: more than a minute late",
        HOURLY,
        {"misfire": "skip"},
        MISFIRE_GRACE_MS + 1,
        step(None, NINE + HOUR, 1, (NINE, NINE, "misfire")),
    ),
    (
        "skip: the latest is on time",
        HOURLY,
        {"misfire": "skip"},
        3 * HOUR + MINUTE,
        step(NINE + 3 * HOUR, NINE + 4 * HOUR, 3, (NINE, NINE + 2 * HOUR, "misfire")),
    ),
    (
        "skip: all are late",
        HOURLY,
        {"misfire": "skip"},
        3 * HOUR + 2 * MINUTE,
        step(None, NINE + 4 * HOUR, 4, (NINE, NINE + 3 * HOUR, "misfire")),
    ),
    (
        "skip: once, late",
        {"at": NINE},
        {"misfire": "skip"},
        HOUR,
        step(None, None, 1, (NINE, NINE, "misfire")),
    ),
    (
        "fire_all: the oldest first",
        HOURLY,
        {"misfire": "fire_all"},
        3 * HOUR,
        step(NINE, NINE + HOUR),
    ),
    (
        "fire_all: those before the window are given up",
        HOURLY,
        {"misfire": "fire_all", "catch_up_ms": 2 * HOUR},
        5 * HOUR + MINUTE,
        step(NINE + 4 * HOUR, NINE + 5 * HOUR, 4, (NINE, NINE + 3 * HOUR, "not caught up")),
    ),
    (
        "fire_all: the window has its beginning",
        HOURLY,
        {"misfire": "fire_all", "catch_up_ms": 2 * HOUR},
        5 * HOUR,
        step(NINE + 3 * HOUR, NINE + 4 * HOUR, 3, (NINE, NINE + 2 * HOUR, "not caught up")),
    ),
    (
        "fire_all: nothing is in the window",
        HOURLY,
        {"misfire": "fire_all", "catch_up_ms": 10 * MINUTE},
        3 * HOUR + 30 * MINUTE,
        step(None, NINE + 4 * HOUR, 4, (NINE, NINE + 3 * HOUR, "not caught up")),
    ),
    (
        "fire_all: the only one is before the window",
        DAILY,
        {"misfire": "fire_all", "catch_up_ms": HOUR},
        2 * HOUR,
        step(None, NINE + DAY, 1, (NINE, NINE, "not caught up")),
    ),
    (
        "fire_all: a window of nothing leaves what is on time",
        HOURLY,
        {"misfire": "fire_all", "catch_up_ms": 0},
        MISFIRE_GRACE_MS,
        step(NINE, NINE + HOUR),
    ),
    (
        "fire_all: as many as it may",
        HOURLY,
        {"misfire": "fire_all", "max_catch_up": 4},
        3 * HOUR,
        step(NINE, NINE + HOUR),
    ),
    (
        "fire_all: more than it may",
        HOURLY,
        {"misfire": "fire_all", "max_catch_up": 3},
        3 * HOUR,
        step(NINE + HOUR, NINE + 2 * HOUR, 1, (NINE, NINE, "not caught up")),
    ),
    (
        "fire_all: only the latest",
        HOURLY,
        {"misfire": "fire_all", "max_catch_up": 1},
        3 * HOUR,
        step(NINE + 3 * HOUR, NINE + 4 * HOUR, 3, (NINE, NINE + 2 * HOUR, "not caught up")),
    ),
    (
        "the end comes while nobody looks",
        HOURLY | {"limits": {"end": NINE + 2 * HOUR}},
        {},
        5 * HOUR,
        step(NINE + HOUR, None, 1, (NINE, NINE, "missed")),
    ),
]


@pytest.mark.parametrize(
    ("form", "fields", "late", "wanted"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_what_is_fired(
    form: dict[str, Any], fields: dict[str, Any], late: int, wanted: Decision
) -> None:
    assert plan(rules(form, **fields), NINE, NINE + late) == wanted


def test_a_moment_that_a_user_has_set_counts_as_one() -> None:
    set_ms = NINE + 30 * MINUTE
    wanted = step(NINE + 2 * HOUR, NINE + 3 * HOUR, 2, (set_ms, NINE + HOUR, "missed"))
    assert plan(rules(HOURLY), set_ms, NINE + 2 * HOUR) == wanted
    assert plan(rules(HOURLY), set_ms, set_ms) == step(set_ms, NINE + HOUR)


def test_the_count_of_what_is_given_up_is_capped_and_its_stretch_is_not() -> None:
    found = plan(rules({"cron": "* * * * * *"}), NINE, NINE + DAY)
    assert found.missed == MISSED_CAP
    assert found.note == stretch(NINE, NINE + DAY - SECOND, MISSED_CAP, "missed")


def test_the_next_moment_waits_for_its_jitter() -> None:
    with_jitter = rules(HOURLY, jitter_ms=30 * MINUTE)
    found = plan(with_jitter, NINE, due_ms(with_jitter, NINE))
    assert (found.moment_ms, found.next_ms) == (NINE, NINE + HOUR)
    assert found.due_ms == due_ms(with_jitter, NINE + HOUR)
    assert NINE + HOUR < due_ms(with_jitter, NINE + HOUR) <= NINE + HOUR + 30 * MINUTE


@pytest.mark.parametrize("misfire", MISFIRES)
def test_a_moment_whose_jitter_is_not_over_has_not_come(misfire: str) -> None:
    """The scheduler is a little late for one moment, and the next has begun to wait."""
    with_jitter = rules(HOURLY, jitter_ms=HOUR, misfire=misfire)
    now = NINE + HOUR + SECOND
    assert due_ms(with_jitter, NINE + HOUR) > now
    found = plan(replace(with_jitter, catch_up_ms=DAY), NINE, now)
    late = now - due_ms(with_jitter, NINE) > MISFIRE_GRACE_MS
    assert found.moment_ms == (None if misfire == "skip" and late else NINE)
    assert (found.next_ms, found.due_ms) == (NINE + HOUR, due_ms(with_jitter, NINE + HOUR))


def test_how_late_a_moment_is_counts_from_the_end_of_its_jitter() -> None:
    patient = rules(DAILY, jitter_ms=12 * HOUR, misfire="skip")
    due = due_ms(patient, NINE)
    assert due > NINE + MISFIRE_GRACE_MS
    assert plan(patient, NINE, due + MISFIRE_GRACE_MS).moment_ms == NINE
    assert plan(patient, NINE, due + MISFIRE_GRACE_MS + 1).moment_ms is None


def test_a_catch_up_goes_from_the_oldest_to_the_latest() -> None:
    catching = rules(HOURLY, misfire="fire_all", catch_up_ms=DAY, max_catch_up=5)
    assert fired_until(catching, NINE, NINE + 9 * HOUR) == [NINE + n * HOUR for n in range(5, 10)]


@pytest.mark.parametrize(
    ("zone", "change"),
    [
        ("Europe/London", datetime(2026, 3, 29, 1, tzinfo=UTC)),
        ("America/New_York", datetime(2026, 11, 1, 6, tzinfo=UTC)),
        ("Australia/Lord_Howe", datetime(2026, 4, 4, 15, tzinfo=UTC)),
        ("UTC", datetime(2028, 2, 29, tzinfo=UTC)),
    ],
)
def test_across_a_clock_change_all_moments_are_caught_up(zone: str, change: datetime) -> None:
    form = {"cron": "30 1,2,12 * * *", "timezone": zone}
    catching = rules(form, misfire="fire_all", catch_up_ms=7 * DAY)
    recurrence = catching.recurrence
    first = recurrence.next_ms(ms(change - timedelta(days=2)))
    assert first is not None
    now = ms(change + timedelta(days=2))
    assert fired_until(catching, first, now) == recurrence.between(first, now + 1, 100)


def fired_until(given_rules: Rules, nominal: int, now: int) -> list[int]:
    """All that is fired at a moment, one step after the other."""
    fired = []
    following: int | None = nominal
    while following is not None and following <= now:
        found = plan(given_rules, following, now)
        if found.moment_ms is not None:
            fired.append(found.moment_ms)
        following = found.next_ms
    return fired


# --- properties -----------------------------------------------------------------------------------

explore = settings(max_examples=300, deadline=None, derandomize=True)

FORMS: list[dict[str, Any]] = [
    HOURLY,
    DAILY,
    {"cron": "*/7 * * * *"},
    {"cron": "30 1 * * *", "timezone": "Europe/London"},
    {"cron": "*/30 * * * *", "timezone": "Australia/Lord_Howe"},
    {"cron": "0 0 29 2 *"},
    {"cron": "H H * * *"},
    {"every": 90 * SECOND, "anchor": 12_345},
    {"every": 7 * HOUR, "anchor": 1},
    {"at": NINE + 3 * HOUR},
    {
        "cron": "*/10 * * * *",
        "timezone": "America/New_York",
        "limits": {
            "windows": [{"days": [1, 2, 3, 4, 5], "from": "22:00", "to": "02:30"}],
            "exclude": ["2026-03-06"],
        },
    },
    {"every": HOUR, "anchor": 0, "limits": {"start": NINE + HOUR, "end": NINE + 30 * HOUR}},
]


@st.composite
def situations(draw: st.DrawFn) -> tuple[Rules, int, int]:
    """Rules, a moment of theirs, and how the time is then."""
    found = rules(
        draw(st.sampled_from(FORMS)),
        misfire=draw(st.sampled_from(MISFIRES)),
        catch_up_ms=draw(st.sampled_from([0, 10 * MINUTE, 5 * HOUR, 3 * DAY])),
        max_catch_up=draw(st.integers(1, 20)),
        jitter_ms=draw(st.sampled_from([0, 30 * SECOND, 20 * MINUTE, DAY])),
    )
    nominal = found.recurrence.next_ms(NINE + draw(st.integers(0, 2 * DAY)))
    if nominal is None:
        nominal = found.recurrence.next_ms(NINE)
    assert nominal is not None
    outage = st.integers(0, 5 * MINUTE) | st.integers(0, 4 * DAY)
    return found, nominal, due_ms(found, nominal) + draw(outage)


def noted(found: Decision) -> tuple[int, int] | None:
    """First and last moment of the stretch that a step gives up."""
    if not found.note:
        return None
    last, first, count, _ = found.note.split("\0")
    assert int(count) == found.missed
    return int(first), int(last)


@explore
@given(situations())
def test_the_next_moment_is_after_all_handled_ones(situation: tuple[Rules, int, int]) -> None:
    given_rules, nominal, now = situation
    found = plan(given_rules, nominal, now)
    stretch_ms = noted(found)
    dealt = [nominal] if found.moment_ms is None else [found.moment_ms]
    dealt += [] if stretch_ms is None else [stretch_ms[1]]
    assert found.next_ms == given_rules.recurrence.next_ms(max(dealt))
    if found.next_ms is None:
        assert found.due_ms is None
    else:
        assert found.next_ms > nominal
        assert found.due_ms == due_ms(given_rules, found.next_ms)


@explore
@given(situations())
def test_every_past_moment_is_either_fired_or_noted(situation: tuple[Rules, int, int]) -> None:
    given_rules, nominal, now = situation
    recurrence = given_rules.recurrence
    fired, given_up, following = [], 0, nominal
    for _ in range(1000):
        found = plan(given_rules, following, now)
        stretch_ms = noted(found)
        if stretch_ms is not None:
            first, last = stretch_ms
            assert first == following
            assert found.missed == min(recurrence.count(first, last + 1, 10_000), MISSED_CAP)
            assert found.moment_ms == (
                None if found.moment_ms is None else recurrence.next_ms(last)
            )
            given_up += recurrence.count(first, last + 1, 10_000)
        else:
            assert (found.moment_ms, found.missed) == (following, 0)
        fired += [] if found.moment_ms is None else [found.moment_ms]
        if found.next_ms is None or due_ms(given_rules, found.next_ms) > now:
            break
        assert given_rules.misfire == "fire_all"  # the others are done in one step
        following = found.next_ms
    end = now + 1 if found.next_ms is None else min(now + 1, found.next_ms)
    assert len(fired) + given_up == recurrence.count(nominal, end, 10_000)
    assert fired == sorted(set(fired))


@explore
@given(situations())
def test_nothing_fires_early_or_against_its_policy(situation: tuple[Rules, int, int]) -> None:
    given_rules, nominal, now = situation
    found = plan(given_rules, nominal, now)
    if found.moment_ms is None:
        assert given_rules.misfire != "fire_once"
        return
    due = due_ms(given_rules, found.moment_ms)
    assert due <= now
    if given_rules.misfire == "skip":
        assert now - due <= MISFIRE_GRACE_MS
    if given_rules.misfire == "fire_all":
        window = max(given_rules.catch_up_ms, MISFIRE_GRACE_MS)
        assert now - due <= window
        later = given_rules.recurrence.count(found.moment_ms + 1, now + 1, 10_000)
        assert later <= given_rules.max_catch_up


@explore
@given(situations())
def test_jitter_is_stable_and_ends_before_the_next_run(
    situation: tuple[Rules, int, int],
) -> None:
    given_rules, nominal, _ = situation
    due = due_ms(given_rules, nominal)
    assert due == due_ms(replace(given_rules), nominal)
    assert nominal <= due <= nominal + given_rules.jitter_ms
    following = given_rules.recurrence.next_ms(nominal)
    assert following is None or due < following


@explore
@given(situations())
def test_what_is_fired_is_within_the_limits(situation: tuple[Rules, int, int]) -> None:
    given_rules, nominal, now = situation
    for moment in fired_until(given_rules, nominal, now):
        assert given_rules.recurrence.latest_ms(moment) == moment
