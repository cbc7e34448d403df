"""Each guard of the scripts by itself: one short test that fails when the guard is taken away.

`scripts/mutants.py` takes each away in turn, in a copy, and sees to it that these tests notice.
"""

import asyncio
import json
import math
import socket
from collections import Counter
from datetime import timedelta
from typing import Any, cast

import pytest
import redis
from helpers.tasks import claim_one, fill, ids_of, info_of, make_task, push, served_users
from helpers.world import World
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric
from redis.connection import AbstractConnection
from starlette.applications import Starlette
from starlette.requests import Request

from fairqueue.access.credentials import Actor
from fairqueue.clock import ManualClock
from fairqueue.errors import (
    InvalidPayload,
    LeaseLost,
    QueueFull,
    RedisRefused,
    ScheduleQuota,
    StaleVersion,
)
from fairqueue.inspection import Inspector
from fairqueue.link.dialer import NobodyThere
from fairqueue.metrics.processes import Tally
from fairqueue.models import Claim, status_head, task_document
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.leadership import Reading
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.validation import Priority
from fairqueue.web import WebServer
from fairqueue.web.auth import SESSION_COOKIE, _is_same_origin
from fairqueue.web.live_updates import LiveUpdates
from fairqueue.web.server import ClientLimits

TERM_S = 10.0


@pytest.fixture
def old(queue: TaskQueue) -> TaskScheduler:
    """The scheduler that leads first. It has one schedule, `s`, of every minute."""
    scheduler = TaskScheduler(queue, "old", lock_timeout=TERM_S)
    scheduler.add_schedule("* * * * *", "alice", payload={"n": 1}, schedule_id="s")
    return scheduler


@pytest.fixture
def new(queue: TaskQueue) -> TaskScheduler:
    """The scheduler that comes second."""
    return TaskScheduler(queue, "new", lock_timeout=TERM_S)


def read_due(scheduler: TaskScheduler, clock: ManualClock) -> Reading:
    """Lead and read what is due, a minute from now: the first half of a tick."""
    clock.advance(60)
    reading = scheduler._posts[0].leadership.lead(10)
    assert [due.schedule_id for due in reading.due] == ["s"]
    return reading


def fire(scheduler: TaskScheduler, reading: Reading) -> TickReport | None:
    """The second half of a tick; None if the scheduler was told that it does not lead."""
    report = TickReport()
    lost = scheduler._fire([(scheduler._posts[0], reading)], report, None)
    return None if lost else report


def leader(world: World) -> Any:
    """Who leads, as the record says."""
    return json.loads(cast(bytes, world.redis.get(world.keys["leader"])))["scheduler"]


def plan(world: World) -> bytes:
    """The plan of schedule `s`."""
    return cast(bytes, world.redis.hget(world.keys["plan"], "s"))


# --- leadership -----------------------------------------------------------------------------------


def test_a_leader_whose_place_is_taken_fires_nothing(
    world: World, old: TaskScheduler, new: TaskScheduler
) -> None:
    reading = read_due(old, world.clock)
    world.advance(TERM_S)
    assert new._posts[0].leadership.lead(10).is_leader
    assert fire(old, reading) is None
    assert world.queue.size() == 0


def test_a_leader_whose_term_is_over_fires_nothing(world: World, old: TaskScheduler) -> None:
    reading = read_due(old, world.clock)
    world.advance(TERM_S)
    assert fire(old, reading) is None
    assert world.queue.size() == 0


def test_a_follower_does_not_take_a_term_that_runs(
    world: World, old: TaskScheduler, new: TaskScheduler
) -> None:
    old.tick()
    assert not new.tick().is_leader
    assert leader(world) == "old"


def test_a_term_of_a_clock_that_was_set_back_keeps_nobody_waiting(
    clock: ManualClock, old: TaskScheduler, new: TaskScheduler
) -> None:
    clock.advance(86_400)
    assert old.tick().is_leader  # and it is never heard of again
    clock.advance(-86_400)
    assert new.tick().is_leader


def test_a_clock_that_is_set_back_by_up_to_a_term_changes_no_leader(
    clock: ManualClock, old: TaskScheduler, new: TaskScheduler
) -> None:
    old.tick()
    clock.advance(-TERM_S)
    assert not new.tick().is_leader
    clock.advance(-0.001)
    assert new.tick().is_leader


def test_a_stale_leader_ends_no_term(world: World, old: TaskScheduler, new: TaskScheduler) -> None:
    old.tick()
    world.advance(TERM_S)
    new.tick()
    old.stop()
    assert leader(world) == "new"


# --- schedules ------------------------------------------------------------------------------------


def test_a_fire_of_a_replaced_plan_is_left_alone(world: World, old: TaskScheduler) -> None:
    reading = read_due(old, world.clock)
    old.update_schedule("s", payload={"n": 2})
    report = fire(old, reading)
    assert report is not None
    assert (report.fired, report.moved) == (0, 1)
    assert world.queue.size() == 0


def test_a_fire_that_was_made_already_is_left_alone(clock: ManualClock, old: TaskScheduler) -> None:
    reading = read_due(old, clock)
    assert old.tick().fired == 1
    report = fire(old, reading)
    assert report is not None
    assert (report.fired, report.moved) == (0, 1)


def test_a_fire_advances_the_plan_with_the_task(world: World, old: TaskScheduler) -> None:
    revision, moment = plan(world).split(b" ")
    world.advance(60)
    assert old.tick().fired == 1
    assert plan(world) == b"%b %d" % (revision, int(moment) + 60_000)
    assert old.tick().fired == 0
    world.advance(60)
    assert old.tick().fired == 1


