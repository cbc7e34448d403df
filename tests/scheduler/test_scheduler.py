"""The loop, tick by tick: what fires, what is set aside, who leads, what a stale leader may do."""

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.network import LossyProxy
from helpers.schedules import (
    THURSDAY,
    add,
    at,
    before_script,
    due_at,
    fire_id,
    fired_ids,
    get,
    ms,
    tamper,
)
from helpers.state import changes, only_lazy_keys, state_of, stats
from helpers.tasks import make_task
from helpers.world import World
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.errors import ConfigurationError, RedisRefused, RedisUnavailable
from fairqueue.link.connection import Link
from fairqueue.link.keys import KEY_TYPES
from fairqueue.link.operation import Call
from fairqueue.link.scripts import load_script
from fairqueue.models import status_head, task_document
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler import firing
from fairqueue.scheduler.scheduler import READ_LIMIT, TaskScheduler
from fairqueue.schedules.planning import MISSED_CAP
from fairqueue.validation import Priority

START = THURSDAY


def sample(world: World, name: str, **labels: str) -> float:
    value = world.registry.get_sample_value(
        f"fairqueue_scheduler_{name}", {"queue": "default"} | labels
    )
    assert value is not None, name
    return value


# --- what fires -----------------------------------------------------------------------------------


def test_a_due_schedule_fires_once_and_its_task_says_where_it_comes_from(world: World) -> None:
    world.add(payload={"report": 7}, name="reports.build", priority=4)
    assert world.tick().fired == 0

    world.clock.set(at(5, 9))
    first, second = world.tick(), world.tick()

    assert (first.fired, second.fired) == (1, 0)
    (claim,) = world.queue.claim("w", limit=10)
    task = claim.task
    assert task.task_id == f"nine:{ms(at(5, 9))}"
    assert (task.schedule_id, task.scheduled_for) == ("nine", at(5, 9))
    assert (task.user_id, task.name, task.priority) == ("alice", "reports.build", Priority.HIGH)
    assert task.payload == {"report": 7}
    world.check()


def test_a_schedule_is_due_at_its_moment_and_not_a_millisecond_before(world: World) -> None:
    world.add()
    early = world.tick_at(at(5, 9) - timedelta(milliseconds=1))
    world.clock.set(at(5, 9))
    assert (early.fired, world.tick().fired) == (0, 1)


def test_moment_after_moment_fires_each_once(world: World) -> None:
    world.add(cron_expr="*/20 * * * * *")
    for _ in range(61):
        world.tick()
        world.advance(1)
    moments = [at(5, 8, 59, 40), at(5, 9), at(5, 9, 0, 20)]
    assert world.fired_ids() == [fire_id("nine", moment) for moment in moments]
    schedule = world.schedule("nine")
    assert (schedule.run_count, schedule.missed_count) == (3, 0)
    assert schedule.last_run == moments[-1]


def test_after_an_outage_the_latest_moment_fires_and_the_others_are_counted(world: World) -> None:
    world.add(cron_expr="0 * * * *")

    report = world.tick_at(at(5, 14, 20))

    assert (report.fired, report.missed) == (1, 5)  # nine, ten, eleven, twelve, one o'clock
    assert world.fired_ids() == [fire_id("nine", at(5, 14))]
    schedule = world.schedule("nine")
    assert (schedule.last_run, schedule.next_run) == (at(5, 14), at(5, 15))
    assert (schedule.run_count, schedule.missed_count) == (1, 5)
    assert world.stats()["missed"] == 5


def test_a_given_next_run_that_was_missed_is_counted_too(world: World) -> None:
    world.add(cron_expr="0 * * * *")
    world.scheduler.update_schedule("nine", next_run=at(5, 9, 34))
    world.tick_at(at(5, 12, 1))
    schedule = world.schedule("nine")
    assert (schedule.last_run, schedule.missed_count) == (at(5, 12), 3)  # 9:34, 10:00, 11:00


def test_the_count_of_what_was_missed_is_capped(world: World) -> None:
    world.add(cron_expr="* * * * * *")
    assert world.tick_after(timedelta(days=30)).missed == MISSED_CAP


def test_more_than_one_reading_of_due_schedules_fires_in_one_tick(world: World) -> None:
    count = 2 * READ_LIMIT + 34
    world.scheduler.add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": f"u{n % 10}", "schedule_id": f"s{n}"}
        for n in range(count)
    )

    report = world.tick_at(at(5, 9))

    assert report.fired == count
    assert world.stats()["fired"] == count
    assert world.tick().fired == 0


def test_the_wait_after_a_fire_is_until_the_next_moment_of_what_was_fired(world: World) -> None:
    world.add("later", cron_expr="0 12 * * *")
    world.add("often", cron_expr="* * * * * *")
    assert 0.5 < world.tick().wait <= 1.0
    report = world.tick_after(1)
    assert report.fired == 1
    assert 0.5 < report.wait <= 1.0


@pytest.mark.one_partition
def test_the_wait_with_nothing_planned_is_the_check_interval(queue: TaskQueue) -> None:
    scheduler = TaskScheduler(queue, check_interval=7.5, registry=CollectorRegistry())
    assert scheduler.tick().wait == 7.5


def test_a_tick_takes_the_time_that_it_is_given(world: World) -> None:
    world.add()
    assert world.tick(now=at(5, 9)).fired == 1
    assert world.tick(now=at(6, 9).timestamp()).fired == 1
    moments = [at(5, 9), at(6, 9)]
    assert world.fired_ids() == [fire_id("nine", moment) for moment in moments]
    with pytest.raises(ValueError, match=r"now must be a datetime with a time zone"):
        world.tick(now=datetime(2026, 3, 5, 9))


@pytest.mark.one_partition
def test_many_tickers_fire_each_moment_once(world: World) -> None:
    count = 600
    world.scheduler.add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": "alice", "schedule_id": f"s{n}"} for n in range(count)
    )
    world.clock.set(at(5, 9))
    queues = [TaskQueue(world.redis, clock=world.clock) for _ in range(4)]
    tickers = [TaskScheduler(queue, registry=CollectorRegistry()) for queue in queues]
    start = threading.Barrier(8)

    def tick(ticker: TaskScheduler) -> int:
        start.wait(10)
        return ticker.tick().fired

    with ThreadPoolExecutor(8) as pool:
        fired = list(pool.map(tick, tickers * 2))

    assert sum(fired) == count
    assert world.stats()["fired"] == count
    world.check()
    for queue in queues:
        queue.close()


@pytest.mark.one_partition
def test_the_last_moment_of_all_fires_and_then_the_schedule_is_disabled(world: World) -> None:
    clock = ManualClock(datetime(9998, 12, 31, 23, 59, tzinfo=UTC))
    with TaskQueue(world.redis, clock=clock) as queue:
        scheduler = TaskScheduler(queue, registry=world.registry)
        add(scheduler, "last", cron_expr="0 0 1 1 *")
        clock.advance(60)

        report = scheduler.tick()

        moment = datetime(9999, 1, 1, tzinfo=UTC)
        assert (report.fired, report.set_aside) == (1, 1)
        assert fired_ids(world.redis, queue) == [fire_id("last", moment)]
        schedule = get(scheduler, "last")
        assert (schedule.is_active, schedule.next_run) == (False, None)
        assert (schedule.last_run, schedule.run_count) == (moment, 1)
        assert schedule.disabled_reason == "cron_expr '0 0 1 1 *' has no next fire time"
        assert [p.schedule_id for p in scheduler.problems()] == ["last"]
        assert world.stats()["set_aside_cron"] == 1
        assert sample(world, "errors_total", type="cron") == 1
        assert due_at(world.redis, queue, "last") is None


# --- what cannot be read --------------------------------------------------------------------------

Spoiler = Callable[[redis.Redis, TaskQueue], object]

