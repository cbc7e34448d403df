"""Kinds of schedules, their limits, and how they are paused: on a clock that the test moves."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
import redis
from helpers.schedules import THURSDAY, at, fire_id, get, ms
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.errors import InvalidCron, InvalidInput, InvalidSchedule, ScheduleQuota
from fairqueue.queue.queue import TaskQueue
from fairqueue.recurrence.frequency import every
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.scheduler import TaskScheduler

START = THURSDAY


def add_rule(world: World, schedule_id: str = "s", **fields: Any) -> str:
    """Add a schedule with exactly the rule that is given."""
    return world.add(schedule_id, **{"cron_expr": None} | fields)


def run_until(world: World, end: datetime, step: timedelta) -> None:
    """Tick again and again until a moment."""
    while world.now() < end:
        world.tick_at(min(end, world.now() + step))


def fires(world: World) -> list[datetime]:
    """The moments of all tasks that were fired, in order."""
    ids = world.fired_ids()
    return [datetime.fromtimestamp(int(name.rpartition(":")[2]) / 1000, UTC) for name in ids]


# --- intervals ------------------------------------------------------------------------------------


def test_an_interval_counts_from_when_it_was_made(world: World) -> None:
    add_rule(world, every=timedelta(seconds=90))
    assert world.schedule("s").every == timedelta(seconds=90)
    assert world.schedule("s").cron_expr == ""
    run_until(world, THURSDAY + timedelta(seconds=300), timedelta(seconds=7))
    wanted = [THURSDAY + timedelta(seconds=90 * n) for n in (1, 2, 3)]
    assert fires(world) == wanted


def test_an_interval_counts_from_its_start(world: World) -> None:
    add_rule(world, every=3600, start=at(5, 10, 15))
    assert world.schedule("s").next_run == at(5, 10, 15)
    run_until(world, at(5, 12, 30), timedelta(minutes=5))
    assert fires(world) == [at(5, 10, 15), at(5, 11, 15), at(5, 12, 15)]


def test_an_interval_does_not_drift_over_an_outage_nor_with_late_ticks(world: World) -> None:
    add_rule(world, every=7)
    for seconds in (8, 100, 86_400, 3, 5):
        world.tick_after(seconds)
        schedule = world.schedule("s")
        assert schedule.next_run is not None
        assert (schedule.next_run - THURSDAY).total_seconds() % 7 == 0
        assert world.now() < schedule.next_run <= world.now() + timedelta(seconds=7)


def test_a_moved_start_moves_the_interval(world: World) -> None:
    add_rule(world, every=3600)
    world.scheduler.update_schedule("s", start=at(5, 12, 5))
    assert world.schedule("s").next_run == at(5, 12, 5)
    world.scheduler.update_schedule("s", payload={"n": 1})
    assert world.schedule("s").next_run == at(5, 12, 5)
    world.scheduler.update_schedule("s", start=None)
    assert world.schedule("s").next_run == THURSDAY + timedelta(hours=1)


# --- once -----------------------------------------------------------------------------------------


def test_a_one_time_schedule_fires_once_and_is_completed(world: World) -> None:
    add_rule(world, at=at(5, 10))
    assert world.schedule("s").at == at(5, 10)
    run_until(world, at(5, 12), timedelta(minutes=10))

    assert world.fired_ids() == [fire_id("s", at(5, 10))]
    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.next_run, schedule.run_count) == (False, None, 1)
    assert schedule.disabled_reason is not None
    assert schedule.disabled_reason.startswith("completed: at '2026-03-05T10:00:00")
    assert world.scheduler.problems() == []
    assert world.due_at("s") is None
    assert "set_aside_cron" not in world.stats()


def test_a_one_time_schedule_is_fired_after_an_outage(world: World) -> None:
    add_rule(world, at=at(5, 10))
    assert world.tick_at(at(20, 10)).fired == 1


def test_a_one_time_schedule_that_may_not_be_late_is_completed_without_a_run(world: World) -> None:
    add_rule(world, at=at(5, 10), misfire="skip")
    report = world.tick_at(at(5, 10, 5))
    assert (report.fired, report.missed, report.set_aside) == (0, 1, 0)
    assert world.noted("s") == [(at(5, 10), at(5, 10), 1, "misfire")]
    assert world.schedule("s").is_active is False
    assert world.scheduler.problems() == []


def test_a_completed_schedule_goes_on_with_a_new_rule(world: World) -> None:
    add_rule(world, at=at(5, 10))
    world.tick_at(at(5, 10))
    world.scheduler.update_schedule("s", name="still.completed")
    assert world.schedule("s").is_active is False
    world.scheduler.update_schedule("s", at=at(5, 11))
    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 11))
    assert schedule.disabled_reason is None


def test_a_moment_that_has_passed_cannot_be_scheduled(world: World) -> None:
    with pytest.raises(InvalidSchedule, match=r"at 2026-03-05T08:59:30.* is in the past"):
        add_rule(world, at=THURSDAY)
    assert world.state() == {}
    add_rule(world, at=at(5, 9))
    world.tick_at(at(5, 9))
    before = world.state()
    with pytest.raises(InvalidSchedule, match="is in the past"):
        world.scheduler.resume_schedule("s")
    assert world.state() == before


# --- limits ---------------------------------------------------------------------------------------


def test_nothing_fires_before_the_start_nor_from_the_end_on(world: World) -> None:
    add_rule(world, cron_expr="0 * * * *", start=at(5, 11), end=at(5, 14))
    run_until(world, at(5, 18), timedelta(minutes=20))
    assert fires(world) == [at(5, 11), at(5, 12), at(5, 13)]
    schedule = world.schedule("s")
    assert schedule.is_active is False
    assert schedule.disabled_reason == "completed: cron_expr '0 * * * *' has no next fire time"
    assert world.scheduler.problems() == []


OFFICE = [{"days": [1, 2, 3, 4, 5], "from": "09:00", "to": "11:00"}]


def test_windows_and_excluded_dates_are_left_out(world: World) -> None:
    """The 5th is a Thursday; the Friday is excluded, and the week-end has no window."""
    add_rule(world, cron_expr="0 * * * *", windows=OFFICE, exclude=["2026-03-06"])
    run_until(world, at(9, 12), timedelta(minutes=30))
    assert fires(world) == [at(5, 9), at(5, 10), at(9, 9), at(9, 10)]
    schedule = world.schedule("s")
    assert (schedule.windows, schedule.exclude) == (OFFICE, ["2026-03-06"])


ACROSS: list[tuple[str, str, datetime, list[datetime]]] = [
    (  # the window from 00:30 to 02:30 is an hour shorter: 01:00 to 02:00 is not there
        "Europe/London",
        "*/30 * * * *",
        datetime(2026, 3, 29, tzinfo=UTC),
        [datetime(2026, 3, 29, 0, 30, tzinfo=UTC), datetime(2026, 3, 29, 1, 0, tzinfo=UTC)],
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
    world: World, zone: str, cron: str, begin: datetime, moments: list[datetime]
) -> None:
    world.clock.set(begin)
    window = [{"from": "00:30", "to": "02:30"}]
    add_rule(world, cron_expr=cron, timezone=zone, windows=window)
    run_until(world, begin + timedelta(hours=14), timedelta(minutes=10))
    assert fires(world) == moments


def test_an_excluded_date_is_a_day_of_the_schedules_zone(world: World) -> None:
    """In New York the 8th of March has 23 hours: it ends at 04:00 UTC."""
    world.clock.set(at(8, 4))
    add_rule(world, every=3600, timezone="America/New_York", exclude=["2026-03-08"])
    run_until(world, at(9, 6), timedelta(minutes=30))
    assert fires(world) == [at(9, 4), at(9, 5), at(9, 6)]


def test_a_schedule_is_completed_after_its_last_run(world: World) -> None:
    add_rule(world, every=60, max_runs=3)
    run_until(world, THURSDAY + timedelta(minutes=10), timedelta(seconds=30))
    assert len(world.fired_ids()) == 3
    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.run_count) == (False, 3)
    assert schedule.disabled_reason == "completed: max_runs of 3 reached"
    assert world.scheduler.problems() == []
    assert world.due_at("s") is None


def test_triggered_and_skipped_runs_are_not_among_its_runs(world: World) -> None:
    add_rule(world, every=60, max_runs=2, overlap="skip")
    assert world.tick_after(60).fired == 1
    assert world.tick_after(60).skipped == 1
    world.queue.finish(world.claim_one())
    world.scheduler.trigger("s")
    world.queue.finish(world.claim_one())
    assert world.schedule("s").is_active is True
    assert world.tick_after(60).fired == 1
    assert world.schedule("s").is_active is False


def test_a_schedule_that_has_had_its_runs_needs_more_of_them_to_go_on(world: World) -> None:
    add_rule(world, every=60, max_runs=1)
    world.tick_after(60)
    before = world.state()
    with pytest.raises(InvalidSchedule, match="max_runs 1 is not more than the 1 runs"):
        world.scheduler.resume_schedule("s")
    assert world.state() == before

    assert world.scheduler.update_schedule("s", max_runs=2, is_active=True)
    with pytest.raises(InvalidSchedule, match="max_runs 1 is not more than the 1 runs"):
        world.scheduler.update_schedule("s", max_runs=1)
    assert world.tick_after(60).fired == 1
    assert world.schedule("s").is_active is False


def test_a_replaced_schedule_that_has_had_its_runs_is_completed(world: World) -> None:
    add_rule(world, every=60)
    world.tick_after(60)
    add_rule(world, every=60, max_runs=1, on_conflict="replace")
    assert world.tick_after(60).fired == 0
    moment = world.now()
    assert world.noted("s") == [(moment, moment, 1, "completed")]
    assert world.schedule("s").disabled_reason == "completed: max_runs of 1 reached"


# --- ways to write a rule -------------------------------------------------------------------------


def test_h_is_hashed_by_the_id(world: World) -> None:
    for n in range(20):
        add_rule(world, f"s{n}", cron_expr="H H * * *")
    moments = {world.schedule(f"s{n}").next_run for n in range(20)}
    assert len(moments) > 15
    assert world.schedule("s0").cron_expr == "H H * * *"
    before = world.schedule("s0").next_run
    world.scheduler.remove_schedule("s0")
    add_rule(world, "s0", cron_expr="H H * * *")
    assert world.schedule("s0").next_run == before


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
def test_a_rule_may_be_written_in_several_ways(world: World, rule: Any, cron: str) -> None:
    add_rule(world, cron_expr=rule)
    assert world.schedule("s").cron_expr == cron
    add_rule(world, "t", cron_expr="@yearly")
    world.scheduler.update_schedule("t", cron_expr=rule)
    assert world.schedule("t").cron_expr == cron
    assert world.schedule("t").next_run == world.schedule("s").next_run


KINDS: list[tuple[dict[str, Any], datetime]] = [
    ({"cron_expr": "30 9 * * *"}, at(5, 9, 30)),
    ({"every": 120}, THURSDAY + timedelta(minutes=2)),
    ({"at": at(7, 1)}, at(7, 1)),
]


@pytest.mark.parametrize(("old", "_"), KINDS)
@pytest.mark.parametrize(("new", "moment"), KINDS)
def test_a_rule_of_another_kind_takes_the_place_of_the_old_one(
    world: World, old: dict[str, Any], _: Any, new: dict[str, Any], moment: datetime
) -> None:
    add_rule(world, **old)
    assert world.scheduler.update_schedule("s", **new) is True
    schedule = world.schedule("s")
    assert schedule.next_run == moment
    rule = {"cron_expr": schedule.cron_expr, "every": schedule.every, "at": schedule.at}
    assert [kind for kind, value in rule.items() if value] == list(new)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"every": 0.5}, "every must .*not 0.5"),
    ({"every": -1}, "every must .*not -1"),
    ({"every": "hour"}, "every must .*not 'hour'"),
    ({"every": True}, "every must .*not True"),
    ({"at": "tomorrow"}, "at must .*not 'tomorrow'"),
    ({"at": datetime(2026, 3, 6)}, "at must be a datetime with a time zone.*'2026-03-06"),
    ({"every": 60, "at": at(6, 1)}, "every"),
    ({"every": 60, "start": "now"}, "start must .*not 'now'"),
    ({"every": 60, "end": datetime(2026, 3, 6)}, "end must .*not '2026-03-06"),
    ({"every": 60, "end": THURSDAY}, "is in the past"),
    ({"every": 60, "start": at(7, 1), "end": at(6, 1)}, "end"),
    ({"every": 60, "windows": "always"}, "windows must .*not 'always'"),
    ({"every": 60, "windows": [{"days": [8]}]}, "8"),
    ({"every": 60, "windows": [{"from": "9"}]}, "'9'"),
    ({"every": 60, "exclude": ["2026-02-30"]}, "2026-02-30"),
    ({"every": 60, "exclude": "2026-02-28"}, "exclude"),
    ({"every": 60, "max_runs": 0}, "max_runs must .*not 0"),
    ({"every": 60, "max_runs": 1.5}, "max_runs must .*not 1.5"),
    ({"every": 60, "misfire": "never"}, "misfire must .*fire_all, not 'never'"),
    ({"every": 60, "misfire": None}, "misfire must .*not None"),
    ({"every": 60, "catch_up": -1}, "catch_up must .*not -1"),
    ({"every": 60, "catch_up": None}, "catch_up must .*not None"),
    ({"every": 60, "max_catch_up": 0}, "max_catch_up must .*not 0"),
    ({"every": 60, "max_catch_up": 1001}, "max_catch_up must .*not 1001"),
    ({"every": 60, "jitter": 86_401}, "jitter must .*not 86401"),
    ({"every": 60, "jitter": "some"}, "jitter must .*not 'some'"),
    ({"every": 60, "overlap": "no"}, "overlap must .*not 'no'"),
    ({"every": 60, "retries": -1}, "retries must .*not -1"),
    ({"every": 60, "backoff": []}, r"backoff must have 1 to 1000 delays, not 0"),
    ({"every": 60, "backoff": [1, "x"]}, "backoff must .*not 'x'"),
    ({"every": 60, "timeout": 0}, "timeout must .*not 0"),
    ({"every": 60, "max_failures": 0}, "max_failures must .*not 0"),
    ({"every": 60, "colour": "red"}, "unknown field 'colour'"),
]


@pytest.mark.parametrize(("fields", "message"), BAD)
def test_a_bad_value_stores_nothing(world: World, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        add_rule(world, **fields)
    assert world.state() == {}
    add_rule(world, every=3600)
    before = world.state()
    with pytest.raises(InvalidInput, match=message):
        world.scheduler.update_schedule("s", **fields)
    assert world.state() == before


@pytest.mark.parametrize("kind", ["cron_expr", "every", "at"])
def test_a_schedule_keeps_a_rule(world: World, kind: str) -> None:
    rules: dict[str, Any] = {"cron_expr": "@daily", "every": 60, "at": at(6, 1)}
    add_rule(world, **{kind: rules[kind]})
    with pytest.raises(InvalidSchedule, match="needs one of cron_expr, every, at"):
        world.scheduler.update_schedule("s", **{kind: None})


def test_all_options_are_kept(world: World) -> None:
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
    add_rule(world, **options)
    assert {name: getattr(world.schedule("s"), name) for name in options} == options


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
def test_a_spoilt_option_stops_only_its_schedule(world: World, fields: dict[str, Any]) -> None:
    add_rule(world, "bad", every=60)
    add_rule(world, "good", every=60)
    world.tamper("bad", **fields)
    report = world.tick_after(60)
    assert (report.fired, report.set_aside) == (1, 1)
    assert [problem.schedule_id for problem in world.scheduler.problems()] == ["bad"]


# --- failures in a row ----------------------------------------------------------------------------


def end_next(world: World, *, good: bool) -> None:
    """Let the next task succeed, or put it among the dead letters."""
    claim = world.claim_one()
    if good:
        world.queue.finish(claim)
    else:
        world.queue.bury(claim, "broken")


def test_a_schedule_that_fails_again_and_again_is_paused(world: World) -> None:
    add_rule(world, every=60, max_failures=3)
    in_a_row = []
    for good in (False, False, True, False, False, False):
        assert world.tick_after(60).fired == 1
        end_next(world, good=good)
        in_a_row.append(world.schedule("s").failures_in_a_row)
    assert in_a_row == [1, 2, 0, 1, 2, 3]

    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.next_run) == (False, None)
    assert schedule.disabled_reason == "paused after 3 failures in a row"
    assert schedule.paused_at == world.now()
    assert world.scheduler.problems() == []
    assert world.stats()["auto_paused"] == 1
    assert world.tick_after(600).fired == 0


def test_a_schedule_paused_for_its_failures_can_be_resumed(world: World) -> None:
    add_rule(world, every=60, max_failures=1)
    world.tick_after(60)
    end_next(world, good=False)
    world.advance(130)
    world.scheduler.update_schedule("s", payload={"mended": True})
    world.scheduler.update_schedule("s", every=50)
    assert world.schedule("s").is_active is False
    world.scheduler.update_schedule("s", every=60)

    assert world.scheduler.resume_schedule("s") is True

    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.disabled_reason) == (True, None)
    assert (schedule.failures_in_a_row, schedule.paused_at) == (0, None)
    assert world.tick_after(60).fired == 1


def test_a_moment_that_has_come_is_in_the_pause_for_failures(world: World) -> None:
    add_rule(world, cron_expr="0 * * * *", max_failures=1)
    world.tick_at(at(5, 9))
    claim = world.claim_one(lease=86_400)
    world.clock.set(at(5, 11, 30))
    world.queue.bury(claim, "broken")
    world.clock.set(at(5, 12, 30))
    world.scheduler.resume_schedule("s")
    assert world.noted("s") == [(at(5, 10), at(5, 12), 3, "paused")]


def test_a_task_that_is_retried_is_no_failure_yet(world: World) -> None:
    add_rule(world, every=60, max_failures=1)
    world.tick_after(60)
    world.queue.retry(world.claim_one(), "once more", delay=0)
    assert world.schedule("s").is_active is True
    end_next(world, good=False)
    assert world.schedule("s").is_active is False


def test_leases_that_expire_too_often_are_a_failure(world: World) -> None:
    world.queue.configure(max_attempts=1)
    add_rule(world, every=60, max_failures=1)
    world.tick_after(60)
    world.claim_one(lease=5)
    world.advance(6)
    assert world.queue.claim("w") == []
    assert world.schedule("s").disabled_reason == "paused after 1 failures in a row"


def test_failures_of_other_tasks_and_of_removed_schedules_change_nothing(world: World) -> None:
    add_rule(world, "limited", every=60, max_failures=1)
    add_rule(world, "free", every=3600)
    world.scheduler.trigger("limited")
    world.scheduler.trigger("free")
    for _ in range(2):
        end_next(world, good=False)
    assert world.schedule("limited").is_active
    assert world.schedule("free").is_active
    world.tick_after(60)
    world.scheduler.remove_schedule("limited")
    end_next(world, good=False)
    assert world.record("schedule_state", "limited") is None


# --- pauses ---------------------------------------------------------------------------------------


def test_a_paused_schedule_fires_nothing_and_says_why(world: World) -> None:
    add_rule(world, cron_expr="0 * * * *")
    assert world.scheduler.pause_schedule("s", note="the printer burns", by="carol") is True
    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.next_run) == (False, None)
    assert (schedule.paused_at, schedule.paused_until) == (THURSDAY, None)
    assert (schedule.pause_note, schedule.paused_by) == ("the printer burns", "carol")
    run_until(world, at(5, 12, 30), timedelta(minutes=30))
    assert world.fired_ids() == []
    assert world.noted("s") == []

    assert world.scheduler.resume_schedule("s", by="dave") is True

    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 13))
    assert (schedule.paused_at, schedule.pause_note, schedule.paused_by) == (None, None, None)
    assert world.noted("s") == [(at(5, 9), at(5, 12), 4, "paused")]
    assert schedule.missed_count == 0


@pytest.mark.one_partition
def test_a_pause_with_an_end_ends_by_itself(world: World, caplog: pytest.LogCaptureFixture) -> None:
    add_rule(world, cron_expr="0 * * * *")
    add_rule(world, "other", cron_expr="0 12 * * *")
    world.scheduler.pause_schedule("s", until=at(5, 11, 30))
    assert world.schedule("s").paused_until == at(5, 11, 30)
    run_until(world, at(5, 11, 29), timedelta(minutes=1))
    assert world.schedule("s").is_active is False
    world.clock.set(at(5, 11, 30))

    with caplog.at_level("INFO", logger="fairqueue.scheduler"):
        report = world.tick()

    assert caplog.text.count("schedule_resumed schedule=s") == 1
    assert (report.fired, report.set_aside, report.moved) == (0, 0, 0)
    assert 1700 < report.wait <= 1800
    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 12))
    assert (schedule.paused_at, schedule.paused_until) == (None, None)
    assert world.noted("s") == [(at(5, 9), at(5, 11), 3, "paused")]
    assert world.tick_at(at(5, 12)).fired == 2


def test_a_pause_ends_at_a_tick(redis_client: redis.Redis, registry: CollectorRegistry) -> None:
    """The queue has the server's clock, and the tick another."""
    with TaskQueue(redis_client) as queue:
        scheduler = TaskScheduler(queue, registry=registry)
        scheduler.add_schedule(every=3600, user_id="alice", schedule_id="s")
        seconds, _ = redis_client.time()
        scheduler.pause_schedule("s", until=seconds + 100.0)
        scheduler.tick(seconds + 101.0)
        assert get(scheduler, "s").is_active is True


