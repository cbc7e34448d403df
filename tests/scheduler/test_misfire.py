"""What becomes of moments that passed while no scheduler ran, on a clock that the test moves."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from helpers.schedules import THURSDAY, Noted, at, fire_id, get, ms
from helpers.world import World

from fairqueue.clock import from_ms

START = THURSDAY


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
    ({"misfire": "skip"}, at(5, 12, 0, 30), [at(5, 12)], [(at(5, 9), at(5, 11), 3, "misfire")]),
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
    world: World, policy: dict[str, Any], end: datetime, fired: list[datetime], notes: list[Noted]
) -> None:
    world.add(cron_expr="0 * * * *", **policy)
    world.tick()
    world.clock.set(end)

    report = world.other.tick()

    missed = sum(count for _, _, count, _ in notes)
    assert (report.fired, report.missed, report.set_aside) == (len(fired), missed, 0)
    assert world.fired_ids() == fires("nine", fired)
    assert world.noted() == notes
    schedule = get(world.other, "nine")
    assert (schedule.run_count, schedule.missed_count) == (len(fired), missed)
    assert schedule.last_run == (fired[-1] if fired else None)
    assert schedule.next_run == end.replace(minute=0, second=0) + timedelta(hours=1)
    assert world.stats().get("missed", 0) == missed
    assert world.other.tick().fired == 0


def test_a_catch_up_is_served_oldest_first(world: World) -> None:
    world.add(cron_expr="0 * * * *", misfire="fire_all")
    world.tick_at(at(5, 12))
    assert [world.claim_one().task.scheduled_for for _ in range(4)] == hours(5, 9, 12)


def test_a_long_catch_up_goes_on_with_the_next_tick(world: World) -> None:
    world.add(cron_expr="* * * * * *", misfire="fire_all", max_catch_up=500)
    world.clock.set(at(5, 10))
    fired = 0
    for _ in range(10):
        report = world.tick()
        fired += report.fired
        if not report.fired:
            break
        assert report.wait == 0 or fired == 500
    assert fired == 500
    first = at(5, 10) - timedelta(seconds=499)
    assert world.fired_ids()[0] == fire_id("nine", first)
    begin = THURSDAY + timedelta(seconds=1)
    late = int((first - begin).total_seconds())
    assert world.noted() == [
        (begin, first - timedelta(seconds=1), min(late, 1000), "not caught up")
    ]


def test_a_catch_up_that_a_limit_refuses_goes_on_where_it_was(world: World) -> None:
    world.add(cron_expr="0 * * * *", misfire="fire_all")
    world.queue.configure(max_waiting=2)
    first = world.tick_at(at(5, 12))
    assert (first.fired, first.refused) == (2, 1)
    assert world.noted() == []

    for _ in range(2):
        world.queue.finish(world.claim_one())
    assert world.tick_after(5).fired == 2
    assert world.fired_ids() == fires("nine", hours(5, 9, 12))


def test_a_catch_up_with_overlap_skips_and_says_so(world: World) -> None:
    world.add(cron_expr="0 * * * *", misfire="fire_all", overlap="skip")
    report = world.tick_at(at(5, 11))
    assert (report.fired, report.skipped, report.missed) == (1, 2, 0)
    assert world.fired_ids() == fires("nine", [at(5, 9)])
    moments = hours(5, 10, 11)
    assert world.noted() == [(moment, moment, 1, "overlap") for moment in moments]


@pytest.mark.parametrize("misfire", ["fire_once", "skip", "fire_all"])
def test_while_a_scheduler_runs_the_policies_are_the_same(world: World, misfire: str) -> None:
    world.add(cron_expr="*/15 * * * * *", misfire=misfire)
    for _ in range(60):
        world.tick_after(1)
    assert len(world.fired_ids()) == 4
    assert world.noted() == []


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
    world: World, zone: str, cron: str, begin: datetime, end: datetime, moments: list[datetime]
) -> None:
    world.clock.set(begin)
    catch_up = timedelta(days=365)
    world.add(cron_expr=cron, timezone=zone, misfire="fire_all", catch_up=catch_up)
    assert world.tick_at(end).fired == len(moments)
    assert world.fired_ids() == fires("nine", moments)


def test_a_change_of_the_plan_gives_up_a_moment_that_has_come_and_says_so(world: World) -> None:
    world.add()
    world.add("replaced")
    world.clock.set(at(5, 9, 10))
    world.scheduler.update_schedule("nine", cron_expr="0 10 * * *")
    world.add("replaced", cron_expr="0 10 * * *", on_conflict="replace")
    for schedule_id in ("nine", "replaced"):
        assert world.noted(schedule_id) == [(at(5, 9), at(5, 9), 1, "missed")]
        assert world.schedule(schedule_id).missed_count == 1


@pytest.mark.one_partition
def test_the_notes_of_a_schedule_are_bounded_and_go_with_it(world: World) -> None:
    world.add(cron_expr="0 * * * *", overlap="skip")
    world.add("other", cron_expr="0 0 * * *", misfire="skip")
    world.clock.set(at(5, 9))
    for _ in range(210):
        world.tick()
        world.advance(3600)
    notes = world.noted()
    assert len(notes) == 200
    assert notes[-1][:2] == (world.now() - timedelta(hours=1),) * 2
    assert world.redis.zcard(world.keys["moments"]) == 200

    world.tick_after(86_400)
    assert len(world.noted("other")) == 1
    assert world.scheduler.remove_schedule("nine") is True
    assert world.noted() == []
    assert len(world.noted("other")) == 1


# --- jitter ---------------------------------------------------------------------------------------


def test_jitter_puts_the_fire_off_and_leaves_the_moment(world: World) -> None:
    world.add(jitter=timedelta(minutes=30))
    due = world.due_at("nine")
    assert due is not None
    assert ms(at(5, 9)) < due <= ms(at(5, 9, 30))
    assert world.schedule("nine").next_run == at(5, 9)

    assert world.tick_at(from_ms(int(due) - 1)).fired == 0
    assert world.tick_at(from_ms(int(due) + 250)).fired == 1

    assert world.claim_one().task.scheduled_for == at(5, 9)
    assert world.schedule("nine").last_run == at(5, 9)
    following = world.due_at("nine")
    assert following is not None
    assert ms(at(6, 9)) <= following <= ms(at(6, 9, 30))
    labels = {"queue": "default"}
    late = world.registry.get_sample_value("fairqueue_scheduler_fire_lateness_seconds_sum", labels)
    assert late == pytest.approx(0.25)


def test_jitter_spreads_schedules_of_one_moment(world: World) -> None:
    spec = {"cron_expr": "0 9 * * *", "user_id": "alice", "jitter": 600}
    world.scheduler.add_schedules(spec | {"schedule_id": f"s{n}"} for n in range(50))
    dues = [world.due_at(f"s{n}") for n in range(50)]
    assert len(set(dues)) > 40
    assert world.tick_at(at(5, 9, 10)).fired == 50


def test_with_jitter_a_moment_never_passes_the_next(world: World) -> None:
    world.add(every=10, cron_expr=None, jitter=86_400, misfire="fire_all")
    for n in range(1, 31):
        moment = THURSDAY + timedelta(seconds=10 * n)
        due = world.due_at("nine")
        assert due is not None
        assert ms(moment) <= due < ms(moment) + 10_000
        assert world.tick_at(from_ms(int(due))).fired == 1
        assert world.schedule("nine").last_run == moment
    assert world.noted() == []


def test_a_changed_jitter_plans_anew(world: World) -> None:
    world.add()
    assert world.due_at("nine") == ms(at(5, 9))
    world.scheduler.update_schedule("nine", jitter=1800)
    due = world.due_at("nine")
    assert due is not None
    assert due > ms(at(5, 9))
    world.scheduler.update_schedule("nine", jitter=0)
    assert world.due_at("nine") == ms(at(5, 9))


def test_a_moment_of_the_past_is_fired_once_whoever_comes_back(world: World) -> None:
    world.add(cron_expr="0 * * * *", misfire="fire_all")
    world.push("in between")
    world.clock.set(at(5, 11))
    fired = [world.tick().fired, world.other.tick().fired]
    world.advance(30)
    fired += [world.other.tick().fired, world.tick().fired]
    assert fired == [3, 0, 0, 0]