BROKEN: dict[str, Spoiler] = {
    "bad JSON": lambda c, q: c.hset(q.keys["schedules"], "bad", "{"),
    "empty definition": lambda c, q: c.hset(q.keys["schedules"], "bad", ""),
    "no text": lambda c, q: c.hset(q.keys["schedules"], "bad", b"\xff\x00\xfe"),
    "missing fields": lambda c, q: c.hset(q.keys["schedules"], "bad", "{}"),
    "no object": lambda c, q: c.hset(q.keys["schedules"], "bad", "[1]"),
    "deep": lambda c, q: c.hset(q.keys["schedules"], "bad", "[" * 100_000),
    "missing definition": lambda c, q: c.hdel(q.keys["schedules"], "bad"),
    "priority": lambda c, q: tamper(c, q, "bad", priority="x"),
    "payload": lambda c, q: tamper(c, q, "bad", payload=[1]),
    "surrogate": lambda c, q: tamper(c, q, "bad", payload={"\ud800": float("nan")}),
    "user": lambda c, q: tamper(c, q, "bad", user_id="a\0b"),
    "cron is a number": lambda c, q: tamper(c, q, "bad", cron_expr=5),
    "times": lambda c, q: tamper(c, q, "bad", created=float("inf")),
    "garbage plan": lambda c, q: c.hset(q.keys["plan"], "bad", "garbage"),
    "binary plan": lambda c, q: c.hset(q.keys["plan"], "bad", b"\xff \xff"),
    "empty plan": lambda c, q: c.hset(q.keys["plan"], "bad", ""),
    "missing plan": lambda c, q: c.hdel(q.keys["plan"], "bad"),
    "plan without moment": lambda c, q: c.hset(q.keys["plan"], "bad", "revision -"),
    "plan in the future": lambda c, q: c.hset(q.keys["plan"], "bad", "revision 9999999999999"),
}


@pytest.mark.parametrize("kind", BROKEN)
@pytest.mark.one_partition
def test_a_broken_record_is_set_aside_and_the_others_fire(world: World, kind: str) -> None:
    world.add("bad", cron_expr="59 8 * * *", timezone="UTC", payload={"a": 1})
    world.add("good")
    world.redis.zadd(world.keys["due"], {"bad": 1})  # at the head
    BROKEN[kind](world.redis, world.queue)

    report = world.tick_at(at(5, 9))

    assert (report.fired, report.set_aside) == (1, 1)
    assert world.fired_ids() == [fire_id("good", at(5, 9))]
    (problem,) = world.scheduler.problems()
    assert (problem.schedule_id, problem.since) == ("bad", world.now())
    assert "'bad'" in problem.reason
    assert world.due_at("bad") is None
    assert world.stats()["set_aside_broken"] == 1
    assert sample(world, "errors_total", type="deserialization") == 1
    again = world.tick()
    assert (again.fired, again.set_aside) == (0, 0)


@pytest.mark.one_partition
def test_a_hundred_broken_records_at_the_head_do_not_delay_the_others(world: World) -> None:
    for n in range(100):
        world.redis.zadd(world.keys["due"], {f"bad{n:03}": n})
        world.redis.hset(world.keys["schedules"], f"bad{n:03}", "{")
    world.add("good")
    world.clock.set(at(5, 9))
    scripts = world.before_script("fire", lambda: None)
    report = world.tick()

    assert (report.fired, report.set_aside) == (1, 100)
    assert scripts[:2] == ["lead", "fire"]
    assert scripts.count("set_aside") == 100
    assert len(world.scheduler.problems()) == 100


def test_more_broken_records_than_one_reading_do_not_block_the_head(world: World) -> None:
    count = READ_LIMIT + 7
    world.redis.zadd(world.keys["due"], {f"bad{n:04}": n for n in range(count)})
    world.add("good")
    report = world.tick_at(at(5, 9))
    assert (report.fired, report.set_aside) == (1, count)


@pytest.mark.untidy
def test_a_member_that_is_no_text_is_set_aside(world: World) -> None:
    world.redis.zadd(world.keys["due"], {b"\xff\xfe": 1})
    world.add("good")
    report = world.tick_at(at(5, 9))
    assert (report.fired, report.set_aside) == (1, 1)
    assert [p.schedule_id for p in world.scheduler.problems()] == ["\\xff\\xfe"]


@pytest.mark.parametrize(
    "state",
    ['{"user":"alice","active":true,"runs":"many"}', '{"runs":{},"missed":1e999}', "{", "[]", ""],
)
def test_a_spoilt_state_is_made_good_by_the_next_fire(world: World, state: str) -> None:
    world.add("bad")
    world.add("good")
    world.redis.hset(world.keys["schedule_state"], "bad", state)

    assert world.tick_at(at(5, 9)).fired == 2

    schedule = world.schedule("bad")
    assert (schedule.is_active, schedule.run_count) == (True, 1)
    assert schedule.last_run == at(5, 9)


@pytest.mark.parametrize(
    "leader", ["{", "5", "{}", '{"token":"x","ends":"never","epoch":1}', '{"token":{},"ends":9e15}']
)
def test_a_spoilt_leader_record_does_not_stop_everybody(world: World, leader: str) -> None:
    world.add()
    world.clock.set(at(5, 9))
    world.redis.set(world.keys["leader"], leader)
    report = world.tick()
    assert (report.is_leader, report.fired) == (True, 1)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"cron_expr": "61 * * * *"}, "61"),
        ({"cron_expr": "0 0 30 2 *"}, "never fires"),
        ({"cron_expr": ""}, "0 fields"),
        ({"timezone": "Mars/Olympus"}, "Mars/Olympus"),
    ],
)
def test_a_cron_that_is_broken_when_it_is_read_disables_the_schedule(
    world: World, fields: dict[str, str], reason: str
) -> None:
    world.add("bad")
    world.add("good")
    world.tamper("bad", **fields)

    report = world.tick_at(at(5, 9))

    assert (report.fired, report.set_aside) == (1, 1)
    bad = world.schedule("bad")
    assert (bad.is_active, bad.next_run) == (False, None)
    assert bad.disabled_reason is not None
    assert reason in bad.disabled_reason
    assert [p.reason for p in world.scheduler.problems()] == [bad.disabled_reason]
    assert world.stats()["set_aside_cron"] == 1
    assert sample(world, "errors_total", type="cron") == 1

    world.scheduler.update_schedule(
        "bad", payload={"still": "broken"}, timezone="UTC", is_active=False
    )
    assert world.scheduler.problems() == []  # its user has taken notice
    world.scheduler.update_schedule("bad", cron_expr="0 10 * * *")
    assert world.schedule("bad").is_active is False
    world.scheduler.update_schedule("bad", is_active=True)
    assert world.schedule("bad").next_run == at(5, 10)


def test_a_new_cron_brings_back_what_the_scheduler_disabled(world: World) -> None:
    world.add()
    world.tamper("nine", cron_expr="x")
    world.tick_at(at(5, 9))
    world.scheduler.update_schedule("nine", payload={"a": 1})
    assert world.schedule("nine").is_active is False

    world.scheduler.update_schedule("nine", cron_expr="30 9 * * *")

    schedule = world.schedule("nine")
    assert (schedule.is_active, schedule.disabled_reason) == (True, None)
    assert schedule.next_run == at(5, 9, 30)
    assert world.scheduler.problems() == []


def test_a_change_that_meets_the_setting_aside_half_way_wins(world: World) -> None:
    """The mended cron was computed when the schedule was active, and arrives after it is not."""
    world.add()
    world.tamper("nine", cron_expr="x")
    world.clock.set(at(5, 9))
    world.before_script("update_schedule", world.other.tick)
    world.scheduler.update_schedule("nine", cron_expr="30 9 * * *")
    schedule = world.schedule("nine")
    assert (schedule.is_active, schedule.next_run) == (True, at(5, 9, 30))
    assert world.scheduler.problems() == []


@pytest.mark.one_partition
def test_a_record_mended_after_the_reading_is_not_set_aside(world: World) -> None:
    world.add()
    good = world.redis.hget(world.keys["schedules"], "nine")
    assert isinstance(good, bytes)
    world.redis.hset(world.keys["schedules"], "nine", "{")
    world.clock.set(at(5, 9))
    world.before_script(
        "set_aside", lambda: world.redis.hset(world.keys["schedules"], "nine", good)
    )
    report = world.tick()
    assert (report.set_aside, report.fired) == (0, 1)
    assert world.scheduler.problems() == []


