"""What became of moments, and what operators do with schedules: fill, change, copy, compare."""

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.network import LossyProxy
from helpers.schedules import THURSDAY, add, at, before_script, fire_id, fired_ids, get, ms
from helpers.state import changes as state_changes
from helpers.state import check_consistency
from helpers.waiting import eventually
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
    InvalidSchedule,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
    ScheduleConflict,
    ScheduleQuota,
    UnknownSchedule,
)
from fairqueue.link.operation import Operation
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules import bulk, search
from fairqueue.schedules import import_export as exchange
from fairqueue.schedules.backfill import CHUNK, Backfill
from fairqueue.schedules.bulk import ACTIONS, BulkResult
from fairqueue.schedules.import_export import dump_schedules, load_schedules
from fairqueue.schedules.outcomes import MAX_MOMENTS, NOTES_KEPT
from fairqueue.schedules.replan import Replanner, zone_data
from fairqueue.schedules.store import GAPS_CHECKED, SETTINGS_MS, ScheduleStore
from fairqueue.validation import Priority

REPLAY_S = 60.0  # a generation of remembered answers; see lua/lib/replay.lua

START = THURSDAY


def fates(
    world: World, start: datetime, end: datetime, schedule_id: str = "nine"
) -> dict[int, str]:
    """Hour of the day -> outcome, with the reason if there is one."""
    page = world.scheduler.moments(schedule_id, start, end, limit=MAX_MOMENTS)
    return {m.at.hour: f"{m.outcome} {m.reason or ''}".strip() for m in page}


def tick_at(scheduler: TaskScheduler, clock: ManualClock, moment: datetime) -> None:
    clock.set(moment)
    scheduler.tick()


def with_an_outage(scheduler: TaskScheduler, clock: ManualClock, **fields: Any) -> None:
    """An hourly schedule that was made before nine, and missed ten and eleven."""
    add(scheduler, **{"cron_expr": "0 * * * *"} | fields)
    tick_at(scheduler, clock, at(5, 9))
    tick_at(scheduler, clock, at(5, 12, 20))


def forget_tasks(world: World) -> None:
    """All tasks are done and dropped, and so is all that is remembered of them for repetitions."""
    world.queue.configure(keep_finished=0)
    while claims := world.queue.claim("w", limit=1000):
        world.queue.finish_many((claim, None) for claim in claims)
    for _ in range(3):
        world.advance(REPLAY_S + 1)
        world.queue.configure(keep_finished=0)


# --- what became of moments -----------------------------------------------------------------------


