"""Schedules as users see them: added, changed, listed, removed, refused when they are wrong."""

import base64
import json
import math
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from helpers.schedules import THURSDAY, add, at, fire_id, get, ms
from helpers.world import World
from prometheus_client import CollectorRegistry

import fairqueue.schedules.store
from fairqueue.clock import ManualClock
from fairqueue.errors import (
    BrokenRecord,
    FairQueueError,
    InvalidCron,
    InvalidPayload,
    InvalidSchedule,
    QueueFull,
    ScheduleConflict,
    UnknownSchedule,
    UnknownTimezone,
)
from fairqueue.link.operation import Operation
from fairqueue.models import ScheduledTask
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.fields import MAX_ID_LENGTH
from fairqueue.schedules.store import MAX_ADDED
from fairqueue.validation import Priority

START = THURSDAY


# --- adding ---------------------------------------------------------------------------------------


def test_a_schedule_is_stored_with_every_field(world: World) -> None:
    answer = world.scheduler.add_schedule(
        cron_expr="0 9 * * 1-5",
        user_id="alice",
        priority=Priority.HIGH,
        payload={"report": 7, "für": ["ä", 1.5, None, True]},
        timezone="Europe/London",
        name="reports.build",
        schedule_id="weekdays",
        metadata={"team": "blue"},
    )

    assert answer == "weekdays"
    assert world.scheduler.get_schedule("weekdays") == ScheduledTask(
        schedule_id="weekdays",
        cron_expr="0 9 * * 1-5",
        user_id="alice",
        priority=Priority.HIGH,
        payload={"report": 7, "für": ["ä", 1.5, None, True]},
        timezone="Europe/London",
        name="reports.build",
        metadata={"team": "blue"},
        is_active=True,
        disabled_reason=None,
        created_at=world.now(),
        updated_at=world.now(),
        last_run=None,
        next_run=at(5, 9),
        run_count=0,
        missed_count=0,
    )


def test_only_cron_and_user_are_needed(scheduler: TaskScheduler) -> None:
    one = scheduler.add_schedule("@daily", "alice")
    two = scheduler.add_schedule("@daily", "alice")

    schedule = get(scheduler, one)
    assert one != two
    assert len(one) == 24
    assert (schedule.priority, schedule.payload, schedule.timezone) == (Priority.NORMAL, {}, "UTC")
    assert (schedule.name, schedule.metadata) == ("default", {})
    assert schedule.next_run == at(6, 0)


def test_an_unknown_schedule_is_none_and_false(world: World) -> None:
    before = world.state()

    assert world.scheduler.get_schedule("none") is None
    assert world.scheduler.update_schedule("none", name="x") is False
    assert world.scheduler.remove_schedule("none") is False
    with pytest.raises(UnknownSchedule, match="'none'") as caught:
        world.scheduler.trigger("none")

    assert isinstance(caught.value, ValueError)
    assert world.state() == before


def test_an_id_that_is_taken_is_refused(world: World) -> None:
    world.add(user_id="alice")
    before = world.state()

    with pytest.raises(ScheduleConflict, match="'nine' is in use"):
        world.add(user_id="bob")

    assert world.state() == before


def test_a_replaced_schedule_keeps_its_counts_and_moves_in_the_index(world: World) -> None:
    world.add(user_id="alice", payload={"old": 1})
    world.tick_after(60)
    world.scheduler.update_schedule("nine", is_active=False)

    world.add(cron_expr="0 10 * * *", user_id="bob", on_conflict="replace")

    schedule = world.schedule("nine")
    assert (schedule.user_id, schedule.payload, schedule.is_active) == ("bob", {}, True)
    assert (schedule.last_run, schedule.run_count) == (at(5, 9), 1)
    assert (schedule.next_run, schedule.created_at) == (at(5, 10), world.now())
    assert world.scheduler.list_schedules(user_id="alice") == []
    assert [s.schedule_id for s in world.scheduler.list_schedules(user_id="bob")] == ["nine"]


def test_replace_is_also_right_for_a_new_id(scheduler: TaskScheduler) -> None:
    assert add(scheduler, on_conflict="replace") == "nine"
    assert get(scheduler, "nine").run_count == 0


@pytest.mark.parametrize("bad", ["ignore", "", None, True])
def test_on_conflict_has_two_meanings(scheduler: TaskScheduler, bad: Any) -> None:
    with pytest.raises(InvalidSchedule, match="on_conflict"):
        add(scheduler, on_conflict=bad)


@pytest.mark.one_partition
def test_ten_thousand_schedules_are_added_in_one_call(world: World) -> None:
    specs = [
        {"cron_expr": f"{n % 60} {n % 24} * * *", "user_id": f"u{n % 97}", "schedule_id": f"s{n}"}
        for n in range(MAX_ADDED)
    ]

    assert world.scheduler.add_schedules(specs) == [f"s{n}" for n in range(MAX_ADDED)]

    for key in ("schedules", "plan", "schedule_state"):
        assert world.redis.hlen(world.keys[key]) == MAX_ADDED
    for key in ("due", "schedule_index"):
        assert world.redis.zcard(world.keys[key]) == MAX_ADDED
    with pytest.raises(InvalidSchedule, match="at most 10000 schedules fit in one call, not 10001"):
        world.scheduler.add_schedules([*specs, {"cron_expr": "@daily", "user_id": "u"}])