def test_an_error_that_nobody_foresaw_disables_one_schedule_and_not_the_loop(world: World) -> None:
    world.add("bad")
    world.add("good")
    plan = firing.plan_fire

    def explode(due: Any, now_ms: int) -> Any:
        if due.schedule_id == "bad":
            raise ZeroDivisionError("boom")
        return plan(due, now_ms)

    world.patch(firing, "plan_fire", explode)
    report = world.tick_at(at(5, 9))
    assert (report.fired, report.set_aside) == (1, 1)
    assert "ZeroDivisionError: boom" in (world.schedule("bad").disabled_reason or "")


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["queue", "user"])
def test_a_refused_fire_waits_until_there_is_room(world: World, whose: str) -> None:
    world.queue.push(make_task("alice", "waits"))
    if whose == "queue":
        world.queue.configure(max_waiting=1)
    else:
        world.queue.set_user("alice", max_waiting=1)
    world.add(cron_expr="0 * * * *")
    world.clock.set(at(5, 10))  # so that there is a missed one as well

    report = world.tick()

    assert (report.fired, report.refused, report.missed) == (0, 1, 0)
    schedule = world.schedule("nine")
    assert (schedule.next_run, schedule.last_run, schedule.run_count) == (at(5, 9), None, 0)
    assert sample(world, "pushes_total", outcome="failed") == 1
    assert sample(world, "errors_total", type="push") == 1
    assert sample(world, "missed_moments_total") == 0
    assert world.stats()["refused"] == 1
    assert world.tick().refused == 0  # it does not stand at the head

    world.queue.finish(world.queue.claim("w")[0])
    report = world.tick_after(5)

    assert (report.fired, report.refused, report.missed) == (1, 0, 1)
    assert world.queue.get(fire_id("nine", at(5, 10))) is not None
    schedule = world.schedule("nine")
    assert (schedule.next_run, schedule.last_run) == (at(5, 11), at(5, 10))
    assert sample(world, "missed_moments_total") == 1
    world.check()


def test_refused_fires_do_not_block_those_of_others(world: World) -> None:
    world.queue.set_user("alice", max_waiting=2)
    world.scheduler.add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": user, "schedule_id": f"{user}{n}"}
        for user in ("alice", "bob")
        for n in range(5)
    )
    report = world.tick_at(at(5, 9))
    assert (report.fired, report.refused) == (7, 3)
    assert (world.queue.size("alice"), world.queue.size("bob")) == (2, 5)


def test_a_queue_with_some_room_takes_that_many_fires(world: World) -> None:
    world.queue.configure(max_waiting=3)
    world.scheduler.add_schedules(
        {"cron_expr": "0 9 * * *", "user_id": "alice", "schedule_id": f"s{n}"} for n in range(5)
    )
    report = world.tick_at(at(5, 9))
    assert (report.fired, report.refused, world.queue.size()) == (3, 2, 3)


def test_a_fire_that_was_overtaken_takes_no_room_from_the_next(world: World) -> None:
    world.queue.set_user("alice", max_waiting=1)
    world.add("a")
    world.add("b")
    world.clock.set(at(5, 9))
    world.before_script("fire", lambda: world.scheduler.remove_schedule("a"))
    report = world.tick()
    assert (report.fired, report.moved, report.refused) == (1, 1, 0)


@pytest.mark.one_partition
def test_a_moment_whose_task_is_there_already_is_not_enqueued_again(world: World) -> None:
    """As after a restore of the plan from a backup: the id of the task is the last guard."""
    world.add()
    plan = world.redis.hget(world.keys["plan"], "nine")
    assert isinstance(plan, bytes)
    world.tick_at(at(5, 9))
    world.queue.finish(world.queue.claim("w")[0])
    world.redis.hset(world.keys["plan"], "nine", plan)
    world.redis.zadd(world.keys["due"], {"nine": ms(at(5, 9))})

    world.tick()

    assert world.queue.size() == 0
    assert world.stats()["fired"] == 1
    assert world.schedule("nine").next_run == at(6, 9)


def test_no_moment_fires_twice_when_the_servers_clock_goes_back(world: World) -> None:
    world.add(cron_expr="0 * * * *")
    world.tick_at(at(5, 10))
    assert world.tick_at(at(5, 8, 30)).fired == 0
    assert world.tick_at(at(5, 10, 30)).fired == 0
    assert world.tick_at(at(5, 11)).fired == 1
    wanted = [fire_id("nine", at(5, 10)), fire_id("nine", at(5, 11))]
    assert world.fired_ids() == wanted


@pytest.mark.parametrize("key", sorted({*load_script("fire").keys} - only_lazy_keys("fire")))
@pytest.mark.one_partition
def test_a_key_of_a_wrong_type_is_named_and_unchanged(world: World, key: str) -> None:
    world.add()
    world.tick()
    world.clock.set(at(5, 9))
    world.spoil(key)
    before = world.state()

    with pytest.raises(RedisRefused, match=f":{key} is a .* and should be a"):
        world.tick()

    changed = {name.split(".")[0] for name in changes(before, world.state())}
    assert changed <= {"leader", "epoch", "stats"}  # lead may have renewed the term
    world.redis.delete(world.keys[key])
    world.tick()
    if key == "schedule_names":
        world.add(on_conflict="replace")


# --- who leads ------------------------------------------------------------------------------------


@pytest.mark.one_partition
def test_leadership_is_sticky_and_goes_over_when_the_term_ends(world: World) -> None:
    assert world.tick().is_leader
    follower = world.other.tick()
    assert (follower.is_leader, follower.wait) == (False, 10.0)
    assert world.tick_after(6).is_leader  # renewed until 16
    world.advance(9)
    assert not world.other.tick().is_leader
    world.advance(0.999)
    assert not world.other.tick().is_leader
    world.advance(0.001)
    assert world.other.tick().is_leader
    assert not world.tick().is_leader
    assert (world.scheduler.is_leader, world.other.is_leader) == (False, True)
    for outcome, count in (("acquired", 1), ("contended", 1), ("lost", 1)):
        assert sample(world, "lock_total", outcome=outcome) == count


def test_only_the_leader_fires(world: World) -> None:
    world.add()
    world.tick()
    world.clock.set(at(5, 9))
    for post in world.scheduler._posts:
        post.leadership.lead(0)
    assert world.other.tick().fired == 0
    assert world.tick().fired == 1


def test_resigning_lets_another_lead_at_once(world: World) -> None:
    world.tick()
    assert not world.other.tick().is_leader

    assert world.scheduler.stop() is True  # there is no thread: it only resigns

    assert not world.scheduler.is_leader
    assert world.redis.get(world.keys["leader"]) is None
    assert world.other.tick().is_leader
    assert world.scheduler.health().leader == "two"


def test_resigning_does_not_take_the_term_of_another(world: World) -> None:
    world.tick()
    world.advance(11)
    world.other.tick()
    before = world.state()

    assert world.scheduler.is_leader  # by its own clock, which has not moved
    assert world.scheduler.stop() is True

    assert world.state() == before


def test_trust_ends_before_term(scheduler: TaskScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler.tick()
    assert scheduler.is_leader
    began = time.monotonic()
    monkeypatch.setattr("fairqueue.scheduler.leadership.time.monotonic", lambda: began + 8.9)
    assert scheduler.is_leader
    monkeypatch.setattr("fairqueue.scheduler.leadership.time.monotonic", lambda: began + 9.1)
    assert not scheduler.is_leader


def test_without_redis_a_leader_loses_its_trust(own_server: OwnServer, clock: ManualClock) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.1, clock=clock) as queue:
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        scheduler.tick()
        server.kill()
        with pytest.raises(RedisUnavailable):
            scheduler.tick()
        assert not scheduler.is_leader


Taking = Callable[[TaskScheduler], object]

TAKEN: dict[str, Taking] = {
    "another leads, and has fired": lambda other: other.tick(),
    "another leads, and has not fired yet": lambda other: other._posts[0].leadership.lead(0),
    "nobody leads": lambda other: None,
}