def test_every_moment_is_fired_or_says_why_not(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    world.clock.set(at(5, 12, 30))
    world.scheduler.pause_schedule("nine")
    world.clock.set(at(5, 14, 20))
    paused = fates(world, at(5, 7), at(5, 17))
    world.scheduler.resume_schedule("nine")
    resumed = fates(world, at(5, 7), at(5, 17))

    past = {
        7: "before",
        8: "before",
        9: "fired",
        10: "skipped missed",
        11: "skipped missed",
        12: "fired",
        13: "skipped paused",
        14: "skipped paused",
    }
    assert paused == past | {15: "unplanned paused", 16: "unplanned paused"}
    assert resumed == past | {15: "planned", 16: "planned"}


POLICIES: list[tuple[dict[str, Any], dict[int, str]]] = [
    ({"misfire": "skip"}, {10: "skipped misfire", 11: "skipped misfire", 12: "skipped misfire"}),
    ({"misfire": "fire_all"}, {10: "fired", 11: "fired", 12: "fired"}),
    (
        {"misfire": "fire_all", "catch_up": 4000},
        {10: "skipped not caught up", 11: "skipped not caught up", 12: "fired"},
    ),
    (
        {"misfire": "fire_all", "max_catch_up": 2},
        {10: "skipped not caught up", 11: "fired", 12: "fired"},
    ),
    ({"overlap": "skip"}, {10: "skipped missed", 11: "skipped missed", 12: "skipped overlap"}),
]


@pytest.mark.parametrize(("policy", "expected"), POLICIES, ids=[str(each[0]) for each in POLICIES])
def test_the_policies_show_in_the_moments(
    world: World, policy: dict[str, Any], expected: dict[int, str]
) -> None:
    with_an_outage(world.scheduler, world.clock, **policy)
    assert fates(world, at(5, 10), at(5, 13)) == expected


def test_a_moment_that_has_come_and_was_not_fired_yet_is_planned(world: World) -> None:
    world.add()
    world.clock.set(at(5, 9, 1))
    assert fates(world, at(5, 9), at(5, 10)) == {9: "planned due"}


def test_moments_after_the_end_of_a_pause_are_planned(world: World) -> None:
    world.add(cron_expr="0 * * * *")
    world.scheduler.pause_schedule("nine", until=at(5, 10, 30))
    assert fates(world, at(5, 9), at(5, 12)) == {
        9: "unplanned paused",
        10: "unplanned paused",
        11: "planned",
    }


@pytest.mark.one_partition
def test_what_a_plan_or_a_note_of_others_says_nothing_about_is_unknown(world: World) -> None:
    world.add()
    world.redis.zadd(world.keys["moments"], {"nine\0x\0y\0": 0, f"nine\0{ms(at(5, 9))}\0b": 0})
    plan_at(world, at(5, 15))
    world.clock.set(at(5, 12))
    assert fates(world, at(5, 9), at(5, 10)) == {9: "unknown"}


def test_moments_before_a_next_run_that_was_set_are_put_off_also_after_it(world: World) -> None:
    world.add(cron_expr="0 * * * *")
    world.scheduler.update_schedule("nine", next_run=at(5, 11, 30))
    world.scheduler.update_schedule("nine", payload={"another": "field"})
    before = fates(world, at(5, 9), at(5, 13))
    tick_at(world.scheduler, world.clock, at(5, 11, 30))
    tick_at(world.scheduler, world.clock, at(5, 12))
    put_off = {9: "unplanned put off", 10: "unplanned put off"}
    # Of the two in the hour of eleven the later one counts here.
    assert before == put_off | {11: "planned", 12: "planned"}
    after = world.scheduler.moments("nine", at(5, 9), at(5, 13))
    assert [(m.at, m.outcome, m.reason) for m in after] == [
        (at(5, 9), "skipped", "put off"),
        (at(5, 10), "skipped", "put off"),
        (at(5, 11), "skipped", "put off"),
        (at(5, 12), "fired", None),
    ]


def test_the_past_of_a_changed_rule_is_known_while_its_task_exists(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    world.scheduler.update_schedule("nine", cron_expr="0,30 * * * *")
    assert fates(world, at(5, 9), at(5, 9, 1)) == {9: "fired"}
    forget_tasks(world)
    assert fates(world, at(5, 9), at(5, 9, 1)) == {9: "unknown"}


@pytest.mark.parametrize("how", ["resume", "until"])
def test_what_was_fired_before_a_pause_stays_known(world: World, how: str) -> None:
    with_an_outage(world.scheduler, world.clock)
    world.clock.set(at(5, 14, 20))  # one o'clock and two o'clock have come, and no scheduler runs
    world.scheduler.pause_schedule("nine", until=at(5, 16, 20) if how == "until" else None)
    world.clock.set(at(5, 16, 20))
    if how == "resume":
        world.scheduler.resume_schedule("nine")
    else:
        world.tick()
    tick_at(world.scheduler, world.clock, at(5, 17))
    forget_tasks(world)
    expected = {
        9: "fired",
        10: "skipped missed",
        11: "skipped missed",
        12: "fired",
        13: "skipped missed",  # the pause gave it up
        14: "skipped paused",
        15: "skipped paused",
        16: "skipped paused",
        17: "fired",
    }
    assert fates(world, at(5, 9), at(5, 18)) == expected
    assert world.scheduler.backfill("nine", at(5, 9), at(5, 18), dry_run=True).moments == 6


def test_of_a_schedule_that_was_disabled_only_what_came_since_is_known(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    stored = world.record("schedules", "nine")
    world.tamper("nine", cron_expr="0 25 * * *")
    tick_at(world.scheduler, world.clock, at(5, 13))
    reason = world.schedule("nine").disabled_reason
    world.tamper("nine", cron_expr=stored["cron_expr"])
    world.clock.set(at(5, 14, 30))
    assert fates(world, at(5, 14), at(5, 15)) == {14: f"skipped {reason}"}
    world.scheduler.resume_schedule("nine")
    tick_at(world.scheduler, world.clock, at(5, 15))
    forget_tasks(world)
    assert fates(world, at(5, 11), at(5, 16)) == {
        11: "skipped missed",
        12: "unknown",
        13: "unknown",
        14: "unknown",
        15: "fired",
    }


def test_a_rule_that_was_changed_in_a_pause_has_fired_nothing_before(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    world.scheduler.pause_schedule("nine")
    world.clock.set(at(5, 14, 20))
    world.scheduler.update_schedule("nine", cron_expr="15 * * * *")
    world.clock.set(at(5, 15, 20))
    assert fates(world, at(5, 9, 1), at(5, 17)) == {
        9: "unknown",
        10: "skipped missed",  # between ten and eleven
        11: "unknown",
        12: "unknown",
        13: "skipped paused",  # between one and two o'clock
        14: "unknown",
        15: "skipped paused",
        16: "unplanned paused",
    }


def test_moments_older_than_what_is_remembered_are_unknown(world: World) -> None:
    world.add(cron_expr="* * * * *", overlap="skip")
    for _ in range(NOTES_KEPT + 5):
        world.tick_after(60)
    page = world.scheduler.moments("nine", at(5, 9), world.now(), limit=MAX_MOMENTS)
    outcomes = [m.outcome for m in page]
    # The first was fired, and its task is there; of the next few the notes were dropped.
    assert outcomes[0] == "fired"
    assert set(outcomes[1:5]) == {"unknown"}
    assert set(outcomes[5:-1]) == {"skipped"}


def test_a_listing_of_moments_goes_on_where_its_page_ended(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    pages, cursor = [], None
    while True:
        page = world.scheduler.moments("nine", at(5, 8), at(5, 15), limit=3, cursor=cursor)
        pages.append([m.at.hour for m in page])
        if (cursor := page.cursor) is None:
            break
    assert pages == [[8, 9, 10], [11, 12, 13], [14]]


BAD_MOMENTS: list[tuple[dict[str, Any], str]] = [
    ({"schedule_id": "none"}, "no schedule 'none'"),
    ({"schedule_id": "a\0b"}, "schedule_id"),
    ({"start": "today"}, "start must .*not 'today'"),
    ({"end": datetime(2026, 3, 5)}, "with a time zone"),
    ({"start": at(6, 9)}, "is after end"),
    ({"limit": 0}, "limit must .*not 0"),
    ({"limit": MAX_MOMENTS + 1}, "limit must .*not 1001"),
    ({"cursor": "x"}, "cursor 'x'"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_MOMENTS, ids=[w for _, w in BAD_MOMENTS])
def test_bad_arguments_of_a_listing_are_named(
    scheduler: TaskScheduler, arguments: dict[str, Any], words: str
) -> None:
    add(scheduler)
    given: dict[str, Any] = {"schedule_id": "nine", "start": at(5, 8), "end": at(5, 9)}
    given |= arguments
    with pytest.raises(InvalidSchedule, match=words):
        scheduler.moments(**given)


# --- backfill -------------------------------------------------------------------------------------


def test_a_backfill_makes_the_tasks_that_were_never_made(world: World) -> None:
    with_an_outage(world.scheduler, world.clock, payload={"report": 7}, name="reports.build")
    before = world.fired_ids()

    report = world.scheduler.backfill("nine", at(5, 8), at(5, 20), by="carol")

    hours = [8, 10, 11]
    assert report == Backfill(dry_run=False, moments=3, filled=3, first=at(5, 8), last=at(5, 11))
    new = sorted(set(world.fired_ids()) - set(before))
    assert new == [fire_id("nine", at(5, hour)) for hour in hours]
    info = world.info(new[0])
    assert info.task is not None
    assert (info.state, info.priority, info.name) == ("ready", Priority.VERY_LOW, "reports.build")
    assert (info.task.run_type, info.task.triggered_by) == ("scheduled", "carol")
    assert (info.task.scheduled_for, info.task.payload) == (at(5, 8), {"report": 7})
    assert fates(world, at(5, 8), at(5, 13)) == {
        8: "backfilled",
        9: "fired",
        10: "backfilled",
        11: "backfilled",
        12: "fired",
    }
    assert world.schedule("nine").next_run == at(5, 13)


def test_a_dry_run_counts_and_changes_nothing(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    before = world.state(replay=True)
    report = world.scheduler.backfill("nine", at(5, 8), at(5, 20), dry_run=True)
    assert report == Backfill(dry_run=True, moments=3, first=at(5, 8), last=at(5, 11))
    assert world.state(replay=True) == before


def test_a_backfill_twice_equals_one(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    world.scheduler.backfill("nine", at(5, 8), at(5, 20))
    once = world.state()
    again = world.scheduler.backfill("nine", at(5, 7, 30), at(5, 20))
    assert again == Backfill(dry_run=False, moments=0)
    assert state_changes(once, world.state()) == {}


def test_a_backfill_twice_equals_one_when_the_tasks_are_long_gone(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    world.scheduler.pause_schedule("nine")
    world.clock.set(at(5, 14, 20))
    world.scheduler.backfill("nine", at(5, 8), at(5, 20))
    world.scheduler.resume_schedule("nine")
    forget_tasks(world)
    assert world.fired_ids() == []

    again = world.scheduler.backfill("nine", at(5, 8), at(5, 20))

    assert (again.moments, again.filled) == (0, 0)
    assert world.fired_ids() == []


def test_a_backfill_twice_equals_one_when_what_was_noted_of_it_is_gone_too(world: World) -> None:
    world.add(cron_expr="* * * * *", overlap="skip")
    assert world.scheduler.backfill("nine", at(5, 8), at(5, 8, 30)).filled == 30
    for _ in range(NOTES_KEPT + 5):  # skipped, since what was filled is unfinished
        world.tick_after(60)
    forget_tasks(world)
    again = world.scheduler.backfill("nine", at(5, 8), at(5, 8, 30))
    assert (again.filled, again.unknown) == (0, 30)
    assert world.fired_ids() == []


def test_what_may_have_been_fired_is_filled_only_if_that_is_wanted(world: World) -> None:
    world.add(cron_expr="0 * * * *")
    tick_at(world.scheduler, world.clock, at(5, 9))
    tick_at(world.scheduler, world.clock, at(5, 10))
    world.scheduler.update_schedule("nine", cron_expr="0,30 * * * *")
    forget_tasks(world)
    careful = world.scheduler.backfill("nine", at(5, 9), at(5, 10))
    bold = world.scheduler.backfill("nine", at(5, 9), at(5, 10), unknown_too=True)
    assert (careful.filled, careful.unknown) == (0, 2)  # nine, and half past
    assert (bold.filled, bold.unknown) == (2, 0)
    assert world.fired_ids() == [fire_id("nine", at(5, 9)), fire_id("nine", at(5, 9, 30))]


def test_a_moment_that_is_about_to_be_fired_is_not_filled(world: World) -> None:
    world.add()
    world.clock.set(at(5, 9))
    assert world.scheduler.backfill("nine", at(5, 8), at(5, 10)).filled == 0
    assert world.tick().fired == 1


def test_moments_that_passed_in_a_pause_are_filled_and_stay_so_when_it_ends(world: World) -> None:
    world.add(cron_expr="0 * * * *")
    world.scheduler.pause_schedule("nine", until=at(5, 11, 30))
    world.clock.set(at(5, 10, 30))
    assert world.scheduler.backfill("nine", at(5, 9), at(5, 12)).filled == 2
    tick_at(world.scheduler, world.clock, at(5, 11, 30))
    assert fates(world, at(5, 9), at(5, 13)) == {
        9: "backfilled",
        10: "backfilled",
        11: "skipped paused",
        12: "planned",
    }


def test_more_moments_than_the_limit_are_refused_with_their_number(world: World) -> None:
    world.add(cron_expr="* * * * *")
    before = world.state()
    with pytest.raises(
        InvalidSchedule, match="has 1440 fire times to fill, more than the limit of 1000"
    ):
        world.scheduler.backfill("nine", at(4, 8, 59, 59), at(5, 8, 59, 59))
    with pytest.raises(InvalidSchedule, match="more than 100000 fire times"):
        world.scheduler.backfill("nine", 0, at(5, 9))
    assert world.state() == before


def test_a_backfill_of_many_moments_is_complete(world: World) -> None:
    world.add(cron_expr="* * * * *")
    count = 3 * CHUNK + 1
    start = at(5, 8, 59) - timedelta(minutes=count - 1)
    assert world.scheduler.backfill("nine", start, at(5, 9)).filled == count
    assert world.fired_ids() == [
        fire_id("nine", start + timedelta(minutes=n)) for n in range(count)
    ]
    assert world.scheduler.backfill("nine", start, at(5, 9)).moments == 0


def test_a_full_queue_stops_a_backfill_which_goes_on_later(world: World) -> None:
    world.add(cron_expr="* * * * *")
    world.queue.set_user("alice", max_waiting=CHUNK + 10)
    count = 2 * CHUNK
    start = at(5, 8, 59) - timedelta(minutes=count - 1)
    with pytest.raises(QueueFull, match=f"^{CHUNK} fire times .* the user had"):
        world.scheduler.backfill("nine", start, at(5, 9))
    world.queue.set_user("alice", max_waiting=None)
    assert world.scheduler.backfill("nine", start, at(5, 9)).filled == count - CHUNK
    assert len(world.fired_ids()) == count


def test_a_backfill_starts_over_when_the_schedule_changes(
    world: World,
) -> None:
    with_an_outage(world.scheduler, world.clock)
    sent = world.before_script(
        "backfill", lambda: world.other.update_schedule("nine", payload={"new": 1})
    )
    assert world.scheduler.backfill("nine", at(5, 8), at(5, 20)).filled == 3
    assert sent.count("backfill") == 2
    info = world.queue.get(fire_id("nine", at(5, 10)))
    assert info is not None
    assert info.task is not None
    assert info.task.payload == {"new": 1}


def test_two_backfills_at_the_same_time_make_each_task_once(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    theirs: list[int] = []
    world.before_script(
        "backfill", lambda: theirs.append(world.other.backfill("nine", at(5, 8), at(5, 11)).filled)
    )
    mine = world.scheduler.backfill("nine", at(5, 8), at(5, 20)).filled
    assert (theirs, mine) == ([2], 1)


def test_a_backfill_whose_reply_is_lost_is_done_once(own_server: OwnServer, world: World) -> None:
    server = own_server()
    with (
        LossyProxy(server.socket_path) as proxy,
        redis.Redis.from_url(server.url) as client,
        TaskQueue.from_url(proxy.url, clock=world.clock) as queue,
    ):
        scheduler = TaskScheduler(queue, "one", registry=world.registry)
        with_an_outage(scheduler, world.clock)
        proxy.drop_replies(1)
        assert scheduler.backfill("nine", at(5, 8), at(5, 20)).filled == 3
        assert proxy.dropped == 1
        assert len(fired_ids(client, queue)) == 5
        check_consistency(client)


def test_a_moment_that_is_fired_during_a_backfill_is_fired_all_the_same(world: World) -> None:
    with_an_outage(world.scheduler, world.clock)
    world.clock.set(at(5, 13))
    world.before_script("fire", lambda: world.other.backfill("nine", at(5, 8), at(5, 20)))
    assert world.tick().fired == 1
    hours = [8, 9, 10, 11, 12, 13]
    assert world.fired_ids() == [fire_id("nine", at(5, hour)) for hour in hours]


@pytest.mark.one_partition
def test_a_schedule_that_is_changed_again_and_again_is_a_conflict(world: World) -> None:
    with TaskQueue(world.redis, clock=world.clock, timeout=0.3) as queue:
        scheduler = TaskScheduler(queue, "impatient", registry=CollectorRegistry())
        add(scheduler)
        before_script(
            queue,
            world.monkeypatch,
            "backfill",
            lambda: world.other.update_schedule("nine", priority=2),
            times=10**9,
        )
        with pytest.raises(ScheduleConflict, match="0 fire times were filled"):
            scheduler.backfill("nine", at(3, 8), at(4, 20))


def test_the_mark_of_a_set_next_run_outlives_a_backfill(world: World) -> None:
    world.add()
    world.scheduler.update_schedule("nine", next_run=at(5, 11))
    world.clock.set(at(5, 9, 30))
    assert world.scheduler.backfill("nine", at(5, 9), at(5, 10)).filled == 1
    world.scheduler.replan()
    assert world.schedule("nine").next_run == at(5, 11)


BAD_BACKFILLS: list[tuple[dict[str, Any], str]] = [
    ({"schedule_id": "none"}, "no schedule 'none'"),
    ({"start": None}, "start must .*not None"),
    ({"start": at(6, 9)}, "is after end"),
    ({"limit": 10_001}, "limit must .*not 10001"),
    ({"priority": 7}, "priority must .*not 7"),
    ({"by": ""}, "by must .*not ''"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_BACKFILLS, ids=[w for _, w in BAD_BACKFILLS])
def test_bad_arguments_of_a_backfill_are_named(
    scheduler: TaskScheduler, arguments: dict[str, Any], words: str
) -> None:
    add(scheduler)
    given: dict[str, Any] = {"schedule_id": "nine", "start": at(4, 8), "end": at(5, 8)}
    given |= arguments
    with pytest.raises(InvalidSchedule, match=words):
        scheduler.backfill(**given)


def test_a_schedule_that_cancels_its_last_run_cannot_be_filled(scheduler: TaskScheduler) -> None:
    add(scheduler, overlap="cancel_previous")
    with pytest.raises(InvalidSchedule, match="cancel_previous"):
        scheduler.backfill("nine", at(4, 8), at(5, 8))


# --- what was changed -----------------------------------------------------------------------------


def test_changes_say_who_when_and_what_newest_first(world: World) -> None:
    world.add(cron_expr=None, every=60, created_by="ann", title="Reports")
    world.scheduler.update_schedule("nine", every=90, start=at(6, 9), changed_by="carol")
    world.advance(10)
    world.scheduler.pause_schedule("nine", by="dave", note="incident 7")
    world.advance(10)
    world.scheduler.update_schedule("nine", payload={"long": "x" * 1000})
    world.scheduler.update_schedule("nine", payload={"long": "x" * 1000})  # as it was

    newest, middle, oldest, making = world.scheduler.changes("nine")

    assert (newest.at, newest.by) == (THURSDAY + timedelta(seconds=20), None)
    assert newest.fields["payload"][0] == {}
    assert newest.fields["payload"][1].endswith("xxx...")
    assert (middle.at, middle.by, middle.note) == (
        THURSDAY + timedelta(seconds=10),
        "dave",
        "incident 7",
    )
    assert middle.fields == {"is_active": (True, False)}
    assert (oldest.by, oldest.fields["every"]) == ("carol", (60.0, 90.0))
    assert oldest.fields["start"] == (None, at(6, 9))
    assert (making.at, making.by, making.made) == (THURSDAY, "ann", True)
    assert making.fields == {
        "user_id": (None, "alice"),
        "every": (None, 60.0),
        "anchor": (None, THURSDAY),
        "title": (None, "Reports"),
    }
    assert not any(each.made for each in (newest, middle, oldest))


def test_a_listing_of_changes_goes_on_where_its_page_ended(world: World) -> None:
    world.add()
    for n in range(5):
        world.scheduler.update_schedule("nine", payload={"n": n})
        world.advance(1)
    world.add("ninety")
    world.scheduler.update_schedule("ninety", payload={"n": 90})
    seen, cursor = [], None
    while True:
        page = world.scheduler.changes("nine", limit=2, cursor=cursor)
        seen.append([change.made or change.fields["payload"][1]["n"] for change in page])
        if (cursor := page.cursor) is None:
            break
    assert seen == [[4, 3], [2, 1], [0, True]]


def test_bad_arguments_of_the_changes_are_named(scheduler: TaskScheduler) -> None:
    add(scheduler)
    with pytest.raises(UnknownSchedule, match="'none'"):
        scheduler.changes("none")
    bad: list[dict[str, Any]] = [{"limit": 0}, {"limit": 51}, {"cursor": "x"}, {"cursor": "bm8A"}]
    for arguments in bad:
        with pytest.raises(InvalidSchedule, match="|".join(arguments)):
            scheduler.changes("nine", **arguments)


@pytest.mark.one_partition
def test_a_change_that_somebody_has_spoilt_is_a_broken_record(world: World) -> None:
    world.add()
    world.redis.zadd(world.keys["changes"], {f"nine\0{ms(THURSDAY)}\0op\0[]": 0})
    with pytest.raises(BrokenRecord, match="a change of schedule 'nine'"):
        world.scheduler.changes("nine")


# --- many at once ---------------------------------------------------------------------------------


def add_some(world: World) -> None:
    """Two of alice's with different tasks, one of bob's."""
    world.add("a1", name="mail.send")
    world.add("a2", name="report")
    world.add("b1", user_id="bob", name="mail.send")


def ids_where(scheduler: TaskScheduler, **filters: Any) -> list[str]:
    return [schedule.schedule_id for schedule in scheduler.list_schedules(**filters)]


@pytest.mark.parametrize("action", ACTIONS)
def test_a_bulk_operation_counts_first_and_changes_nothing(world: World, action: str) -> None:
    add_some(world)
    before = world.state(replay=True)
    changes: dict[str, Any] = {"priority": 5} if action == "update" else {}
    result = world.scheduler.bulk(action, user_id="alice", **changes)
    assert result == BulkResult(action=action, dry_run=True, matched=2)
    assert world.state(replay=True) == before


FILTERS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, ["a1", "a2", "b1"]),
    ({"user_id": "alice"}, ["a1", "a2"]),
    ({"name": "mail.send"}, ["a1", "b1"]),
    ({"name": "mail"}, []),
    ({"name": "mail.send", "user_id": "bob"}, ["b1"]),
    ({"is_active": False}, ["a2"]),
    ({"is_active": True, "user_id": "alice"}, ["a1"]),
    ({"user_id": "ali"}, []),
]


@pytest.mark.parametrize(("filters", "expected"), FILTERS, ids=[str(f) for f, _ in FILTERS])
def test_a_bulk_operation_reaches_those_that_match(
    world: World, filters: dict[str, Any], expected: list[str]
) -> None:
    add_some(world)
    world.scheduler.pause_schedule("a2")
    result = world.scheduler.bulk("update", dry_run=False, metadata={"seen": True}, **filters)
    changed = [s.schedule_id for s in world.scheduler.list_schedules() if s.metadata]
    assert changed == expected
    assert (result.matched, result.done) == (len(expected), len(expected))


@pytest.mark.parametrize("by", [{}, {"contains": "a"}, {"user_id": "alice"}], ids=str)
def test_schedules_that_the_state_rules_out_are_not_read(world: World, by: dict[str, Any]) -> None:
    add_some(world)

    def asked() -> int:
        return int(world.redis.info("commandstats")["cmdstat_hmget"]["calls"])

    before = asked()
    assert world.scheduler.list_schedules(is_active=False, **by) == []
    assert asked() - before == 1  # the states, and no definition or plan


@pytest.mark.parametrize("spoilt", ["", "[", "1,2", '{"active":true', '"x"'])
def test_a_spoilt_state_misleads_no_search(world: World, spoilt: str) -> None:
    add_some(world)
    world.scheduler.pause_schedule("b1")
    world.redis.hset(world.scheduler.queue.keys["schedule_state"], "a2", spoilt)
    filters: list[dict[str, Any]] = [{}, {"name_prefix": "m"}]
    for more in filters:
        listed = [s.schedule_id for s in world.scheduler.list_schedules(**more)]
        paused = ids_where(world.scheduler, is_active=False, **more)
        active = ids_where(world.scheduler, is_active=True, **more)
        assert "b1" in paused
        assert "a1" in active
        assert sorted(paused + active) == sorted(listed)


def test_each_bulk_action_does_what_the_single_one_does(world: World) -> None:
    add_some(world)
    seen: list[tuple[int, int]] = []

    world.scheduler.bulk("pause", user_id="alice", dry_run=False, by="carol", note="stop")
    assert ids_where(world.scheduler, is_active=False) == ["a1", "a2"]
    assert (world.schedule("a1").paused_by, world.schedule("a1").pause_note) == ("carol", "stop")
    world.scheduler.bulk("resume", dry_run=False, by="carol")
    assert ids_where(world.scheduler, is_active=False) == []
    world.scheduler.bulk("trigger", name="mail.send", dry_run=False, by="carol")
    claims = world.queue.claim("w", limit=10)
    assert sorted(str(c.task.schedule_id) for c in claims) == ["a1", "b1"]
    assert {c.task.triggered_by for c in claims} == {"carol"}
    world.scheduler.bulk(
        "remove", user_id="alice", dry_run=False, progress=lambda *each: seen.append(each)
    )
    assert ids_where(world.scheduler) == ["b1"]
    assert seen == [(1, 2), (2, 2)]


def test_one_that_fails_does_not_stop_the_others(world: World) -> None:
    add_some(world)
    world.add("once", cron_expr=None, at=at(5, 9))
    tick_at(world.scheduler, world.clock, at(5, 9))

    def somebody_removes_another(done: int, total: int) -> None:
        if done == 1:
            world.other.remove_schedule("b1")

    result = world.scheduler.bulk("resume", dry_run=False, progress=somebody_removes_another)

    assert (result.matched, result.done, result.gone, result.failed) == (4, 2, 1, 1)
    assert "is in the past" in result.errors["once"]


def test_one_that_is_gone_before_it_is_triggered_is_counted(world: World) -> None:
    add_some(world)
    result = world.scheduler.bulk(
        "trigger", dry_run=False, progress=lambda *_: world.other.remove_schedule("b1")
    )
    assert (result.done, result.gone, result.errors) == (2, 1, {})


def test_without_redis_a_bulk_operation_stops_and_says_how_many_are_left() -> None:
    def act(schedule_id: str) -> Operation[bool]:
        yield from ()
        if schedule_id == "two":
            raise RedisUnavailable("gone")
        return True

    result = BulkResult(action="pause", dry_run=False, matched=4)
    list(bulk.run_bulk(result, ["one", "two", "three", "four"], act))
    assert (result.done, result.failed, result.left) == (1, 1, 2)
    assert result.errors == {"two": "gone"}


def test_the_errors_of_a_bulk_operation_are_bounded() -> None:
    def act(schedule_id: str) -> Operation[bool]:
        yield from ()
        raise InvalidSchedule(f"{schedule_id} is bad")

    ids = [str(n) for n in range(bulk.MAX_ERRORS + 5)]
    result = BulkResult(action="pause", dry_run=False, matched=len(ids))
    list(bulk.run_bulk(result, ids, act))
    assert (result.failed, len(result.errors)) == (len(ids), bulk.MAX_ERRORS)


BAD_BULKS: list[tuple[dict[str, Any], str]] = [
    ({"action": "delete"}, "action must be one of pause.*, not 'delete'"),
    ({"action": "update"}, "at least one field"),
    ({"action": "update", "colour": "red"}, "unknown field 'colour'"),
    ({"action": "update", "priority": 9}, "priority must .*not 9"),
    ({"action": "pause", "priority": 1}, "pause takes no changes; priority"),
    ({"action": "pause", "user_id": ""}, "user_id must .*not ''"),
    ({"action": "pause", "name": 7}, "name must .*not 7"),
    ({"action": "pause", "is_active": "yes"}, "is_active must be True, False or None, not 'yes'"),
    ({"action": "pause", "by": "\n"}, "by "),
    ({"action": "pause", "note": 7}, "note must be a string .*, not 7"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_BULKS, ids=[words for _, words in BAD_BULKS])
def test_bad_arguments_of_a_bulk_operation_are_named_and_nothing_is_done(
    world: World, arguments: dict[str, Any], words: str
) -> None:
    add_some(world)
    before = world.state()
    with pytest.raises(InvalidSchedule, match=words):
        world.scheduler.bulk(dry_run=False, **arguments)
    assert world.state() == before


def test_a_run_that_is_triggered_may_have_another_payload(world: World) -> None:
    world.add(payload={"report": 7})
    world.scheduler.trigger("nine", payload={"report": 8})
    (claim,) = world.queue.claim("w")
    assert claim.task.payload == {"report": 8}
    assert world.schedule("nine").payload == {"report": 7}


# --- copies ---------------------------------------------------------------------------------------

FULL: dict[str, Any] = {
    "timezone": "Europe/London",
    "priority": 5,
    "payload": {"report": 7, "list": [1, None, "é"]},
    "name": "reports.build",
    "metadata": {"team": "blue"},
    "start": at(4, 9),
    "end": datetime(2027, 3, 5, 9, 0, 0, 250_000, tzinfo=UTC),
    "windows": [{"days": [1, 2, 3, 4, 5], "from": "08:00", "to": "17:30"}],
    "exclude": ["2026-12-25"],
    "max_runs": 10,
    "misfire": "fire_all",
    "catch_up": 1800.5,
    "max_catch_up": 7,
    "jitter": 30,
    "overlap": "skip",
    "retries": 2,
    "backoff": [1, 2.5],
    "backoff_cap": 90,
    "backoff_multiplier": 1.5,
    "backoff_jitter": "full",
    "timeout": 60,
    "max_failures": 3,
    "tenant": "acme",
}
RULES: list[dict[str, Any]] = [
    {"cron_expr": "H 9 * * *"},
    {"cron_expr": None, "every": 90},
    {"cron_expr": None, "every": timedelta(minutes=2, milliseconds=500)},
    {"cron_expr": None, "at": at(6, 9)},
]
_OWN = ("schedule_id", "created_at", "updated_at", "next_run", "revision")


def settings_of(world: World, schedule_id: str) -> dict[str, Any]:
    """What a user has set of a schedule."""
    schedule = world.schedule(schedule_id)
    names = [name for name in schedule.__slots__ if name not in _OWN]
    return {name: getattr(schedule, name) for name in names}


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_copy_has_all_that_the_original_has(world: World, rule: dict[str, Any]) -> None:
    world.add(**FULL | rule)
    world.advance(7)
    assert world.scheduler.copy_schedule("nine", "copy") == "copy"
    assert settings_of(world, "copy") == settings_of(world, "nine")
    if rule["cron_expr"] is None:
        assert world.schedule("copy").next_run == world.schedule("nine").next_run


def test_a_copy_takes_changes_also_of_the_kind_of_rule(scheduler: TaskScheduler) -> None:
    add(scheduler, **FULL)
    new = scheduler.copy_schedule("nine", every=60, user_id="bob", start=None, windows=None)
    copied = get(scheduler, new)
    assert new != "nine"
    assert (copied.cron_expr, copied.every) == ("", timedelta(minutes=1))
    assert (copied.user_id, copied.start, copied.payload) == ("bob", None, FULL["payload"])


def test_a_copy_of_nothing_or_over_another_is_refused(world: World) -> None:
    add_some(world)
    with pytest.raises(UnknownSchedule, match="'none'"):
        world.scheduler.copy_schedule("none")
    with pytest.raises(ScheduleConflict, match="'a2' is in use"):
        world.scheduler.copy_schedule("a1", "a2")
    for bad in ({"colour": "red"}, {"next_run": at(6, 9)}, {"is_active": False}):
        with pytest.raises(InvalidSchedule, match="|".join(bad)):
            world.scheduler.copy_schedule("a1", **bad)


# --- schedules as code ----------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["json", "yaml"])
def test_an_export_imported_elsewhere_is_equal(world: World, redis_url: str, format: str) -> None:
    for number, rule in enumerate(RULES):
        world.add(f"full{number}", **FULL | rule)
        world.add(f"plain{number}", **rule)
    world.scheduler.pause_schedule("plain0")
    text = dump_schedules(world.scheduler.export_schedules(), format)
    world.advance(7)
    with TaskQueue.from_url(redis_url, "elsewhere", clock=world.clock) as queue:
        there = TaskScheduler(queue, registry=CollectorRegistry())
        diff = there.import_schedules(load_schedules(text, format), dry_run=False)
        assert len(diff.added) == 2 * len(RULES)
        assert dump_schedules(there.export_schedules(), format) == text
        for number in range(1, len(RULES)):
            for schedule_id in (f"full{number}", f"plain{number}"):
                assert get(there, schedule_id).next_run == world.schedule(schedule_id).next_run
        assert ids_where(there, is_active=False) == ["plain0"]
        assert there.import_schedules(load_schedules(text, format)).is_empty
        queue.destroy()


def test_documents_have_times_that_people_can_read(scheduler: TaskScheduler) -> None:
    add(scheduler, cron_expr=None, every=90, start=at(6, 9), jitter=0.5)
    assert scheduler.export_schedules() == [
        {
            "schedule_id": "nine",
            "user_id": "alice",
            "priority": 3,
            "timezone": "UTC",
            "name": "default",
            "every": 90,
            "anchor": "2026-03-06T09:00:00+00:00",
            "start": "2026-03-06T09:00:00+00:00",
            "jitter": 0.5,
            "is_active": True,
        }
    ]


def test_an_export_has_those_that_match(world: World) -> None:
    add_some(world)
    exported = world.scheduler.export_schedules(user_id="alice", name="report")
    assert [document["schedule_id"] for document in exported] == ["a2"]


def document(schedule_id: str, **fields: Any) -> dict[str, Any]:
    given = {"schedule_id": schedule_id, "user_id": "alice", "cron_expr": "0 9 * * *"} | fields
    return {name: value for name, value in given.items() if value is not None}


def test_an_import_tells_the_difference_first_and_then_makes_it(world: World) -> None:
    add_some(world)
    world.scheduler.import_schedules([document("same")], dry_run=False)
    documents = [
        document("new", every=60, cron_expr=None),
        document("same"),
        document("a1", name="mail.send", priority=5, is_active=False),
        document("a2", name="report", at="2026-03-06T09:00:00+01:00", cron_expr=None),
    ]
    before = world.state(replay=True)

    told = world.scheduler.import_schedules(documents, prune=True)
    assert world.state(replay=True) == before
    made = world.scheduler.import_schedules(documents, prune=True, dry_run=False, by="ci")
    again = world.scheduler.import_schedules(documents, prune=True, dry_run=False)

    assert (told.added, told.unchanged, told.removed) == (["new"], ["same"], ["b1"])
    assert told.changed == {
        "a1": {"priority": (3, 5), "is_active": (True, False)},
        "a2": {"cron_expr": ("0 9 * * *", None), "at": (None, "2026-03-06T08:00:00+00:00")},
    }
    assert (made.added, made.changed, made.removed) == (told.added, told.changed, told.removed)
    assert again.is_empty
    assert ids_where(world.scheduler) == ["a1", "a2", "new", "same"]
    assert world.schedule("a2").next_run == at(6, 8)
    assert world.scheduler.changes("a1")[0].by == "ci"


def test_an_import_prunes_only_if_asked_and_only_one_users_if_one_is_given(world: World) -> None:
    add_some(world)
    documents = [document("a1", name="mail.send")]
    assert world.scheduler.import_schedules(documents, dry_run=False).removed == []
    diff = world.scheduler.import_schedules(documents, prune=True, user_id="alice", dry_run=False)
    assert diff.removed == ["a2"]
    assert ids_where(world.scheduler) == ["a1", "b1"]
    with pytest.raises(InvalidSchedule, match="remove every schedule"):
        world.scheduler.import_schedules([], prune=True, dry_run=False)


def test_what_a_document_no_longer_says_goes_back_to_the_default(world: World) -> None:
    world.add(**FULL)
    world.scheduler.import_schedules([document("nine")], dry_run=False)
    world.add("plain")
    assert settings_of(world, "nine") == settings_of(world, "plain")


def test_a_pause_or_an_end_is_no_difference_unless_the_document_speaks_of_it(world: World) -> None:
    world.add("paused")
    world.add("once", cron_expr=None, at=at(5, 9))
    exported = world.scheduler.export_schedules()
    world.scheduler.pause_schedule("paused")
    tick_at(world.scheduler, world.clock, at(5, 9))

    silent = [{k: v for k, v in each.items() if k != "is_active"} for each in exported]
    assert world.scheduler.import_schedules(silent).is_empty
    # The one-time schedule has had its run, which is not undone.
    assert list(world.scheduler.import_schedules(exported, dry_run=False).changed) == ["paused"]
    assert world.schedule("paused").is_active


def test_an_import_mends_a_schedule_that_cannot_be_read(world: World) -> None:
    world.add()
    exported = world.scheduler.export_schedules()
    world.tamper("nine", user_id=7)
    assert world.scheduler.import_schedules(exported, dry_run=False).added == ["nine"]
    assert world.scheduler.export_schedules() == exported


def test_an_import_keeps_where_an_interval_counts_from(world: World) -> None:
    world.add(cron_expr=None, every=3600)
    planned = world.schedule("nine").next_run
    world.advance(100)
    written = document("nine", cron_expr=None, every=3600, payload={"n": 1})
    world.scheduler.import_schedules([written], dry_run=False)
    assert (world.schedule("nine").payload, world.schedule("nine").next_run) == ({"n": 1}, planned)


BAD_DOCUMENTS: list[tuple[Any, str]] = [
    (7, "document 1 must be a dict of .*, not 7"),
    ({"user_id": "alice", "cron_expr": "0 9 * * *"}, "document 1, field 'schedule_id'"),
    (document("x", cron_expr="0 25 * * *"), r"document 1 \('x'\), field 'cron_expr'.*25"),
    (document("x", colour="red"), r"document 1 \('x'\), field 'colour'"),
    (document("x", next_run=at(6, 9)), "field 'next_run'"),
    (document("x", every=0.5, cron_expr=None), "field 'every': every must be .*0.5"),
    (document("x", start="tomorrow"), "field 'start': start must .*not 'tomorrow'"),
    (document("x", start="2026-03-06T09:00:00"), "field 'start'.*with an offset from UTC"),
    (document("x", timezone="Mars"), "field 'timezone'.*Mars"),
    (document("x", payload={"at": at(5, 9)}), "field 'payload': payload.at"),
    (document("x", is_active="yes"), "field 'is_active'"),
    (document("x", user_id=None), r"document 1 \('x'\).*user_id"),
    (document("x", every=60), "document 1.*one of cron_expr, every, at"),
    (document("x\n"), "document 1.*schedule_id"),
    (document("good"), r"document 1 \('good'\): has the id of document 0"),
    (document("x", cron_expr=None, at=0), r"document 1 \('x'\): at 1970.* is in the past"),
]


@pytest.mark.parametrize(("bad", "words"), BAD_DOCUMENTS, ids=[words for _, words in BAD_DOCUMENTS])
def test_a_bad_document_is_named_and_nothing_is_stored(world: World, bad: Any, words: str) -> None:
    before = world.state()
    with pytest.raises(InvalidSchedule, match=f"nothing was stored.*{words}"):
        world.scheduler.import_schedules([document("good"), bad], dry_run=False)
    assert world.state() == before


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cron_expr": None, "at": 0}, "at 1970.* is in the past"),
        ({"end": at(1, 9)}, "end 2026-03-01.* is in the past"),
    ],
)
def test_an_import_that_leaves_a_schedule_without_moments_is_refused(
    scheduler: TaskScheduler, change: dict[str, Any], words: str, dry_run: bool
) -> None:
    scheduler.import_schedules([document("x")], dry_run=False)
    with pytest.raises(InvalidSchedule, match=words):
        scheduler.import_schedules([document("x", **change)], dry_run=dry_run)
    assert get(scheduler, "x").cron_expr == "0 9 * * *"


def test_an_import_resumes_no_schedule_whose_moments_are_past(world: World) -> None:
    paused = document("x", end=at(5, 9, 30), is_active=False)
    world.scheduler.import_schedules([paused], dry_run=False)
    world.advance(86_400)
    world.scheduler.import_schedules([paused])  # it is as it is
    with pytest.raises(InvalidSchedule, match="is in the past"):
        world.scheduler.import_schedules([paused | {"is_active": True}])


def test_all_bad_documents_are_named_up_to_a_number(scheduler: TaskScheduler) -> None:
    with pytest.raises(InvalidSchedule, match=r"document 0 must.*document 19 must.*and 5 more"):
        scheduler.import_schedules([7] * 25)  # type: ignore[list-item]


def test_more_documents_than_one_call_takes_are_refused(
    scheduler: TaskScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "MAX_DOCUMENTS", 1)
    with pytest.raises(InvalidSchedule, match="at most 1 documents fit in one call, not 2"):
        scheduler.import_schedules([document("a"), document("b")])


def test_yaml_that_a_person_writes_is_understood(scheduler: TaskScheduler) -> None:
    text = """
    - schedule_id: nine
      user_id: alice
      cron_expr: 0 9 * * *
      start: 2026-03-05 09:00:00+00:00
      exclude: [2026-12-25]
      windows:
        - days: [1, 2, 3, 4, 5]
          from: 08:00
          to: 17:30
    """
    scheduler.import_schedules(load_schedules(text, "yaml"), dry_run=False)
    schedule = get(scheduler, "nine")
    assert schedule.start == at(5, 9)
    assert schedule.exclude == ["2026-12-25"]
    assert schedule.windows == [{"days": [1, 2, 3, 4, 5], "from": "08:00", "to": "17:30"}]


BAD_TEXTS = [
    ("{", "json", "not JSON"),
    ("{}", "json", "a list of schedules"),
    ("a: [", "yaml", "not YAML"),
    ("- &a [1]\n- *a", "yaml", "^the text has a YAML alias"),
    ("- !!python/object/apply:os.getcwd []", "yaml", "not YAML"),
    ("- 2026-13-45", "yaml", "not YAML"),
    ("- {[]: 1}", "yaml", "not YAML"),
    ("[]", "toml", "format must be one of json, yaml, not 'toml'"),
    (None, "json", "not JSON"),
    (None, "yaml", "not YAML"),
]


@pytest.mark.parametrize(("text", "format", "words"), BAD_TEXTS, ids=[str(t) for t in BAD_TEXTS])
def test_a_bad_text_is_refused(text: Any, format: str, words: str) -> None:
    with pytest.raises(InvalidSchedule, match=words):
        load_schedules(text, format)


def test_without_yaml_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    for act in (lambda: dump_schedules([], "yaml"), lambda: load_schedules("[]", "yaml")):
        with pytest.raises(ConfigurationError, match=r"fairqueue\[cli\]"):
            act()
    assert load_schedules(dump_schedules([])) == []


# --- finding --------------------------------------------------------------------------------------

SEARCHES: list[tuple[dict[str, Any], list[str]]] = [
    ({"name_prefix": "mail"}, ["m1", "m3", "m2"]),
    ({"name_prefix": "mail."}, ["m1", "m3"]),
    ({"name_prefix": "mail.send"}, ["m1", "m3"]),
    ({"name_prefix": "ail"}, []),
    ({"name_prefix": "é"}, ["z"]),
    ({"name_prefix": "mail", "user_id": "bob"}, ["m3"]),
    ({"name_prefix": "mail", "is_active": False}, ["m2"]),
    ({"name_prefix": "mail", "contains": "SEND"}, ["m1", "m3"]),
    ({"contains": "AI"}, ["m1", "m3", "m2"]),
    ({"contains": "m"}, ["m1", "m3", "m2"]),
    ({"contains": "m", "user_id": "alice"}, ["m1", "m2"]),
    ({"contains": "Z"}, ["z"]),
    ({"contains": "nowhere"}, []),
]


def add_named(world: World) -> None:
    world.add("m1", name="mail.send")
    world.add("m2", name="mailing")
    world.add("m3", name="mail.send", user_id="bob")
    world.add("z", name="état")
    world.scheduler.pause_schedule("m2")


@pytest.mark.parametrize(("filters", "expected"), SEARCHES, ids=[str(f) for f, _ in SEARCHES])
@pytest.mark.parametrize("limit", [1, 100])
def test_schedules_are_found_by_parts_of_their_names(
    world: World, filters: dict[str, Any], expected: list[str], limit: int
) -> None:
    add_named(world)
    found, cursor = [], None
    while True:
        page = world.scheduler.list_schedules(limit=limit, cursor=cursor, **filters)
        assert len(page) <= limit
        found += [schedule.schedule_id for schedule in page]
        if (cursor := page.cursor) is None:
            break
    assert found == expected


def test_a_renamed_or_removed_schedule_is_found_where_it_is_now(world: World) -> None:
    add_named(world)
    world.scheduler.update_schedule("m1", name="post.send")
    world.scheduler.remove_schedule("m3")
    assert ids_where(world.scheduler, name_prefix="mail") == ["m2"]
    assert ids_where(world.scheduler, name_prefix="post") == ["m1"]


def test_a_search_is_bounded(scheduler: TaskScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MAX_LISTED", 2)
    monkeypatch.setattr(search, "MAX_WALKED", 4)
    scheduler.add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": "alice", "schedule_id": f"s{n}"} for n in range(9)
    )
    first = scheduler.list_schedules(contains="s7", limit=2)
    assert (list(first), first.cursor is None) == ([], False)
    second = scheduler.list_schedules(contains="s7", limit=2, cursor=first.cursor)
    assert [schedule.schedule_id for schedule in second] == ["s7"]


BAD_SEARCHES: list[tuple[dict[str, Any], str]] = [
    ({"name_prefix": ""}, "name_prefix must .*not ''"),
    ({"contains": "a\0"}, "contains"),
    ({"contains": "a", "limit": 1001}, "limit must .*not 1001"),
    ({"contains": "a", "is_active": 7}, "is_active must be True, False or None, not 7"),
    ({"contains": "a", "cursor": "?"}, "cursor"),
    ({"contains": "a", "cursor": 7}, "cursor 7"),
    ({"name_prefix": "a", "cursor": "YgBi"}, "not valid for (this|a) listing"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_SEARCHES, ids=[w for _, w in BAD_SEARCHES])
def test_bad_arguments_of_a_search_are_named(
    scheduler: TaskScheduler, arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidSchedule, match=words):
        scheduler.list_schedules(**arguments)


# --- how close moments may be ---------------------------------------------------------------------

CLOSE: list[tuple[dict[str, Any], bool]] = [
    ({"cron_expr": "*/5 * * * *"}, True),
    ({"cron_expr": "*/4 * * * *"}, False),
    ({"cron_expr": "0,4 9 * * *"}, False),
    ({"cron_expr": None, "every": 300}, True),
    ({"cron_expr": None, "every": 299.9}, False),
    ({"cron_expr": None, "at": at(6, 9)}, True),
    ({"cron_expr": "* * * * *", "windows": [{"from": "09:00", "to": "09:01"}]}, True),
]


@pytest.mark.parametrize(("rule", "allowed"), CLOSE, ids=[str(rule) for rule, _ in CLOSE])
def test_too_frequent_a_rule_is_refused(world: World, rule: dict[str, Any], allowed: bool) -> None:
    world.queue.configure(min_interval=300)
    world.add("before")
    before = world.state()
    acts: list[Callable[[], object]] = [
        lambda: world.add(**rule),
        lambda: world.scheduler.update_schedule("before", **rule),
    ]
    for act in acts:
        if allowed:
            act()
        else:
            with pytest.raises(ScheduleQuota, match="min_interval is 300 seconds"):
                act()
    assert (world.state() != before) is allowed


def test_only_a_change_of_the_rule_is_compared_with_the_limit(world: World) -> None:
    world.add(cron_expr="* * * * *")
    world.queue.configure(min_interval=timedelta(minutes=5))
    world.advance(SETTINGS_MS / 1000)
    assert world.scheduler.update_schedule("nine", payload={"n": 1})
    with pytest.raises(ScheduleQuota):
        world.scheduler.update_schedule("nine", cron_expr="*/2 * * * *")


def test_the_setting_is_read_again_after_a_while(world: World) -> None:
    world.add("one", cron_expr="* * * * *")
    world.queue.configure(min_interval=300)
    world.add("two", cron_expr="* * * * *")  # not yet
    world.advance(SETTINGS_MS / 1000)
    with pytest.raises(ScheduleQuota):
        world.add("three", cron_expr="* * * * *")
    world.queue.configure(min_interval=0)
    world.advance(SETTINGS_MS / 1000)
    world.add("four", cron_expr="* * * * *")


def test_only_the_next_moments_are_looked_at(world: World) -> None:
    world.queue.configure(min_interval=3600)
    days = ",".join(str(day) for day in range(1, GAPS_CHECKED + 5))
    world.add("later", cron_expr=f"0 9 {days} 4 *", start=datetime(2026, 4, 1, tzinfo=UTC))
    with pytest.raises(ScheduleQuota):
        world.add("soon", cron_expr="0,30 9 1 4 *")


# --- other zone data ------------------------------------------------------------------------------


def plan_at(world: World, moment: datetime) -> None:
    """The plan of `nine` as if the zone's offset had been another."""
    revision = world.record("plan", "nine").split(" ")[0]
    world.redis.hset(world.keys["plan"], "nine", f"{revision} {ms(moment)}")
    world.redis.zadd(world.keys["due"], {"nine": ms(moment)})


@pytest.mark.parametrize("hour", [10, 15])
@pytest.mark.one_partition
def test_replanning_moves_moments_that_other_zone_data_has_planned(world: World, hour: int) -> None:
    world.add(cron_expr="0 12 * * *")
    world.add("same")
    plan_at(world, at(5, hour))
    report = world.scheduler.replan()
    assert (report.looked_at, report.changed) == (2, 1)
    assert world.schedule("nine").next_run == at(5, 12)
    assert world.due_at("nine") == ms(at(5, 12))
    assert world.scheduler.replan().changed == 0
    tick_at(world.scheduler, world.clock, at(5, 12))
    assert world.schedule("nine").last_run == at(5, 12)


@pytest.mark.one_partition
def test_replanning_loses_no_moment_that_is_due_or_will_be_at_once(world: World) -> None:
    world.add(cron_expr="0 12 * * *")
    plan_at(world, at(5, 9))
    for moment in (at(5, 8, 59, 59), at(5, 9), at(5, 9, 5)):
        world.clock.set(moment)
        assert world.scheduler.replan().changed == 0
    assert world.tick().fired == 1
    assert world.schedule("nine").next_run == at(5, 12)


@pytest.mark.one_partition
def test_replanning_leaves_what_is_paused_set_by_a_user_or_unreadable(world: World) -> None:
    world.add()
    world.scheduler.update_schedule("nine", next_run=at(5, 15))
    world.add("paused")
    world.scheduler.pause_schedule("paused")
    world.add("broken")
    world.tamper("broken", user_id=7)
    world.add("lost zone", cron_expr="0 12 * * *")
    world.tamper("lost zone", timezone="Atlantis/Poseidonis")
    before = world.state()
    report = world.scheduler.replan()
    assert (report.looked_at, report.changed, report.failed) == (2, 0, 1)
    assert state_changes(before, world.state()).keys() == {"settings.tzdata"}


@pytest.mark.one_partition
def test_a_replanning_that_redis_interrupts_goes_on_where_it_was(world: World) -> None:
    world.add(cron_expr="0 12 * * *")
    plan_at(world, at(5, 15))
    replanner = Replanner(ScheduleStore(world.queue.link))
    key = world.keys["schedules"]
    text = world.redis.hget(key, "nine")
    world.spoil("schedules")
    with pytest.raises(RedisRefused):
        replanner.step()
    world.redis.delete(key)
    world.redis.hset(key, "nine", text)
    assert [replanner.step(), replanner.step()] == [True, False]
    assert world.schedule("nine").next_run == at(5, 12)


@pytest.mark.one_partition
def test_replanning_does_not_take_a_lost_server_for_a_broken_schedule(
    world: World,
) -> None:
    world.add(cron_expr="0 12 * * *")
    plan_at(world, at(5, 15))

    def gone() -> None:
        raise RedisUnavailable("gone")

    world.before_script("update_schedule", gone)
    replanner = Replanner(ScheduleStore(world.queue.link))
    with pytest.raises(RedisUnavailable):
        replanner.step()
    assert [replanner.step(), replanner.step()] == [True, False]
    assert (replanner.report.changed, replanner.report.failed) == (1, 0)


@pytest.mark.one_partition
def test_a_leader_replans_after_its_start_if_the_zone_data_is_new(world: World) -> None:
    with TaskQueue(world.redis, timeout=5) as real:
        scheduler = TaskScheduler(real, "one", check_interval=0.05, registry=world.registry)
        add(scheduler, cron_expr="0 12 1 1 *")
        planned = get(scheduler, "nine").next_run
        assert planned is not None
        world.redis.hset(world.keys["settings"], "tzdata", "2001a")
        plan_at(world, planned + timedelta(days=90))

        def is_stored() -> bool:
            return world.redis.hget(world.keys["settings"], "tzdata") == zone_data().encode()

        scheduler.start()
        try:
            eventually(is_stored, "the zone data is stored")
        finally:
            assert scheduler.stop(30)
        assert get(scheduler, "nine").next_run == planned


@pytest.mark.one_partition
def test_a_leader_with_the_same_zone_data_leaves_all_as_it_is(world: World) -> None:
    world.add(cron_expr="0 12 * * *")
    world.scheduler.replan()
    plan_at(world, at(5, 15))
    assert not Replanner(ScheduleStore(world.queue.link)).is_needed()
    world.tick()
    assert world.scheduler._replan_some() is False
    assert world.schedule("nine").next_run == at(5, 15)


# --- titles ---------------------------------------------------------------------------------------


def test_a_schedule_is_found_by_a_part_of_its_title(world: World) -> None:
    world.add("a", title="Täglicher Bericht")
    world.add("b", title="Backup", user_id="bob")
    world.add("c", name="bericht.senden")
    world.add("d")
    assert found_ids(world, contains="BERICHT") == ["a", "c"]
    assert found_ids(world, contains="backup", user_id="bob") == ["b"]
    world.scheduler.update_schedule("a", title="Mails")
    world.scheduler.update_schedule("b", title=None)
    assert found_ids(world, contains="bericht") == ["c"]
    assert found_ids(world, contains="mail") == ["a"]
    assert found_ids(world, contains="backup") == []


@pytest.mark.parametrize("title", ['say "hi"', "a/b", "back\\slash", "Ünï", ',"title":"x"', "%"])
def test_a_title_is_found_whatever_it_holds(world: World, title: str) -> None:
    world.add("a", title=title)
    world.add("b", title="other")
    assert found_ids(world, contains=title) == ["a"]
    world.scheduler.pause_schedule("a", note='"title":"other"')
    assert found_ids(world, contains="OTHER") == ["b"]


def found_ids(world: World, **filters: Any) -> list[str]:
    return sorted(each.schedule_id for each in world.scheduler.list_schedules(**filters))


@pytest.mark.one_partition
def test_a_schedule_from_before_titles_is_read_and_changed(world: World) -> None:
    world.add(title="T", description="D", created_by="ann")
    stored = world.record("schedules", "nine")
    for name in ("title", "description", "created_by"):
        del stored[name]
    world.redis.hset(world.keys["schedules"], "nine", json.dumps(stored))
    world.redis.delete(world.keys["changes"])

    schedule = world.schedule("nine")
    assert (schedule.title, schedule.description, schedule.created_by) == (None, None, None)
    assert schedule.label == "default"
    assert world.scheduler.changes("nine") == []
    assert world.scheduler.update_schedule("nine", title="New", changed_by="bo")
    schedule = world.schedule("nine")
    assert (schedule.label, schedule.created_by) == ("New", None)
    (change,) = world.scheduler.changes("nine")
    assert (change.made, change.fields) == (False, {"title": (None, "New")})


def test_who_made_a_schedule_cannot_be_changed(scheduler: TaskScheduler) -> None:
    add(scheduler, created_by="ann")
    with pytest.raises(InvalidSchedule, match="unknown field 'created_by'"):
        scheduler.update_schedule("nine", created_by="bo")
    scheduler.update_schedule("nine", priority=5)
    assert get(scheduler, "nine").created_by == "ann"
    copied = scheduler.copy_schedule("nine", "ten")
    assert get(scheduler, copied).created_by is None
    add(scheduler, on_conflict="replace", created_by="carol")
    assert get(scheduler, "nine").created_by == "carol"
    assert [change.by for change in scheduler.changes("nine") if change.made] == ["carol", "ann"]


def test_a_schedule_that_is_made_paused_does_not_fire(world: World) -> None:
    world.add(is_active=False)
    assert world.tick_at(at(6, 9)).fired == 0
    assert world.schedule("nine").paused_at == THURSDAY
    world.scheduler.resume_schedule("nine")
    assert world.schedule("nine").next_run == at(7, 9)
    passed = world.scheduler.moments("nine", at(5, 0), at(7, 0))
    assert [(each.outcome, each.reason) for each in passed] == [("skipped", "paused")] * 2


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"title": "x" * 201}, "title must .*not 'xxx"),
        ({"title": "a\nb"}, r"title must .*not 'a\\nb'"),
        ({"title": 7}, "title must .*not 7"),
        ({"description": "x" * 4001}, "description must .*not 'xxx"),
        ({"description": "a\0b"}, "description must .*not 'a"),
        ({"created_by": "a\nb"}, "created_by"),
        ({"is_active": 1}, "is_active must be True or False, not 1"),
    ],
)
def test_a_bad_title_is_named(scheduler: TaskScheduler, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSchedule, match=said):
        add(scheduler, **fields)
    assert scheduler.list_schedules() == []