def test_a_moment_that_comes_again_is_the_same_task(world: World, old: TaskScheduler) -> None:
    world.advance(60)
    old.tick()
    world.queue.finish(world.claim_one())
    world.advance(-60)
    old.remove_schedule("s")
    old.add_schedule("* * * * *", "alice", payload={"n": 1}, schedule_id="s")
    world.advance(60)
    assert old.tick().fired == 1
    assert world.queue.size() == 0


def test_a_clock_set_back_fires_no_moment_again(world: World, old: TaskScheduler) -> None:
    world.queue.configure(keep_finished=0)
    for _ in range(3):
        world.advance(60)
        assert old.tick().fired == 1
        world.queue.finish(world.claim_one())
    world.advance(3600)  # long enough for all to be forgotten
    world.queue.set_user("bob", weight=2)
    world.advance(3600)
    world.queue.set_user("bob", weight=1)
    world.advance(-7380)
    old.update_schedule("s", cron_expr="*/1 * * * *")
    for fired in (0, 0, 0, 0, 1):
        report = old.tick()
        assert (report.fired, report.missed, world.queue.size()) == (fired, 0, fired)
        world.advance(60)


def test_moments_before_one_that_was_fired_are_not_missed_when_the_clock_was_set_back(
    clock: ManualClock, old: TaskScheduler
) -> None:
    for _ in range(3):
        clock.advance(60)
        assert old.tick().fired == 1
    clock.advance(-180)
    old.update_schedule("s", cron_expr="*/1 * * * *")
    clock.advance(120)
    report = old.tick()
    assert (report.fired, report.missed) == (0, 0)
    schedule = old.get_schedule("s")
    assert schedule is not None
    assert schedule.missed_count == 0


def test_a_refused_fire_keeps_its_plan(world: World, old: TaskScheduler) -> None:
    world.queue.configure(max_waiting=1)
    world.push("in the way")
    before = plan(world)
    world.advance(60)
    assert old.tick().refused == 1
    assert plan(world) == before
    assert world.queue.size() == 1


def update_from(world: World, **read: bytes | str) -> list[bytes]:
    """Send an update that was made from what was read, which is what is stored unless given."""
    now_ms = world.clock.now_ms()
    stored = cast(bytes, world.redis.hget(world.keys["schedules"], "s"))
    arguments: dict[str, Any] = {
        "op": "op",
        "client_now": now_ms,
        "id": "s",
        "expected": stored,
        "base": plan(world).partition(b" ")[0],
        "definition": '{"spoilt":true}',
        "user": "alice",
        "tenant": "",
        "title": "",
        "revision": "r",
        "old_name": "default",
        "task_name": "default",
        "next_ms": now_ms + 1000,
        "due_ms": now_ms + 1000,
        "active": "",
        "pause": "",
        "noted": "",
        "change": "",
    }
    answer: list[bytes] = world.queue.link.run("update_schedule", **(arguments | read))
    return answer


def test_an_update_from_an_old_text_changes_nothing(world: World, old: TaskScheduler) -> None:
    assert update_from(world, expected="what it was") == [b"changed"]
    schedule = old.get_schedule("s")
    assert schedule is not None
    assert schedule.payload == {"n": 1}


def test_an_update_from_an_old_revision_changes_nothing(world: World, old: TaskScheduler) -> None:
    assert update_from(world, base="what it was") == [b"changed"]
    schedule = old.get_schedule("s")
    assert schedule is not None
    assert schedule.payload == {"n": 1}


def test_a_moment_of_a_wrong_clock_is_not_stored(world: World, old: TaskScheduler) -> None:
    wrong_ms = world.clock.now_ms() - 5000
    moment_ms = wrong_ms + 1000
    fields: list[str | int] = ["t", "alice", "default", "{}", "r", moment_ms, moment_ms]
    fields += ["", "", ""]
    answer = world.queue.link.run(
        "add_schedules", op="op", client_now=wrong_ms, on_conflict="error", rest=fields
    )
    assert answer == [b"skewed", world.clock.now_ms()]
    assert old.get_schedule("t") is None


# --- repeated operations --------------------------------------------------------------------------


def test_the_same_task_pushed_again_is_one_task(queue: TaskQueue) -> None:
    push(queue, "a")
    push(queue, "a")
    assert queue.size() == 1


def test_a_task_that_is_gone_is_still_known(queue: TaskQueue) -> None:
    queue.configure(keep_finished=0)
    push(queue, "a")
    claim = claim_one(queue)
    queue.finish(claim)
    assert queue.get("a") is None
    queue.finish(claim)
    push(queue, "a")
    assert queue.size() == 0


def test_a_repeated_operation_gets_its_first_answer(queue: TaskQueue) -> None:
    push(queue, "a")
    claim = claim_one(queue)
    call: dict[str, Any] = {"op": "op", "id": "a", "token": claim.token, "delay_ms": 0}
    call |= {"error": "", "timed_out": "", "report": "", "cost": ""}
    assert queue.link.run("retry", **call) == b"retried"
    assert queue.link.run("retry", **call) == b"retried"


def test_an_answer_outlives_the_turn_of_the_generations(world: World) -> None:
    world.push("a")
    world.queue.cancel("unknown")
    world.advance(59)
    assert world.queue.link.run("cancel", op="op", id="a") == b"cancelled"
    world.advance(2)
    world.queue.cancel("unknown")
    world.advance(27)
    world.queue.configure(keep_finished=0)
    world.push("b")
    world.queue.cancel("b")
    assert world.queue.get("a") is None
    assert world.queue.link.run("cancel", op="op", id="a") == b"cancelled"


def test_a_repeated_claim_gets_the_tasks_that_it_holds(queue: TaskQueue) -> None:
    fill(queue, "alice", 4)
    call: dict[str, Any] = {"op": "op", "worker": "w", "limit": 2, "lease_ms": 1000}
    call |= {"place": "here", "names": "", "pools": "", "floor": ""}
    first = queue.link.run("claim", **call)
    assert queue.link.run("claim", **call) == first
    assert queue.size() == 2