def test_the_end_of_a_pause_over_an_outage_gives_up_what_has_passed(world: World) -> None:
    add_rule(world, cron_expr="0 * * * *", misfire="fire_all")
    world.scheduler.pause_schedule("s", until=at(5, 11, 30))
    assert world.tick_at(at(5, 15, 30)).fired == 0
    assert world.noted("s") == [(at(5, 9), at(5, 15), 7, "paused")]
    assert world.schedule("s").next_run == at(5, 16)


def test_a_one_time_schedule_whose_moment_was_in_its_pause_is_completed(world: World) -> None:
    add_rule(world, at=at(5, 10))
    world.scheduler.pause_schedule("s", until=at(5, 11))
    report = world.tick_at(at(5, 11))
    assert (report.fired, report.set_aside) == (0, 0)
    schedule = world.schedule("s")
    assert schedule.is_active is False
    assert schedule.disabled_reason is not None
    assert schedule.disabled_reason.startswith("completed: ")
    assert (schedule.paused_at, schedule.paused_until) == (None, None)
    assert world.noted("s") == [(at(5, 10), at(5, 10), 1, "paused")]
    assert world.scheduler.problems() == []
    assert world.due_at("s") is None


def test_a_pause_in_its_jitter_gives_up_the_moment(world: World) -> None:
    add_rule(world, cron_expr="0 9 * * *", jitter=1800)
    due = world.due_at("s")
    assert due is not None
    assert due > ms(at(5, 9))
    world.clock.set(at(5, 9))
    world.scheduler.pause_schedule("s")
    assert world.tick_at(at(5, 9, 30)).fired == 0
    assert world.noted("s") == [(at(5, 9), at(5, 9), 1, "missed")]