def test_many_are_added_all_or_none(world: World) -> None:
    world.add("taken")
    before = world.state()
    good = [
        {"cron_expr": "@daily", "user_id": "bob", "schedule_id": f"new{n}"} for n in range(1200)
    ]

    bad: list[tuple[dict[str, Any], type[FairQueueError]]] = [
        (good[0] | {"schedule_id": "taken"}, ScheduleConflict),
        (good[0] | {"schedule_id": "new7"}, InvalidSchedule),
        (good[0] | {"schedule_id": "x", "cron_expr": "61 * * * *"}, InvalidCron),
    ]
    for last, error in bad:
        with pytest.raises(error):
            world.scheduler.add_schedules([*good, last])
        assert world.state() == before


def test_no_schedules_at_all_is_no_error(world: World) -> None:
    assert world.scheduler.add_schedules([]) == []
    assert world.state() == {}


def test_schedules_may_come_from_a_generator(scheduler: TaskScheduler) -> None:
    ids = scheduler.add_schedules(
        {"cron_expr": "@hourly", "user_id": user, "schedule_id": user} for user in ("a", "b")
    )
    assert ids == ["a", "b"]


def test_what_was_given_and_returned_can_be_changed_without_consequence(world: World) -> None:
    payload = {"items": [1]}
    world.add(payload=payload, metadata={"team": {"name": "blue"}})
    payload["items"].append(2)

    schedule = world.schedule("nine")
    schedule.payload["items"].append(3)
    schedule.metadata["team"]["name"] = "red"
    world.scheduler.list_schedules()[0].payload["items"].clear()
    world.scheduler.update_schedule("nine", name="other")

    assert world.schedule("nine").payload == {"items": [1]}
    assert world.schedule("nine").metadata == {"team": {"name": "blue"}}


# --- bad input ------------------------------------------------------------------------------------

DEEP: dict[str, Any] = {}
_inner = DEEP
for _ in range(40):
    _inner["x"] = {}
    _inner = _inner["x"]

BAD_FIELDS: list[tuple[str, Any, type[ValueError], str]] = [
    ("cron_expr", "* * * *", InvalidCron, r"'\* \* \* \*' has 4 fields"),
    ("cron_expr", "* * * * * * *", InvalidCron, "has 7 fields"),
    ("cron_expr", "", InvalidCron, "'' has 0 fields"),
    ("cron_expr", "60 * * * *", InvalidCron, "60"),
    ("cron_expr", "* * * * mon-", InvalidCron, "mon-"),
    ("cron_expr", "0 0 30 2 *", InvalidCron, "'0 0 30 2 *' never fires".replace("*", r"\*")),
    ("cron_expr", "0 0 31 4,6,9,11 *", InvalidCron, "never fires"),
    ("cron_expr", "@reboot", InvalidCron, "@reboot"),
    ("cron_expr", "R * * * *", InvalidCron, "R"),
    ("cron_expr", None, InvalidSchedule, "needs one of cron_expr, every, at"),
    ("cron_expr", 5, InvalidCron, "a cron expression must be .* not 5"),
    ("cron_expr", ["* * * * *"], InvalidCron, "a cron expression must be"),
    ("cron_expr", "0 9 * * *\x00", InvalidCron, "not printable ASCII"),
    ("timezone", "Mars/Olympus", UnknownTimezone, "'Mars/Olympus'"),
    ("timezone", "europe/london", UnknownTimezone, "write 'Europe/London'"),
    ("timezone", "", UnknownTimezone, "''"),
    ("timezone", None, UnknownTimezone, "None"),
    ("timezone", ["UTC"], UnknownTimezone, "UTC"),
    ("user_id", "", InvalidSchedule, "user_id must .*not ''"),
    ("user_id", None, InvalidSchedule, "user_id must .*not None"),
    ("user_id", "a\0b", InvalidSchedule, r"user_id must .*not 'a\\x00b'"),
    ("user_id", "x" * 201, InvalidSchedule, "user_id must .*not 'xxx"),
    ("user_id", "\ud800", InvalidSchedule, "user_id"),
    ("name", "", InvalidSchedule, "name must .*not ''"),
    ("name", 7, InvalidSchedule, "name must .*not 7"),
    ("priority", 0, InvalidSchedule, "priority must .*not 0"),
    ("priority", 7, InvalidSchedule, "priority must .*not 7"),
    ("priority", True, InvalidSchedule, "priority must .*not True"),
    ("priority", "HIGH", InvalidSchedule, "priority must .*not 'HIGH'"),
    ("priority", None, InvalidSchedule, "priority must .*not None"),
    ("payload", [1], InvalidPayload, "payload must be a dict .* not a list"),
    ("payload", "text", InvalidPayload, "payload must be a dict .* not a str"),
    ("payload", {"a": {"b": [0, {1}]}}, InvalidPayload, r"payload\.a\.b\[1\] must be .* not a set"),
    ("payload", {"a": math.nan}, InvalidPayload, "payload.a must be .* not nan"),
    ("payload", {1: 2}, InvalidPayload, "payload must have strings as keys .* not 1"),
    ("payload", {"when": THURSDAY}, InvalidPayload, "payload.when"),
    ("payload", {"text": "\ud800"}, InvalidPayload, "surrogate"),
    ("payload", {"text": "x" * 262_144}, InvalidPayload, "payload must be at most .* not 262155"),
    ("payload", DEEP, InvalidPayload, "levels deep"),
    ("metadata", [], InvalidPayload, "metadata must be a dict .* not a list"),
    ("metadata", {"text": "x" * 16_384}, InvalidPayload, "metadata must be at most .* not 16395"),
]