@pytest.mark.parametrize("how", TAKEN)
@pytest.mark.one_partition
def test_the_fire_of_a_stale_leader_changes_nothing(world: World, how: str) -> None:
    world.add()
    world.clock.set(at(5, 9))
    states: list[Any] = []

    def stand_still() -> None:
        world.advance(10)
        TAKEN[how](world.other)
        states.append(world.state())

    world.before_script("fire", stand_still)
    report = world.tick()

    assert (report.is_leader, report.fired, report.moved) == (False, 0, 0)
    assert world.state() == states[0]
    assert sample(world, "lock_total", outcome="lost") == 1
    assert sample(world, "is_leader", scheduler="one") == 0
    assert not world.scheduler.is_leader
    world.other.tick()
    assert world.fired_ids() == [fire_id("nine", at(5, 9))]
    assert world.stats()["fired"] == 1


@pytest.mark.one_partition
def test_a_stale_leader_sets_nothing_aside(world: World) -> None:
    world.add()
    world.redis.hset(world.keys["schedules"], "nine", "{")
    world.clock.set(at(5, 9))

    def stand_still() -> None:
        world.advance(10)
        world.other._posts[0].leadership.lead(0)

    world.before_script("set_aside", stand_still)
    report = world.tick()

    assert (report.set_aside, report.is_leader) == (0, False)
    assert world.scheduler.problems() == []
    assert "set_aside_broken" not in world.stats()


def test_a_second_term_has_another_token_than_the_lost_one(world: World) -> None:
    world.tick()
    first = world.scheduler._posts[0].leadership.token
    world.advance(10)
    world.other.tick()
    world.tick()
    assert world.tick_after(10).is_leader
    assert world.scheduler._posts[0].leadership.token != first


# --- each script: states before and after, and the same command again -----------------------------

NOW = ms(THURSDAY)
LEADER = {"token": "T", "scheduler": "one", "epoch": 1, "ends": NOW + 10_000, "term": 20_000}
DEFINITION = '{"n":1,"name":"job"}'
STORED_DEFINITION = {"n": 1, "name": "job"}
STATE = {"user": "alice", "active": True, "runs": 0}
STORED = {
    "schedules": {"s": DEFINITION},
    "plan": {"s": f"rev {NOW - 500}"},
    "due": {"s": NOW - 500},
    "schedule_state": {"s": json.dumps(STATE)},
    "schedule_index": {"alice\0s": 0},
    "schedule_names": {"job\0s": 0},
}
DROPPED = f"moments.s\0{NOW - 500}\0{NOW - 500}\x001\0missed"
OFF = STORED | {
    "plan": {"s": "rev -"},
    "due": {},
    "schedule_state": {"s": json.dumps(STATE | {"active": False, "reason": "r"})},
    "broken": {"s": json.dumps({"reason": "r", "since": 1})},
}
OF_TENANT = STORED | {
    "plan": {"s": f"rev {NOW + 5}"},
    "due": {"s": NOW + 5},
    "schedule_state": {"s": json.dumps(STATE | {"tenant": "acme"})},
    "fair": {"layout": 2},
    "tenant_schedules": {"acme\0alice\0s": 0},
    "user_tenants": {"alice\0acme": 0},
    "tenant_users": {"acme\0alice": 0},
}
TASK = f"s:{NOW - 500}"
DOCUMENT = task_document("alice", "default", 3, "{}", "s", NOW - 500)


def arrange(world: World, state: dict[str, Any]) -> None:
    """Put a state into Redis."""
    for key, content in state.items():
        if key == "leader":
            world.redis.set(world.keys[key], json.dumps(content))
        elif key == "epoch":
            world.redis.set(world.keys[key], content)
        elif KEY_TYPES[key] == "zset":
            if content:
                world.redis.zadd(world.keys[key], content)
        else:
            world.redis.hset(world.keys[key], mapping=content)


def fire_arguments(**fields: Any) -> list[Any]:
    fire = {
        "id": "s",
        "plan": f"rev {NOW - 500}",
        "moment": NOW - 500,
        "next": NOW + 60_000,
        "due": NOW + 60_000,
        "missed": 0,
        "note": "",
        "user": "alice",
        "name": "default",
        "document": DOCUMENT,
        "head": status_head("alice", "default", 3) + ',"schedule":"s"',
        "level": 3,
        "overlap": "allow",
        "max_runs": "",
        "reason": "",
        "completed": "",
    }
    return list((fire | fields).values())


LEADS = STORED | {"leader": LEADER, "epoch": 1}
PAUSED_STATE = STATE | {
    "active": False,
    "paused": NOW - 60_000,
    "note": "n",
    "by": "b",
    "until": NOW - 500,
    "failures": 2,
}
PAUSED = LEADS | {"plan": {"s": "rev -"}, "schedule_state": {"s": json.dumps(PAUSED_STATE)}}
RENEWED = {"leader.ends": (NOW + 10_000, NOW + 20_000)}
FIRED = {
    "plan.s": (f"rev {NOW - 500}", f"rev {NOW + 60_000}"),
    "due.s": (NOW - 500, NOW + 60_000),
    "schedule_state.s": (STATE, STATE | {"last_run": NOW - 500, "runs": 1}),
    "stats.fired": (None, "1"),
}
# What storing a task changes besides; tests of the queue look into it.
ENQUEUED = {
    f"tasks.{TASK}",
    f"status.{TASK}",
    f"waiting.{TASK}",
    f"backlog.alice\x00300000000000001\x00{TASK}\x00default",
    f"open.s\x00{TASK}",
    "fair.clock",
    "fair.critical_clock",
    "fair.seq",
    "ready.alice",
    "served.alice",
    "wake",
}

Row = tuple[str, dict[str, Any], dict[str, Any], list[Any], Any, dict[str, Any]]