def test_a_pause_of_an_absent_schedule_is_none(world: World) -> None:
    assert world.scheduler.pause_schedule("s", note="n", by="b", until=at(6, 1)) is False
    assert world.scheduler.resume_schedule("s") is False
    assert world.state() == {}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"by": ""}, "by must .*not ''"),
        ({"by": 5}, "by must .*not 5"),
        ({"note": 5}, "note must be a string of at most 1000 characters, not 5"),
        ({"note": "x" * 1001}, "note must be a string of at most 1000 characters, not 'xxx"),
        ({"until": THURSDAY}, "until 2026-03-05T08:59:30.* is in the past"),
        ({"until": "noon"}, "until must .*not 'noon'"),
        ({"until": datetime(2026, 3, 6)}, "until must .*not '2026-03-06"),
    ],
)
def test_a_bad_pause_stores_nothing(world: World, fields: dict[str, Any], message: str) -> None:
    add_rule(world, every=60)
    before = world.state()
    with pytest.raises(InvalidInput, match=message):
        world.scheduler.pause_schedule("s", **fields)
    assert world.state() == before


def test_an_update_of_a_paused_schedule_leaves_it_paused(world: World) -> None:
    add_rule(world, cron_expr="0 * * * *")
    world.scheduler.pause_schedule("s", note="n", by="b", until=at(5, 12, 30))
    world.clock.set(at(5, 9, 30))
    world.scheduler.update_schedule(
        "s", cron_expr="15 * * * *", payload={"n": 2}, timezone="Asia/Tokyo"
    )
    schedule = world.schedule("s")
    assert (schedule.is_active, schedule.next_run) == (False, None)
    assert (schedule.pause_note, schedule.paused_until) == ("n", at(5, 12, 30))
    assert world.due_at("s") == ms(at(5, 12, 30))
    world.tick_at(at(5, 12, 30))
    assert world.schedule("s").next_run == at(5, 13, 15)