@pytest.mark.parametrize(("field", "value", "error", "message"), BAD_FIELDS)
def test_a_bad_field_is_refused_and_nothing_is_stored(
    world: World, field: str, value: Any, error: type[ValueError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        world.add(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, FairQueueError)
    assert world.state() == {}


@pytest.mark.parametrize(("field", "value", "error", "message"), BAD_FIELDS)
def test_a_bad_change_is_refused_and_nothing_is_stored(
    world: World, field: str, value: Any, error: type[ValueError], message: str
) -> None:
    world.add()
    before = world.state()
    with pytest.raises(error, match=message):
        world.scheduler.update_schedule("nine", **({"name": "changed"} | {field: value}))
    assert world.state() == before


BAD_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"colour": "red"}, "unknown field 'colour'"),
    ({"created_at": THURSDAY}, "unknown field 'created_at'"),
    ({"run_count": 0}, "unknown field 'run_count'"),
    ({"is_active": 1}, "is_active must be True or False, not 1"),
    ({"is_active": None}, "is_active must be True or False, not None"),
    ({"next_run": datetime(2026, 3, 6)}, "next_run must be a datetime with a time zone"),
    ({"next_run": "tomorrow"}, "next_run must .*not 'tomorrow'"),
    ({"next_run": None}, "next_run must .*not None"),
    ({"next_run": THURSDAY}, "next_run 2026-03-05T08:59:30.* is in the past"),
    ({"next_run": THURSDAY - timedelta(days=1)}, "next_run 2026-03-04.* is in the past"),
    ({"next_run": -1.0}, "next_run must .*not -1.0"),
    ({"next_run": math.inf}, "next_run must .*not inf"),
    ({"next_run": at(6, 9), "is_active": False}, "next_run cannot be set"),
]


@pytest.mark.parametrize(("change", "message"), BAD_CHANGES)
def test_a_bad_change_is_refused(world: World, change: dict[str, Any], message: str) -> None:
    world.add()
    before = world.state()
    with pytest.raises(InvalidSchedule, match=message) as caught:
        world.scheduler.update_schedule("nine", **change)
    assert isinstance(caught.value, ValueError)
    assert world.state() == before


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"user_id": "alice"}, "needs one of cron_expr, every, at; this one has none of them"),
        ({"cron_expr": "@daily", "every": 60, "user_id": "a"}, "has cron_expr and every"),
        ({"cron_expr": "@daily"}, "needs user_id"),
        ({"cron_expr": "@daily", "user_id": "a", "cron": "x"}, "unknown field 'cron'"),
        ({"cron_expr": "@daily", "user_id": "a", "next_run": 1}, "unknown field 'next_run'"),
        ("@daily", "must be a dict of its fields, not a str"),
        (None, "must be a dict of its fields, not None"),
    ],
)
def test_a_spec_needs_known_fields(world: World, spec: Any, message: str) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        world.scheduler.add_schedules([spec])
    assert world.state() == {}


@pytest.mark.parametrize("bad", ["", "a\nb", 5, b"x", "x" * (MAX_ID_LENGTH + 1), "\udfff"])
def test_a_bad_id_is_refused_everywhere(world: World, bad: Any) -> None:
    calls = (
        lambda: world.add(bad),
        lambda: world.scheduler.update_schedule(bad, name="x"),
        lambda: world.scheduler.remove_schedule(bad),
        lambda: world.scheduler.get_schedule(bad),
        lambda: world.scheduler.trigger(bad),
    )
    for call in calls:
        with pytest.raises(InvalidSchedule, match="schedule_id"):
            call()
    assert world.state() == {}


def test_the_task_of_the_longest_id_can_be_looked_up_and_cancelled(world: World) -> None:
    longest = world.add("x" * MAX_ID_LENGTH)
    world.tick_after(60)

    assert world.queue.get(fire_id(longest, at(5, 9))) is not None
    assert world.queue.cancel(fire_id(longest, at(5, 9)))


# --- changing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("user_id", "bob"),
        ("priority", Priority.CRITICAL),
        ("payload", {"new": [1, 2]}),
        ("name", "other"),
        ("metadata", {"team": "red"}),
    ],
)
def test_a_patch_changes_its_field_and_keeps_the_plan(world: World, field: str, value: Any) -> None:
    world.add(payload={"a": 1}, metadata={"m": 1}, priority=2, name="n")
    before = world.schedule("nine")
    world.advance(10)

    assert world.scheduler.update_schedule("nine", **{field: value}) is True

    after = world.schedule("nine")
    assert after.revision != before.revision
    for name in ScheduledTask.__dataclass_fields__.keys() - {"revision"}:
        expected = {field: value, "updated_at": world.now()}.get(name, getattr(before, name))
        assert getattr(after, name) == expected, name