# --- leases ---------------------------------------------------------------------------------------


def test_a_worker_that_lost_its_lease_ends_nothing(world: World) -> None:
    stale = world.push_and_claim("a", lease=1)
    world.advance(2)
    world.claim_one(worker="another")
    for end in (world.queue.finish, world.queue.release, world.queue.retry, world.queue.bury):
        with pytest.raises(LeaseLost):
            end(stale)
    info = world.info("a")
    assert (info.state, info.worker_id) == ("running", "another")


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_lease_taken_back_is_lost_however_it_ended(world: World, cancelled: bool) -> None:
    world.queue.configure(max_attempts=1)
    claim = world.push_and_claim("t1", lease=1)
    if cancelled:
        world.queue.cancel("t1")
    world.advance(1)
    assert world.queue.claim("other") == []
    assert world.info("t1").state == ("cancelled" if cancelled else "buried")
    assert world.queue.extend([claim]) == ["lost_lease"]
    assert world.queue.finish_many([(claim, None)]) == ["lost_lease"]
    assert world.stats()["lost_leases"] == 2


def test_a_worker_that_lost_its_lease_extends_nothing(world: World) -> None:
    stale = world.push_and_claim("a", lease=1)
    world.advance(2)
    lease_until = world.claim_one().lease_until
    assert world.queue.extend([stale], lease=1000) == ["lost_lease"]
    assert world.info("a").lease_until == lease_until


def test_a_task_whose_leases_expire_is_not_offered_for_ever(world: World) -> None:
    world.queue.configure(max_attempts=2)
    world.push("a")
    for _ in range(2):
        world.claim_one(lease=1)
        world.advance(2)
    assert world.queue.claim("w") == []
    info = world.info("a")
    assert (info.state, info.attempts) == ("buried", 2)


def test_a_run_that_does_not_answer_is_ended_and_not_offered_again(world: World) -> None:
    claim = world.push_and_claim("a", timeout=10, lease=5)
    for _ in range(5):
        world.advance(3)
        world.queue.extend([claim], lease=5)
    WorkerStore(world.queue.link).find_stale()
    info = world.info("a")
    assert (info.state, info.attempts) == ("buried", 1)
    with pytest.raises(LeaseLost):
        world.queue.finish(claim)


def test_a_run_whose_worker_died_before_its_deadline_is_offered_again(world: World) -> None:
    world.push_and_claim("a", timeout=10, lease=5)
    world.advance(100)
    WorkerStore(world.queue.link).find_stale()
    assert world.claim_one().attempt == 2


def test_no_lease_is_kept_beyond_the_deadline_of_its_run(world: World) -> None:
    claim = world.push_and_claim("a", timeout=10, lease=5)
    deadline = world.now() + timedelta(seconds=15)
    assert world.queue.extend([claim], lease=3600) == ["extended"]
    assert world.info("a").lease_until == deadline
    world.advance(15)
    assert world.queue.extend([claim], lease=3600) == ["lost_lease"]


def test_a_run_that_is_to_be_cancelled_does_not_go_on_for_ever(world: World) -> None:
    claim = world.push_and_claim("a", lease=5)
    world.queue.cancel("a")
    for _ in range(4):
        world.advance(3)
        world.queue.extend([claim], lease=5)
    WorkerStore(world.queue.link).find_stale()
    assert world.info("a").state == "cancelled"


def test_what_ended_without_a_word_is_told_until_somebody_has_heard(world: World) -> None:
    workers = WorkerStore(world.queue.link)
    world.push_and_claim("a", max_attempts=1, lease=1)
    world.advance(1)
    (notice,) = workers.look_over(can_alert=True)
    assert notice.task_id == "a"
    world.advance(60)
    assert workers.look_over(can_alert=True) == [notice]
    world.advance(60)
    assert workers.look_over(can_alert=True, heard=[notice.text]) == []


def test_a_task_that_is_to_be_cancelled_is_not_offered_again(queue: TaskQueue) -> None:
    push(queue, "a")
    claim = claim_one(queue)
    assert queue.cancel("a")
    queue.retry(claim)
    assert queue.claim("w") == []
    assert info_of(queue, "a").state == "cancelled"


# --- fairness -------------------------------------------------------------------------------------


def test_a_stream_of_newcomers_does_not_starve_a_user(queue: TaskQueue) -> None:
    fill(queue, "zed", 20)
    served: Counter[str] = Counter()
    for n in range(20):
        push(queue, f"t{n}", user_id=f"a{n:02}")
        served[served_users(queue, 1)[0]] += 1
    assert served["zed"] >= 3


def test_service_goes_by_weight(queue: TaskQueue) -> None:
    queue.set_user("bob", weight=3)
    fill(queue, "alice", 20)
    fill(queue, "bob", 20)
    assert Counter(served_users(queue, 16)) == {"alice": 4, "bob": 12}


def test_a_raised_weight_acts_on_what_is_owed_already(queue: TaskQueue) -> None:
    queue.set_user("alice", weight=0.01)
    fill(queue, "alice", 5)
    fill(queue, "bob", 50)
    served_users(queue, 5)
    queue.set_user("alice", weight=10)
    assert "alice" in served_users(queue, 3)


def test_a_raised_weight_acts_on_the_turn_for_a_slot(queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=1)
    queue.set_user("alice", weight=0.01)
    for user in ("alice", "bob"):
        queue.push_many(make_task(user_id=user, name="slow") for _ in range(30))
    users = []
    for turn in range(15):
        if turn == 10:
            queue.set_user("alice", weight=10)
        (claim,) = queue.claim("w", limit=5)
        users.append(claim.task.user_id)
        queue.finish(claim)
    assert users[10:].count("alice") > users[:10].count("alice")


