"""Kinds of schedules, their limits, and how they are paused: on a clock that the test moves."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis
from prometheus_client import CollectorRegistry
from scheduling import (
    THURSDAY,
    add,
    at,
    before_script,
    due_at,
    fire_id,
    fired_ids,
    get,
    ms,
    noted,
    record,
    state_of,
    tamper,
)
from support import claim_one, stats

from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidCron, InvalidInput, InvalidSchedule, ScheduleQuota
from fairqueue.queue.queue import TaskQueue
from fairqueue.recurrence.frequency import every
from fairqueue.scheduler.scheduler import TaskScheduler, TickReport


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(THURSDAY)


def add_rule(scheduler: TaskScheduler, schedule_id: str = "s", **fields: Any) -> str:
    """Add a schedule with exactly the rule that is given."""
    return add(scheduler, schedule_id, **{"cron_expr": None} | fields)


def run_until(scheduler: TaskScheduler, clock: ManualClock, end: datetime, step: timedelta) -> None:
    """Tick again and again until a moment."""
    while clock.now() < end:
        clock.set(min(end, clock.now() + step))
        scheduler.tick()


def fires(client: redis.Redis, queue: TaskQueue) -> list[datetime]:
    """The moments of all tasks that were fired, in order."""
    ids = fired_ids(client, queue)
    return [datetime.fromtimestamp(int(name.rpartition(":")[2]) / 1000, UTC) for name in ids]


# --- intervals ------------------------------------------------------------------------------------


def test_an_interval_counts_from_when_it_was_made(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=timedelta(seconds=90))
    assert get(scheduler, "s").every == timedelta(seconds=90)
    assert get(scheduler, "s").cron_expr == ""
    run_until(scheduler, clock, THURSDAY + timedelta(seconds=300), timedelta(seconds=7))
    wanted = [THURSDAY + timedelta(seconds=90 * n) for n in (1, 2, 3)]
    assert fires(redis_client, queue) == wanted


def test_an_interval_counts_from_its_start(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=3600, start=at(5, 10, 15))
    assert get(scheduler, "s").next_run == at(5, 10, 15)
    run_until(scheduler, clock, at(5, 12, 30), timedelta(minutes=5))
    assert fires(redis_client, queue) == [at(5, 10, 15), at(5, 11, 15), at(5, 12, 15)]


def test_an_interval_does_not_drift_over_an_outage_nor_with_late_ticks(
    scheduler: TaskScheduler, clock: ManualClock
) -> None:
    add_rule(scheduler, every=7)
    for seconds in (8, 100, 86_400, 3, 5):
        clock.advance(seconds)
        scheduler.tick()
        schedule = get(scheduler, "s")
        assert schedule.next_run is not None
        assert (schedule.next_run - THURSDAY).total_seconds() % 7 == 0
        assert clock.now() < schedule.next_run <= clock.now() + timedelta(seconds=7)


def test_a_moved_start_moves_the_interval(scheduler: TaskScheduler) -> None:
    add_rule(scheduler, every=3600)
    scheduler.update_schedule("s", start=at(5, 12, 5))
    assert get(scheduler, "s").next_run == at(5, 12, 5)
    scheduler.update_schedule("s", payload={"n": 1})
    assert get(scheduler, "s").next_run == at(5, 12, 5)
    scheduler.update_schedule("s", start=None)
    assert get(scheduler, "s").next_run == THURSDAY + timedelta(hours=1)


# --- once -----------------------------------------------------------------------------------------


def test_a_one_time_schedule_fires_once_and_is_completed(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, at=at(5, 10))
    assert get(scheduler, "s").at == at(5, 10)
    run_until(scheduler, clock, at(5, 12), timedelta(minutes=10))

    assert fired_ids(redis_client, queue) == [fire_id("s", at(5, 10))]
    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.next_run, schedule.run_count) == (False, None, 1)
    assert schedule.disabled_reason is not None
    assert schedule.disabled_reason.startswith("completed: at '2026-03-05T10:00:00")
    assert scheduler.problems() == []
    assert due_at(redis_client, queue, "s") is None
    assert "set_aside_cron" not in stats(redis_client)


def test_a_one_time_schedule_is_fired_after_an_outage(
    scheduler: TaskScheduler, clock: ManualClock
) -> None:
    add_rule(scheduler, at=at(5, 10))
    clock.set(at(20, 10))
    assert scheduler.tick().fired == 1


def test_a_one_time_schedule_that_may_not_be_late_is_completed_without_a_run(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, at=at(5, 10), misfire="skip")
    clock.set(at(5, 10, 5))
    report = scheduler.tick()
    assert (report.fired, report.missed, report.set_aside) == (0, 1, 0)
    assert noted(redis_client, queue, "s") == [(at(5, 10), at(5, 10), 1, "misfire")]
    assert get(scheduler, "s").is_active is False
    assert scheduler.problems() == []


def test_a_completed_schedule_goes_on_with_a_new_rule(
    scheduler: TaskScheduler, clock: ManualClock
) -> None:
    add_rule(scheduler, at=at(5, 10))
    clock.set(at(5, 10))
    scheduler.tick()
    scheduler.update_schedule("s", name="still.completed")
    assert get(scheduler, "s").is_active is False
    scheduler.update_schedule("s", at=at(5, 11))
    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 11))
    assert schedule.disabled_reason is None


def test_a_moment_that_has_passed_cannot_be_scheduled(
    scheduler: TaskScheduler, clock: ManualClock, redis_client: redis.Redis
) -> None:
    with pytest.raises(InvalidSchedule, match=r"at 2026-03-05T08:59:30.* is in the past"):
        add_rule(scheduler, at=THURSDAY)
    assert state_of(redis_client) == {}
    add_rule(scheduler, at=at(5, 9))
    clock.set(at(5, 9))
    scheduler.tick()
    before = state_of(redis_client)
    with pytest.raises(InvalidSchedule, match="is in the past"):
        scheduler.resume_schedule("s")
    assert state_of(redis_client) == before


# --- limits ---------------------------------------------------------------------------------------


def test_nothing_fires_before_the_start_nor_from_the_end_on(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *", start=at(5, 11), end=at(5, 14))
    run_until(scheduler, clock, at(5, 18), timedelta(minutes=20))
    assert fires(redis_client, queue) == [at(5, 11), at(5, 12), at(5, 13)]
    schedule = get(scheduler, "s")
    assert schedule.is_active is False
    assert schedule.disabled_reason == "completed: cron_expr '0 * * * *' has no next moment"
    assert scheduler.problems() == []


OFFICE = [{"days": [1, 2, 3, 4, 5], "from": "09:00", "to": "11:00"}]


def test_windows_and_excluded_dates_are_left_out(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    """The 5th is a Thursday; the Friday is excluded, and the week-end has no window."""
    add_rule(scheduler, cron_expr="0 * * * *", windows=OFFICE, exclude=["2026-03-06"])
    run_until(scheduler, clock, at(9, 12), timedelta(minutes=30))
    assert fires(redis_client, queue) == [at(5, 9), at(5, 10), at(9, 9), at(9, 10)]
    schedule = get(scheduler, "s")
    assert (schedule.windows, schedule.exclude) == (OFFICE, ["2026-03-06"])


ACROSS: list[tuple[str, str, datetime, list[datetime]]] = [
    (  # the window from 00:30 to 02:30 is an hour shorter: 01:00 to 02:00 is not there
        "Europe/London",
        "*/30 * * * *",
        datetime(2026, 3, 29, tzinfo=UTC),
        [
            datetime(2026, 3, 29, 0, 30, tzinfo=UTC),
            datetime(2026, 3, 29, 1, 0, tzinfo=UTC),
        ],
    ),
    (  # it is an hour longer: 01:00 and 01:30 come twice
        "America/New_York",
        "*/30 * * * *",
        datetime(2026, 11, 1, 4, tzinfo=UTC),
        [datetime(2026, 11, 1, 4, 30, tzinfo=UTC) + timedelta(minutes=30 * n) for n in range(6)],
    ),
    (  # it is half an hour longer: 01:30 comes twice
        "Australia/Lord_Howe",
        "*/30 * * * *",
        datetime(2026, 4, 4, 13, tzinfo=UTC),
        [datetime(2026, 4, 4, 13, 30, tzinfo=UTC) + timedelta(minutes=30 * n) for n in range(5)],
    ),
    (
        "UTC",
        "0 1 29 2 *",
        datetime(2028, 2, 28, 12, tzinfo=UTC),
        [datetime(2028, 2, 29, 1, tzinfo=UTC)],
    ),
]


@pytest.mark.parametrize(("zone", "cron", "begin", "moments"), ACROSS)
def test_windows_are_what_the_wall_clock_shows(
    scheduler: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    zone: str,
    cron: str,
    begin: datetime,
    moments: list[datetime],
) -> None:
    clock.set(begin)
    window = [{"from": "00:30", "to": "02:30"}]
    add_rule(scheduler, cron_expr=cron, timezone=zone, windows=window)
    run_until(scheduler, clock, begin + timedelta(hours=14), timedelta(minutes=10))
    assert fires(redis_client, queue) == moments


def test_an_excluded_date_is_a_day_of_the_schedules_zone(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    """In New York the 8th of March has 23 hours: it ends at 04:00 UTC."""
    clock.set(at(8, 4))
    add_rule(scheduler, every=3600, timezone="America/New_York", exclude=["2026-03-08"])
    run_until(scheduler, clock, at(9, 6), timedelta(minutes=30))
    assert fires(redis_client, queue) == [at(9, 4), at(9, 5), at(9, 6)]


def test_a_schedule_is_completed_after_its_last_run(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=60, max_runs=3)
    run_until(scheduler, clock, THURSDAY + timedelta(minutes=10), timedelta(seconds=30))
    assert len(fired_ids(redis_client, queue)) == 3
    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.run_count) == (False, 3)
    assert schedule.disabled_reason == "completed: it has had its 3 runs"
    assert scheduler.problems() == []
    assert due_at(redis_client, queue, "s") is None


def test_triggered_and_skipped_runs_are_not_among_its_runs(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue
) -> None:
    add_rule(scheduler, every=60, max_runs=2, overlap="skip")
    clock.advance(60)
    assert scheduler.tick().fired == 1
    clock.advance(60)
    assert scheduler.tick().skipped == 1
    queue.finish(claim_one(queue))
    scheduler.trigger("s")
    queue.finish(claim_one(queue))
    assert get(scheduler, "s").is_active is True
    clock.advance(60)
    assert scheduler.tick().fired == 1
    assert get(scheduler, "s").is_active is False


def test_a_schedule_that_has_had_its_runs_needs_more_of_them_to_go_on(
    scheduler: TaskScheduler, clock: ManualClock, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=60, max_runs=1)
    clock.advance(60)
    scheduler.tick()
    before = state_of(redis_client)
    with pytest.raises(InvalidSchedule, match="max_runs 1 is no more than the 1 runs"):
        scheduler.resume_schedule("s")
    assert state_of(redis_client) == before

    assert scheduler.update_schedule("s", max_runs=2, is_active=True)
    with pytest.raises(InvalidSchedule, match="max_runs 1 is no more than the 1 runs"):
        scheduler.update_schedule("s", max_runs=1)
    clock.advance(60)
    assert scheduler.tick().fired == 1
    assert get(scheduler, "s").is_active is False


def test_a_replaced_schedule_that_has_had_its_runs_is_completed_without_another(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=60)
    clock.advance(60)
    scheduler.tick()
    add_rule(scheduler, every=60, max_runs=1, on_conflict="replace")
    clock.advance(60)
    assert scheduler.tick().fired == 0
    moment = clock.now()
    assert noted(redis_client, queue, "s") == [(moment, moment, 1, "completed")]
    assert get(scheduler, "s").disabled_reason == "completed: it has had its 1 runs"


# --- ways to write a rule -------------------------------------------------------------------------


def test_h_is_hashed_by_the_id(scheduler: TaskScheduler) -> None:
    for n in range(20):
        add_rule(scheduler, f"s{n}", cron_expr="H H * * *")
    moments = {get(scheduler, f"s{n}").next_run for n in range(20)}
    assert len(moments) > 15
    assert get(scheduler, "s0").cron_expr == "H H * * *"
    before = get(scheduler, "s0").next_run
    scheduler.remove_schedule("s0")
    add_rule(scheduler, "s0", cron_expr="H H * * *")
    assert get(scheduler, "s0").next_run == before


@pytest.mark.parametrize(
    ("rule", "cron"),
    [
        ({"minutes": "*/15", "hours": "9-17", "wday": "1-5"}, "*/15 9-17 * * 1-5"),
        (every().day.at("09:30"), "30 9 * * *"),
        (every().five_minutes.weekdays, "*/5 * * * 1-5"),
        ("EVERY_DAY", "10 2 * * *"),
        ("0 9 * * 1-5", "0 9 * * 1-5"),
    ],
)
def test_a_rule_may_be_written_in_several_ways(
    scheduler: TaskScheduler, rule: Any, cron: str
) -> None:
    add_rule(scheduler, cron_expr=rule)
    assert get(scheduler, "s").cron_expr == cron
    add_rule(scheduler, "t", cron_expr="@yearly")
    scheduler.update_schedule("t", cron_expr=rule)
    assert get(scheduler, "t").cron_expr == cron
    assert get(scheduler, "t").next_run == get(scheduler, "s").next_run


KINDS: list[tuple[dict[str, Any], datetime]] = [
    ({"cron_expr": "30 9 * * *"}, at(5, 9, 30)),
    ({"every": 120}, THURSDAY + timedelta(minutes=2)),
    ({"at": at(7, 1)}, at(7, 1)),
]


@pytest.mark.parametrize(("old", "_"), KINDS)
@pytest.mark.parametrize(("new", "moment"), KINDS)
def test_a_rule_of_another_kind_takes_the_place_of_the_old_one(
    scheduler: TaskScheduler, old: dict[str, Any], _: Any, new: dict[str, Any], moment: datetime
) -> None:
    add_rule(scheduler, **old)
    assert scheduler.update_schedule("s", **new) is True
    schedule = get(scheduler, "s")
    assert schedule.next_run == moment
    rule = {"cron_expr": schedule.cron_expr, "every": schedule.every, "at": schedule.at}
    assert [kind for kind, value in rule.items() if value] == list(new)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"every": 0.5}, "every 0.5 "),
    ({"every": -1}, "every -1 "),
    ({"every": "hour"}, "every 'hour'"),
    ({"every": True}, "every True"),
    ({"at": "tomorrow"}, "at 'tomorrow'"),
    ({"at": datetime(2026, 3, 6)}, "at '2026-03-06T00:00:00' has no time zone"),
    ({"every": 60, "at": at(6, 1)}, "every"),
    ({"every": 60, "start": "now"}, "start 'now'"),
    ({"every": 60, "end": datetime(2026, 3, 6)}, "end '2026-03-06"),
    ({"every": 60, "end": THURSDAY}, "is in the past"),
    ({"every": 60, "start": at(7, 1), "end": at(6, 1)}, "end"),
    ({"every": 60, "windows": "always"}, "windows 'always'"),
    ({"every": 60, "windows": [{"days": [8]}]}, "8"),
    ({"every": 60, "windows": [{"from": "9"}]}, "'9'"),
    ({"every": 60, "exclude": ["2026-02-30"]}, "2026-02-30"),
    ({"every": 60, "exclude": "2026-02-28"}, "exclude"),
    ({"every": 60, "max_runs": 0}, "max_runs 0"),
    ({"every": 60, "max_runs": 1.5}, "max_runs 1.5"),
    ({"every": 60, "misfire": "never"}, "misfire 'never' is none of fire_once, skip, fire_all"),
    ({"every": 60, "misfire": None}, "misfire None"),
    ({"every": 60, "catch_up": -1}, "catch_up -1"),
    ({"every": 60, "catch_up": None}, "catch_up None"),
    ({"every": 60, "max_catch_up": 0}, "max_catch_up 0"),
    ({"every": 60, "max_catch_up": 1001}, "max_catch_up 1001"),
    ({"every": 60, "jitter": 86_401}, "jitter 86401"),
    ({"every": 60, "jitter": "some"}, "jitter 'some'"),
    ({"every": 60, "overlap": "no"}, "overlap 'no'"),
    ({"every": 60, "retries": -1}, "retries -1"),
    ({"every": 60, "backoff": []}, r"backoff \[\]"),
    ({"every": 60, "backoff": [1, "x"]}, "backoff 'x'"),
    ({"every": 60, "timeout": 0}, "timeout 0"),
    ({"every": 60, "max_failures": 0}, "max_failures 0"),
    ({"every": 60, "colour": "red"}, "unknown field 'colour'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_value_is_named_and_nothing_is_stored(
    scheduler: TaskScheduler, redis_client: redis.Redis, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInput, match=message):
        add_rule(scheduler, **fields)
    assert state_of(redis_client) == {}
    add_rule(scheduler, every=3600)
    before = state_of(redis_client)
    with pytest.raises(InvalidInput, match=message):
        scheduler.update_schedule("s", **fields)
    assert state_of(redis_client) == before


@pytest.mark.parametrize("kind", ["cron_expr", "every", "at"])
def test_a_schedule_keeps_a_rule(scheduler: TaskScheduler, kind: str) -> None:
    rules: dict[str, Any] = {"cron_expr": "@daily", "every": 60, "at": at(6, 1)}
    add_rule(scheduler, **{kind: rules[kind]})
    with pytest.raises(InvalidSchedule, match="needs one of cron_expr, every, at"):
        scheduler.update_schedule("s", **{kind: None})


def test_all_options_are_kept(scheduler: TaskScheduler) -> None:
    options: dict[str, Any] = {
        "every": timedelta(seconds=90),
        "start": at(5, 10),
        "end": at(30, 10),
        "windows": OFFICE,
        "exclude": ["2026-03-07"],
        "max_runs": 9,
        "misfire": "fire_all",
        "catch_up": 5_000_000.0,
        "max_catch_up": 7,
        "jitter": 1.5,
        "overlap": "skip",
        "retries": 2,
        "backoff": [1.0, 2.5],
        "backoff_cap": 90.0,
        "backoff_multiplier": 1.5,
        "backoff_jitter": "full",
        "timeout": 30.0,
        "max_failures": 4,
    }
    add_rule(scheduler, **options)
    schedule = get(scheduler, "s")
    assert {name: getattr(schedule, name) for name in options} == options


@pytest.mark.parametrize(
    "fields",
    [
        {"every": "60000"},
        {"at": 1.5},
        {"start": "soon"},
        {"catch_up": None},
        {"jitter": -1},
        {"misfire": "x"},
        {"max_runs": "3"},
        {"cron_expr": "@daily"},
    ],
)
def test_a_spoilt_option_sets_the_schedule_aside_and_the_others_fire(
    scheduler: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    fields: dict[str, Any],
) -> None:
    add_rule(scheduler, "bad", every=60)
    add_rule(scheduler, "good", every=60)
    tamper(redis_client, queue, "bad", **fields)
    clock.advance(60)
    report = scheduler.tick()
    assert (report.fired, report.set_aside) == (1, 1)
    assert [problem.schedule_id for problem in scheduler.problems()] == ["bad"]


# --- failures in a row ----------------------------------------------------------------------------


def end_next(queue: TaskQueue, *, good: bool) -> None:
    """Let the next task succeed, or put it among the dead letters."""
    claim = claim_one(queue)
    if good:
        queue.finish(claim)
    else:
        queue.bury(claim, "broken")


def test_a_schedule_that_fails_again_and_again_is_paused(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=60, max_failures=3)
    in_a_row = []
    for good in (False, False, True, False, False, False):
        clock.advance(60)
        assert scheduler.tick().fired == 1
        end_next(queue, good=good)
        in_a_row.append(get(scheduler, "s").failures_in_a_row)
    assert in_a_row == [1, 2, 0, 1, 2, 3]

    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.next_run) == (False, None)
    assert schedule.disabled_reason == "paused after 3 failures in a row"
    assert schedule.paused_at == clock.now()
    assert scheduler.problems() == []
    assert stats(redis_client)["auto_paused"] == 1
    clock.advance(600)
    assert scheduler.tick().fired == 0


def test_a_schedule_that_was_paused_for_its_failures_goes_on_when_it_is_resumed(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=60, max_failures=1)
    clock.advance(60)
    scheduler.tick()
    end_next(queue, good=False)
    clock.advance(130)
    scheduler.update_schedule("s", payload={"mended": True})
    scheduler.update_schedule("s", every=50)
    assert get(scheduler, "s").is_active is False
    scheduler.update_schedule("s", every=60)

    assert scheduler.resume_schedule("s") is True

    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.disabled_reason) == (True, None)
    assert (schedule.failures_in_a_row, schedule.paused_at) == (0, None)
    clock.advance(60)
    assert scheduler.tick().fired == 1


def test_a_moment_that_has_come_is_in_the_pause_for_failures(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *", max_failures=1)
    clock.set(at(5, 9))
    scheduler.tick()
    claim = claim_one(queue, lease=86_400)
    clock.set(at(5, 11, 30))
    queue.bury(claim, "broken")
    clock.set(at(5, 12, 30))
    scheduler.resume_schedule("s")
    assert noted(redis_client, queue, "s") == [(at(5, 10), at(5, 12), 3, "paused")]


def test_a_task_that_is_retried_is_no_failure_yet(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue
) -> None:
    add_rule(scheduler, every=60, max_failures=1)
    clock.advance(60)
    scheduler.tick()
    queue.retry(claim_one(queue), "once more", delay=0)
    assert get(scheduler, "s").is_active is True
    end_next(queue, good=False)
    assert get(scheduler, "s").is_active is False


def test_leases_that_expire_too_often_are_a_failure(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue
) -> None:
    queue.configure(max_attempts=1)
    add_rule(scheduler, every=60, max_failures=1)
    clock.advance(60)
    scheduler.tick()
    claim_one(queue, lease=5)
    clock.advance(6)
    assert queue.claim("w") == []
    assert get(scheduler, "s").disabled_reason == "paused after 1 failures in a row"


def test_failures_of_other_tasks_and_of_removed_schedules_change_nothing(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, "limited", every=60, max_failures=1)
    add_rule(scheduler, "free", every=3600)
    scheduler.trigger("limited")
    scheduler.trigger("free")
    for _ in range(2):
        end_next(queue, good=False)
    assert get(scheduler, "limited").is_active
    assert get(scheduler, "free").is_active
    clock.advance(60)
    scheduler.tick()
    scheduler.remove_schedule("limited")
    end_next(queue, good=False)
    assert record(redis_client, queue, "schedule_state", "limited") is None


# --- pauses ---------------------------------------------------------------------------------------


def test_a_paused_schedule_fires_nothing_and_says_why(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *")
    assert scheduler.pause_schedule("s", note="the printer burns", by="carol") is True
    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.next_run) == (False, None)
    assert (schedule.paused_at, schedule.paused_until) == (THURSDAY, None)
    assert (schedule.pause_note, schedule.paused_by) == ("the printer burns", "carol")
    run_until(scheduler, clock, at(5, 12, 30), timedelta(minutes=30))
    assert fired_ids(redis_client, queue) == []
    assert noted(redis_client, queue, "s") == []

    assert scheduler.resume_schedule("s", by="dave") is True

    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 13))
    assert (schedule.paused_at, schedule.pause_note, schedule.paused_by) == (None, None, None)
    assert noted(redis_client, queue, "s") == [(at(5, 9), at(5, 12), 4, "paused")]
    assert schedule.missed_count == 0


def test_a_pause_with_an_end_ends_by_itself(
    scheduler: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *")
    add_rule(scheduler, "other", cron_expr="0 12 * * *")
    scheduler.pause_schedule("s", until=at(5, 11, 30))
    assert get(scheduler, "s").paused_until == at(5, 11, 30)
    run_until(scheduler, clock, at(5, 11, 29), timedelta(minutes=1))
    assert get(scheduler, "s").is_active is False
    clock.set(at(5, 11, 30))

    with caplog.at_level("INFO", logger="fairqueue.scheduler"):
        report = scheduler.tick()

    assert caplog.text.count("schedule_resumed schedule=s") == 1
    assert (report.fired, report.set_aside, report.moved) == (0, 0, 0)
    assert 1700 < report.wait <= 1800
    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 12))
    assert (schedule.paused_at, schedule.paused_until) == (None, None)
    assert noted(redis_client, queue, "s") == [(at(5, 9), at(5, 11), 3, "paused")]
    clock.set(at(5, 12))
    assert scheduler.tick().fired == 2


def test_a_pause_that_ends_at_a_given_time_of_a_tick_ends(
    redis_client: redis.Redis, registry: CollectorRegistry
) -> None:
    """The queue has the server's clock, and the tick another."""
    with TaskQueue(redis_client) as queue:
        scheduler = TaskScheduler(queue, registry=registry)
        scheduler.add_schedule(every=3600, user_id="alice", schedule_id="s")
        seconds, _ = redis_client.time()
        scheduler.pause_schedule("s", until=seconds + 100.0)
        scheduler.tick(seconds + 101.0)
        assert get(scheduler, "s").is_active is True


