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
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as Metric
from redis.connection import AbstractConnection
from starlette.applications import Starlette
from starlette.requests import Request
from support import claim_one, dump, fill, ids_of, make_task, push, served_users, stats

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
from fairqueue.scheduler.leadership import Reading
from fairqueue.scheduler.scheduler import TaskScheduler, TickReport
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
    reading = scheduler._leadership.lead(10)
    assert [due.schedule_id for due in reading.due] == ["s"]
    return reading


def fire(scheduler: TaskScheduler, reading: Reading) -> TickReport | None:
    """The second half of a tick; None if the scheduler was told that it does not lead."""
    report = TickReport()
    return report if scheduler._handle(reading, report, None) else None


def leader(client: redis.Redis, queue: TaskQueue) -> Any:
    """Who leads, as the record says."""
    return json.loads(cast(bytes, client.get(queue.keys["leader"])))["scheduler"]


def plan(client: redis.Redis, queue: TaskQueue) -> bytes:
    """The plan of schedule `s`."""
    return cast(bytes, client.hget(queue.keys["plan"], "s"))


# --- leadership -----------------------------------------------------------------------------------


def test_a_leader_whose_place_is_taken_fires_nothing(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler, new: TaskScheduler
) -> None:
    reading = read_due(old, clock)
    clock.advance(TERM_S)
    assert new._leadership.lead(10).is_leader
    assert fire(old, reading) is None
    assert queue.size() == 0