def test_a_release_gives_the_charge_back(queue: TaskQueue) -> None:
    fill(queue, "alice", 5)
    fill(queue, "bob", 5)
    for _ in range(3):
        (claim,) = queue.claim("w")
        assert claim.task.task_id == "alice-0"
        queue.release(claim)


def test_a_capped_user_gets_no_more_until_one_has_ended(queue: TaskQueue) -> None:
    queue.set_user("alice", max_running=2)
    fill(queue, "alice", 5)
    first, second = queue.claim("w", limit=5)
    assert queue.claim("w") == []
    queue.finish(first)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-2"]
    queue.bury(second)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-3"]


def test_a_paused_user_gets_nothing(queue: TaskQueue) -> None:
    fill(queue, "alice", 2)
    queue.set_user("alice", paused=True)
    assert queue.claim("w") == []
    queue.set_user("alice", paused=False)
    assert ids_of(queue.claim("w")) == ["alice-0"]


def test_a_pause_with_an_end_is_over_then(world: World) -> None:
    world.fill("alice", 2)
    world.queue.pause_user("alice", until=world.now() + timedelta(seconds=60))
    world.advance(59)
    assert world.queue.claim("w") == []
    world.advance(1)
    assert ids_of(world.queue.claim("w")) == ["alice-0"]


def test_a_purge_takes_delayed_tasks_and_leaves_nothing_of_them(world: World) -> None:
    world.push("later", user_id="alice", delay=60)
    assert Inspector(world.queue).users.purge("alice", dry_run=False) == 1
    assert not {"delayed", "delayed_index"} & world.dump().keys()


def test_a_rate_limit_limits_and_passes(world: World) -> None:
    world.queue.set_user("alice", rate=1)
    world.fill("alice", 5)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-0"]
    world.advance(0.9)
    assert world.queue.claim("w", limit=5) == []
    world.advance(0.1)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-1"]


def test_what_is_owed_from_a_lower_rate_is_cut_down(world: World) -> None:
    world.queue.set_user("alice", rate=0.001)
    world.fill("alice", 5)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-0"]
    world.queue.set_user("alice", rate=10)
    world.advance(0.1)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-1"]


def test_a_clock_that_is_set_back_lets_a_rate_go_on(world: World) -> None:
    world.queue.set_user("alice", rate=1)
    world.fill("alice", 5)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-0"]
    world.advance(-60)
    assert world.queue.claim("w", limit=5) == []
    world.advance(1)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-1"]


def test_an_answer_has_no_more_than_a_megabyte(queue: TaskQueue) -> None:
    for n in range(6):
        push(queue, f"t{n}", payload={"text": "x" * 250_000})
    assert ids_of(queue.claim("w", limit=9)) == ["t0", "t1", "t2", "t3", "t4"]


def test_critical_tasks_do_not_take_more_than_their_share(queue: TaskQueue) -> None:
    fill(queue, "alice", 60, priority=Priority.CRITICAL)
    fill(queue, "bob", 60)
    fill(queue, "carol", 60)
    served = Counter(served_users(queue, 50))
    assert served["bob"] + served["carol"] >= 15


def test_only_critical_tasks_go_first(queue: TaskQueue) -> None:
    fill(queue, "carol", 10, priority=Priority.CRITICAL)
    queue.claim("w", limit=10)  # which uses up the credit
    fill(queue, "alice", 1, priority=Priority.CRITICAL)
    push(queue, "a1", "a2")
    fill(queue, "bob", 2)
    assert ids_of(queue.claim("w", limit=4)) == ["alice-0", "bob-0", "a1", "bob-1"]


def test_a_user_whose_critical_tasks_are_gone_is_not_looked_at_in_the_lane(world: World) -> None:
    world.queue.set_limits("slow", slots=1)
    world.push("d1", user_id="dave", name="slow")
    world.queue.claim("w")  # which takes the slot
    world.fill("carol", 10, priority=Priority.CRITICAL)
    world.queue.claim("w", limit=10)  # which uses up the credit
    world.fill("alice", 1, priority=Priority.CRITICAL)
    world.push("a1", name="slow")
    world.fill("bob", 2)
    assert ids_of(world.queue.claim("w", limit=2)) == ["alice-0", "bob-0"]
    assert world.redis.exists(world.keys["held"]) == 0


def test_a_critical_task_for_others_lets_no_other_task_go_first(queue: TaskQueue) -> None:
    push(queue, "z1", user_id="zed", priority=Priority.CRITICAL, name="other")
    push(queue, "z2", user_id="zed")
    push(queue, "b1", user_id="bob")
    assert ids_of(queue.claim("w", limit=1, avoid=["other"])) == ["b1"]


def test_a_full_queue_takes_no_more(queue: TaskQueue) -> None:
    queue.configure(max_waiting=2)
    push(queue, "a", "b")
    with pytest.raises(QueueFull):
        push(queue, "c")
    assert queue.size() == 2


# --- names and their limits -----------------------------------------------------------------------


def test_no_more_than_its_slots_run_at_a_time(queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=2)
    fill(queue, "alice", 5, name="slow")
    assert len(queue.claim("w", limit=5)) == 2


def test_the_end_of_a_lease_frees_its_slot(world: World) -> None:
    world.queue.set_limits("slow", slots=1)
    world.fill("alice", 3, name="slow")
    for _ in range(2):
        world.queue.finish(world.queue.claim("w", limit=2, lease=1)[0])
        assert "slots" not in world.dump()
    world.queue.claim("w", lease=1)
    world.advance(2)
    world.queue.set_user("alice", paused=True)
    world.queue.claim("w")
    assert "slots" not in world.dump()


def test_a_release_frees_its_slot(world: World) -> None:
    world.queue.set_limits("slow", slots=1)
    world.fill("alice", 1, name="slow")
    world.queue.release(world.claim_one())
    assert "slots" not in world.dump()