def test_the_end_of_a_pause_over_an_outage_gives_up_what_has_passed(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *", misfire="fire_all")
    scheduler.pause_schedule("s", until=at(5, 11, 30))
    clock.set(at(5, 15, 30))
    assert scheduler.tick().fired == 0
    assert noted(redis_client, queue, "s") == [(at(5, 9), at(5, 15), 7, "paused")]
    assert get(scheduler, "s").next_run == at(5, 16)


def test_a_one_time_schedule_whose_moment_was_in_its_pause_is_completed(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, at=at(5, 10))
    scheduler.pause_schedule("s", until=at(5, 11))
    clock.set(at(5, 11))
    report = scheduler.tick()
    assert (report.fired, report.set_aside) == (0, 0)
    schedule = get(scheduler, "s")
    assert schedule.is_active is False
    assert schedule.disabled_reason is not None
    assert schedule.disabled_reason.startswith("completed: ")
    assert (schedule.paused_at, schedule.paused_until) == (None, None)
    assert noted(redis_client, queue, "s") == [(at(5, 10), at(5, 10), 1, "paused")]
    assert scheduler.problems() == []
    assert due_at(redis_client, queue, "s") is None


def test_a_pause_in_its_jitter_gives_up_the_moment(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 9 * * *", jitter=1800)
    due = due_at(redis_client, queue, "s")
    assert due is not None
    assert due > ms(at(5, 9))
    clock.set(at(5, 9))
    scheduler.pause_schedule("s")
    clock.set(at(5, 9, 30))
    assert scheduler.tick().fired == 0
    assert noted(redis_client, queue, "s") == [(at(5, 9), at(5, 9), 1, "missed")]


def test_a_pause_of_an_absent_schedule_is_none(
    scheduler: TaskScheduler, redis_client: redis.Redis
) -> None:
    assert scheduler.pause_schedule("s", note="n", by="b", until=at(6, 1)) is False
    assert scheduler.resume_schedule("s") is False
    assert state_of(redis_client) == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"by": ""}, "by ''"),
        ({"by": 5}, "by 5"),
        ({"note": 5}, "note 5"),
        ({"note": "x" * 1001}, "note 'xxx"),
        ({"until": THURSDAY}, "until 2026-03-05T08:59:30.* is in the past"),
        ({"until": "noon"}, "until 'noon'"),
        ({"until": datetime(2026, 3, 6)}, "until '2026-03-06"),
    ],
)
def test_a_bad_pause_is_named_and_nothing_is_stored(
    scheduler: TaskScheduler, redis_client: redis.Redis, fields: dict[str, Any], message: str
) -> None:
    add_rule(scheduler, every=60)
    before = state_of(redis_client)
    with pytest.raises(InvalidInput, match=message):
        scheduler.pause_schedule("s", **fields)
    assert state_of(redis_client) == before