# what, state before, arguments, the rest, answer, changes
TRANSITIONS: dict[str, list[Row]] = {
    "add_schedules": [
        (
            "a new one, earlier than all others",
            {},
            {"op": "o", "client_now": NOW, "on_conflict": "error"},
            ["s", "alice", "job", DEFINITION, "rev", NOW + 5, NOW + 5, "", "", '{"made":true}'],
            [b"added"],
            {
                "schedules.s": (None, STORED_DEFINITION),
                f'changes.s\0{NOW:013d}\0!o\0{{"made":true}}': (None, 0),
                "plan.s": (None, f"rev {NOW + 5}"),
                "due.s": (None, NOW + 5),
                "schedule_state.s": (None, STATE | {"since": NOW}),
                "schedule_index.alice\0s": (None, 0),
                "schedule_names.job\0s": (None, 0),
                "scheduler_wake": (None, ["1"]),
            },
        ),
        (
            "a new one that is paused",
            {},
            {"op": "o", "client_now": NOW, "on_conflict": "error"},
            ["s", "alice", "job", DEFINITION, "rev", "", "", "", "Mail", ""],
            [b"added"],
            {
                "schedules.s": (None, STORED_DEFINITION),
                "plan.s": (None, "rev -"),
                "schedule_state.s": (
                    None,
                    STATE | {"since": NOW, "active": False, "paused": NOW, "title": "Mail"},
                ),
                "schedule_index.alice\0s": (None, 0),
                "schedule_names.job\0s": (None, 0),
            },
        ),
        (
            "one that is replaced by one that is paused",
            STORED | {"plan": {"s": f"rev {NOW + 5}"}, "due": {"s": NOW + 5}},
            {"op": "o", "client_now": NOW, "on_conflict": "replace"},
            ["s", "alice", "job", '{"n":2}', "rev2", "", "", "", "", '{"made":true}'],
            [b"added"],
            {
                "schedules.s": (STORED_DEFINITION, {"n": 2}),
                "plan.s": (f"rev {NOW + 5}", "rev2 -"),
                "due.s": (NOW + 5, None),
                "schedule_state.s": (STATE, STATE | {"since": NOW, "active": False, "paused": NOW}),
                f'changes.s\0{NOW:013d}\0o\0{{"made":true}}': (None, 0),
            },
        ),
        (
            "one that is taken",
            STORED,
            {"op": "o", "client_now": NOW, "on_conflict": "error"},
            [
                *("t", "bob", "job", "{}", "rev2", NOW + 5, NOW + 5, "", "", ""),
                *("s", "bob", "job", "{}", "rev2", NOW + 5, NOW + 5, "", "", ""),
            ],
            [b"exists", b"s"],
            {},
        ),
        (
            "one that is replaced",
            OFF,
            {"op": "o", "client_now": NOW, "on_conflict": "replace"},
            ["s", "bob", "other", '{"n":2}', "rev2", NOW + 5, NOW + 9, "", "", ""],
            [b"added"],
            {
                "schedules.s": (STORED_DEFINITION, {"n": 2}),
                "plan.s": ("rev -", f"rev2 {NOW + 5}"),
                "due.s": (None, NOW + 9),
                "schedule_state.s": (
                    STATE | {"active": False, "reason": "r"},
                    STATE | {"user": "bob", "since": NOW},
                ),
                "schedule_names.job\0s": (0, None),
                "schedule_names.other\0s": (None, 0),
                "schedule_index.alice\0s": (0, None),
                "schedule_index.bob\0s": (None, 0),
                "broken.s": ({"reason": "r", "since": 1}, None),
                "scheduler_wake": (None, ["1"]),
            },
        ),
        (
            "one of a tenant, in place of one of another",
            OF_TENANT,
            {"op": "o", "client_now": NOW, "on_conflict": "replace"},
            ["s", "bob", "job", DEFINITION, "rev2", NOW + 60_000, NOW + 60_000, "blue", "", ""],
            [b"added"],
            {
                "plan.s": (f"rev {NOW + 5}", f"rev2 {NOW + 60_000}"),
                "due.s": (NOW + 5, NOW + 60_000),
                "schedule_state.s": (
                    STATE | {"tenant": "acme"},
                    STATE | {"user": "bob", "tenant": "blue", "since": NOW},
                ),
                "schedule_index.alice\0s": (0, None),
                "schedule_index.bob\0s": (None, 0),
                "tenant_schedules.acme\0alice\0s": (0, None),
                "tenant_schedules.blue\0bob\0s": (None, 0),
                "user_tenants.bob\0blue": (None, 0),
                "tenant_users.blue\0bob": (None, 0),
            },
        ),
        (
            "more than a user may have",
            STORED | {"settings": {"max_schedules": 1}},
            {"op": "o", "client_now": NOW, "on_conflict": "replace"},
            [
                *("s", "alice", "job", "{}", "rev2", NOW + 5, NOW + 5, "", "", ""),
                *("t", "alice", "job", "{}", "rev2", NOW + 5, NOW + 5, "", "", ""),
            ],
            [b"quota", b"alice"],
            {},
        ),
        (
            "from a clock that is wrong",
            {},
            {"op": "o", "client_now": NOW - 1001, "on_conflict": "error"},
            ["s", "alice", "job", DEFINITION, "rev", NOW + 5, NOW + 5, "", "", ""],
            [b"skewed", NOW],
            {},
        ),
    ],
    "update_schedule": [
        (
            "content only: the plan keeps its moment under a new revision",
            STORED,
            {"expected": DEFINITION, "definition": '{"n":2}', "next_ms": "", "active": ""},
            [],
            [b"updated"],
            {
                "schedules.s": (STORED_DEFINITION, {"n": 2}),
                "plan.s": (f"rev {NOW - 500}", f"rev2 {NOW - 500}"),
            },
        ),
        (
            "a new moment, and another user",
            STORED,
            {
                "expected": DEFINITION,
                "definition": '{"n":2}',
                "next_ms": NOW + 5,
                "due_ms": NOW + 9,
                "active": "",
                "user": "bob",
                "task_name": "other",
                "change": "{}",
            },
            [],
            [b"updated"],
            {
                "schedules.s": (STORED_DEFINITION, {"n": 2}),
                "plan.s": (f"rev {NOW - 500}", f"rev2 {NOW + 5}"),
                "due.s": (NOW - 500, NOW + 9),
                "schedule_state.s": (STATE, STATE | {"user": "bob", "missed": 1, "since": NOW}),
                "schedule_names.job\0s": (0, None),
                "schedule_names.other\0s": (None, 0),
                DROPPED: (None, 0),
                f"changes.s\0{NOW}\0o\0{{}}": (None, 0),
                "schedule_index.alice\0s": (0, None),
                "schedule_index.bob\0s": (None, 0),
                "stats.missed": (None, "1"),
            },
        ),
        (
            "to another tenant, of which the user is one more",
            OF_TENANT,
            {
                "expected": DEFINITION,
                "definition": DEFINITION,
                "next_ms": "",
                "active": "",
                "tenant": "blue",
            },
            [],
            [b"updated"],
            {
                "plan.s": (f"rev {NOW + 5}", f"rev2 {NOW + 5}"),
                "schedule_state.s": (STATE | {"tenant": "acme"}, STATE | {"tenant": "blue"}),
                "tenant_schedules.acme\0alice\0s": (0, None),
                "tenant_schedules.blue\0alice\0s": (None, 0),
                "user_tenants.alice\0blue": (None, 0),
                "tenant_users.blue\0alice": (None, 0),
            },
        ),
        (
            "of a tenant, to another user",
            OF_TENANT,
            {
                "expected": DEFINITION,
                "definition": DEFINITION,
                "next_ms": "",
                "active": "",
                "user": "bob",
                "tenant": "acme",
            },
            [],
            [b"updated"],
            {
                "plan.s": (f"rev {NOW + 5}", f"rev2 {NOW + 5}"),
                "schedule_state.s": (
                    STATE | {"tenant": "acme"},
                    STATE | {"tenant": "acme", "user": "bob"},
                ),
                "schedule_index.alice\0s": (0, None),
                "schedule_index.bob\0s": (None, 0),
                "tenant_schedules.acme\0alice\0s": (0, None),
                "tenant_schedules.acme\0bob\0s": (None, 0),
                "user_tenants.bob\0acme": (None, 0),
                "tenant_users.acme\0bob": (None, 0),
            },
        ),
        (
            "to no tenant",
            OF_TENANT,
            {"expected": DEFINITION, "definition": DEFINITION, "next_ms": "", "active": ""},
            [],
            [b"updated"],
            {
                "plan.s": (f"rev {NOW + 5}", f"rev2 {NOW + 5}"),
                "schedule_state.s": (STATE | {"tenant": "acme"}, STATE),
                "tenant_schedules.acme\0alice\0s": (0, None),
            },
        ),
        (
            "off",
            STORED,
            {"expected": DEFINITION, "definition": DEFINITION, "next_ms": "", "active": "0"},
            [],
            [b"updated"],
            {
                "plan.s": (f"rev {NOW - 500}", "rev2 -"),
                "due.s": (NOW - 500, None),
                "schedule_state.s": (STATE, STATE | {"active": False, "missed": 1, "paused": NOW}),
                DROPPED: (None, 0),
                "stats.missed": (None, "1"),
            },
        ),
        (
            "on",
            OFF,
            {
                "expected": DEFINITION,
                "definition": DEFINITION,
                "next_ms": NOW + 5,
                "due_ms": NOW + 5,
                "active": "1",
                "noted": "2\x001\x002\0paused",
            },
            [],
            [b"updated"],
            {
                "plan.s": ("rev -", f"rev2 {NOW + 5}"),
                "due.s": (None, NOW + 5),
                "schedule_state.s": (
                    STATE | {"active": False, "reason": "r"},
                    STATE | {"since": NOW},
                ),
                "moments.s\x002\x001\x002\0paused": (None, 0),
                "broken.s": ({"reason": "r", "since": 1}, None),
                "scheduler_wake": (None, ["1"]),
            },
        ),
        (
            "off with a note and an end, and off since before",
            OFF
            | {"schedule_state": {"s": json.dumps(STATE | {"active": False, "paused": NOW - 9})}},
            {
                "expected": DEFINITION,
                "definition": DEFINITION,
                "next_ms": "",
                "active": "0",
                "pause": json.dumps({"note": "n", "by": "b", "until": NOW + 9}),
            },
            [],
            [b"updated"],
            {
                "plan.s": ("rev -", "rev2 -"),
                "due.s": (None, NOW + 9),
                "schedule_state.s": (
                    STATE | {"active": False, "paused": NOW - 9},
                    STATE
                    | {"active": False, "paused": NOW - 9}
                    | {"note": "n", "by": "b", "until": NOW + 9},
                ),
                "broken.s": ({"reason": "r", "since": 1}, None),
            },
        ),
        (
            "to a user who may have no more",
            STORED | {"settings": {"max_schedules": 1}, "schedule_index": {"bob\0t": 0}},
            {
                "expected": DEFINITION,
                "definition": DEFINITION,
                "next_ms": "",
                "active": "",
                "user": "bob",
            },
            [],
            [b"quota", b"bob"],
            {},
        ),
        (
            "changed by somebody else",
            STORED,
            {"expected": '{"n":0}', "definition": '{"n":2}', "next_ms": "", "active": ""},
            [],
            [b"changed"],
            {},
        ),
        (
            "absent",
            {},
            {"expected": DEFINITION, "definition": '{"n":2}', "next_ms": "", "active": ""},
            [],
            [b"absent"],
            {},
        ),
        (
            "from a clock that is wrong",
            STORED,
            {
                "expected": DEFINITION,
                "definition": '{"n":2}',
                "next_ms": NOW + 5,
                "active": "",
                "client_now": NOW + 1001,
            },
            [],
            [b"skewed", NOW],
            {},
        ),
    ],
    "remove_schedule": [
        (
            "one that is there",
            OFF,
            {"op": "o", "id": "s"},
            [],
            b"removed",
            {
                "schedules.s": (STORED_DEFINITION, None),
                "schedule_names.job\0s": (0, None),
                "plan.s": ("rev -", None),
                "schedule_state.s": (STATE | {"active": False, "reason": "r"}, None),
                "schedule_index.alice\0s": (0, None),
                "broken.s": ({"reason": "r", "since": 1}, None),
            },
        ),
        (
            "one of a tenant, whose user stays with it",
            OF_TENANT,
            {"op": "o", "id": "s"},
            [],
            b"removed",
            {
                "schedules.s": (STORED_DEFINITION, None),
                "schedule_names.job\0s": (0, None),
                "plan.s": (f"rev {NOW + 5}", None),
                "due.s": (NOW + 5, None),
                "schedule_state.s": (STATE | {"tenant": "acme"}, None),
                "schedule_index.alice\0s": (0, None),
                "tenant_schedules.acme\0alice\0s": (0, None),
            },
        ),
        ("absent", STORED, {"op": "o", "id": "t"}, [], b"absent", {}),
    ],
    "lead": [
        (
            "nobody leads",
            STORED,
            {"token": "T", "scheduler": "one", "term_ms": 10_000, "limit": 5},
            [],
            [
                b"elected",
                1,
                NOW,
                0,
                NOW + 10_000,
                -1,
                b"s",
                DEFINITION.encode(),
                f"rev {NOW - 500}".encode(),
            ],
            {
                "leader.token": (None, "T"),
                "leader.scheduler": (None, "one"),
                "leader.epoch": (None, 1),
                "leader.ends": (None, NOW + 10_000),
                "leader.term": (None, 10_000),
                "epoch": (None, "1"),
                "stats.terms": (None, "1"),
            },
        ),
        (
            "the leader asks again, and there is more than it wants to read",
            LEADS | {"due": {"s": NOW - 500, "t": NOW}},
            {"token": "T", "scheduler": "one", "term_ms": 20_000, "limit": 1},
            [],
            [
                b"leader",
                1,
                NOW,
                0,
                NOW + 20_000,
                NOW,
                b"s",
                DEFINITION.encode(),
                f"rev {NOW - 500}".encode(),
            ],
            RENEWED,
        ),
        (
            "somebody else leads",
            LEADS,
            {"token": "U", "scheduler": "two", "term_ms": 10_000, "limit": 5},
            [],
            [b"follower", 1, NOW, 0, NOW + 10_000, -1],
            {},
        ),
        (
            "the term of somebody else is over",
            {"leader": LEADER | {"ends": NOW}, "epoch": 1, "due": {"later": NOW + 700}},
            {"token": "U", "scheduler": "two", "term_ms": 10_000, "limit": 5},
            [],
            [b"elected", 2, NOW, 0, NOW + 10_000, NOW + 700],
            {
                "leader.token": ("T", "U"),
                "leader.scheduler": ("one", "two"),
                "leader.epoch": (1, 2),
                "leader.ends": (NOW, NOW + 10_000),
                "leader.term": (20_000, 10_000),
                "epoch": ("1", "2"),
                "stats.terms": (None, "1"),
            },
        ),
    ],
    "fire": [
        (
            "one that is due",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(),
            [b"fired", b"fired"],
            RENEWED | FIRED,
        ),
        (
            "one that has missed moments, and has no next",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(next="", due="", missed=3, note="2\x001\x003\0missed", reason="r"),
            [b"fired", b"fired"],
            RENEWED
            | FIRED
            | {
                "plan.s": (f"rev {NOW - 500}", "rev -"),
                "due.s": (NOW - 500, None),
                "schedule_state.s": (
                    STATE,
                    STATE
                    | {
                        "last_run": NOW - 500,
                        "runs": 1,
                        "missed": 3,
                        "active": False,
                        "reason": "r",
                    },
                ),
                "stats.missed": (None, "3"),
                "moments.s\x002\x001\x003\0missed": (None, 0),
                "stats.set_aside_cron": (None, "1"),
                "broken.s": (None, {"reason": "r", "since": NOW}),
            },
        ),
        (
            "the same schedule twice in one batch",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments() + fire_arguments(),
            [b"fired", b"fired", b"moved"],
            RENEWED | FIRED,
        ),
        (
            "one whose revision has changed",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(plan=f"old {NOW - 500}"),
            [b"fired", b"moved"],
            RENEWED,
        ),
        (
            "one whose moment has changed",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(plan=f"rev {NOW - 60_500}", moment=NOW - 60_500),
            [b"fired", b"moved"],
            RENEWED,
        ),
        (
            "one that is gone",
            {"leader": LEADER, "epoch": 1},
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(),
            [b"fired", b"moved"],
            RENEWED,
        ),
        (
            "one that a limit refuses",
            LEADS
            | {"users": {"alice": '{"max_waiting":1}'}, "backlog": {"alice\x003\x00t\x00n": 0}},
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(missed=2),
            [b"fired", b"refused"],
            RENEWED
            | {
                "due.s": (NOW - 500, NOW + 5000),
                "schedule_state.s": (STATE, STATE | {"refused": 1}),
                "stats.refused": (None, "1"),
            },
        ),
        (
            "somebody else leads",
            LEADS,
            {"op": "o", "token": "U", "term_ms": 20_000},
            fire_arguments(),
            [b"stale"],
            {},
        ),
        (
            "the term is over",
            LEADS | {"leader": LEADER | {"ends": NOW}},
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(),
            [b"stale"],
            {},
        ),
        (
            "nobody leads",
            STORED,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(),
            [b"stale"],
            {},
        ),
        (
            "one that is to act later at its next moment",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(due=NOW + 70_000),
            [b"fired", b"fired"],
            RENEWED | FIRED | {"due.s": (NOW - 500, NOW + 70_000)},
        ),
        (
            "one of which nothing is to be fired",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(moment="", document="", missed=2, note="2\x001\x002\0misfire"),
            [b"fired", b"passed"],
            RENEWED
            | {
                "plan.s": (f"rev {NOW - 500}", f"rev {NOW + 60_000}"),
                "due.s": (NOW - 500, NOW + 60_000),
                "schedule_state.s": (STATE, STATE | {"missed": 2}),
                "moments.s\x002\x001\x002\0misfire": (None, 0),
                "stats.missed": (None, "2"),
            },
        ),
        (
            "the last of its runs",
            LEADS,
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(max_runs=1),
            [b"fired", b"fired"],
            RENEWED
            | FIRED
            | {
                "plan.s": (f"rev {NOW - 500}", "rev -"),
                "due.s": (NOW - 500, None),
                "schedule_state.s": (
                    STATE,
                    STATE
                    | {"active": False, "last_run": NOW - 500, "runs": 1}
                    | {"reason": "completed: max_runs of 1 reached"},
                ),
            },
        ),
        (
            "one that has had its runs",
            LEADS | {"schedule_state": {"s": json.dumps(STATE | {"runs": 4})}},
            {"op": "o", "token": "T", "term_ms": 20_000},
            fire_arguments(max_runs=3),
            [b"fired", b"passed"],
            RENEWED
            | {
                "plan.s": (f"rev {NOW - 500}", "rev -"),
                "due.s": (NOW - 500, None),
                "schedule_state.s": (
                    STATE | {"runs": 4},
                    STATE
                    | {"active": False, "runs": 4, "reason": "completed: max_runs of 3 reached"},
                ),
                f"moments.s\0{NOW - 500}\0{NOW - 500}\x001\0completed": (None, 0),
            },
        ),
    ],
    "resume": [
        (
            "one that was paused until now",
            PAUSED,
            {"noted": "2\x001\x002\0paused"},
            [],
            b"resumed",
            {
                "plan.s": ("rev -", f"rev {NOW + 5}"),
                "due.s": (NOW - 500, NOW + 9),
                "schedule_state.s": (PAUSED_STATE, STATE | {"since": NOW}),
                "moments.s\x002\x001\x002\0paused": (None, 0),
            },
        ),
        (
            "one that has no moment left",
            PAUSED,
            {"next_ms": "", "due_ms": "", "reason": "completed: r"},
            [],
            b"completed",
            {
                "due.s": (NOW - 500, None),
                "schedule_state.s": (
                    PAUSED_STATE,
                    STATE | {"active": False, "since": NOW, "reason": "completed: r"},
                ),
            },
        ),
        ("one that was saved anew", PAUSED, {"plan": "old -"}, [], b"moved", {}),
        ("one that is paused for good", LEADS | {"plan": {"s": "rev -"}}, {}, [], b"moved", {}),
        ("somebody else leads", PAUSED, {"token": "U"}, [], b"stale", {}),
    ],
    "set_aside": [
        (
            "one that cannot be read",
            LEADS,
            {"definition": DEFINITION, "plan": f"rev {NOW - 500}", "kind": "broken"},
            [],
            b"set_aside",
            {
                "plan.s": (f"rev {NOW - 500}", "rev -"),
                "due.s": (NOW - 500, None),
                "schedule_state.s": (STATE, STATE | {"active": False, "reason": "why"}),
                "broken.s": (None, {"reason": "why", "since": NOW}),
                "stats.set_aside_broken": (None, "1"),
            },
        ),
        (
            "one of which there is only the moment",
            {"leader": LEADER, "epoch": 1, "due": {"s": 1}},
            {"definition": "", "plan": "", "kind": "cron"},
            [],
            b"set_aside",
            {
                "due.s": (1, None),
                "schedule_state.s": (None, {"active": False, "reason": "why"}),
                "broken.s": (None, {"reason": "why", "since": NOW}),
                "stats.set_aside_cron": (None, "1"),
            },
        ),
        (
            "one whose definition has changed",
            LEADS,
            {"definition": "{", "plan": f"rev {NOW - 500}", "kind": "broken"},
            [],
            b"moved",
            {},
        ),
        (
            "one whose plan has changed",
            LEADS,
            {"definition": DEFINITION, "plan": f"old {NOW - 500}", "kind": "broken"},
            [],
            b"moved",
            {},
        ),
        (
            "somebody else leads",
            LEADS,
            {"definition": DEFINITION, "plan": f"rev {NOW - 500}", "kind": "broken", "token": "U"},
            [],
            b"stale",
            {},
        ),
    ],
    "resign": [
        (
            "the leader",
            {"leader": LEADER, "epoch": 1},
            {"op": "o", "token": "T"},
            [],
            b"resigned",
            {
                "leader.token": ("T", None),
                "leader.scheduler": ("one", None),
                "leader.epoch": (1, None),
                "leader.ends": (NOW + 10_000, None),
                "leader.term": (20_000, None),
            },
        ),
        (
            "somebody else",
            {"leader": LEADER, "epoch": 1},
            {"op": "o", "token": "U"},
            [],
            b"stale",
            {},
        ),
        (
            "a leader whose term is over",
            {"leader": LEADER | {"ends": NOW}, "epoch": 1},
            {"op": "o", "token": "T"},
            [],
            b"stale",
            {},
        ),
    ],
}
USUAL: dict[str, dict[str, Any]] = {
    "update_schedule": {
        "op": "o",
        "client_now": NOW,
        "id": "s",
        "user": "alice",
        "tenant": "",
        "title": "",
        "revision": "rev2",
        "base": "rev",
        "old_name": "job",
        "task_name": "job",
        "due_ms": "",
        "pause": "",
        "noted": "",
        "change": "",
    },
    "resume": {
        "op": "o",
        "token": "T",
        "id": "s",
        "plan": "rev -",
        "next_ms": NOW + 5,
        "due_ms": NOW + 9,
        "noted": "",
        "reason": "",
    },
    "set_aside": {"op": "o", "token": "T", "id": "s", "reason": "why"},
    "remove_schedule": {"revision": ""},
}