@pytest.mark.untidy
def test_a_slot_without_a_lease_is_free(world: World) -> None:
    world.queue.set_limits("slow", slots=1)
    world.redis.zadd(world.keys["slots"], {"slow\0gone": 0})
    world.fill("alice", 1, name="slow")
    assert len(world.queue.claim("w")) == 1


def test_tasks_that_wait_for_a_slot_get_it(queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=1)
    fill(queue, "alice", 4, name="slow")
    (running,) = queue.claim("w", limit=4)
    queue.finish(running)
    assert served_users(queue, 4) == ["alice"] * 3


def test_users_who_wait_for_slots_take_turns(world: World) -> None:
    world.queue.set_limits("slow", slots=1)
    world.fill("alice", 5, name="slow")
    world.fill("bob", 5, name="slow")
    world.queue.claim("w", limit=9)
    line = world.dump()["slot_line"]
    assert len([member for member in line if not member.startswith("\1")]) == 2


def test_weights_act_on_turns_for_a_slot(queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=1)
    queue.set_user("alice", weight=4)
    fill(queue, "alice", 20, name="slow")
    fill(queue, "bob", 20, name="slow")
    users = []
    for _ in range(20):
        (claim,) = queue.claim("w", limit=9)
        users.append(claim.task.user_id)
        queue.finish(claim)
    assert users.count("alice") >= 15


def test_a_rate_of_a_name_limits_and_passes(world: World) -> None:
    world.queue.set_limits("slow", rate=1)
    world.fill("alice", 5, name="slow")
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-0"]
    world.advance(0.9)
    assert world.queue.claim("w", limit=5) == []
    world.advance(0.1)
    assert ids_of(world.queue.claim("w", limit=5)) == ["alice-1"]


def test_a_claim_takes_nothing_that_it_avoids(queue: TaskQueue) -> None:
    fill(queue, "alice", 2, name="a")
    fill(queue, "bob", 2, name="b")
    assert ids_of(queue.claim("w", limit=9, avoid=["a"])) == ["bob-0", "bob-1"]


def test_a_claim_looks_behind_users_who_have_nothing_for_it(queue: TaskQueue) -> None:
    for n in range(30):
        push(queue, f"t{n}", user_id=f"u{n:02}", name="a")
    push(queue, "wanted", user_id="zoe", name="b")
    assert ids_of(queue.claim("w", names=["b"])) == ["wanted"]


def others(world: World, users: int) -> None:
    """So many users with a task that a claim of the name `b` does not want."""
    world.queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(users))


def test_repeated_claims_come_to_users_far_behind(world: World) -> None:
    others(world, 400)
    world.push("wanted", user_id="zoe", name="b")
    assert [ids_of(world.queue.claim("w", names=["b"])) for _ in range(8)].count(["wanted"]) == 1


def test_a_claim_looks_at_users_of_whom_its_kind_was_told(world: World) -> None:
    others(world, 900)
    world.queue.claim("w", names=["b"])
    world.push("wanted", user_id="zoe", name="b")
    assert ids_of(world.queue.claim("w", names=["b"])) == ["wanted"]


def test_a_kind_hears_of_a_user_who_may_be_served_again(world: World) -> None:
    others(world, 3)
    world.queue.set_user("zoe", paused=True)
    world.push("wanted", user_id="zoe", name="b")
    assert world.queue.claim("w", names=["b"]) == []
    world.queue.set_user("zoe", paused=False)
    assert ids_of(world.queue.claim("w", names=["b"])) == ["wanted"]


def test_a_claim_in_vain_does_not_look_at_everybody(world: World) -> None:
    others(world, 600)
    world.push("wanted", user_id="zoe", name="b")
    assert world.queue.claim("w", names=["b"]) == []


def test_kinds_that_share_a_list_pass_on_what_is_for_the_other(world: World) -> None:
    for n in range(9):  # the first and the ninth wait at one list
        world.queue.claim("w", names=[f"n{n}"])
    lists = [world.keys["wake"], *(world.keys[f"wake_{n + 1}"] for n in range(8))]

    def passed_on(name: str) -> list[int]:
        world.redis.delete(*lists)
        world.queue.claim("w", names=[name])
        return [number for number, key in enumerate(lists) if world.redis.exists(key)]

    assert passed_on("n8") == []  # it was for nobody
    for task_id in ("t1", "t2"):
        world.push(task_id, name="n0")
        assert passed_on("n1") == []
        assert [passed_on("n8") for _ in range(20)] == [[1]] * 16 + [[]] * 4
        world.redis.delete(*lists)


def test_what_a_claim_of_some_names_promotes_wakes_those_that_take_all(world: World) -> None:
    world.queue.claim("w", names=["mail"])
    world.push("t", name="report", delay=5)
    world.advance(5)
    world.redis.delete(world.keys["wake"])
    assert world.queue.claim("w", names=["mail"]) == []
    assert world.redis.exists(world.keys["wake"])


def test_a_run_has_the_time_that_its_own_worker_gives_it(world: World) -> None:
    WorkerStore(world.queue.link).beat({"names": ["a"]}, "other", {"a": {"timeout_ms": 1000}})
    claim = world.push_and_claim("t", name="a", lease=30)
    for _ in range(6):
        world.advance(10)
        assert world.queue.extend([claim], 30, timeouts=[60]) == ["extended"]
    world.advance(30)
    assert world.queue.extend([claim], 30, timeouts=[60]) == ["lost_lease"]


def test_a_time_out_of_an_operator_wins_over_the_handlers(world: World) -> None:
    world.queue.set_limits("a", timeout=10)
    claim = world.push_and_claim("t", name="a", lease=30)
    assert world.queue.extend([claim], 30, timeouts=[None]) == ["extended"]
    world.advance(20)
    assert world.queue.extend([claim], 30, timeouts=[None]) == ["extended"]
    world.advance(20)
    assert world.queue.extend([claim], 30, timeouts=[None]) == ["lost_lease"]