def test_a_rule_that_is_changed_in_a_pause_has_its_moments_from_then_on(world: World) -> None:
    add_rule(world, cron_expr="0 * * * *")
    world.scheduler.pause_schedule("s")
    world.clock.set(at(5, 10, 30))
    world.scheduler.update_schedule("s", cron_expr="15 * * * *")
    world.scheduler.update_schedule("s", payload={"n": 2})
    world.clock.set(at(5, 12, 30))
    world.scheduler.resume_schedule("s")
    assert world.noted("s") == [
        (at(5, 9), at(5, 10), 2, "paused"),
        (at(5, 11, 15), at(5, 12, 15), 2, "paused"),
    ]


def test_a_schedule_that_is_paused_again_is_paused_since_the_first_time(world: World) -> None:
    add_rule(world, cron_expr="0 * * * *")
    world.scheduler.pause_schedule("s", note="first", until=at(5, 10, 30))
    world.clock.set(at(5, 10, 15))
    world.scheduler.pause_schedule("s", note="second", by="carol")
    schedule = world.schedule("s")
    assert (schedule.pause_note, schedule.paused_by) == ("second", "carol")
    assert (schedule.paused_at, schedule.paused_until) == (THURSDAY, None)
    assert world.due_at("s") is None
    assert world.tick_at(at(5, 11, 30)).fired == 0
    world.scheduler.resume_schedule("s")
    assert world.noted("s") == [(at(5, 9), at(5, 11), 3, "paused")]