def test_a_new_cron_plans_anew_from_now(world: World) -> None:
    world.add()
    world.clock.set(at(5, 10, 30))  # nine has passed, and nobody was there to fire
    world.scheduler.update_schedule("nine", cron_expr="0 11 * * *")

    schedule = world.schedule("nine")
    assert (schedule.cron_expr, schedule.next_run) == ("0 11 * * *", at(5, 11))
    assert world.due_at("nine") == ms(at(5, 11))


def test_a_new_zone_plans_anew(scheduler: TaskScheduler) -> None:
    add(scheduler)
    scheduler.update_schedule("nine", timezone="America/New_York")
    assert get(scheduler, "nine").next_run == at(5, 14)


def test_cron_and_zone_change_together(scheduler: TaskScheduler) -> None:
    add(scheduler)
    scheduler.update_schedule("nine", timezone="Asia/Tokyo", cron_expr="30 18 * * *", priority=1)
    schedule = get(scheduler, "nine")
    assert (schedule.next_run, schedule.priority) == (at(5, 9, 30), Priority.VERY_LOW)


def test_a_given_next_run_is_fired_and_then_the_cron_goes_on(world: World) -> None:
    world.add()
    given = at(5, 8, 59, 45)
    world.scheduler.update_schedule("nine", next_run=given)
    assert world.schedule("nine").next_run == given

    world.tick_at(given)

    assert world.fired_ids() == [fire_id("nine", given)]
    schedule = world.schedule("nine")
    assert (schedule.last_run, schedule.next_run) == (given, at(5, 9))


def test_next_run_may_be_seconds_or_in_another_zone(scheduler: TaskScheduler) -> None:
    add(scheduler)
    scheduler.update_schedule("nine", next_run=at(7, 1).timestamp() + 0.25)
    assert get(scheduler, "nine").next_run == at(7, 1) + timedelta(milliseconds=250)

    scheduler.update_schedule("nine", next_run=at(7, 2).astimezone())
    assert get(scheduler, "nine").next_run == at(7, 2)


def test_next_run_of_an_inactive_schedule_needs_is_active(world: World) -> None:
    world.add()
    world.scheduler.update_schedule("nine", is_active=False)
    before = world.state()

    with pytest.raises(InvalidSchedule, match="pass is_active=True"):
        world.scheduler.update_schedule("nine", next_run=at(7, 1))
    assert world.state() == before

    world.scheduler.update_schedule("nine", next_run=at(7, 1), is_active=True)
    assert world.schedule("nine").next_run == at(7, 1)


def test_what_is_off_does_not_fire_and_what_is_on_again_does_not_catch_up(world: World) -> None:
    world.add()
    world.scheduler.update_schedule("nine", is_active=False)
    off = world.schedule("nine")
    report = world.tick_after(timedelta(days=3))

    world.scheduler.update_schedule("nine", is_active=True)
    world.tick()

    assert (off.is_active, off.next_run, off.disabled_reason) == (False, None, None)
    assert report.fired == 0
    assert world.fired_ids() == []
    on = world.schedule("nine")
    assert (on.is_active, on.next_run, on.missed_count) == (True, at(8, 9), 0)


def test_on_again_when_it_is_on_keeps_the_plan(world: World) -> None:
    world.add()
    world.scheduler.update_schedule("nine", next_run=at(9, 3))
    world.scheduler.update_schedule("nine", is_active=True)
    assert world.schedule("nine").next_run == at(9, 3)


def test_a_new_cron_does_not_switch_on_what_its_user_switched_off(world: World) -> None:
    world.add()
    world.scheduler.update_schedule("nine", is_active=False)
    world.scheduler.update_schedule("nine", cron_expr="0 10 * * *")

    off = world.schedule("nine")
    assert (off.is_active, off.next_run) == (False, None)
    assert world.due_at("nine") is None
    world.scheduler.update_schedule("nine", is_active=True)
    assert world.schedule("nine").next_run == at(5, 10)


def test_off_and_a_new_cron_in_one_change(scheduler: TaskScheduler) -> None:
    add(scheduler)
    scheduler.update_schedule("nine", is_active=False, cron_expr="0 10 * * *")
    off = get(scheduler, "nine")
    assert (off.is_active, off.cron_expr, off.next_run) == (False, "0 10 * * *", None)


def test_updated_at_changes_only_by_a_users_change(world: World) -> None:
    world.add()
    world.tick_after(60)
    world.scheduler.trigger("nine")
    fired = world.schedule("nine")
    assert (fired.updated_at, fired.created_at, fired.run_count) == (THURSDAY, THURSDAY, 1)

    world.scheduler.update_schedule("nine", is_active=False)
    assert world.schedule("nine").updated_at == world.now()
    assert world.schedule("nine").created_at == THURSDAY


def test_last_run_is_the_nominal_moment_and_not_when_it_was_noticed(world: World) -> None:
    world.add()
    world.tick_at(at(5, 9, 17, 3))
    schedule = world.schedule("nine")
    assert (schedule.last_run, schedule.next_run, schedule.run_count) == (at(5, 9), at(6, 9), 1)


def test_a_new_user_moves_the_schedule_in_the_index(scheduler: TaskScheduler) -> None:
    add(scheduler, user_id="alice")
    scheduler.update_schedule("nine", user_id="bob")

    assert scheduler.list_schedules(user_id="alice") == []
    assert [s.user_id for s in scheduler.list_schedules(user_id="bob")] == ["bob"]
    assert len(scheduler.list_schedules()) == 1