def test_a_token_is_passed_on_some_times_and_no_more(world: World) -> None:
    for n in range(24):  # those before it have places
        world.queue.claim("w", avoid=[f"a{n}"])
    world.push("t1", name="a")
    passed = 0
    for _ in range(30):
        world.redis.delete(world.keys["wake"])
        world.queue.claim("w", avoid=["a"])
        passed += world.redis.exists(world.keys["wake"])
    assert 1 <= passed <= 20


def beat(world: World, worker: str, limits: str = "") -> list[Any]:
    """Say that a worker is alive, for ten seconds."""
    answer: list[Any] = world.queue.link.run(
        "heartbeat",
        worker=worker,
        record='{"names":["a"]',
        ttl_ms=10_000,
        limits=limits,
        can_alert="",
    )
    return answer


def test_limits_of_an_operator_stand_over_those_of_workers(world: World) -> None:
    world.queue.set_limits("a", slots=1)
    beat(world, "w", '{"a":{"slots":5},"b":{"slots":5}}')
    assert {name: limits.slots for name, limits in world.queue.get_limits().items()} == {
        "a": 1,
        "b": 5,
    }


def test_a_worker_that_beats_no_more_is_forgotten(world: World) -> None:
    beat(world, "old")
    world.advance(5)
    assert beat(world, "new")[3] == []
    world.advance(6)
    assert beat(world, "new")[3] == [b"old"]
    assert world.dump()["workers"].keys() - {""} == {"new"}


# --- runs of a schedule ---------------------------------------------------------------------------


def fire_again(
    scheduler: TaskScheduler, clock: ManualClock, overlap: str
) -> tuple[TickReport, Claim]:
    """The report of a second fire of `s`, while the first run goes on."""
    scheduler.update_schedule("s", overlap=overlap)
    clock.advance(60)
    assert scheduler.tick().fired == 1
    claim = claim_one(scheduler.queue, lease=1000)
    clock.advance(60)
    return scheduler.tick(), claim


def test_a_run_that_goes_on_is_not_overlapped(world: World, old: TaskScheduler) -> None:
    report, _ = fire_again(old, world.clock, "skip")
    assert (report.fired, report.skipped) == (0, 1)
    assert world.queue.claim("w") == []


def test_a_buffered_run_waits_for_the_one_before(world: World, old: TaskScheduler) -> None:
    report, running = fire_again(old, world.clock, "buffer_one")
    assert report.fired == 1
    assert world.queue.claim("w") == []
    world.queue.finish(running)
    assert len(world.queue.claim("w")) == 1


def test_a_buffered_run_waits_for_the_end_of_all_others(world: World, old: TaskScheduler) -> None:
    _, running = fire_again(old, world.clock, "buffer_one")
    old.update_schedule("s", overlap="allow")
    world.advance(60)
    assert old.tick().fired == 1
    another = world.claim_one(lease=1000)
    world.queue.finish(running)
    assert world.queue.claim("w") == []
    world.queue.finish(another)
    assert len(world.queue.claim("w")) == 1


def test_a_run_that_is_replaced_is_cancelled(world: World, old: TaskScheduler) -> None:
    report, running = fire_again(old, world.clock, "cancel_previous")
    assert report.fired == 1
    assert world.info(running.task.task_id).cancel_requested


# --- schedules: what they may, and when they stop -------------------------------------------------


def due_score(world: World, schedule_id: str = "s") -> int:
    """When the loop looks at a schedule, ms."""
    score = world.redis.zscore(world.keys["due"], schedule_id)
    assert score is not None
    return int(score)


def nominal(world: World) -> int:
    """The next moment of schedule `s`, ms."""
    return int(plan(world).partition(b" ")[2])


def is_active(scheduler: TaskScheduler) -> bool:
    """Whether schedule `s` is."""
    schedule = scheduler.get_schedule("s")
    assert schedule is not None
    return schedule.is_active


def test_a_fire_is_put_off_by_its_jitter(world: World, old: TaskScheduler) -> None:
    options: dict[str, Any] = {"every": 3600, "jitter": 3000, "on_conflict": "replace"}
    old.add_schedule(user_id="alice", schedule_id="s", **options)
    assert due_score(world) > nominal(world)
    world.advance(7000)
    assert old.tick().fired == 1
    assert due_score(world) > nominal(world)
    old.update_schedule("s", every=7200)
    assert due_score(world) > nominal(world)


def test_a_schedule_has_no_more_runs_than_it_may(clock: ManualClock, old: TaskScheduler) -> None:
    old.update_schedule("s", max_runs=2)
    for _ in range(2):
        assert is_active(old)
        clock.advance(60)
        assert old.tick().fired == 1
    assert not is_active(old)
    clock.advance(60)
    assert old.tick().fired == 0


def test_a_schedule_that_has_had_its_runs_gets_no_other(world: World, old: TaskScheduler) -> None:
    world.advance(60)
    assert old.tick().fired == 1
    old.add_schedule("* * * * *", "alice", schedule_id="s", max_runs=1, on_conflict="replace")
    world.advance(60)
    assert old.tick().fired == 0
    assert not is_active(old)


def fail_once(clock: ManualClock, scheduler: TaskScheduler) -> None:
    """One more run of `s` that ends among the dead letters."""
    clock.advance(60)
    assert scheduler.tick().fired == 1
    scheduler.queue.bury(claim_one(scheduler.queue), "x")


def test_a_schedule_that_fails_too_often_is_paused(clock: ManualClock, old: TaskScheduler) -> None:
    old.update_schedule("s", max_failures=2)
    fail_once(clock, old)
    assert is_active(old)
    fail_once(clock, old)
    assert not is_active(old)
    clock.advance(60)
    assert old.tick().fired == 0