@pytest.mark.parametrize(
    ("script", "row"),
    [
        pytest.param(script, row, id=f"{script}: {row[0]}")
        for script, rows in TRANSITIONS.items()
        for row in rows
    ],
)
@pytest.mark.untidy
def test_a_repeated_script_changes_nothing_more(world: World, script: str, row: Row) -> None:
    _, state, arguments, rest, answer, expected = row
    arguments = USUAL.get(script, {}) | arguments
    arrange(world, state)
    world.redis.hsetnx(world.keys["fair"], "layout", 1)
    before = world.state()

    assert world.queue.link.run(script, rest=rest, **arguments) == answer

    found = changes(before, world.state())
    if script == "fire" and answer == [b"fired", b"fired"][: len(answer)]:
        assert {key for key in found if key not in expected} <= ENQUEUED
        found = {key: value for key, value in found.items() if key not in ENQUEUED}
    if script == "fire" and b"moved" in answer and b"fired" in answer[1:]:
        found = {key: value for key, value in found.items() if key not in ENQUEUED}
    assert found == expected

    after = world.state(replay=True)
    again = world.queue.link.run(script, rest=rest, **arguments)
    if script == "lead" and answer[0] == b"elected":
        # Told by the epoch, which is the same: see Leadership.
        assert (again[0], again[1:]) == (b"leader", answer[1:])
    else:
        assert again == answer
    assert world.state(replay=True) == after