@pytest.mark.one_partition
def test_concurrent_updates_of_different_fields_lose_nothing(redis_url: str, world: World) -> None:
    world.add(metadata={"n": 0})
    per_field = 20
    values: dict[str, list[Any]] = {
        "payload": [{"n": n} for n in range(per_field)],
        "name": [f"name{n}" for n in range(per_field)],
        "priority": [1 + n % 6 for n in range(per_field)],
        "metadata": [{"n": n} for n in range(per_field)],
        "user_id": [f"user{n}" for n in range(per_field)],
        "cron_expr": [f"{n} 10 * * *" for n in range(per_field)],
    }
    start = threading.Barrier(len(values))

    def change(field: str) -> None:
        with TaskQueue.from_url(redis_url, clock=ManualClock(THURSDAY)) as queue:
            mine = TaskScheduler(queue, field, registry=CollectorRegistry())
            start.wait(10)
            for value in values[field]:
                assert mine.update_schedule("nine", **{field: value})
                assert getattr(get(mine, "nine"), field) == value

    with ThreadPoolExecutor(len(values)) as pool:
        for future in [pool.submit(change, field) for field in values]:
            future.result(30)

    schedule = world.schedule("nine")
    for field, wanted in values.items():
        assert getattr(schedule, field) == wanted[-1], field
    assert schedule.next_run == at(5, 10, per_field - 1)
    assert world.redis.zcard("{fairqueue:default}:schedule_index") == 1


def overtaken(*_: object) -> Operation[bytes]:
    yield from ()
    return b"changed"


@pytest.mark.one_partition
def test_an_update_that_others_overtake_for_ever_gives_up(world: World) -> None:
    with TaskQueue(world.redis, clock=world.clock, timeout=0.1) as queue:
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        add(scheduler)
        world.patch(scheduler.store, "_try_update", overtaken)
        with pytest.raises(ScheduleConflict, match="'nine' was changed by others"):
            scheduler.update_schedule("nine", name="x")


def test_an_update_starts_over_when_somebody_else_was_faster(world: World) -> None:
    world.add()
    sent = world.before_script(
        "update_schedule", lambda: world.scheduler.update_schedule("nine", payload={"theirs": 1})
    )
    assert world.scheduler.update_schedule("nine", name="ours")

    schedule = world.schedule("nine")
    assert (schedule.name, schedule.payload) == ("ours", {"theirs": 1})
    assert sent.count("update_schedule") == 3


@pytest.mark.one_partition
def test_a_fire_planned_from_an_old_definition_is_refused(
    world: World,
) -> None:
    """On a Friday, `0 9 * * *` and `0 9 * * 1-5` agree on today and not on tomorrow."""
    world.clock.set(at(6, 8, 59))
    world.add()

    def change() -> None:
        # A client that is half a second behind: for it the moment, which stays, is yet to come.
        world.patch(world.queue.link, "now_ms", lambda: world.clock.now_ms() - 500)
        world.scheduler.update_schedule("nine", cron_expr="0 9 * * 1-5")

    world.before_script("fire", change)
    report = world.tick_at(at(6, 9))

    assert (report.fired, report.moved) == (1, 1)
    assert world.fired_ids() == [fire_id("nine", at(6, 9))]
    assert world.schedule("nine").next_run == at(9, 9)  # Monday, as the new text says


def test_on_a_thursday_the_next_moment_stays_and_the_revision_changes(world: World) -> None:
    world.add()
    before = world.record("plan", "nine")
    world.scheduler.update_schedule("nine", cron_expr="0 9 * * 1-5")
    after = world.record("plan", "nine")

    assert before.split()[1] == after.split()[1] == str(ms(at(5, 9)))
    assert before.split()[0] != after.split()[0]


def test_a_payload_changed_after_the_reading_is_the_one_that_is_fired(world: World) -> None:
    world.add(payload={"version": 1})
    world.clock.set(at(5, 9))
    world.before_script(
        "fire", lambda: world.scheduler.update_schedule("nine", payload={"version": 2})
    )
    report = world.tick()

    (claim,) = world.queue.claim("w", limit=10)
    assert claim.task.payload == {"version": 2}
    assert (report.fired, report.moved) == (1, 1)


def test_a_schedule_removed_after_the_reading_is_not_fired(world: World) -> None:
    world.add()
    world.clock.set(at(5, 9))
    world.before_script("fire", lambda: world.scheduler.remove_schedule("nine"))
    report = world.tick()

    assert (report.fired, report.moved) == (0, 1)
    state = world.state()
    assert not {"tasks", "schedules", "plan", "due", "schedule_state"} & state.keys()


# --- a client whose clock is wrong ----------------------------------------------------------------


def test_a_wrong_idea_of_the_time_is_corrected_by_the_server(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client) as queue:
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        seconds, _ = redis_client.time()
        wrong = (seconds - 7 * 86_400) * 1000

        queue.link._clock_sample = (wrong, time.monotonic(), queue.link.era)
        add(scheduler, "added", cron_expr="@hourly")
        queue.link._clock_sample = (wrong, time.monotonic(), queue.link.era)
        scheduler.update_schedule("added", cron_expr="30 * * * *")

        schedule = get(scheduler, "added")
        assert schedule.next_run is not None
        for moment in (schedule.next_run, schedule.created_at, schedule.updated_at):
            assert abs(moment.timestamp() - seconds) < 3700
        assert schedule.next_run.timestamp() > seconds