def test_a_leader_whose_term_is_over_fires_nothing(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    reading = read_due(old, clock)
    clock.advance(TERM_S)
    assert fire(old, reading) is None
    assert queue.size() == 0


def test_a_follower_does_not_take_a_term_that_runs(
    redis_client: redis.Redis, queue: TaskQueue, old: TaskScheduler, new: TaskScheduler
) -> None:
    old.tick()
    assert not new.tick().is_leader
    assert leader(redis_client, queue) == "old"


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


def test_a_stale_leader_resigns_nobody_elses_term(
    redis_client: redis.Redis,
    queue: TaskQueue,
    clock: ManualClock,
    old: TaskScheduler,
    new: TaskScheduler,
) -> None:
    old.tick()
    clock.advance(TERM_S)
    new.tick()
    old.stop()
    assert leader(redis_client, queue) == "new"


# --- schedules ------------------------------------------------------------------------------------


def test_a_fire_of_a_plan_that_was_saved_anew_is_left_alone(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    reading = read_due(old, clock)
    old.update_schedule("s", payload={"n": 2})
    report = fire(old, reading)
    assert report is not None
    assert (report.fired, report.moved) == (0, 1)
    assert queue.size() == 0


def test_a_fire_that_was_made_already_is_left_alone(clock: ManualClock, old: TaskScheduler) -> None:
    reading = read_due(old, clock)
    assert old.tick().fired == 1
    report = fire(old, reading)
    assert report is not None
    assert (report.fired, report.moved) == (0, 1)


def test_a_fire_advances_the_plan_with_the_task(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    revision, moment = plan(redis_client, queue).split(b" ")
    clock.advance(60)
    assert old.tick().fired == 1
    assert plan(redis_client, queue) == b"%b %d" % (revision, int(moment) + 60_000)
    assert old.tick().fired == 0
    clock.advance(60)
    assert old.tick().fired == 1


def test_a_moment_that_comes_again_is_the_same_task(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    clock.advance(60)
    old.tick()
    queue.finish(claim_one(queue))
    clock.advance(-60)
    old.remove_schedule("s")
    old.add_schedule("* * * * *", "alice", payload={"n": 1}, schedule_id="s")
    clock.advance(60)
    assert old.tick().fired == 1
    assert queue.size() == 0


def test_a_moment_is_not_fired_again_when_the_clock_was_set_back(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    queue.configure(keep_finished=0)
    for _ in range(3):
        clock.advance(60)
        assert old.tick().fired == 1
        queue.finish(claim_one(queue))
    clock.advance(3600)  # long enough for all to be forgotten
    queue.set_user("bob", weight=2)
    clock.advance(3600)
    queue.set_user("bob", weight=1)
    clock.advance(-7380)
    old.update_schedule("s", cron_expr="*/1 * * * *")
    for fired in (0, 0, 0, 0, 1):
        report = old.tick()
        assert (report.fired, report.missed, queue.size()) == (fired, 0, fired)
        clock.advance(60)


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


def test_a_refused_fire_keeps_its_plan(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    queue.configure(max_waiting=1)
    push(queue, "in the way")
    before = plan(redis_client, queue)
    clock.advance(60)
    assert old.tick().refused == 1
    assert plan(redis_client, queue) == before
    assert queue.size() == 1


def update_from(
    queue: TaskQueue, client: redis.Redis, clock: ManualClock, **read: bytes | str
) -> list[bytes]:
    """Send an update that was made from what was read, which is what is stored unless given."""
    now_ms = clock.now_ms()
    stored = cast(bytes, client.hget(queue.keys["schedules"], "s"))
    arguments: dict[str, Any] = {
        "op": "op",
        "client_now": now_ms,
        "id": "s",
        "expected": stored,
        "base": plan(client, queue).partition(b" ")[0],
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
    answer: list[bytes] = queue.link.run("update_schedule", **(arguments | read))
    return answer


def test_an_update_from_an_old_text_changes_nothing(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler, redis_client: redis.Redis
) -> None:
    assert update_from(queue, redis_client, clock, expected="what it was") == [b"changed"]
    schedule = old.get_schedule("s")
    assert schedule is not None
    assert schedule.payload == {"n": 1}


def test_an_update_from_an_old_revision_changes_nothing(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler, redis_client: redis.Redis
) -> None:
    assert update_from(queue, redis_client, clock, base="what it was") == [b"changed"]
    schedule = old.get_schedule("s")
    assert schedule is not None
    assert schedule.payload == {"n": 1}


def test_a_moment_computed_from_a_wrong_clock_is_not_stored(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    wrong_ms = clock.now_ms() - 5000
    moment_ms = wrong_ms + 1000
    fields: list[str | int] = ["t", "alice", "default", "{}", "r", moment_ms, moment_ms]
    fields += ["", "", ""]
    answer = queue.link.run(
        "add_schedules", op="op", client_now=wrong_ms, on_conflict="error", rest=fields
    )
    assert answer == [b"skewed", clock.now_ms()]
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
    call |= {"error": "", "timed_out": "", "report": ""}
    assert queue.link.run("retry", **call) == b"retried"
    assert queue.link.run("retry", **call) == b"retried"


def test_an_answer_outlives_the_turn_of_the_generations(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "a")
    queue.cancel("unknown")
    clock.advance(59)
    assert queue.link.run("cancel", op="op", id="a") == b"cancelled"
    clock.advance(2)
    queue.cancel("unknown")
    clock.advance(27)
    queue.configure(keep_finished=0)
    push(queue, "b")
    queue.cancel("b")
    assert queue.get("a") is None
    assert queue.link.run("cancel", op="op", id="a") == b"cancelled"


def test_a_repeated_claim_gets_the_tasks_that_it_holds(queue: TaskQueue) -> None:
    fill(queue, "alice", 4)
    call: dict[str, Any] = {"op": "op", "worker": "w", "limit": 2, "lease_ms": 1000}
    call |= {"place": "here", "names": ""}
    first = queue.link.run("claim", **call)
    assert queue.link.run("claim", **call) == first
    assert queue.size() == 2


# --- leases ---------------------------------------------------------------------------------------


def test_a_worker_that_lost_its_lease_ends_nothing(queue: TaskQueue, clock: ManualClock) -> None:
    push(queue, "a")
    stale = claim_one(queue, lease=1)
    clock.advance(2)
    claim_one(queue, worker="another")
    for end in (queue.finish, queue.release, queue.retry, queue.bury):
        with pytest.raises(LeaseLost):
            end(stale)
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.worker_id) == ("running", "another")


@pytest.mark.parametrize("cancelled", [False, True])
def test_a_lease_that_was_taken_back_is_lost_however_the_task_ended(
    queue: TaskQueue, redis_client: redis.Redis, clock: ManualClock, cancelled: bool
) -> None:
    queue.configure(max_attempts=1)
    push(queue, "t1")
    claim = claim_one(queue, lease=1)
    if cancelled:
        queue.cancel("t1")
    clock.advance(1)
    assert queue.claim("other") == []
    info = queue.get("t1")
    assert info is not None
    assert info.state == ("cancelled" if cancelled else "buried")
    assert queue.extend([claim]) == ["lost_lease"]
    assert queue.finish_many([(claim, None)]) == ["lost_lease"]
    assert stats(redis_client)["lost_leases"] == 2


def test_a_worker_that_lost_its_lease_extends_nothing(queue: TaskQueue, clock: ManualClock) -> None:
    push(queue, "a")
    stale = claim_one(queue, lease=1)
    clock.advance(2)
    lease_until = claim_one(queue).lease_until
    assert queue.extend([stale], lease=1000) == ["lost_lease"]
    info = queue.get("a")
    assert info is not None
    assert info.lease_until == lease_until


def test_a_task_whose_leases_expire_is_not_offered_for_ever(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.configure(max_attempts=2)
    push(queue, "a")
    for _ in range(2):
        claim_one(queue, lease=1)
        clock.advance(2)
    assert queue.claim("w") == []
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.attempts) == ("buried", 2)


def test_a_run_that_does_not_answer_is_ended_and_not_offered_again(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "a", timeout=10)
    claim = claim_one(queue, lease=5)
    for _ in range(5):
        clock.advance(3)
        queue.extend([claim], lease=5)
    WorkerStore(queue.link).find_stale()
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.attempts) == ("buried", 1)
    with pytest.raises(LeaseLost):
        queue.finish(claim)


def test_a_run_whose_worker_died_before_its_deadline_is_offered_again(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "a", timeout=10)
    claim_one(queue, lease=5)
    clock.advance(100)
    WorkerStore(queue.link).find_stale()
    assert claim_one(queue).attempt == 2


def test_no_lease_is_kept_beyond_the_deadline_of_its_run(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "a", timeout=10)
    claim = claim_one(queue, lease=5)
    deadline = clock.now() + timedelta(seconds=15)
    assert queue.extend([claim], lease=3600) == ["extended"]
    info = queue.get("a")
    assert info is not None
    assert info.lease_until == deadline
    clock.advance(15)
    assert queue.extend([claim], lease=3600) == ["lost_lease"]


def test_a_run_that_is_to_be_cancelled_does_not_go_on_for_ever(
    queue: TaskQueue, clock: ManualClock
) -> None:
    push(queue, "a")
    claim = claim_one(queue, lease=5)
    queue.cancel("a")
    for _ in range(4):
        clock.advance(3)
        queue.extend([claim], lease=5)
    WorkerStore(queue.link).find_stale()
    info = queue.get("a")
    assert info is not None
    assert info.state == "cancelled"


def test_what_ended_without_a_word_is_told_until_somebody_has_heard(
    queue: TaskQueue, clock: ManualClock
) -> None:
    workers = WorkerStore(queue.link)
    push(queue, "a", max_attempts=1)
    claim_one(queue, lease=1)
    clock.advance(1)
    (notice,) = workers.look_over(can_alert=True)
    assert notice.task_id == "a"
    clock.advance(60)
    assert workers.look_over(can_alert=True) == [notice]
    clock.advance(60)
    assert workers.look_over(can_alert=True, heard=[notice.text]) == []


def test_a_task_that_is_to_be_cancelled_is_not_offered_again(queue: TaskQueue) -> None:
    push(queue, "a")
    claim = claim_one(queue)
    assert queue.cancel("a")
    queue.retry(claim)
    assert queue.claim("w") == []
    info = queue.get("a")
    assert info is not None
    assert info.state == "cancelled"


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


def test_a_pause_with_an_end_is_over_then(queue: TaskQueue, clock: ManualClock) -> None:
    fill(queue, "alice", 2)
    queue.pause_user("alice", until=clock.now() + timedelta(seconds=60))
    clock.advance(59)
    assert queue.claim("w") == []
    clock.advance(1)
    assert ids_of(queue.claim("w")) == ["alice-0"]


def test_a_purge_takes_delayed_tasks_and_leaves_nothing_of_them(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    push(queue, "later", user_id="alice", delay=60)
    assert Inspector(queue).users.purge("alice", dry_run=False) == 1
    assert not {"delayed", "delayed_index"} & dump(redis_client).keys()


def test_a_rate_limit_limits_and_passes(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_user("alice", rate=1)
    fill(queue, "alice", 5)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-0"]
    clock.advance(0.9)
    assert queue.claim("w", limit=5) == []
    clock.advance(0.1)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-1"]


def test_what_is_owed_from_a_lower_rate_is_cut_down(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_user("alice", rate=0.001)
    fill(queue, "alice", 5)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-0"]
    queue.set_user("alice", rate=10)
    clock.advance(0.1)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-1"]


def test_a_clock_that_is_set_back_lets_a_rate_go_on(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_user("alice", rate=1)
    fill(queue, "alice", 5)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-0"]
    clock.advance(-60)
    assert queue.claim("w", limit=5) == []
    clock.advance(1)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-1"]


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


def test_a_user_whose_critical_tasks_are_gone_is_not_looked_at_in_the_lane(
    queue: TaskQueue, redis_client: redis.Redis
) -> None:
    queue.set_limits("slow", slots=1)
    push(queue, "d1", user_id="dave", name="slow")
    queue.claim("w")  # which takes the slot
    fill(queue, "carol", 10, priority=Priority.CRITICAL)
    queue.claim("w", limit=10)  # which uses up the credit
    fill(queue, "alice", 1, priority=Priority.CRITICAL)
    push(queue, "a1", name="slow")
    fill(queue, "bob", 2)
    assert ids_of(queue.claim("w", limit=2)) == ["alice-0", "bob-0"]
    assert redis_client.exists(queue.keys["held"]) == 0


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


def test_the_end_of_a_lease_frees_its_slot(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock
) -> None:
    queue.set_limits("slow", slots=1)
    fill(queue, "alice", 3, name="slow")
    for _ in range(2):
        queue.finish(queue.claim("w", limit=2, lease=1)[0])
        assert "slots" not in dump(redis_client)
    queue.claim("w", lease=1)
    clock.advance(2)
    queue.set_user("alice", paused=True)
    queue.claim("w")
    assert "slots" not in dump(redis_client)


def test_a_release_frees_its_slot(redis_client: redis.Redis, queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=1)
    fill(queue, "alice", 1, name="slow")
    queue.release(claim_one(queue))
    assert "slots" not in dump(redis_client)


@pytest.mark.untidy
def test_a_slot_without_a_lease_is_free(redis_client: redis.Redis, queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=1)
    redis_client.zadd(queue.keys["slots"], {"slow\0gone": 0})
    fill(queue, "alice", 1, name="slow")
    assert len(queue.claim("w")) == 1


def test_tasks_that_wait_for_a_slot_get_it(queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=1)
    fill(queue, "alice", 4, name="slow")
    (running,) = queue.claim("w", limit=4)
    queue.finish(running)
    assert served_users(queue, 4) == ["alice"] * 3


def test_users_who_wait_for_slots_take_turns(redis_client: redis.Redis, queue: TaskQueue) -> None:
    queue.set_limits("slow", slots=1)
    fill(queue, "alice", 5, name="slow")
    fill(queue, "bob", 5, name="slow")
    queue.claim("w", limit=9)
    line = dump(redis_client)["slot_line"]
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


def test_a_rate_of_a_name_limits_and_passes(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_limits("slow", rate=1)
    fill(queue, "alice", 5, name="slow")
    assert ids_of(queue.claim("w", limit=5)) == ["alice-0"]
    clock.advance(0.9)
    assert queue.claim("w", limit=5) == []
    clock.advance(0.1)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-1"]


def test_a_claim_takes_nothing_that_it_avoids(queue: TaskQueue) -> None:
    fill(queue, "alice", 2, name="a")
    fill(queue, "bob", 2, name="b")
    assert ids_of(queue.claim("w", limit=9, avoid=["a"])) == ["bob-0", "bob-1"]


def test_a_claim_looks_behind_users_who_have_nothing_for_it(queue: TaskQueue) -> None:
    for n in range(30):
        push(queue, f"t{n}", user_id=f"u{n:02}", name="a")
    push(queue, "wanted", user_id="zoe", name="b")
    assert ids_of(queue.claim("w", names=["b"])) == ["wanted"]


def others(queue: TaskQueue, users: int) -> None:
    """So many users with a task that a claim of the name `b` does not want."""
    queue.push_many(make_task(f"u{n:03}", f"a{n}", name="a") for n in range(users))


def test_repeated_claims_come_to_users_far_behind(queue: TaskQueue) -> None:
    others(queue, 400)
    push(queue, "wanted", user_id="zoe", name="b")
    assert [ids_of(queue.claim("w", names=["b"])) for _ in range(8)].count(["wanted"]) == 1


def test_a_claim_looks_at_users_of_whom_its_kind_was_told(queue: TaskQueue) -> None:
    others(queue, 900)
    queue.claim("w", names=["b"])
    push(queue, "wanted", user_id="zoe", name="b")
    assert ids_of(queue.claim("w", names=["b"])) == ["wanted"]


def test_a_kind_hears_of_a_user_who_may_be_served_again(queue: TaskQueue) -> None:
    others(queue, 3)
    queue.set_user("zoe", paused=True)
    push(queue, "wanted", user_id="zoe", name="b")
    assert queue.claim("w", names=["b"]) == []
    queue.set_user("zoe", paused=False)
    assert ids_of(queue.claim("w", names=["b"])) == ["wanted"]


def test_a_claim_in_vain_does_not_look_at_everybody(queue: TaskQueue) -> None:
    others(queue, 600)
    push(queue, "wanted", user_id="zoe", name="b")
    assert queue.claim("w", names=["b"]) == []


def test_kinds_that_share_a_list_pass_on_what_is_for_the_other(
    redis_client: redis.Redis, queue: TaskQueue
) -> None:
    for n in range(9):  # the first and the ninth wait at one list
        queue.claim("w", names=[f"n{n}"])
    lists = [queue.keys["wake"], *(queue.keys[f"wake_{n + 1}"] for n in range(8))]

    def passed_on(name: str) -> list[int]:
        redis_client.delete(*lists)
        queue.claim("w", names=[name])
        return [number for number, key in enumerate(lists) if redis_client.exists(key)]

    assert passed_on("n8") == []  # it was for nobody
    for task_id in ("t1", "t2"):
        push(queue, task_id, name="n0")
        assert passed_on("n1") == []
        assert [passed_on("n8") for _ in range(20)] == [[1]] * 16 + [[]] * 4
        redis_client.delete(*lists)


def test_what_a_claim_of_some_names_promotes_wakes_those_that_take_all(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock
) -> None:
    queue.claim("w", names=["mail"])
    push(queue, "t", name="report", delay=5)
    clock.advance(5)
    redis_client.delete(queue.keys["wake"])
    assert queue.claim("w", names=["mail"]) == []
    assert redis_client.exists(queue.keys["wake"])


def test_a_run_has_the_time_that_its_own_worker_gives_it(
    queue: TaskQueue, clock: ManualClock
) -> None:
    WorkerStore(queue.link).beat({"names": ["a"]}, "other", {"a": {"timeout_ms": 1000}})
    push(queue, "t", name="a")
    claim = claim_one(queue, lease=30)
    for _ in range(6):
        clock.advance(10)
        assert queue.extend([claim], 30, timeouts=[60]) == ["extended"]
    clock.advance(30)
    assert queue.extend([claim], 30, timeouts=[60]) == ["lost_lease"]


def test_a_time_out_of_an_operator_wins_over_the_handlers(
    queue: TaskQueue, clock: ManualClock
) -> None:
    queue.set_limits("a", timeout=10)
    push(queue, "t", name="a")
    claim = claim_one(queue, lease=30)
    assert queue.extend([claim], 30, timeouts=[None]) == ["extended"]
    clock.advance(20)
    assert queue.extend([claim], 30, timeouts=[None]) == ["extended"]
    clock.advance(20)
    assert queue.extend([claim], 30, timeouts=[None]) == ["lost_lease"]


def test_a_token_is_passed_on_some_times_and_no_more(
    redis_client: redis.Redis, queue: TaskQueue
) -> None:
    for n in range(24):  # those before it have places
        queue.claim("w", avoid=[f"a{n}"])
    push(queue, "t1", name="a")
    passed = 0
    for _ in range(30):
        redis_client.delete(queue.keys["wake"])
        queue.claim("w", avoid=["a"])
        passed += redis_client.exists(queue.keys["wake"])
    assert 1 <= passed <= 20


def beat(queue: TaskQueue, worker: str, limits: str = "") -> list[Any]:
    """Say that a worker is alive, for ten seconds."""
    answer: list[Any] = queue.link.run(
        "heartbeat",
        worker=worker,
        record='{"names":["a"]',
        ttl_ms=10_000,
        limits=limits,
        can_alert="",
    )
    return answer


def test_limits_of_an_operator_stand_over_those_of_workers(queue: TaskQueue) -> None:
    queue.set_limits("a", slots=1)
    beat(queue, "w", '{"a":{"slots":5},"b":{"slots":5}}')
    assert {name: limits.slots for name, limits in queue.get_limits().items()} == {"a": 1, "b": 5}


def test_a_worker_that_beats_no_more_is_forgotten(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock
) -> None:
    beat(queue, "old")
    clock.advance(5)
    assert beat(queue, "new")[3] == []
    clock.advance(6)
    assert beat(queue, "new")[3] == [b"old"]
    assert dump(redis_client)["workers"].keys() - {""} == {"new"}


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


def test_a_run_that_goes_on_is_not_overlapped(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    report, _ = fire_again(old, clock, "skip")
    assert (report.fired, report.skipped) == (0, 1)
    assert queue.claim("w") == []


def test_a_buffered_run_waits_for_the_end_of_the_one_before(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    report, running = fire_again(old, clock, "buffer_one")
    assert report.fired == 1
    assert queue.claim("w") == []
    queue.finish(running)
    assert len(queue.claim("w")) == 1


def test_a_buffered_run_waits_for_the_end_of_all_others(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    _, running = fire_again(old, clock, "buffer_one")
    old.update_schedule("s", overlap="allow")
    clock.advance(60)
    assert old.tick().fired == 1
    another = claim_one(queue, lease=1000)
    queue.finish(running)
    assert queue.claim("w") == []
    queue.finish(another)
    assert len(queue.claim("w")) == 1


def test_a_run_that_is_replaced_is_cancelled(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    report, running = fire_again(old, clock, "cancel_previous")
    assert report.fired == 1
    info = queue.get(running.task.task_id)
    assert info is not None
    assert info.cancel_requested


# --- schedules: what they may, and when they stop -------------------------------------------------


def due_score(client: redis.Redis, queue: TaskQueue, schedule_id: str = "s") -> int:
    """When the loop looks at a schedule, ms."""
    score = client.zscore(queue.keys["due"], schedule_id)
    assert score is not None
    return int(score)


def nominal(client: redis.Redis, queue: TaskQueue) -> int:
    """The next moment of schedule `s`, ms."""
    return int(plan(client, queue).partition(b" ")[2])


def is_active(scheduler: TaskScheduler) -> bool:
    """Whether schedule `s` is."""
    schedule = scheduler.get_schedule("s")
    assert schedule is not None
    return schedule.is_active


def test_a_fire_is_put_off_by_its_jitter(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    options: dict[str, Any] = {"every": 3600, "jitter": 3000, "on_conflict": "replace"}
    old.add_schedule(user_id="alice", schedule_id="s", **options)
    assert due_score(redis_client, queue) > nominal(redis_client, queue)
    clock.advance(7000)
    assert old.tick().fired == 1
    assert due_score(redis_client, queue) > nominal(redis_client, queue)
    old.update_schedule("s", every=7200)
    assert due_score(redis_client, queue) > nominal(redis_client, queue)


def test_a_schedule_has_no_more_runs_than_it_may(clock: ManualClock, old: TaskScheduler) -> None:
    old.update_schedule("s", max_runs=2)
    for _ in range(2):
        assert is_active(old)
        clock.advance(60)
        assert old.tick().fired == 1
    assert not is_active(old)
    clock.advance(60)
    assert old.tick().fired == 0


def test_a_schedule_that_has_had_its_runs_gets_no_other(
    clock: ManualClock, old: TaskScheduler
) -> None:
    clock.advance(60)
    assert old.tick().fired == 1
    old.add_schedule("* * * * *", "alice", schedule_id="s", max_runs=1, on_conflict="replace")
    clock.advance(60)
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


def test_a_fire_on_its_way_does_not_undo_a_pause_for_failures(
    queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    old.update_schedule("s", max_failures=1)
    clock.advance(60)
    old.tick()
    claim = claim_one(queue, lease=1000)
    reading = read_due(old, clock)
    queue.bury(claim, "x")
    report = fire(old, reading)
    assert report is not None
    assert (report.fired, report.moved) == (0, 1)
    assert not is_active(old)


def read_end_of_pause(scheduler: TaskScheduler, clock: ManualClock) -> Reading:
    """Pause `s` for half a minute, and read that this is over."""
    scheduler.pause_schedule("s", until=clock.now() + timedelta(seconds=30))
    return read_due(scheduler, clock)


def test_the_end_of_a_pause_that_was_changed_is_left_alone(
    clock: ManualClock, old: TaskScheduler
) -> None:
    reading = read_end_of_pause(old, clock)
    old.pause_schedule("s", until=clock.now() + timedelta(hours=1))
    fire(old, reading)
    assert not is_active(old)


def test_a_leader_whose_term_is_over_resumes_nothing(
    clock: ManualClock, old: TaskScheduler
) -> None:
    reading = read_end_of_pause(old, clock)
    clock.advance(TERM_S)
    fire(old, reading)
    assert not is_active(old)


def read_broken(
    scheduler: TaskScheduler, clock: ManualClock, client: redis.Redis, queue: TaskQueue
) -> Reading:
    """Spoil the definition of `s`, as somebody else might, and read that it is due."""
    client.hset(queue.keys["schedules"], "s", "{")
    return read_due(scheduler, clock)


def test_a_leader_whose_term_is_over_sets_nothing_aside(
    redis_client: redis.Redis, queue: TaskQueue, clock: ManualClock, old: TaskScheduler
) -> None:
    reading = read_broken(old, clock, redis_client, queue)
    clock.advance(TERM_S)
    fire(old, reading)
    assert old.problems() == []


@pytest.mark.parametrize("changed", ["plan", "schedules"])
def test_a_schedule_that_was_saved_anew_is_not_set_aside(
    redis_client: redis.Redis,
    queue: TaskQueue,
    clock: ManualClock,
    old: TaskScheduler,
    changed: str,
) -> None:
    reading = read_broken(old, clock, redis_client, queue)
    redis_client.hset(queue.keys[changed], "s", "something else")
    fire(old, reading)
    assert old.problems() == []


def test_a_schedule_that_was_saved_anew_is_not_removed(old: TaskScheduler) -> None:
    with pytest.raises(StaleVersion):
        old.remove_schedule("s", if_revision="another")
    assert old.get_schedule("s") is not None


def fill_moment(queue: TaskQueue, client: redis.Redis, op: str, **read: str) -> list[Any]:
    """Send a backfill of one moment of `s`, made from the plan that is stored unless given."""
    base = plan(client, queue).partition(b" ")[0].decode()
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
    answer: list[Any] = queue.link.run("backfill", rest=[1000, document], **(arguments | read))
    return answer


@pytest.mark.usefixtures("old")
def test_a_moment_is_filled_once(redis_client: redis.Redis, queue: TaskQueue) -> None:
    assert fill_moment(queue, redis_client, "one") == [b"filled", 1]
    assert fill_moment(queue, redis_client, "two") == [b"filled", 0]
    assert queue.size() == 1


@pytest.mark.usefixtures("old")
def test_a_backfill_from_an_old_plan_changes_nothing(
    redis_client: redis.Redis, queue: TaskQueue
) -> None:
    assert fill_moment(queue, redis_client, "one", base="old") == [b"changed"]
    assert queue.size() == 0


def test_a_user_has_no_more_schedules_than_allowed(queue: TaskQueue, old: TaskScheduler) -> None:
    queue.configure(max_schedules=1)
    with pytest.raises(ScheduleQuota):
        old.add_schedule("@daily", "alice", schedule_id="t")
    assert old.get_schedule("t") is None


def test_a_user_is_given_no_more_schedules_than_allowed(
    queue: TaskQueue, old: TaskScheduler
) -> None:
    queue.configure(max_schedules=1)
    old.add_schedule("@daily", "bob", schedule_id="t")
    with pytest.raises(ScheduleQuota):
        old.update_schedule("t", user_id="alice")


# --- history --------------------------------------------------------------------------------------


def test_runs_are_listed_from_their_end_until_they_are_dropped(
    redis_client: redis.Redis, queue: TaskQueue
) -> None:
    push(queue, "a", "b")
    finished, buried = queue.claim("w", limit=2)
    queue.finish(finished)
    assert {member[:2] for member in dump(redis_client)["runs"]} == {"os", "ua", "nd"}
    queue.bury(buried, "no")
    assert {member[:2] for member in dump(redis_client)["runs"]} >= {"os", "of"}
    queue.configure(keep_finished=0, keep_dead=0)
    push(queue, "c")
    queue.cancel("c")
    assert "runs" not in dump(redis_client)
    assert "failures" not in dump(redis_client)


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
def test_a_key_of_a_wrong_type_stops_a_script_before_its_first_write(
    redis_client: redis.Redis, queue: TaskQueue
) -> None:
    push(queue, "a")
    claim = claim_one(queue)
    redis_client.set(queue.keys["ended"], "text")
    before = dump(redis_client)
    with pytest.raises(RedisRefused):
        queue.finish(claim)
    assert dump(redis_client) == before


@pytest.mark.untidy
def test_a_push_looks_at_its_keys_before_its_first_write(
    redis_client: redis.Redis, queue: TaskQueue
) -> None:
    redis_client.set(queue.keys["delayed"], "text")
    before = dump(redis_client)
    with pytest.raises(RedisRefused):
        queue.push(make_task(task_id="a", delay=5))
    assert dump(redis_client) == before


# --- tenants --------------------------------------------------------------------------------------


def test_a_user_stays_with_its_first_tenant(queue: TaskQueue) -> None:
    push(queue, "t1", tenant="acme")
    push(queue, "t2", tenant="blue")
    assert queue.tenant_of("alice") == "acme"


def test_a_schedule_is_listed_under_one_tenant(
    queue: TaskQueue, old: TaskScheduler, redis_client: redis.Redis
) -> None:
    old.update_schedule("s", tenant="acme")
    old.update_schedule("s", tenant="blue")
    assert redis_client.zrange(queue.keys["tenant_schedules"], 0, -1) == [b"blue\0alice\0s"]


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


def test_a_schedule_that_is_replaced_by_a_paused_one_is_not_due(
    queue: TaskQueue, old: TaskScheduler, redis_client: redis.Redis
) -> None:
    old.add_schedule("* * * * *", "alice", schedule_id="s", on_conflict="replace", is_active=False)
    assert redis_client.zrange(queue.keys["due"], 0, -1) == []


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
    queue.link._closed = False
    dial, refusals = queue.link._dialer.dial, [NobodyThere("Connection refused")] * 2

    def refused_once(within: float = math.inf) -> AbstractConnection:
        if refusals:
            raise refusals.pop()
        return dial(within)

    monkeypatch.setattr(queue.link._dialer, "dial", refused_once)
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
