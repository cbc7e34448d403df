"""Each guard of the scripts by itself: one short test that fails when the guard is taken away.

`scripts/mutants.py` takes each away in turn, in a copy, and sees to it that these tests notice.
"""

import json
from collections import Counter
from typing import Any, cast

import pytest
import redis
from support import claim_one, dump, fill, ids_of, make_task, push, served_users

from fairqueue.clock import ManualClock
from fairqueue.errors import LeaseLost, QueueFull, RedisRefused
from fairqueue.leadership import Reading
from fairqueue.queue import TaskQueue
from fairqueue.scheduler import TaskScheduler, TickReport
from fairqueue.validation import Priority

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
    old.update_schedule("s", cron_expr="*/1 * * * *")
    clock.advance(60)
    assert old.tick().fired == 1
    assert queue.size() == 0


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
        "revision": "r",
        "next_ms": now_ms + 1000,
        "active": "",
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
    fields: list[str | int] = ["t", "alice", "{}", "r", wrong_ms + 1000]
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
    call: dict[str, Any] = {"op": "op", "id": "a", "token": claim.token, "error": "", "delay_ms": 0}
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
    first = queue.link.run("claim", **call)
    assert queue.link.run("claim", **call) == first
    assert queue.size() == 2


# --- leases ---------------------------------------------------------------------------------------


def test_a_worker_that_lost_its_lease_ends_nothing(queue: TaskQueue, clock: ManualClock) -> None:
    push(queue, "a")
    stale = claim_one(queue, lease=1)
    clock.advance(2)
    claim_one(queue, worker="another")
    with pytest.raises(LeaseLost):
        queue.finish(stale)
    with pytest.raises(LeaseLost):
        queue.release(stale)
    info = queue.get("a")
    assert info is not None
    assert (info.state, info.worker_id) == ("running", "another")


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


def test_a_rate_limit_limits_and_passes(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_user("alice", rate=1)
    fill(queue, "alice", 5)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-0"]
    clock.advance(0.9)
    assert queue.claim("w", limit=5) == []
    clock.advance(0.1)
    assert ids_of(queue.claim("w", limit=5)) == ["alice-1"]


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


def test_a_full_queue_takes_no_more(queue: TaskQueue) -> None:
    queue.configure(max_waiting=2)
    push(queue, "a", "b")
    with pytest.raises(QueueFull):
        push(queue, "c")
    assert queue.size() == 2


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