def test_an_update_of_a_paused_schedule_leaves_it_paused(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *")
    scheduler.pause_schedule("s", note="n", by="b", until=at(5, 12, 30))
    clock.set(at(5, 9, 30))
    scheduler.update_schedule("s", cron_expr="15 * * * *", payload={"n": 2}, timezone="Asia/Tokyo")
    schedule = get(scheduler, "s")
    assert (schedule.is_active, schedule.next_run) == (False, None)
    assert (schedule.pause_note, schedule.paused_until) == ("n", at(5, 12, 30))
    assert due_at(redis_client, queue, "s") == ms(at(5, 12, 30))
    clock.set(at(5, 12, 30))
    scheduler.tick()
    assert get(scheduler, "s").next_run == at(5, 13, 15)


def test_a_rule_that_is_changed_in_a_pause_has_its_moments_from_then_on(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *")
    scheduler.pause_schedule("s")
    clock.set(at(5, 10, 30))
    scheduler.update_schedule("s", cron_expr="15 * * * *")
    scheduler.update_schedule("s", payload={"n": 2})
    clock.set(at(5, 12, 30))
    scheduler.resume_schedule("s")
    assert noted(redis_client, queue, "s") == [
        (at(5, 9), at(5, 10), 2, "paused"),
        (at(5, 11, 15), at(5, 12, 15), 2, "paused"),
    ]


def test_a_schedule_that_is_paused_again_is_paused_since_the_first_time(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *")
    scheduler.pause_schedule("s", note="first", until=at(5, 10, 30))
    clock.set(at(5, 10, 15))
    scheduler.pause_schedule("s", note="second", by="carol")
    schedule = get(scheduler, "s")
    assert (schedule.pause_note, schedule.paused_by) == ("second", "carol")
    assert (schedule.paused_at, schedule.paused_until) == (THURSDAY, None)
    assert due_at(redis_client, queue, "s") is None
    clock.set(at(5, 11, 30))
    assert scheduler.tick().fired == 0
    scheduler.resume_schedule("s")
    assert noted(redis_client, queue, "s") == [(at(5, 9), at(5, 11), 3, "paused")]


def test_a_resume_of_a_schedule_that_runs_changes_nothing_of_its_plan(
    scheduler: TaskScheduler, redis_client: redis.Redis, queue: TaskQueue
) -> None:
    add_rule(scheduler, every=3600)
    before = get(scheduler, "s").next_run
    assert scheduler.resume_schedule("s") is True
    assert get(scheduler, "s").next_run == before
    assert noted(redis_client, queue, "s") == []


CHANGED: dict[str, Callable[[TaskScheduler], object]] = {
    "resumed": lambda scheduler: scheduler.resume_schedule("s"),
    "paused anew": lambda scheduler: scheduler.pause_schedule("s", until=at(5, 15)),
    "changed": lambda scheduler: scheduler.update_schedule("s", payload={"n": 2}),
    "removed": lambda scheduler: scheduler.remove_schedule("s"),
}


@pytest.mark.parametrize("how", CHANGED)
def test_what_was_changed_since_it_was_read_is_not_resumed(
    scheduler: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    add_rule(scheduler, cron_expr="0 * * * *")
    scheduler.pause_schedule("s", until=at(5, 11, 30))
    clock.set(at(5, 11, 30))
    states: list[Any] = []

    def change() -> None:
        CHANGED[how](scheduler)
        states.append(state_of(redis_client).get("plan"))

    before_script(queue, monkeypatch, "resume", change)
    scheduler._handle(scheduler._leadership.lead(10), TickReport(), None)
    assert state_of(redis_client).get("plan") == states[0]


def changes_of(client: redis.Redis, queue: TaskQueue) -> list[Any]:
    """What was noted of the changes of the only schedule, oldest first."""
    members = cast(list[bytes], client.zrange(queue.keys["changes"], 0, -1))
    return [json.loads(member.split(b"\0")[3]) for member in members]


def test_who_paused_and_resumed_is_in_the_history_of_changes(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=60)
    scheduler.update_schedule("s", every=90, changed_by="alice")
    clock.advance(1)
    scheduler.pause_schedule("s", note="n", by="bob")
    clock.advance(1)
    scheduler.resume_schedule("s", by="carol")
    making, *changed = changes_of(redis_client, queue)
    assert making["made"]
    assert [change["by"] for change in changed] == ["alice", "bob", "carol"]
    assert changed[0]["fields"]["every"] == [60_000, 90_000]
    assert (changed[1]["note"], changed[1]["fields"]) == ("n", {"is_active": [True, False]})
    assert changed[2]["fields"] == {"is_active": [False, True]}


def test_the_history_of_changes_is_bounded_and_goes_with_the_schedule(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add_rule(scheduler, every=60)
    for n in range(55):
        scheduler.update_schedule("s", metadata={"n": n})
        clock.advance(1)
    changed = changes_of(redis_client, queue)
    assert len(changed) == 50
    assert changed[-1]["fields"]["metadata"] == [{"n": 53}, {"n": 54}]
    scheduler.remove_schedule("s")
    assert redis_client.zcard(queue.keys["changes"]) == 0


# --- quotas ---------------------------------------------------------------------------------------


def spec(schedule_id: str, user_id: str = "alice", **fields: Any) -> dict[str, Any]:
    return {"cron_expr": "@hourly", "schedule_id": schedule_id, "user_id": user_id} | fields


def test_a_user_has_no_more_schedules_than_allowed(
    scheduler: TaskScheduler, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.configure(max_schedules=2)
    scheduler.add_schedules([spec("a1"), spec("a2"), spec("b1", "bob")])
    before = state_of(redis_client)
    with pytest.raises(ScheduleQuota, match="'alice' would have more schedules"):
        scheduler.add_schedule("@daily", "alice")
    with pytest.raises(ScheduleQuota, match="'alice'"):
        scheduler.add_schedules([spec("b2", "bob"), spec("a3")])
    with pytest.raises(ScheduleQuota, match="'bob'"):
        scheduler.add_schedules([spec("b2", "bob"), spec("b3", "bob")])
    assert state_of(redis_client) == before

    scheduler.add_schedules([spec("a1"), spec("a2", name="again")], on_conflict="replace")
    scheduler.remove_schedule("a1")
    scheduler.add_schedule("@daily", "alice")
    queue.configure(max_schedules=0)
    scheduler.add_schedule("@daily", "alice")


def test_a_schedule_cannot_be_given_to_a_user_who_has_enough(
    scheduler: TaskScheduler, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    scheduler.add_schedules([spec("a1"), spec("b1", "bob"), spec("b2", "bob")])
    queue.configure(max_schedules=2)
    before = state_of(redis_client)
    with pytest.raises(ScheduleQuota, match="'bob'"):
        scheduler.update_schedule("a1", user_id="bob")
    with pytest.raises(ScheduleQuota, match="'bob'"):
        scheduler.add_schedules([spec("a1", "bob")], on_conflict="replace")
    assert state_of(redis_client) == before
    scheduler.update_schedule("b1", user_id="alice")
    scheduler.update_schedule("b2", payload={"n": 1})
    assert [s.schedule_id for s in scheduler.list_schedules("alice")] == ["a1", "b1"]


def test_schedules_beyond_a_lowered_limit_go_on(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue
) -> None:
    scheduler.add_schedules(spec(f"a{n}", cron_expr="0 9 * * *") for n in range(3))
    queue.configure(max_schedules=1)
    clock.set(at(5, 9))
    report = scheduler.tick()
    assert (report.fired, report.refused) == (3, 0)


@pytest.mark.parametrize("rule", [{"every": 59}, {"cron_expr": "*/30 * * * * *"}])
def test_moments_that_are_closer_than_allowed_are_refused(
    scheduler: TaskScheduler, queue: TaskQueue, redis_client: redis.Redis, rule: dict[str, Any]
) -> None:
    queue.configure(min_interval=60)
    before = state_of(redis_client)
    with pytest.raises(ScheduleQuota, match="min_interval is 60 seconds"):
        add_rule(scheduler, **rule)
    assert state_of(redis_client) == before
    add_rule(scheduler, every=60)
    before = state_of(redis_client)
    with pytest.raises(ScheduleQuota, match="min_interval is 60 seconds"):
        scheduler.update_schedule("s", **rule)
    assert state_of(redis_client) == before


def test_a_cron_error_is_still_one(scheduler: TaskScheduler) -> None:
    with pytest.raises(InvalidCron, match="cron_expr '0 0 1 1 \\*' has no moment"):
        add_rule(scheduler, cron_expr="0 0 1 1 *", end=at(6, 1))