def test_planning_may_take_a_while(world: World) -> None:
    plan = fairqueue.schedules.update.first_fire

    def slowly(*arguments: Any) -> Any:
        world.advance(2)
        return plan(*arguments)

    world.patch(fairqueue.schedules.store, "first_fire", slowly)
    scheduler = TaskScheduler(world.queue, registry=CollectorRegistry())
    add(scheduler, "s", cron_expr="@hourly")
    assert get(scheduler, "s").is_active


@pytest.mark.one_partition
def test_a_clock_that_jumps_all_the_time_is_said(world: World) -> None:
    world.patch(world.queue.link, "now_ms", lambda: world.clock.now_ms() + 60_000)
    scheduler = TaskScheduler(world.queue, registry=CollectorRegistry())
    with pytest.raises(ScheduleConflict, match="clock of Redis jumps"):
        add(scheduler, "s", cron_expr="@hourly")
    assert world.state() == {}


@pytest.mark.parametrize(("off_ms", "word"), [(1000, b"added"), (-1000, b"added"), (1001, None)])
def test_one_second_is_forgiven_and_no_more(world: World, off_ms: int, word: bytes | None) -> None:
    answer = world.queue.link.run(
        "add_schedules",
        op="op",
        client_now=world.clock.now_ms() + off_ms,
        on_conflict="error",
        rest=[*("s", "alice", "job", "{}", "rev"), *[world.clock.now_ms() + 5000] * 2, "", "", ""],
    )
    if word is None:
        assert answer == [b"skewed", world.clock.now_ms()]
        assert world.state() == {}
    else:
        assert answer == [word]


# --- removing and triggering ----------------------------------------------------------------------


def test_a_removed_schedule_leaves_its_tasks_and_nothing_else(world: World) -> None:
    world.add()
    world.tick_after(30)

    assert world.scheduler.remove_schedule("nine") is True
    assert world.scheduler.remove_schedule("nine") is False

    state = world.state()
    schedule_keys = {"schedules", "plan", "due", "schedule_state", "schedule_index", "broken"}
    assert not schedule_keys & state.keys()
    assert world.fired_ids() == [fire_id("nine", at(5, 9))]


def test_a_trigger_runs_now_and_leaves_the_plan(world: World) -> None:
    world.add(payload={"a": 1}, name="reports", priority=5)
    before = world.state()

    first, second = world.scheduler.trigger("nine"), world.scheduler.trigger("nine")

    after = world.state()
    for key in ("schedules", "plan", "due", "schedule_state", "schedule_index"):
        assert after[key] == before[key]
    assert first != second
    claim = world.queue.claim("w")[0]
    task = claim.task
    assert (task.task_id, task.schedule_id, task.scheduled_for) == (first, "nine", None)
    assert (task.user_id, task.name, task.priority) == ("alice", "reports", Priority.VERY_HIGH)
    assert task.payload == {"a": 1}


def test_an_inactive_schedule_can_be_triggered(world: World) -> None:
    world.add()
    world.scheduler.update_schedule("nine", is_active=False)
    world.scheduler.trigger("nine")
    assert world.queue.size("alice") == 1


def test_a_trigger_into_a_full_queue_says_so(world: World) -> None:
    world.queue.set_user("alice", max_waiting=1)
    world.add()
    world.scheduler.trigger("nine")
    with pytest.raises(QueueFull):
        world.scheduler.trigger("nine")


# --- listing --------------------------------------------------------------------------------------


def walk(world: World, **filters: Any) -> list[str]:
    """The ids on all pages, in order."""
    found: list[str] = []
    cursor: str | None = None
    while True:
        page = world.scheduler.list_schedules(cursor=cursor, **filters)
        found += [schedule.schedule_id for schedule in page]
        cursor = page.cursor
        if cursor is None:
            return found


@pytest.fixture
def many(scheduler: TaskScheduler) -> dict[str, list[str]]:
    """Three thousand schedules of three users; every seventh is not active."""
    users = ("alice", "bob", "bob2")
    ids: dict[str, list[str]] = {user: [] for user in users}
    for n in range(3000):
        ids[users[n % 3]].append(f"{users[n % 3]}-{n:04}")
    scheduler.add_schedules(
        {"cron_expr": "@daily", "user_id": user, "schedule_id": name}
        for user, names in ids.items()
        for name in names
    )
    for user in users:
        for name in ids[user][::7]:
            scheduler.update_schedule(name, is_active=False)
    return ids


@pytest.mark.parametrize("limit", [1000, 999, 77])
def test_each_schedule_is_on_one_page(world: World, many: dict[str, list[str]], limit: int) -> None:
    everything = [name for user in sorted(many) for name in many[user]]
    assert walk(world, limit=limit) == everything
    assert walk(world, limit=limit, user_id="bob") == many["bob"]

    off = [name for user in sorted(many) for name in many[user][::7]]
    assert walk(world, limit=limit, is_active=False) == off
    assert walk(world, limit=limit, is_active=True) == [n for n in everything if n not in off]
    assert walk(world, limit=limit, is_active=False, user_id="bob2") == many["bob2"][::7]