@pytest.mark.one_partition
def test_every_command_of_a_scheduler_may_arrive_twice(world: World) -> None:
    """As redis-py, or a proxy, may do it after a lost reply; through the public calls this time."""
    command = world.queue.link.command_of
    sent: list[tuple[str, list[Any]]] = []
    seen: set[str] = set()

    def note(call: Call) -> Any:
        made = command(call)
        sent.append((call.script, made[1]))
        return made

    def repeated(answer: Any) -> Any:
        """Send all commands of the call again, after the call."""
        state = world.state(replay=True)
        for name, words in sent:
            world.redis.execute_command(*words)
            assert world.state(replay=True) == state, name
            seen.add(name)
        sent.clear()
        return answer

    world.patch(world.queue.link, "command_of", note)
    repeated(world.add())
    repeated(world.add("bad"))
    assert repeated(world.scheduler.update_schedule("nine", payload={"a": 1}))
    world.redis.hset(world.keys["schedules"], "bad", "{")
    world.clock.set(at(5, 9))
    report = repeated(world.tick())
    assert (report.fired, report.set_aside) == (1, 1)
    assert repeated(world.scheduler.remove_schedule("bad"))
    assert repeated(world.scheduler.stop())

    assert seen == {
        "add_schedules",
        "update_schedule",
        "remove_schedule",
        "lead",
        "fire",
        "set_aside",
        "resign",
        "find_stale",
        "sample",
    }
    assert world.stats()["fired"] == 1