def test_a_resume_of_a_schedule_that_runs_changes_nothing_of_its_plan(world: World) -> None:
    add_rule(world, every=3600)
    before = world.schedule("s").next_run
    assert world.scheduler.resume_schedule("s") is True
    assert world.schedule("s").next_run == before
    assert world.noted("s") == []


CHANGED: dict[str, Callable[[TaskScheduler], object]] = {
    "resumed": lambda scheduler: scheduler.resume_schedule("s"),
    "paused anew": lambda scheduler: scheduler.pause_schedule("s", until=at(5, 15)),
    "changed": lambda scheduler: scheduler.update_schedule("s", payload={"n": 2}),
    "removed": lambda scheduler: scheduler.remove_schedule("s"),
}


@pytest.mark.parametrize("how", CHANGED)
@pytest.mark.one_partition
def test_what_was_changed_since_it_was_read_is_not_resumed(world: World, how: str) -> None:
    add_rule(world, cron_expr="0 * * * *")
    world.scheduler.pause_schedule("s", until=at(5, 11, 30))
    world.clock.set(at(5, 11, 30))
    states: list[Any] = []

    def change() -> None:
        CHANGED[how](world.scheduler)
        states.append(world.state().get("plan"))

    world.before_script("resume", change)
    post = world.scheduler._posts[0]
    world.scheduler._fire([(post, post.leadership.lead(10))], TickReport(), None)
    assert world.state().get("plan") == states[0]