def test_pages_are_right_while_others_come_and_go(world: World, many: dict[str, list[str]]) -> None:
    """Whatever is there all the time is listed once; what comes or goes, at most once."""
    found: list[str] = []
    cursor: str | None = None
    removed: set[str] = set()
    for turn in range(1000):
        page = world.scheduler.list_schedules(limit=100, cursor=cursor)
        found += [schedule.schedule_id for schedule in page]
        cursor = page.cursor
        if cursor is None:
            break
        # The last one listed, so that the cursor points at nothing; one ahead; one behind.
        gone = {found[-1], many["bob2"][500 + turn], many["alice"][turn]}
        removed |= gone
        for name in gone:
            world.scheduler.remove_schedule(name)
        world.add(f"bob-new-{turn}", user_id="bob")
    assert turn > 20

    assert len(found) == len(set(found))
    stayed = {name for names in many.values() for name in names} - removed
    assert stayed <= set(found)


def test_the_default_page_has_a_hundred(world: World, many: dict[str, list[str]]) -> None:
    page = world.scheduler.list_schedules()
    assert len(page) == 100
    assert page.cursor is not None
    assert world.scheduler.list_schedules(user_id="nobody").cursor is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 0}, "limit must .*not 0"),
        ({"limit": 1001}, "limit must .*not 1001"),
        ({"limit": True}, "limit must .*not True"),
        ({"limit": "10"}, "limit must .*not '10'"),
        ({"user_id": ""}, "user_id must .*not ''"),
        ({"is_active": "yes"}, "is_active must be True, False or None, not 'yes'"),
        ({"cursor": "???"}, r"cursor '\?\?\?'"),
        ({"cursor": ""}, "cursor ''"),
        ({"cursor": 5}, "cursor 5"),
        ({"cursor": "YWxpY2U="}, "cursor 'YWxpY2U='"),
        ({"cursor": base64.b64encode(b"\xff\0").decode()}, "cursor"),
    ],
)
def test_a_listing_that_makes_no_sense_is_refused(
    scheduler: TaskScheduler, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidSchedule, match=message):
        scheduler.list_schedules(**arguments)


def test_a_cursor_never_leads_to_the_schedules_of_other_users(scheduler: TaskScheduler) -> None:
    add(scheduler, "a", user_id="alice")
    add(scheduler, "b", user_id="bob")
    forged = base64.urlsafe_b64encode(b"alice\0").decode()
    for cursor in (forged, scheduler.list_schedules(limit=1).cursor):
        with pytest.raises(InvalidSchedule, match=r"not valid for (this|a) listing"):
            scheduler.list_schedules(user_id="bob", cursor=cursor)


def test_users_whose_names_begin_alike_are_told_apart(scheduler: TaskScheduler) -> None:
    for user in ("a", "a b", "a:b", "ab", "ä"):
        add(scheduler, f"of {user}", user_id=user)
    for user in ("a", "a b", "a:b", "ab", "ä"):
        assert [s.user_id for s in scheduler.list_schedules(user_id=user)] == [user]


# --- records that somebody has spoilt -------------------------------------------------------------

SPOILT: list[tuple[str, bytes]] = [
    ("empty", b""),
    ("bad JSON", b"{"),
    ("no object", b"[]"),
    ("null", b"null"),
    ("not text", b"\xff\xfe"),
    ("no fields", b"{}"),
    ("deep", b"[" * 100_000),
]


@pytest.mark.parametrize("text", [text for _, text in SPOILT], ids=[name for name, _ in SPOILT])
@pytest.mark.one_partition
def test_an_unreadable_definition_fails_only_its_reader(world: World, text: bytes) -> None:
    world.add("bad")
    world.add("good")
    world.redis.hset(world.keys["schedules"], "bad", text)

    for call in (
        lambda: world.scheduler.get_schedule("bad"),
        lambda: world.scheduler.update_schedule("bad", name="x"),
        lambda: world.scheduler.trigger("bad"),
    ):
        with pytest.raises(BrokenRecord, match="'bad'"):
            call()
    for is_active in (None, True):
        assert [s.schedule_id for s in world.scheduler.list_schedules(is_active=is_active)] == [
            "good"
        ]
    assert world.scheduler.remove_schedule("bad") is True
    assert world.scheduler.get_schedule("bad") is None


@pytest.mark.parametrize(
    "fields",
    [
        {"created": "long ago"},
        {"created": math.inf},
        {"updated": 10**30},
        {"priority": 9},
        {"priority": "3"},
        {"user_id": None},
        {"name": ""},
        {"payload": []},
        {"payload": {"x": math.nan}},
        {"metadata": None},
        {"cron_expr": 5},
        {"timezone": None},
    ],
)
def test_a_field_of_a_wrong_type_is_a_broken_record(world: World, fields: dict[str, Any]) -> None:
    world.add("bad")
    world.add("good")
    world.tamper("bad", **fields)

    with pytest.raises(BrokenRecord, match="'bad'"):
        world.scheduler.get_schedule("bad")
    assert [s.schedule_id for s in world.scheduler.list_schedules()] == ["good"]


