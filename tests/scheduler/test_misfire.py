"""What becomes of moments that passed while no scheduler ran, on a clock that the test moves."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry
from scheduling import THURSDAY, Noted, add, at, due_at, fire_id, fired_ids, get, ms, noted
from support import claim_one, push, stats

from fairqueue.clock import ManualClock, from_ms
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(THURSDAY)


def hours(day: int, first: int, last: int) -> list[datetime]:
    """The full hours of a day in March 2026, both ends included."""
    return [at(day, hour) for hour in range(first, last + 1)]


def fires(schedule_id: str, moments: list[datetime]) -> list[str]:
    return [fire_id(schedule_id, moment) for moment in moments]


# policy, end of the outage, what is fired, what is noted
OUTAGES: list[tuple[dict[str, Any], datetime, list[datetime], list[Noted]]] = [
    ({}, at(5, 9, 30), [at(5, 9)], []),
    ({}, at(5, 12, 30), [at(5, 12)], [(at(5, 9), at(5, 11), 3, "missed")]),
    ({}, at(9, 0, 0, 1), [at(9, 0)], [(at(5, 9), at(8, 23), 87, "missed")]),
    ({"misfire": "skip"}, at(5, 9, 1), [at(5, 9)], []),
    ({"misfire": "skip"}, at(5, 9, 1, 1), [], [(at(5, 9), at(5, 9), 1, "misfire")]),
    ({"misfire": "skip"}, at(9, 0, 30), [], [(at(5, 9), at(9, 0), 88, "misfire")]),
    (
        {"misfire": "skip"},
        at(5, 12, 0, 30),
        [at(5, 12)],
        [(at(5, 9), at(5, 11), 3, "misfire")],
    ),
    ({"misfire": "fire_all"}, at(5, 9, 30), [at(5, 9)], []),
    ({"misfire": "fire_all"}, at(5, 15, 30), hours(5, 9, 15), []),
    (
        {"misfire": "fire_all"},
        at(8, 9, 30),
        [*hours(7, 10, 23), *hours(8, 0, 9)],
        [(at(5, 9), at(7, 9), 49, "not caught up")],
    ),
    (
        {"misfire": "fire_all", "catch_up": timedelta(hours=2), "max_catch_up": 2},
        at(5, 15),
        hours(5, 14, 15),
        [(at(5, 9), at(5, 13), 5, "not caught up")],
    ),
    (
        {"misfire": "fire_all", "catch_up": 600},
        at(5, 12, 30),
        [],
        [(at(5, 9), at(5, 12), 4, "not caught up")],
    ),
    (
        {"misfire": "fire_all", "catch_up": timedelta(days=30), "max_catch_up": 3},
        at(7, 0),
        [at(6, 22), at(6, 23), at(7, 0)],
        [(at(5, 9), at(6, 21), 37, "not caught up")],
    ),
]


@pytest.mark.parametrize(("policy", "end", "fired", "notes"), OUTAGES)
def test_after_an_outage_the_policy_decides(
    scheduler: TaskScheduler,
    other: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    policy: dict[str, Any],
    end: datetime,
    fired: list[datetime],
    notes: list[Noted],
) -> None:
    add(scheduler, cron_expr="0 * * * *", **policy)
    scheduler.tick()
    clock.set(end)

    report = other.tick()

    missed = sum(count for _, _, count, _ in notes)
    assert (report.fired, report.missed, report.set_aside) == (len(fired), missed, 0)
    assert fired_ids(redis_client, queue) == fires("nine", fired)
    assert noted(redis_client, queue) == notes
    schedule = get(other, "nine")
    assert (schedule.run_count, schedule.missed_count) == (len(fired), missed)
    assert schedule.last_run == (fired[-1] if fired else None)
    assert schedule.next_run == end.replace(minute=0, second=0) + timedelta(hours=1)
    assert stats(redis_client).get("missed", 0) == missed
    assert other.tick().fired == 0


def test_a_catch_up_is_served_oldest_first(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue
) -> None:
    add(scheduler, cron_expr="0 * * * *", misfire="fire_all")
    clock.set(at(5, 12))
    scheduler.tick()
    assert [claim_one(queue).task.scheduled_for for _ in range(4)] == hours(5, 9, 12)


def test_a_long_catch_up_goes_on_with_the_next_tick(
    scheduler: TaskScheduler, clock: ManualClock, redis_client: redis.Redis, queue: TaskQueue
) -> None:
    add(scheduler, cron_expr="* * * * * *", misfire="fire_all", max_catch_up=500)
    clock.set(at(5, 10))
    fired = 0
    for _ in range(10):
        report = scheduler.tick()
        fired += report.fired
        if not report.fired:
            break
        assert report.wait == 0 or fired == 500
    assert fired == 500
    first = at(5, 10) - timedelta(seconds=499)
    assert fired_ids(redis_client, queue)[0] == fire_id("nine", first)
    begin = THURSDAY + timedelta(seconds=1)
    late = int((first - begin).total_seconds())
    assert noted(redis_client, queue) == [
        (begin, first - timedelta(seconds=1), min(late, 1000), "not caught up")
    ]


def test_a_catch_up_that_a_limit_refuses_goes_on_where_it_was(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add(scheduler, cron_expr="0 * * * *", misfire="fire_all")
    queue.configure(max_waiting=2)
    clock.set(at(5, 12))
    first = scheduler.tick()
    assert (first.fired, first.refused) == (2, 1)
    assert noted(redis_client, queue) == []

    for _ in range(2):
        queue.finish(claim_one(queue))
    clock.advance(5)
    assert scheduler.tick().fired == 2
    assert fired_ids(redis_client, queue) == fires("nine", hours(5, 9, 12))


def test_a_catch_up_with_overlap_skips_and_says_so(
    scheduler: TaskScheduler, clock: ManualClock, redis_client: redis.Redis, queue: TaskQueue
) -> None:
    add(scheduler, cron_expr="0 * * * *", misfire="fire_all", overlap="skip")
    clock.set(at(5, 11))
    report = scheduler.tick()
    assert (report.fired, report.skipped, report.missed) == (1, 2, 0)
    assert fired_ids(redis_client, queue) == fires("nine", [at(5, 9)])
    moments = hours(5, 10, 11)
    assert noted(redis_client, queue) == [(moment, moment, 1, "overlap") for moment in moments]


@pytest.mark.parametrize("misfire", ["fire_once", "skip", "fire_all"])
def test_while_a_scheduler_runs_the_policies_are_the_same(
    scheduler: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    misfire: str,
) -> None:
    add(scheduler, cron_expr="*/15 * * * * *", misfire=misfire)
    for _ in range(60):
        clock.advance(1)
        scheduler.tick()
    assert len(fired_ids(redis_client, queue)) == 4
    assert noted(redis_client, queue) == []


CHANGES: list[tuple[str, str, datetime, datetime, list[datetime]]] = [
    (  # 02:30 is skipped, so it is at the end of the gap
        "America/New_York",
        "30 2 * * *",
        datetime(2026, 3, 7, 12, tzinfo=UTC),
        datetime(2026, 3, 9, 12, tzinfo=UTC),
        [datetime(2026, 3, 8, 7, tzinfo=UTC), datetime(2026, 3, 9, 6, 30, tzinfo=UTC)],
    ),
    (  # 01:30 comes twice, and is one moment
        "Europe/London",
        "30 1 * * *",
        datetime(2026, 10, 24, 12, tzinfo=UTC),
        datetime(2026, 10, 26, 12, tzinfo=UTC),
        [datetime(2026, 10, 25, 0, 30, tzinfo=UTC), datetime(2026, 10, 26, 1, 30, tzinfo=UTC)],
    ),
    (  # half an hour back at 02:00, so the wall clock shows 01:45 twice
        "Australia/Lord_Howe",
        "45 1 * * *",
        datetime(2026, 4, 4, 0, tzinfo=UTC),
        datetime(2026, 4, 6, 0, tzinfo=UTC),
        [datetime(2026, 4, 4, 14, 45, tzinfo=UTC), datetime(2026, 4, 5, 15, 15, tzinfo=UTC)],
    ),
    (
        "UTC",
        "0 12 29 2 *",
        datetime(2026, 1, 1, tzinfo=UTC),
        datetime(2029, 1, 1, tzinfo=UTC),
        [datetime(2028, 2, 29, 12, tzinfo=UTC)],
    ),
]


@pytest.mark.parametrize(("zone", "cron", "begin", "end", "moments"), CHANGES)
def test_an_outage_over_a_change_of_the_clock_loses_and_doubles_nothing(
    scheduler: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    zone: str,
    cron: str,
    begin: datetime,
    end: datetime,
    moments: list[datetime],
) -> None:
    clock.set(begin)
    catch_up = timedelta(days=365)
    add(scheduler, cron_expr=cron, timezone=zone, misfire="fire_all", catch_up=catch_up)
    clock.set(end)
    assert scheduler.tick().fired == len(moments)
    assert fired_ids(redis_client, queue) == fires("nine", moments)


def test_a_change_of_the_plan_gives_up_a_moment_that_has_come_and_says_so(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add(scheduler)
    add(scheduler, "replaced")
    clock.set(at(5, 9, 10))
    scheduler.update_schedule("nine", cron_expr="0 10 * * *")
    add(scheduler, "replaced", cron_expr="0 10 * * *", on_conflict="replace")
    for schedule_id in ("nine", "replaced"):
        assert noted(redis_client, queue, schedule_id) == [(at(5, 9), at(5, 9), 1, "missed")]
        assert get(scheduler, schedule_id).missed_count == 1


def test_the_notes_of_a_schedule_are_bounded_and_go_with_it(
    scheduler: TaskScheduler, clock: ManualClock, queue: TaskQueue, redis_client: redis.Redis
) -> None:
    add(scheduler, cron_expr="0 * * * *", overlap="skip")
    add(scheduler, "other", cron_expr="0 0 * * *", misfire="skip")
    clock.set(at(5, 9))
    for _ in range(210):
        scheduler.tick()
        clock.advance(3600)
    notes = noted(redis_client, queue)
    assert len(notes) == 200
    assert notes[-1][:2] == (clock.now() - timedelta(hours=1),) * 2
    assert redis_client.zcard(queue.keys["moments"]) == 200

    clock.advance(86_400)
    scheduler.tick()
    assert len(noted(redis_client, queue, "other")) == 1
    assert scheduler.remove_schedule("nine") is True
    assert noted(redis_client, queue) == []
    assert len(noted(redis_client, queue, "other")) == 1


# --- jitter ---------------------------------------------------------------------------------------


def test_jitter_puts_the_fire_off_and_leaves_the_moment(
    scheduler: TaskScheduler,
    clock: ManualClock,
    queue: TaskQueue,
    redis_client: redis.Redis,
    registry: CollectorRegistry,
) -> None:
    add(scheduler, jitter=timedelta(minutes=30))
    due = due_at(redis_client, queue, "nine")
    assert due is not None
    assert ms(at(5, 9)) < due <= ms(at(5, 9, 30))
    assert get(scheduler, "nine").next_run == at(5, 9)

    clock.set(from_ms(int(due) - 1))
    assert scheduler.tick().fired == 0
    clock.set(from_ms(int(due) + 250))
    assert scheduler.tick().fired == 1

    assert claim_one(queue).task.scheduled_for == at(5, 9)
    assert get(scheduler, "nine").last_run == at(5, 9)
    following = due_at(redis_client, queue, "nine")
    assert following is not None
    assert ms(at(6, 9)) <= following <= ms(at(6, 9, 30))
    labels = {"queue": "default"}
    late = registry.get_sample_value("fairqueue_scheduler_fire_lateness_seconds_sum", labels)
    assert late == pytest.approx(0.25)


def test_jitter_spreads_schedules_of_one_moment(
    scheduler: TaskScheduler, clock: ManualClock, redis_client: redis.Redis, queue: TaskQueue
) -> None:
    spec = {"cron_expr": "0 9 * * *", "user_id": "alice", "jitter": 600}
    scheduler.add_schedules(spec | {"schedule_id": f"s{n}"} for n in range(50))
    dues = [due_at(redis_client, queue, f"s{n}") for n in range(50)]
    assert len(set(dues)) > 40
    clock.set(at(5, 9, 10))
    assert scheduler.tick().fired == 50


def test_with_jitter_a_moment_never_passes_the_next(
    scheduler: TaskScheduler, clock: ManualClock, redis_client: redis.Redis, queue: TaskQueue
) -> None:
    add(scheduler, every=10, cron_expr=None, jitter=86_400, misfire="fire_all")
    for n in range(1, 31):
        moment = THURSDAY + timedelta(seconds=10 * n)
        due = due_at(redis_client, queue, "nine")
        assert due is not None
        assert ms(moment) <= due < ms(moment) + 10_000
        clock.set(from_ms(int(due)))
        assert scheduler.tick().fired == 1
        assert get(scheduler, "nine").last_run == moment
    assert noted(redis_client, queue) == []


def test_a_changed_jitter_plans_anew(
    scheduler: TaskScheduler, redis_client: redis.Redis, queue: TaskQueue
) -> None:
    add(scheduler)
    assert due_at(redis_client, queue, "nine") == ms(at(5, 9))
    scheduler.update_schedule("nine", jitter=1800)
    due = due_at(redis_client, queue, "nine")
    assert due is not None
    assert due > ms(at(5, 9))
    scheduler.update_schedule("nine", jitter=0)
    assert due_at(redis_client, queue, "nine") == ms(at(5, 9))


def test_a_moment_of_the_past_is_fired_once_whoever_comes_back(
    scheduler: TaskScheduler, other: TaskScheduler, clock: ManualClock, queue: TaskQueue
) -> None:
    add(scheduler, cron_expr="0 * * * *", misfire="fire_all")
    push(queue, "in between")
    clock.set(at(5, 11))
    fired = [scheduler.tick().fired, other.tick().fired]
    clock.advance(30)
    fired += [other.tick().fired, scheduler.tick().fired]
    assert fired == [3, 0, 0, 0]