def changes_of(world: World) -> list[Any]:
    """What was noted of the changes of the only schedule, oldest first."""
    members = cast(list[bytes], world.redis.zrange(world.keys["changes"], 0, -1))
    return [json.loads(member.split(b"\0")[3]) for member in members]


@pytest.mark.one_partition
def test_who_paused_and_resumed_is_in_the_history_of_changes(world: World) -> None:
    add_rule(world, every=60)
    world.scheduler.update_schedule("s", every=90, changed_by="alice")
    world.advance(1)
    world.scheduler.pause_schedule("s", note="n", by="bob")
    world.advance(1)
    world.scheduler.resume_schedule("s", by="carol")
    making, *changed = changes_of(world)
    assert making["made"]
    assert [change["by"] for change in changed] == ["alice", "bob", "carol"]
    assert changed[0]["fields"]["every"] == [60_000, 90_000]
    assert (changed[1]["note"], changed[1]["fields"]) == ("n", {"is_active": [True, False]})
    assert changed[2]["fields"] == {"is_active": [False, True]}


@pytest.mark.one_partition
def test_the_history_of_changes_is_bounded_and_goes_with_the_schedule(world: World) -> None:
    add_rule(world, every=60)
    for n in range(55):
        world.scheduler.update_schedule("s", metadata={"n": n})
        world.advance(1)
    changed = changes_of(world)
    assert len(changed) == 50
    assert changed[-1]["fields"]["metadata"] == [{"n": 53}, {"n": 54}]
    world.scheduler.remove_schedule("s")
    assert world.redis.zcard(world.keys["changes"]) == 0