@pytest.mark.parametrize(
    "state", ['{"user":"alice","runs":"x"}', '{"last_run":[]}', '{"missed":1e999}', "5", "{", ""]
)
def test_a_state_that_cannot_be_read_does_not_stop_a_listing(world: World, state: str) -> None:
    world.add("bad")
    world.add("good")
    world.redis.hset(world.keys["schedule_state"], "bad", state)

    assert "good" in [s.schedule_id for s in world.scheduler.list_schedules()]
    assert world.scheduler.update_schedule("bad", user_id="bob", is_active=False)
    assert world.schedule("bad").run_count == 0
    assert world.scheduler.remove_schedule("bad")


def test_a_replaced_schedule_whose_count_is_lost_has_never_run(world: World) -> None:
    world.add()
    world.redis.hset(world.keys["schedule_state"], "nine", '{"user":"alice","active":true}')
    world.add(on_conflict="replace")
    assert world.schedule("nine").run_count == 0


@pytest.mark.one_partition
def test_a_spoilt_schedule_can_be_replaced(world: World) -> None:
    world.add("bad")
    world.redis.hset(world.keys["schedules"], "bad", "{")
    world.redis.hset(world.keys["schedule_state"], "bad", '{"user":["x"],"runs":{}}')
    world.tick_after(60)
    assert [p.schedule_id for p in world.scheduler.problems()] == ["bad"]

    world.add("bad", on_conflict="replace")

    assert world.scheduler.problems() == []
    assert world.schedule("bad").next_run == at(6, 9)


@pytest.mark.one_partition
def test_what_is_left_of_a_schedule_without_definition_can_be_removed(world: World) -> None:
    world.add()
    world.redis.hdel(world.keys["schedules"], "nine")
    world.tick_after(60)
    (problem,) = world.scheduler.problems()
    assert problem.schedule_id == "nine"

    assert world.scheduler.remove_schedule("nine") is True
    assert world.scheduler.problems() == []
    assert not {"plan", "schedule_state", "schedule_index", "broken"} & world.state().keys()


@pytest.mark.one_partition
def test_an_id_whose_definition_was_lost_can_be_used_again(world: World) -> None:
    world.add(user_id="alice")
    world.redis.hdel(world.keys["schedules"], "nine")
    world.tick_after(60)

    world.add(user_id="bob")

    assert world.scheduler.problems() == []
    assert [s.user_id for s in world.scheduler.list_schedules()] == ["bob"]


@pytest.mark.untidy
def test_problems_are_listed_oldest_first_and_unreadable_ones_too(world: World) -> None:
    broken = world.keys["broken"]
    world.redis.hset(broken, "late", json.dumps({"reason": "r2", "since": ms(at(5, 2))}))
    world.redis.hset(broken, "early", json.dumps({"reason": "r1", "since": ms(at(5, 1))}))
    world.redis.hset(broken, "spoilt", "{")
    world.redis.hset(broken, b"\xff", json.dumps({"reason": "r3", "since": ms(at(5, 3))}))

    spoilt, *problems = world.scheduler.problems()

    assert (spoilt.schedule_id, spoilt.since) == ("spoilt", datetime(1970, 1, 1, tzinfo=UTC))
    assert [(p.schedule_id, p.reason, p.since) for p in problems] == [
        ("early", "r1", at(5, 1)),
        ("late", "r2", at(5, 2)),
        ("\\xff", "r3", at(5, 3)),
    ]


def test_at_most_a_thousand_problems_are_listed(world: World) -> None:
    problem = json.dumps({"reason": "r", "since": 0})
    world.redis.hset(world.keys["broken"], mapping={f"s{n}": problem for n in range(1500)})
    assert len(world.scheduler.problems()) == 1000


def test_updates_that_leave_the_text_as_it_was_are_not_overlooked(world: World) -> None:
    """Switching on writes the same definition in the same millisecond, under a new revision."""
    world.add(cron_expr="0 9 * * *")
    world.scheduler.update_schedule("nine", is_active=False)
    world.before_script(
        "update_schedule", lambda: world.scheduler.update_schedule("nine", is_active=True)
    )
    world.scheduler.update_schedule("nine", cron_expr="0 17 * * *")
    schedule = world.schedule("nine")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 17))


@pytest.mark.parametrize(
    "change", [{"timezone": "Asia/Tokyo"}, {"cron_expr": "0 17 * * *"}, {"is_active": False}]
)
def test_a_moment_dropped_by_a_change_is_missed(world: World, change: dict[str, Any]) -> None:
    world.add(cron_expr="0 9 * * *")
    world.clock.set(at(5, 9, 0, 5))
    world.scheduler.update_schedule("nine", **change)
    assert world.schedule("nine").missed_count == 1
    assert world.scheduler.queue.inspect().counters["missed"] == 1
    world.scheduler.update_schedule("nine", **change)
    assert world.schedule("nine").missed_count == 1, "once"


def test_a_moment_that_a_replacement_gives_up_counts_as_missed(world: World) -> None:
    world.add(cron_expr="0 9 * * *")
    world.clock.set(at(5, 9, 0, 5))
    world.scheduler.add_schedule("0 17 * * *", "alice", schedule_id="nine", on_conflict="replace")
    assert world.schedule("nine").missed_count == 1


def test_the_error_of_a_long_schedule_id_says_how_long_it_may_be(scheduler: TaskScheduler) -> None:
    with pytest.raises(InvalidSchedule, match="1 to 184 characters"):
        add(scheduler, "x" * 300)