def test_a_success_ends_a_row_of_failures(clock: ManualClock, old: TaskScheduler) -> None:
    old.update_schedule("s", max_failures=2)
    fail_once(clock, old)
    clock.advance(60)
    old.tick()
    old.queue.finish(claim_one(old.queue))
    fail_once(clock, old)
    assert is_active(old)


def test_a_late_fire_does_not_undo_a_pause_for_failures(world: World, old: TaskScheduler) -> None:
    old.update_schedule("s", max_failures=1)
    world.advance(60)
    old.tick()
    claim = world.claim_one(lease=1000)
    reading = read_due(old, world.clock)
    world.queue.bury(claim, "x")
    report = fire(old, reading)
    assert report is not None
    assert (report.fired, report.moved) == (0, 1)
    assert not is_active(old)


def read_end_of_pause(scheduler: TaskScheduler, clock: ManualClock) -> Reading:
    """Pause `s` for half a minute, and read that this is over."""
    scheduler.pause_schedule("s", until=clock.now() + timedelta(seconds=30))
    return read_due(scheduler, clock)


def test_the_end_of_a_changed_pause_is_ignored(clock: ManualClock, old: TaskScheduler) -> None:
    reading = read_end_of_pause(old, clock)
    old.pause_schedule("s", until=clock.now() + timedelta(hours=1))
    fire(old, reading)
    assert not is_active(old)


def test_a_leader_whose_term_is_over_resumes_nothing(world: World, old: TaskScheduler) -> None:
    reading = read_end_of_pause(old, world.clock)
    world.advance(TERM_S)
    fire(old, reading)
    assert not is_active(old)


def read_broken(
    scheduler: TaskScheduler, clock: ManualClock, client: redis.Redis, queue: TaskQueue
) -> Reading:
    """Spoil the definition of `s`, as somebody else might, and read that it is due."""
    client.hset(queue.keys["schedules"], "s", "{")
    return read_due(scheduler, clock)


def test_a_leader_whose_term_is_over_sets_nothing_aside(world: World, old: TaskScheduler) -> None:
    reading = read_broken(old, world.clock, world.redis, world.queue)
    world.advance(TERM_S)
    fire(old, reading)
    assert old.problems() == []


@pytest.mark.parametrize("changed", ["plan", "schedules"])
def test_a_resaved_schedule_is_kept(world: World, old: TaskScheduler, changed: str) -> None:
    reading = read_broken(old, world.clock, world.redis, world.queue)
    world.redis.hset(world.keys[changed], "s", "something else")
    fire(old, reading)
    assert old.problems() == []


def test_a_schedule_that_was_saved_anew_is_not_removed(old: TaskScheduler) -> None:
    with pytest.raises(StaleVersion):
        old.remove_schedule("s", if_revision="another")
    assert old.get_schedule("s") is not None


def fill_moment(world: World, op: str, **read: str) -> list[Any]:
    """Send a backfill of one moment of `s`, made from the plan that is stored unless given."""
    base = plan(world).partition(b" ")[0].decode()
    document = task_document("alice", "default", 1, "{}", "s", 1000)
    arguments: dict[str, Any] = {
        "op": op,
        "id": "s",
        "base": base,
        "revision": f"{base}x",
        "user": "alice",
        "task_name": "default",
        "head": status_head("alice", "default", 1) + ',"schedule":"s"',
        "level": 1,
        "notes": "",
    }
    answer: list[Any] = world.queue.link.run(
        "backfill", rest=[1000, document], **(arguments | read)
    )
    return answer


@pytest.mark.usefixtures("old")
def test_a_moment_is_filled_once(world: World) -> None:
    assert fill_moment(world, "one") == [b"filled", 1]
    assert fill_moment(world, "two") == [b"filled", 0]
    assert world.queue.size() == 1


@pytest.mark.usefixtures("old")
def test_a_backfill_from_an_old_plan_changes_nothing(world: World) -> None:
    assert fill_moment(world, "one", base="old") == [b"changed"]
    assert world.queue.size() == 0


def test_a_user_has_no_more_schedules_than_allowed(queue: TaskQueue, old: TaskScheduler) -> None:
    queue.configure(max_schedules=1)
    with pytest.raises(ScheduleQuota):
        old.add_schedule("@daily", "alice", schedule_id="t")
    assert old.get_schedule("t") is None


def test_a_user_is_given_no_more_schedules_than_allowed(world: World, old: TaskScheduler) -> None:
    world.queue.configure(max_schedules=1)
    old.add_schedule("@daily", "bob", schedule_id="t")
    with pytest.raises(ScheduleQuota):
        old.update_schedule("t", user_id="alice")


# --- history --------------------------------------------------------------------------------------


def test_runs_are_listed_from_their_end_until_they_are_dropped(world: World) -> None:
    world.push("a", "b")
    finished, buried = world.queue.claim("w", limit=2)
    world.queue.finish(finished)
    assert {member[:2] for member in world.dump()["runs"]} == {"os", "ua", "nd"}
    world.queue.bury(buried, "no")
    assert {member[:2] for member in world.dump()["runs"]} >= {"os", "of"}
    world.queue.configure(keep_finished=0, keep_dead=0)
    world.push("c")
    world.queue.cancel("c")
    assert "runs" not in world.dump()
    assert "failures" not in world.dump()


def test_a_dead_letter_is_run_again_once(queue: TaskQueue) -> None:
    push(queue, "a")
    queue.bury(claim_one(queue), "no")
    task = make_task(task_id="again")
    fields: dict[str, Any] = {"id": "a", "user": "alice", "task_name": task.name}
    fields["document"] = task.document
    fields |= {"head": task.status_head, "level": "3", "schedule": ""}
    for n in range(3):
        answer = queue.link.run("revive", op=f"op{n}", new_id=f"again-{n}", **fields)
        assert answer == [b"retried", b"again-0"]
    assert queue.size() == 1