# --- quotas ---------------------------------------------------------------------------------------


def spec(schedule_id: str, user_id: str = "alice", **fields: Any) -> dict[str, Any]:
    return {"cron_expr": "@hourly", "schedule_id": schedule_id, "user_id": user_id} | fields


def test_a_user_has_no_more_schedules_than_allowed(world: World) -> None:
    world.queue.configure(max_schedules=2)
    world.scheduler.add_schedules([spec("a1"), spec("a2"), spec("b1", "bob")])
    before = world.state()
    with pytest.raises(ScheduleQuota, match="'alice' would have more schedules"):
        world.scheduler.add_schedule("@daily", "alice")
    with pytest.raises(ScheduleQuota, match="'alice'"):
        world.scheduler.add_schedules([spec("b2", "bob"), spec("a3")])
    with pytest.raises(ScheduleQuota, match="'bob'"):
        world.scheduler.add_schedules([spec("b2", "bob"), spec("b3", "bob")])
    assert world.state() == before

    world.scheduler.add_schedules([spec("a1"), spec("a2", name="again")], on_conflict="replace")
    world.scheduler.remove_schedule("a1")
    world.scheduler.add_schedule("@daily", "alice")
    world.queue.configure(max_schedules=0)
    world.scheduler.add_schedule("@daily", "alice")