def test_lost_replies_change_nothing_for_the_caller(own_server: OwnServer, world: World) -> None:
    server = own_server()
    with (
        LossyProxy(server.socket_path) as proxy,
        redis.Redis.from_url(server.url) as client,
        TaskQueue.from_url(proxy.url, clock=world.clock) as queue,
    ):
        scheduler = TaskScheduler(queue, "one", registry=world.registry)
        lossy = proxy.losing
        queue.inspect()
        assert lossy(lambda: add(scheduler)) == "nine"
        assert lossy(lambda: scheduler.update_schedule("nine", name="n")) is True
        assert lossy(scheduler.tick).is_leader
        assert sample(world, "lock_total", outcome="acquired") == 1
        world.clock.set(at(5, 9))
        dropped = proxy.dropped
        before_script(queue, world.monkeypatch, "fire", proxy.drop_replies)
        assert scheduler.tick().fired == 1
        assert proxy.dropped == dropped + 1
        assert get(scheduler, "nine").run_count == 1
        assert lossy(lambda: scheduler.remove_schedule("nine")) is True
        assert lossy(lambda: scheduler._posts[0].leadership.resign()) is True
        assert stats(client)["fired"] == 1


# --- making one -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"queue": None}, "queue must be a TaskQueue, not None"),
        ({"queue": "redis://localhost"}, "queue must be a TaskQueue, not a str"),
        ({"scheduler_id": ""}, "scheduler_id must .*not ''"),
        ({"scheduler_id": 5}, "scheduler_id must .*not 5"),
        ({"scheduler_id": "a\nb"}, "scheduler_id"),
        ({"check_interval": 0}, "check_interval must be .* seconds, not 0"),
        ({"check_interval": -1}, "check_interval must .*not -1"),
        ({"check_interval": "1"}, "check_interval must .*not '1'"),
        ({"check_interval": float("nan")}, "check_interval must .*not nan"),
        ({"check_interval": None}, "check_interval must .*not None"),
        ({"check_interval": True}, "check_interval must .*not True"),
        ({"lock_timeout": 0}, "lock_timeout must be .* seconds, not 0"),
        ({"lock_timeout": float("inf")}, "lock_timeout must .*not inf"),
        ({"lock_timeout": "10"}, "lock_timeout must .*not '10'"),
        ({"registry": "default"}, "registry must be a CollectorRegistry, not a str"),
    ],
)
def test_a_bad_argument_is_named(queue: TaskQueue, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        TaskScheduler(**({"queue": queue} | arguments))
    assert isinstance(caught.value, ValueError)


def test_times_may_be_timedeltas(queue: TaskQueue) -> None:
    scheduler = TaskScheduler(
        queue,
        check_interval=timedelta(seconds=2),  # type: ignore[arg-type]
        lock_timeout=timedelta(minutes=1),  # type: ignore[arg-type]
        registry=CollectorRegistry(),
    )
    assert (scheduler.check_interval, scheduler.lock_timeout) == (2.0, 60.0)


def test_schedulers_without_a_name_get_different_ones(queue: TaskQueue) -> None:
    one, two = (TaskScheduler(queue, registry=CollectorRegistry()) for _ in range(2))
    assert one.scheduler_id != two.scheduler_id


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/at/all"])
def test_without_redis_the_constructor_says_so_soon(url: str) -> None:
    with TaskQueue.from_url(url) as queue:
        began = time.monotonic()
        with pytest.raises(RedisUnavailable, match="did not answer"):
            TaskScheduler(queue, registry=CollectorRegistry())
        assert time.monotonic() - began < 4


def test_a_server_that_may_evict_schedules_is_refused(own_server: OwnServer) -> None:
    server = own_server(config={"maxmemory-policy": "allkeys-lru"})
    with (
        TaskQueue.from_url(server.url) as queue,
        pytest.raises(ConfigurationError, match="allkeys-lru"),
    ):
        TaskScheduler(queue, registry=CollectorRegistry())


def test_stop_of_one_that_never_ran_does_nothing(world: World) -> None:
    assert world.scheduler.stop() is True
    assert world.scheduler.state == "stopped"
    assert world.state() == {}
    with pytest.raises(ConfigurationError, match=r"timeout must .*not -1"):
        world.scheduler.stop(timeout=-1)


# --- health ---------------------------------------------------------------------------------------


def test_health_before_and_after_a_tick(world: World) -> None:
    world.add()
    world.clock.set(at(5, 9, 0, 7))
    before = world.scheduler.health()
    assert (before.state, before.up_since, before.last_good_cycle) == ("stopped", None, None)
    assert (before.redis_up, before.is_leader, before.leader) == (True, False, None)
    assert (before.lag, before.last_error) == (7.0, None)

    world.tick()

    after, theirs = world.scheduler.health(), world.other.health()
    assert (after.is_leader, after.leader, after.lag) == (True, "one", 0.0)
    assert after.last_good_cycle is not None
    assert (theirs.is_leader, theirs.leader) == (False, "one")
    world.advance(10)
    assert world.other.health().leader is None  # the term is over


def test_health_says_when_redis_is_away(own_server: OwnServer) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.2) as queue:
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        scheduler.tick()
        server.kill()
        with pytest.raises(RedisUnavailable):
            scheduler.tick()
        health = scheduler.health()
        assert (health.redis_up, health.is_leader, health.leader) == (False, False, None)
        assert health.lag is None

        server.restart()
        scheduler.tick()
        assert scheduler.health().redis_up is True


def test_a_full_server_delays_fires(own_server: OwnServer, world: World) -> None:
    server = own_server()
    with (
        TaskQueue.from_url(server.url, clock=world.clock) as queue,
        redis.Redis.from_url(server.url) as client,
    ):
        scheduler = TaskScheduler(queue, registry=world.registry)
        add(scheduler)
        world.clock.set(at(5, 8, 59, 55))
        scheduler.tick()
        client.config_set("maxmemory", 1)
        world.clock.set(at(5, 9))
        before = state_of(client)
        with pytest.raises(RedisRefused, match="maxmemory"):
            scheduler.tick()
        assert changes(before, state_of(client)).keys() <= {"leader.ends"}
        assert sample(world, "errors_total", type="push") == 1
        assert scheduler.stop() is True  # may resign all the same
        client.config_set("maxmemory", 0)
        assert scheduler.tick().fired == 1


def test_the_link_of_a_closed_queue_says_so(world: World) -> None:
    assert isinstance(world.queue.link, Link)
    world.queue.close()
    with pytest.raises(RedisRefused, match="closed"):
        world.tick()


def test_the_refused_fire_is_planned_again_from_the_record(world: World) -> None:
    world.queue.set_user("alice", max_waiting=1)
    world.queue.push(make_task("alice"))
    world.add()
    world.tick_at(at(5, 9))
    assert world.record("schedule_state", "nine")["refused"] == 1
    assert world.due_at("nine") == ms(at(5, 9, 0, 5))

    world.scheduler.update_schedule("nine", user_id="bob")  # who has room; the plan stays
    assert world.tick_at(at(5, 9, 0, 5)).fired == 1
    assert world.queue.size("bob") == 1
    assert world.schedule("nine").last_run == at(5, 9)


@pytest.mark.one_partition
def test_a_term_that_ran_out_unseen_counts_as_lost(world: World) -> None:
    one = TaskScheduler(world.queue, "one", registry=world.registry)
    two = TaskScheduler(world.queue, "two", registry=CollectorRegistry())
    one.tick()
    one._posts[0].leadership.doubt()  # as after a time in which Redis was away
    world.advance(60)
    two.tick()
    one.tick()
    one.tick()
    lost = world.registry.get_sample_value(
        "fairqueue_scheduler_lock_total", {"queue": "default", "outcome": "lost"}
    )
    assert lost == 1


@pytest.mark.untidy
@pytest.mark.one_partition
def test_an_id_that_is_not_text_is_set_aside_despite_its_definition(world: World) -> None:
    world.add()
    for key in ("schedules", "plan"):
        stored = world.redis.hget(world.keys[key], "nine")
        assert isinstance(stored, bytes)
        world.redis.hset(world.keys[key], b"\xff", stored)
    world.redis.zadd(world.keys["due"], {b"\xff": 1})
    report = world.tick_at(at(5, 9))
    assert (report.fired, report.set_aside, report.moved) == (1, 1, 0)
    assert [problem.schedule_id for problem in world.scheduler.problems()] == ["\\xff"]