# --- what is in Redis -----------------------------------------------------------------------------


@pytest.mark.untidy
def test_a_key_of_a_wrong_type_stops_a_script_before_its_first_write(world: World) -> None:
    claim = world.push_and_claim("a")
    world.redis.set(world.keys["ended"], "text")
    before = world.dump()
    with pytest.raises(RedisRefused):
        world.queue.finish(claim)
    assert world.dump() == before


@pytest.mark.untidy
def test_a_push_looks_at_its_keys_before_its_first_write(world: World) -> None:
    world.redis.set(world.keys["parked"], "text")
    before = world.dump()
    with pytest.raises(RedisRefused):
        world.queue.push(make_task(task_id="a"))
    assert world.dump() == before


# --- tenants --------------------------------------------------------------------------------------


def test_a_user_id_of_two_tenants_is_two_users(queue: TaskQueue) -> None:
    queue.set_user("alice", tenant="acme", paused=True)
    push(queue, "t1", tenant="acme")
    push(queue, "t2", tenant="blue")
    assert ids_of(queue.claim("w", limit=2)) == ["t2"]


def test_a_schedule_is_listed_under_one_tenant(world: World, old: TaskScheduler) -> None:
    old.update_schedule("s", tenant="acme")
    old.update_schedule("s", tenant="blue")
    assert world.redis.zrange(world.keys["tenant_schedules"], 0, -1) == [b"blue\0alice\0s"]


def test_an_id_that_a_tenant_gives_is_not_compared_with_those_of_others(
    queue: TaskQueue, old: TaskScheduler
) -> None:
    blue = Inspector(queue, Actor(name="bo", tenant="blue"))
    push(queue, "t", tenant="acme")
    assert blue.schedules.add(schedule_id="s", cron_expr="0 9 * * *", user_id="bo") == "blue~s"
    assert blue.tasks.push(task_id="t", user_id="bo") == "blue~t"


def test_runs_that_are_asked_for_by_id_are_those_of_the_own_tenant(queue: TaskQueue) -> None:
    push(queue, "ours", tenant="blue")
    push(queue, "theirs", user_id="bob", tenant="acme")
    blue = Inspector(queue, Actor(name="bo", tenant="blue"))
    assert [run.task_id for run in blue.runs.find(["ours", "theirs"])] == ["ours"]


# --- the making of schedules ----------------------------------------------------------------------


def test_the_making_of_a_schedule_is_its_first_change(old: TaskScheduler) -> None:
    old.update_schedule("s", priority=5)
    assert [change.made for change in old.changes("s")] == [False, True]


def test_a_schedule_replaced_by_a_paused_one_is_not_due(world: World, old: TaskScheduler) -> None:
    old.add_schedule("* * * * *", "alice", schedule_id="s", on_conflict="replace", is_active=False)
    assert world.redis.zrange(world.keys["due"], 0, -1) == []


def test_an_http_task_to_the_inside_is_not_stored(queue: TaskQueue, old: TaskScheduler) -> None:
    payload = {"url": "https://169.254.169.254/"}
    with pytest.raises(InvalidPayload):
        old.add_schedule("* * * * *", "alice", name="http", payload=payload)
    with pytest.raises(InvalidPayload):
        old.update_schedule("s", name="http", payload=payload)
    with pytest.raises(InvalidPayload):
        Inspector(queue).tasks.push(user_id="alice", name="http", payload=payload)
    assert len(old.list_schedules()) == 1
    assert queue.size() == 0


# --- connections and processes --------------------------------------------------------------------


def test_a_server_that_was_there_before_is_given_time_to_come_back(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(queue, "before")
    queue.link.close()
    queue.link.connections._closed = False
    dial, refusals = queue.link.connections.dialer.dial, [NobodyThere("Connection refused")] * 2

    def refused_once(within: float = math.inf) -> AbstractConnection:
        if refusals:
            raise refusals.pop()
        return dial(within)

    monkeypatch.setattr(queue.link.connections.dialer, "dial", refused_once)
    push(queue, "after")
    assert (queue.size(), refusals) == (2, [])


def test_counters_go_on_when_a_process_is_replaced() -> None:
    registry = CollectorRegistry()
    runs = Metric("runs", "Runs.", registry=registry)
    tally = Tally(1, registry)
    tally._owner = 0  # as in a child: what is told here is not added to it
    for _ in range(3):
        with tally.reporting(0):
            runs.inc()
    (families,) = tally.read()
    assert families["runs"].values["runs_total", ()] == 3


def test_a_half_sent_request_has_its_time() -> None:
    app = Starlette()
    with (
        WebServer(app, limits=ClientLimits(head=0.05)) as server,
        socket.create_connection((server.host, server.port), 30) as client,
    ):
        client.sendall(b"GET / HTTP/1.1\r\n")
        assert client.recv(1) == b""


def test_streams_end_when_the_server_wants_to_end() -> None:
    async def watch() -> list[bytes]:
        ending: list[bool] = []
        live_updates = LiveUpdates(lambda tenant: {}, is_ending=lambda: bool(ending))
        messages = []
        async for message in live_updates.stream(None, None):
            messages.append(message)
            ending.append(True)
        return messages

    assert asyncio.run(asyncio.wait_for(watch(), 30))


def test_a_session_alone_changes_nothing_for_who_does_not_say_where_it_comes_from() -> None:
    cookie, key = (b"cookie", f"{SESSION_COOKIE}=x".encode()), (b"x-api-key", b"fq_x")

    def is_let_in(*headers: tuple[bytes, bytes]) -> bool:
        scope = {"type": "http", "method": "POST", "path": "/", "headers": list(headers)}
        return _is_same_origin(Request(scope), None)

    assert (is_let_in(cookie), is_let_in(cookie, key), is_let_in(key)) == (False, True, True)