def test_a_schedule_cannot_be_given_to_a_user_who_has_enough(world: World) -> None:
    world.scheduler.add_schedules([spec("a1"), spec("b1", "bob"), spec("b2", "bob")])
    world.queue.configure(max_schedules=2)
    before = world.state()
    with pytest.raises(ScheduleQuota, match="'bob'"):
        world.scheduler.update_schedule("a1", user_id="bob")
    with pytest.raises(ScheduleQuota, match="'bob'"):
        world.scheduler.add_schedules([spec("a1", "bob")], on_conflict="replace")
    assert world.state() == before
    world.scheduler.update_schedule("b1", user_id="alice")
    world.scheduler.update_schedule("b2", payload={"n": 1})
    assert [s.schedule_id for s in world.scheduler.list_schedules("alice")] == ["a1", "b1"]


def test_schedules_beyond_a_lowered_limit_go_on(world: World) -> None:
    world.scheduler.add_schedules(spec(f"a{n}", cron_expr="0 9 * * *") for n in range(3))
    world.queue.configure(max_schedules=1)
    report = world.tick_at(at(5, 9))
    assert (report.fired, report.refused) == (3, 0)


@pytest.mark.parametrize("rule", [{"every": 59}, {"cron_expr": "*/30 * * * * *"}])
def test_too_frequent_moments_are_refused(world: World, rule: dict[str, Any]) -> None:
    world.queue.configure(min_interval=60)
    before = world.state()
    with pytest.raises(ScheduleQuota, match="min_interval is 60 seconds"):
        add_rule(world, **rule)
    assert world.state() == before
    add_rule(world, every=60)
    before = world.state()
    with pytest.raises(ScheduleQuota, match="min_interval is 60 seconds"):
        world.scheduler.update_schedule("s", **rule)
    assert world.state() == before


def test_a_cron_error_is_still_one(world: World) -> None:
    with pytest.raises(InvalidCron, match="cron_expr '0 0 1 1 \\*' has no fire time"):
        add_rule(world, cron_expr="0 0 1 1 *", end=at(6, 1))
