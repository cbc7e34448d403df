"""The queue on a real server: each transition as a state before, one call, and a state after."""

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import changes, check_consistency, dump, only_lazy_keys, places, stats
from helpers.tasks import claim_one, fill, ids_of, info_of, make_task, push
from helpers.waiting import in_thread, until_blocked
from helpers.world import World

from fairqueue.clock import from_ms
from fairqueue.errors import (
    BrokenRecord,
    ConfigurationError,
    FairQueueError,
    InvalidTask,
    LeaseLost,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
    UnknownTask,
)
from fairqueue.link.connection import Link
from fairqueue.link.keys import KEY_TYPES
from fairqueue.link.scripts import load_script, parts_of
from fairqueue.models import Claim, QueueSettings, UserSettings
from fairqueue.queue.claim import Wanted, this_place
from fairqueue.queue.queue import TaskQueue
from fairqueue.reasons import when
from fairqueue.validation import Priority

# --- pushing --------------------------------------------------------------------------------------


def test_a_pushed_task_is_stored_whole(world: World) -> None:
    task = make_task("zoë", "t1", payload={"n": 1, "é": ["a"]}, name="build", priority=4)
    assert world.queue.push(task) == "t1"
    now = world.clock.now_ms()
    rank = "2" + "1".zfill(14)
    assert world.dump() == {
        "tasks": {"t1": json.loads(task.document)},
        "status": {
            "t1": {
                "user": "zoë",
                "name": "build",
                "level": 4,
                "attempts": 0,
                "state": "ready",
                "rank": rank,
                "pushed": now,
                "due": now,
            }
        },
        "backlog": {f"zoë\0{rank}\0t1\0build": 0.0},
        "waiting": {"t1": float(now)},
        "ready": {"zoë": 1.0},
        "served": {"zoë": "late"},
        "fair": {"layout": "1", "clock": "0", "critical_clock": "0", "seq": "1"},
        "wake": ["1"],
    }


def test_pushing_the_same_task_again_is_one_task(world: World) -> None:
    task = make_task(task_id="t1", payload={"n": 1})
    world.queue.push(task)
    before = world.dump()
    world.queue.push(task)
    world.queue.push(make_task(task_id="t1", payload={"n": 1}))
    assert changes(before, world.dump()) == {"stats.duplicates": (None, "2")}


@pytest.mark.parametrize(
    "other",
    [
        {"payload": {"n": 2}},
        {"payload": {"n": 1}, "user_id": "bob"},
        {"payload": {"n": 1}, "name": "other"},
        {"payload": {"n": 1}, "priority": Priority.HIGH},
    ],
    ids=["payload", "user", "name", "priority"],
)
def test_the_same_id_with_other_content_is_refused(world: World, other: dict[str, Any]) -> None:
    world.queue.push(make_task(task_id="t1", payload={"n": 1}))
    before = world.dump()
    with pytest.raises(InvalidTask, match="'t1' is already used by a task with different content"):
        world.queue.push(make_task(**{"user_id": "alice", "task_id": "t1", **other}))
    assert world.dump() == before


@pytest.mark.parametrize("state", ["running", "finished", "buried", "cancelled", "delayed"])
def test_a_known_id_is_recognised_in_every_state(world: World, state: str) -> None:
    world.queue.push(make_task(task_id="t1", payload={"n": 1}))
    bring_to(world, "t1", state)
    before = world.dump()
    assert world.queue.push(make_task(task_id="t1", payload={"n": 1})) == "t1"
    assert changes(before, world.dump()) == {"stats.duplicates": (None, "1")}
    with pytest.raises(InvalidTask, match="'t1'"):
        world.queue.push(make_task(task_id="t1", payload={"n": 2}))


def bring_to(world: World, task_id: str, state: str) -> Claim | None:
    """Bring the only ready task into a state."""
    if state == "ready":
        return None
    if state == "cancelled":
        assert world.queue.cancel(task_id)
        return None
    claim = world.claim_one()
    if state == "finished":
        world.queue.finish(claim)
    elif state == "buried":
        world.queue.bury(claim, "broken")
    elif state == "delayed":
        world.queue.retry(claim, "again", delay=5)
    return claim


def test_a_gone_id_with_other_content_is_refused(world: World, other: dict[str, Any]) -> None:
    world.queue.configure(keep_finished=0)
    world.queue.push(make_task(task_id="t1", payload={"n": 1}))
    world.queue.finish(world.claim_one())
    assert world.queue.get("t1") is None
    assert world.queue.push(make_task(task_id="t1", payload={"n": 1})) == "t1"
    assert world.queue.size() == 0
    with pytest.raises(InvalidTask, match="'t1'"):
        world.queue.push(make_task(task_id="t1", payload={"n": 2}))


def test_an_id_is_free_again_a_while_after_its_task_is_gone(world: World) -> None:
    world.queue.configure(keep_finished=0)
    world.push("t1")
    world.queue.finish(world.claim_one())
    for n in range(3):  # two generations of remembered operations
        world.advance(61)
        world.push(f"other-{n}")
        world.queue.finish(world.claim_one())
    world.queue.push(make_task(task_id="t1", payload={"n": 2}))
    assert world.queue.size() == 1


def test_many_tasks_are_pushed_in_order(world: World) -> None:
    tasks = [make_task(f"user-{n % 7}", f"t{n}", payload={"n": n}) for n in range(1001)]
    assert world.queue.push_many(iter(tasks)) == [f"t{n}" for n in range(1001)]
    assert world.queue.size() == 1001
    assert world.stats() == {"pushed": 1001}
    claims = world.queue.claim("w", limit=1000)
    assert len(claims) == 1000
    of_user = [c.task.payload["n"] for c in claims if c.task.user_id == "user-3"]
    assert of_user == sorted(of_user)


def test_pushing_none_asks_nothing_of_redis(redis_client: redis.Redis) -> None:
    nowhere = TaskQueue.from_url("redis://127.0.0.1:1/0", timeout=0.1)
    assert nowhere.push_many([]) == []


def test_the_same_task_twice_in_one_call_is_one_task(queue: TaskQueue) -> None:
    task = make_task(task_id="t1")
    assert queue.push_many([task, task]) == ["t1", "t1"]
    assert queue.size() == 1


def test_a_few_hundred_are_stored_together_or_not_at_all(world: World) -> None:
    world.push("taken")
    before = world.dump()
    tasks = [make_task(task_id=f"t{n}") for n in range(100)]
    with pytest.raises(InvalidTask, match="'taken'"):
        world.queue.push_many([*tasks, make_task(task_id="taken", payload={"other": 1})])
    assert world.dump() == before


def test_a_task_id_twice_in_one_call_with_other_content_is_refused(world: World) -> None:
    with pytest.raises(InvalidTask, match="'t1'"):
        world.queue.push_many([make_task(task_id="t1"), make_task(task_id="t1", payload={"n": 1})])
    assert world.dump() == {}


def test_push_many_after_an_error_can_be_repeated(queue: TaskQueue) -> None:
    queue.configure(max_waiting=600)
    tasks = [make_task(task_id=f"t{n}") for n in range(700)]
    with pytest.raises(QueueFull):
        queue.push_many(tasks)
    queue.configure(max_waiting=0)
    assert len(queue.push_many(tasks)) == 700
    assert queue.size() == 700


@pytest.mark.parametrize("limited", ["queue", "user"])
def test_a_full_queue_takes_no_more(world: World, limited: str) -> None:
    if limited == "queue":
        world.queue.configure(max_waiting=3)
    else:
        world.queue.set_user("alice", max_waiting=3)
    world.fill("alice", 2)
    with pytest.raises(
        QueueFull, match=f"'t2' was not stored: max_waiting is reached for the {limited}"
    ):
        world.push("t1", "t2")
    assert world.places() == {"ready": ["alice-0", "alice-1"]}
    world.push("t1")
    world.push("t1")  # a repeated push is no new task
    if limited == "user":
        world.push("b1", user_id="bob")
    world.queue.finish(world.claim_one())
    world.push("t2")
    assert world.stats()["refused"] == 1


def test_delayed_tasks_count_towards_the_limit_of_the_queue(queue: TaskQueue) -> None:
    queue.configure(max_waiting=2)
    push(queue, "t1", "t2", delay=60)
    with pytest.raises(QueueFull):
        push(queue, "t3")


# --- delays ---------------------------------------------------------------------------------------


def test_a_delayed_task_becomes_ready_at_its_moment(world: World) -> None:
    world.push("t1", delay=10)
    state = world.dump()
    assert state["delayed"] == {"t1": world.clock.now_ms() + 10_000}
    assert state["status"]["t1"]["state"] == "delayed"
    assert not state.keys() & {"backlog", "waiting", "ready", "parked"}
    assert world.queue.size() == 0
    world.advance(9.999)
    assert world.queue.claim("w") == []
    world.advance(0.001)
    assert world.claim_one().task.task_id == "t1"
    assert "delayed" not in world.dump()


@pytest.mark.parametrize(
    ("fields", "due_in"),
    [
        ({"delay": 0}, 0),
        ({"delay": 2.5}, 2500),
        ({"delay": timedelta(minutes=1)}, 60_000),
        ({"at": 1_700_000_010.5}, 10_500),
        ({"at": from_ms(1_700_000_001_234)}, 1234),
        ({"at": 0}, 0),
        ({"at": from_ms(-1000)}, 0),
        ({"at": from_ms(253_400_000_000_000)}, 253_400_000_000_000 - 1_700_000_000_000),
    ],
    ids=["0", "seconds", "timedelta", "at s", "at datetime", "past", "before 1970", "year 9999"],
)
def test_when_a_task_becomes_ready(world: World, fields: dict[str, Any], due_in: int) -> None:
    world.push("t1", **fields)
    info = world.info("t1")
    assert info.due_at == from_ms(world.clock.now_ms() + due_in)
    assert info.state == ("delayed" if due_in else "ready")
    world.clock.set(info.due_at)
    assert ids_of(world.queue.claim("w")) == ["t1"]


def test_more_due_tasks_than_one_claim_promotes_are_all_offered(world: World) -> None:
    world.fill("alice", 250, delay=1)
    world.advance(1)
    got = [len(world.queue.claim("w", limit=1000)) for _ in range(5)]
    assert sum(got) == 250
    assert 0 < got[0] < 250


@pytest.mark.parametrize("as_retries", [False, True])
def test_a_due_task_does_not_wait_for_another_user(world: World, as_retries: bool) -> None:
    """Ten thousand of one user become ready a moment before the one task of another."""
    count = 1000 if as_retries else 10_000
    if as_retries:
        world.queue.push_many(make_task("alice") for _ in range(count))
        while claims := world.queue.claim("w", limit=250):
            for claim in claims:
                world.queue.retry(claim, "later", delay=60)
        world.advance(0.001)
        world.push("single", user_id="bob")
        world.queue.retry(world.claim_one(), "later", delay=60)
    else:
        world.queue.push_many(make_task("alice", delay=60) for _ in range(count))
        world.push("single", user_id="bob", delay=60.001)
    world.advance(61)
    users = [claim.task.user_id for _ in range(2) for claim in world.queue.claim("w", limit=8)]
    assert "bob" in users
    world.check()


def test_due_tasks_of_many_users_are_promoted_in_turns(world: World) -> None:
    """Whoever has more due waits behind those who have not had a turn."""
    for n in range(3):
        world.queue.push_many(make_task(f"heavy-{n}", delay=1) for _ in range(500))
    world.queue.push_many(make_task(f"light-{n}", delay=2) for n in range(150))
    world.advance(3)
    for _ in range(4):
        world.queue.claim("w")
    backlog = world.dump()["backlog"]
    promoted = {member.split("\0")[0] for member in backlog}
    assert len({user for user in promoted if user.startswith("light")}) >= 149
    while world.queue.claim("w", limit=250):
        pass
    state = world.dump()
    assert not {"delayed", "delayed_index", "delayed_users"} & state.keys()


def test_delayed_tasks_that_no_index_has_become_ready_too(world: World) -> None:
    """As a version before the index has stored them; and though others go on being due."""
    world.fill("old", 30, delay=1)
    world.redis.delete(world.keys["delayed_index"], world.keys["delayed_users"])
    world.queue.push_many(make_task("new", delay=1) for _ in range(400))
    world.advance(2)
    users = Counter(
        claim.task.user_id for _ in range(30) for claim in world.queue.claim("w", limit=20)
    )
    assert users == {"old": 30, "new": 400}


def test_an_entry_of_the_index_that_is_not_delayed_counts_for_nothing(world: World) -> None:
    """A version before the index has cancelled the task."""
    world.push("t1", "t2", delay=1)
    kept = world.dump()["delayed_index"]
    world.queue.cancel("t1")
    world.redis.zadd(world.keys["delayed_index"], kept)
    world.advance(2)
    assert ids_of(world.queue.claim("w", limit=5)) == ["t2"]
    assert "broken_tasks" not in world.stats()


# --- claiming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kilobytes", [90, 250])
def test_a_claim_takes_no_more_than_a_megabyte_of_documents(world: World, kilobytes: int) -> None:
    """At least one task, and none more once they come to that; the rest can be claimed at once."""
    payload = {"text": "x" * kilobytes * 1000}
    for n in range(16):
        world.push(f"t{n}", user_id=f"u{n % 3}", payload=payload)
    taken = []
    while True:
        claims, hint, *_ = world.queue.link.perform(
            world.queue._claim_once("w", 250, 30_000, Wanted())
        )
        size = sum(len(claim.task.document) for claim in claims)
        assert claims
        assert size < 2**20 + len(claims[0].task.document)
        taken += ids_of(claims)
        if len(taken) == 16:
            break
        assert size >= 2**20
        assert hint == 0
    assert len(set(taken)) == 16
    world.check()


def test_a_claimed_task_is_leased_to_its_worker(world: World) -> None:
    task = make_task(task_id="t1", payload={"n": 1}, name="build", priority=2)
    world.queue.push(task)
    before = world.dump()
    (claim,) = world.queue.claim("worker-1", lease=7.5)
    now = world.clock.now_ms()
    assert (claim.task, claim.attempt, claim.worker_id) == (task, 1, "worker-1")
    assert claim.lease_until == from_ms(now + 7500)
    record = before["status"]["t1"] | {
        "state": "running",
        "token": claim.token,
        "worker": "worker-1",
        "place": this_place(),
        "attempts": 1,
        "charge": 1,
        "claimed": now,
    }
    assert changes(before, world.dump()) == {
        "status.t1": (before["status"]["t1"], record),
        "backlog.alice\x004" + "1".zfill(14) + "\0t1\0build": (0.0, None),
        "waiting.t1": (now, None),
        "leases.t1": (None, now + 7500.0),
        "ready.alice": (1.0, None),
        "idle.alice": (None, 2.0),
        "running.alice": (None, "1"),
        "fair.clock": ("0", "1"),
        "fair.window": (None, str(now)),
        "fair.seen": (None, str(now)),
        "fair.pace": (None, f"0 0 {now} 0"),
        "served_before.alice": (None, "late"),
        "ops.": (None, str(now)),
        f"ops.{claim.token}": (None, "t1"),
        "stats.claimed": (None, "1"),
    }


def test_an_empty_queue_offers_nothing(queue: TaskQueue) -> None:
    assert queue.claim("w", limit=10) == []


def test_a_claim_takes_no_more_than_its_limit(queue: TaskQueue) -> None:
    fill(queue, "alice", 5)
    assert ids_of(queue.claim("w", limit=3)) == ["alice-0", "alice-1", "alice-2"]
    assert ids_of(queue.claim("w", limit=3)) == ["alice-3", "alice-4"]


def test_the_largest_claim_works(queue: TaskQueue) -> None:
    for n in range(10):
        fill(queue, f"u{n}", 120)
    claims = queue.claim("w", limit=1000)
    assert len(set(ids_of(claims))) == 1000
    assert queue.extend(claims) == ["extended"] * 1000
    assert queue.finish_many((c, None) for c in claims) == ["finished"] * 1000


def test_a_task_that_a_schedule_fired_says_so(queue: TaskQueue) -> None:
    task = make_task(task_id="t1")
    document = json.loads(task.document) | {"schedule": "s1", "scheduled_for": 1_700_000_000_000}
    fired = task.from_document("t1", json.dumps(document))
    queue.push(fired)
    claimed = claim_one(queue).task
    assert claimed.schedule_id == "s1"
    assert claimed.scheduled_for == from_ms(1_700_000_000_000)


# --- expiry ---------------------------------------------------------------------------------------


def test_a_task_whose_worker_died_is_offered_again(world: World) -> None:
    first = world.push_and_claim("t1", lease=10, worker="dead")
    world.advance(9.999)
    assert world.queue.claim("w") == []
    world.advance(0.001)
    second = world.claim_one(worker="alive")
    assert second.task == first.task
    assert (second.attempt, second.worker_id) == (2, "alive")
    assert second.token != first.token
    assert world.info("t1").error == "the lease of worker dead expired"
    assert world.stats() == {"pushed": 1, "claimed": 2, "expired": 1}


ENDINGS: dict[str, Callable[[TaskQueue, Claim], None]] = {
    "finish": lambda queue, claim: queue.finish(claim),
    "retry": lambda queue, claim: queue.retry(claim, "late"),
    "release": lambda queue, claim: queue.release(claim),
    "bury": lambda queue, claim: queue.bury(claim, "late"),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("meanwhile", ["claimed", "finished", "buried", "gone", "taken back"])
def test_a_worker_without_its_lease_changes_nothing(
    world: World, ending: str, meanwhile: str
) -> None:
    stale = world.push_and_claim("t1", lease=1)
    world.advance(1)
    if meanwhile == "taken back":
        world.queue.set_user("alice", paused=True)
        assert world.queue.claim("other") == []
    else:
        second = world.claim_one()
        if meanwhile == "gone":
            world.queue.configure(keep_finished=0)
        if meanwhile in ("finished", "gone"):
            world.queue.finish(second)
        elif meanwhile == "buried":
            world.queue.bury(second)
    before = world.dump()
    with pytest.raises(LeaseLost, match="'t1'"):
        ENDINGS[ending](world.queue, stale)
    assert world.queue.extend([stale]) == ["lost_lease"]
    after = changes(before, world.dump())
    assert after.pop("stats.lost_leases") == (None, "2")
    assert all(key.startswith("ops.") for key in after), after


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_lease_that_is_over_but_not_taken_back_still_counts(world: World, ending: str) -> None:
    claim = world.push_and_claim("t1", lease=1)
    world.advance(100)
    ENDINGS[ending](world.queue, claim)


@pytest.mark.parametrize("keep_dead", [10, 0])
def test_a_task_that_kills_its_workers_is_a_dead_letter(world: World, keep_dead: int) -> None:
    world.queue.configure(max_attempts=3, keep_dead=keep_dead)
    world.push("t1")
    for attempt in (1, 2, 3):
        claim = world.claim_one(lease=1, worker=f"w{attempt}")
        assert claim.attempt == attempt
        world.advance(1)
    assert world.queue.claim("w") == []
    if keep_dead:
        assert world.places() == {"buried": ["t1"]}
        info = world.info("t1")
        assert info.error == "the lease of worker w3 expired"
        assert info.attempts == 3
    # Its last worker comes back: the task was given up, and that is not undone.
    assert world.queue.finish_many([(claim, None)]) == ["lost_lease"]
    counted = world.stats()
    assert (counted["buried"], counted["expired"], counted["lost_leases"]) == (1, 3, 1)
    assert "finished" not in counted


def test_an_expired_task_goes_before_later_ones_of_its_user(world: World) -> None:
    world.fill("alice", 3)
    world.claim_one(lease=1)
    world.advance(1)
    assert ids_of(world.queue.claim("w", limit=3)) == ["alice-0", "alice-1", "alice-2"]


def test_more_expired_leases_than_one_claim_takes_back_are_all_offered(world: World) -> None:
    world.fill("alice", 250)
    world.queue.claim("w", limit=250, lease=1)
    world.advance(1)
    assert sum(len(world.queue.claim("w", limit=1000)) for _ in range(3)) == 250


# --- extending ------------------------------------------------------------------------------------


def test_extended_leases_last_longer(world: World) -> None:
    world.fill("alice", 2)
    claims = world.queue.claim("w", limit=2, lease=10)
    world.advance(9)
    before = world.dump()
    assert world.queue.extend(claims, lease=10) == ["extended", "extended"]
    after = changes(before, world.dump())
    end = world.clock.now_ms() + 10_000
    assert {k: v[1] for k, v in after.items() if not k.startswith("ops.")} == {
        "leases.alice-0": end,
        "leases.alice-1": end,
    }
    world.advance(9)
    assert world.queue.claim("other") == []


def test_extending_says_which_are_lost_and_which_are_cancelled(world: World) -> None:
    world.fill("alice", 3)
    one, two, three = world.queue.claim("w", limit=3)
    world.queue.finish(one)
    world.queue.cancel(two.task.task_id)
    assert world.queue.extend([one, two, three]) == ["ended", "cancel", "extended"]
    assert world.queue.extend([]) == []


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("meanwhile", ["nothing", "claimed by another", "dropped"])
def test_a_lease_ended_by_its_holder_is_not_lost(world: World, ending: str, meanwhile: str) -> None:
    # A worker extends all its leases in one call while its slots end some of them.
    if meanwhile == "dropped":
        world.queue.configure(keep_finished=0, keep_dead=0)
    claim = world.push_and_claim("t1")
    ENDINGS[ending](world.queue, claim)
    if meanwhile == "claimed by another":
        world.queue.claim("other")
    assert world.queue.extend([claim]) == ["ended"]
    assert "lost_leases" not in world.stats()


def test_thousands_of_leases_are_extended_in_one_call(queue: TaskQueue) -> None:
    claims = []
    fill(queue, "alice", 4500)
    for _ in range(5):
        claims += queue.claim("w", limit=1000)
    assert queue.extend(claims) == ["extended"] * 4500


# --- ending ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [None, 7, "text", [1, None], {"a": {"b": True}}, "", 0, False])
def test_a_finished_task_keeps_its_result(world: World, result: object) -> None:
    claim = world.push_and_claim("t1")
    before = world.dump()
    world.advance(2)
    world.queue.finish(claim, result)
    now = world.clock.now_ms()
    ended = before["status"]["t1"] | {"state": "finished", "ended": now}
    if result is not None:
        ended["result"] = json.dumps(result, separators=(",", ":"))
    assert changes(before, world.dump()) == {
        "status.t1": (before["status"]["t1"], ended),
        "leases.t1": (before["leases"]["t1"], None),
        "running.alice": ("1", None),
        "ended.t1": (None, now),
        **{f"runs.{place}\0{now}st1": (None, 0.0) for place in ("os", "ualice", "ndefault")},
        "stats.finished": (None, "1"),
    }
    info = world.info("t1")
    assert (info.state, info.result, info.error) == ("finished", result, None)
    assert type(info.result) is type(result)


def test_the_shortest_delay_of_a_retry_is_a_millisecond(world: World) -> None:
    world.fill("alice", 1)
    world.queue.retry(world.claim_one(), "again", delay=0.001)
    assert world.places() == {"delayed": ["alice-0"]}
    assert world.queue.claim("w") == []
    world.advance(0.001)
    world.queue.retry(world.claim_one(), "again", delay=0.0001)
    assert world.places() == {"ready": ["alice-0"]}


def test_a_retried_task_is_offered_again_after_its_delay(world: World) -> None:
    world.fill("alice", 2)
    world.queue.retry(world.claim_one(), "first failure", delay=2)
    assert world.places() == {"delayed": ["alice-0"], "ready": ["alice-1"]}
    info = world.info("alice-0")
    assert (info.error, info.attempts) == ("first failure", 1)
    assert info.due_at == from_ms(world.clock.now_ms() + 2000)
    assert world.claim_one().task.task_id == "alice-1"
    assert world.queue.claim("w") == []
    world.advance(2)
    again = world.claim_one()
    assert (again.task.task_id, again.attempt) == ("alice-0", 2)
    world.queue.finish(again)
    info = world.info("alice-0")
    assert (info.error, info.state) == (None, "finished")


def test_a_task_retried_without_delay_is_ready_at_once(world: World) -> None:
    world.fill("alice", 2)
    world.queue.retry(world.claim_one(), "again")
    assert world.places() == {"ready": ["alice-0", "alice-1"]}
    assert world.claim_one().task.task_id == "alice-0"


@pytest.mark.parametrize("error", ["x" * 5000, "é" * 5000, "\ud800", ValueError("odd"), ""])
def test_any_error_text_can_be_kept(queue: TaskQueue, error: Any) -> None:
    push(queue, "t1")
    queue.bury(claim_one(queue), error)
    assert info_of(queue, "t1").error == str(error)[:2000].replace("\ud800", "?")


def test_a_released_task_is_as_if_it_had_not_been_claimed(world: World) -> None:
    world.fill("alice", 3)
    world.fill("bob", 3)
    world.queue.finish(world.claim_one())
    before = world.dump()
    for _ in range(5):
        world.queue.release(world.claim_one())
    after = changes(before, world.dump())
    # The operations are remembered and counted; the users' turn, tasks and tags are as before.
    passing = ("ops.", "stats.", "served", "fair.pace")
    assert not {key for key in after if not key.startswith(passing)}
    assert after["stats.released"] == (None, "5")
    assert world.claim_one().attempt == 1


def test_a_buried_task_is_a_dead_letter(world: World) -> None:
    world.push("t1")
    world.queue.bury(world.claim_one(), "hopeless")
    state = world.dump()
    assert state["dead"] == {"t1": world.clock.now_ms()}
    assert state["status"]["t1"]["state"] == "buried"
    assert state["status"]["t1"]["error"] == "hopeless"
    assert world.queue.claim("w") == []
    world.advance(1000)
    assert world.queue.claim("w") == []


def test_a_claim_can_be_ended_only_once(queue: TaskQueue) -> None:
    push(queue, "t1")
    claim = claim_one(queue)
    queue.retry(claim)
    for ending in ("finish", "release", "bury"):
        with pytest.raises(LeaseLost):
            ENDINGS[ending](queue, claim)


def test_many_tasks_are_finished_in_one_call(world: World) -> None:
    world.fill("alice", 600)
    claims = world.queue.claim("w", limit=600)
    world.queue.cancel("alice-5")
    world.queue.bury(claims[7])
    words = world.queue.finish_many((claim, {"n": n}) for n, claim in enumerate(claims))
    assert Counter(words) == {"finished": 598, "cancelled": 1, "lost_lease": 1}
    assert (words[5], words[7]) == ("cancelled", "lost_lease")
    assert world.queue.finish_many([]) == []


# --- cancelling -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "answer", "afterwards"),
    [
        ("ready", True, "cancelled"),
        ("delayed", True, "cancelled"),
        ("running", True, "running"),
        ("cancelled", True, "cancelled"),
        ("finished", False, "finished"),
        ("buried", False, "buried"),
    ],
)
def test_cancelling(world: World, state: str, answer: bool, afterwards: str) -> None:
    world.push("t1")
    bring_to(world, "t1", state)
    assert world.queue.cancel("t1") is answer
    assert world.places() == {afterwards: ["t1"]}
    assert world.info("t1").cancel_requested is (state == "running")
    assert world.queue.claim("w") == []


def test_cancelling_a_task_that_nobody_knows(queue: TaskQueue) -> None:
    assert queue.cancel("nobody") is False


@pytest.mark.parametrize("ending", [*ENDINGS, "expiry"])
def test_a_running_task_that_was_cancelled_ends_as_cancelled(world: World, ending: str) -> None:
    claim = world.push_and_claim("t1", lease=5)
    assert world.queue.cancel("t1")
    if ending == "expiry":
        world.advance(5)
        assert world.queue.claim("w") == []
    else:
        ENDINGS[ending](world.queue, claim)
    assert world.places() == {"cancelled": ["t1"]}
    assert world.stats()["cancelled"] == 1
    assert world.queue.claim("w") == []


def test_cancelling_the_last_task_of_a_user_takes_the_user_out_of_the_round(world: World) -> None:
    world.push("a1", "a2", user_id="alice")
    world.push("b1", user_id="bob", priority=Priority.CRITICAL)
    world.queue.cancel("b1")
    world.queue.cancel("a1")
    state = world.dump()
    assert state["ready"].keys() == {"alice"}
    assert "critical" not in state
    assert world.claim_one().task.task_id == "a2"


# --- retention ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({"keep_finished": 3}, ["t7", "t8", "t9"]),
        ({"keep_finished": 0}, []),
        ({"keep_finished_for": 3}, ["t7", "t8", "t9"]),
        ({"keep_finished_for": timedelta(seconds=1)}, ["t9"]),
        ({"keep_finished_for": 0}, []),
        ({"keep_finished": 5, "keep_finished_for": 2}, ["t8", "t9"]),
        ({}, [f"t{n}" for n in range(10)]),
    ],
)
@pytest.mark.parametrize("how", ["finish", "cancel", "bury"])
def test_ended_tasks_are_kept_by_count_and_age(
    world: World, settings: dict[str, Any], kept: list[str], how: str
) -> None:
    if how == "bury":
        settings = {name.replace("finished", "dead"): value for name, value in settings.items()}
    world.queue.configure(**settings)
    for n in range(10):
        world.advance(1)
        world.push(f"t{n}")
        if how == "cancel":
            world.queue.cancel(f"t{n}")
        else:
            ENDINGS[how](world.queue, world.claim_one())
    state = world.dump()
    assert sorted(state.get("tasks", {})) == kept
    assert sorted(state.get("status", {})) == kept
    assert sorted(state.get("dead" if how == "bury" else "ended", {})) == kept


def test_a_lowered_limit_is_reached_soon(world: World) -> None:
    world.fill("alice", 105)
    claims = world.queue.claim("w", limit=105)
    world.queue.finish_many((claim, None) for claim in claims[:100])
    world.queue.configure(keep_finished=10)
    kept = []
    for claim in claims[100:]:
        world.queue.finish(claim)
        kept.append(len(world.dump()["ended"]))
    assert kept[0] == 101 - 12  # bounded: two for each that is added, and ten
    assert kept == sorted(kept, reverse=True)
    for n in range(10):
        world.push(f"more-{n}")
        world.queue.finish(world.claim_one())
    assert len(world.dump()["ended"]) == 10


# --- looking --------------------------------------------------------------------------------------


def test_what_is_known_of_a_task(world: World) -> None:
    task = make_task("alice", "t1", payload={"n": 1}, name="build", priority=5)
    pushed = world.now()
    world.queue.push(task)
    world.advance(1)
    world.claim_one(lease=10, worker="worker-1")
    info = world.info("t1")
    assert (info.task_id, info.state, info.user_id, info.name) == (
        "t1",
        "running",
        "alice",
        "build",
    )
    assert (info.priority, info.attempts, info.worker_id) == (Priority.VERY_HIGH, 1, "worker-1")
    assert (info.pushed_at, info.due_at, info.claimed_at) == (pushed, pushed, world.now())
    assert info.lease_until == world.now() + timedelta(seconds=10)
    assert (info.ended_at, info.error, info.result) == (None, None, None)
    assert info.cancel_requested is False
    assert info.task == task


def test_a_task_that_nobody_knows_is_none(queue: TaskQueue) -> None:
    assert queue.get("nobody") is None
    assert queue.explain("nobody") is None


def test_size_counts_what_waits_for_a_worker(queue: TaskQueue) -> None:
    fill(queue, "a", 3)
    fill(queue, "ab", 2)  # the names are prefixes of each other
    fill(queue, "capped", 2)
    fill(queue, "paused", 4)
    push(queue, "later", user_id="a", delay=60)
    queue.set_user("paused", paused=True)
    queue.set_user("capped", max_running=1)
    users = Counter(claim.task.user_id for claim in queue.claim("w", limit=4))
    sizes = {user: queue.size(user) for user in ("a", "ab", "capped", "paused", "nobody")}
    expected = {"a": 3, "ab": 2, "capped": 2, "paused": 4, "nobody": 0}
    assert sizes == {user: count - users[user] for user, count in expected.items()}
    assert queue.size() == sum(sizes.values())
    assert users["paused"] == 0


def summary_of(world: World, task_id: str) -> str:
    explanation = world.queue.explain(task_id)
    assert explanation is not None
    assert explanation.task_id == task_id
    return explanation.summary


def test_why_a_task_waits(world: World) -> None:
    world.fill("alice", 3)
    world.fill("bob", 3)
    explanation = world.queue.explain("bob-2")
    assert explanation is not None
    assert (explanation.own_tasks_ahead, explanation.users_ahead) == (2, 1)
    world.beat("w", ["*"])
    assert summary_of(world, "bob-2") == (
        "It waits for its turn, after 1 other user and 2 earlier tasks of 'bob'."
    )
    world.queue.set_user("bob", paused=True)
    said = summary_of(world, "bob-2")
    assert said.startswith("User 'bob' is paused since ")
    assert said.endswith(" (now). 2 earlier tasks of 'bob' run first.")
    paused = world.queue.explain("bob-2")
    assert paused is not None
    assert paused.user_paused
    assert paused.users_ahead is None
    world.queue.set_user("bob", paused=False, max_running=1)
    world.queue.set_user("alice", paused=True)
    world.claim_one()
    assert "has 1 task running, as many as max_running allows." in summary_of(world, "bob-2")
    capped = world.queue.explain("bob-2")
    assert capped is not None
    assert capped.user_capped
    world.queue.set_user("alice", paused=False, rate=0.5)
    world.claim_one()
    limited = world.queue.explain("alice-2")
    assert limited is not None
    assert limited.user_rate_limited_until == from_ms(world.clock.now_ms() + 2000)
    assert "has reached the rate limit of 0.5 tasks per second. The next one" in limited.summary
    world.push("later", delay=60)
    until = world.now() + timedelta(seconds=60)
    assert summary_of(world, "later") == f"Starts at {when(until, world.now())}."
    delayed = world.queue.explain("later")
    assert delayed is not None
    assert delayed.delayed_until == until


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("running", "It is running on w since "),
        ("finished", "It succeeded at "),
        ("cancelled", "It was cancelled at "),
        ("buried", "It failed at "),
    ],
)
def test_why_a_task_does_not_wait(world: World, state: str, said: str) -> None:
    world.push("t1")
    bring_to(world, "t1", state)
    assert summary_of(world, "t1").startswith(said)


def test_a_snapshot_counts_everything(world: World) -> None:
    world.queue.set_user("paused", paused=True)
    world.fill("paused", 2)
    world.advance(3)
    world.fill("alice", 4)
    world.push("later", delay=60)
    claims = world.queue.claim("w", limit=3)
    world.queue.bury(claims[0])
    world.queue.finish(claims[1])
    snapshot = world.queue.inspect()
    assert snapshot.at == world.now()
    assert (snapshot.ready, snapshot.delayed, snapshot.running, snapshot.dead) == (3, 1, 1, 1)
    assert (snapshot.active_users, snapshot.parked_users) == (2, 1)
    assert snapshot.oldest_wait == 3.0
    assert snapshot.counters == {"pushed": 7, "claimed": 3, "buried": 1, "finished": 1}


# --- waiting --------------------------------------------------------------------------------------


def hint_of(world: World) -> float:
    """How long the claim says until there may be more, in seconds."""
    return world.queue.link.perform(world.queue._claim_once("w", 1, 30_000, Wanted()))[1]


def test_how_long_an_idle_worker_may_wait(world: World) -> None:
    assert hint_of(world) == float("inf")
    world.push("later", delay=60)
    assert hint_of(world) == 60.0
    world.fill("alice", 2)
    world.queue.set_user("alice", rate=0.1)
    world.claim_one(lease=20)
    assert hint_of(world) == 10.0  # the next token of the rate
    world.queue.set_user("alice", paused=True)
    assert hint_of(world) == 20.0  # the end of the lease
    world.queue.set_user("alice", paused=False, rate=None)
    assert hint_of(world) == 20.0  # alice-1 was claimed for 30
    world.advance(15)
    assert hint_of(world) == 5.0


def test_a_claim_that_leaves_work_says_so_and_wakes_another(world: World) -> None:
    world.fill("alice", 2)
    world.redis.delete(world.keys["wake"])
    assert hint_of(world) == 0.0
    assert world.dump()["wake"] == ["1"]
    world.redis.delete(world.keys["wake"])
    assert hint_of(world) == 30.0
    assert "wake" not in world.dump()


WAKING: dict[str, Callable[[TaskQueue, Claim], object]] = {
    "push": lambda queue, claim: push(queue, "new", user_id="bob"),
    "retry": lambda queue, claim: queue.retry(claim),
    "release": lambda queue, claim: queue.release(claim),
    "finish frees a cap": lambda queue, claim: queue.finish(claim),
    "set_user": lambda queue, claim: queue.set_user("alice", max_running=None),
}


@pytest.mark.parametrize("waking", WAKING)
def test_a_waiting_worker_is_woken(world: World, waking: str) -> None:
    world.fill("alice", 2)
    world.queue.set_user("alice", max_running=1)
    held = world.claim_one(lease=1000)
    world.redis.delete(world.keys["wake"])
    began = time.monotonic()
    # With a clock that stands still nothing but the token can end the wait before 5 seconds.
    waiter = in_thread(lambda: world.queue.claim("waiter", wait=60))
    world.until_blocked()
    WAKING[waking](world.queue, held)
    claims: list[Claim] = waiter()
    assert len(claims) == 1
    assert time.monotonic() - began < 4


def test_each_of_many_waiting_workers_gets_a_task(world: World) -> None:
    waiters = [in_thread(lambda: world.queue.claim("w", wait=60)) for _ in range(8)]
    world.until_blocked()
    began = time.monotonic()
    world.fill("alice", 8)
    got = [task_id for waiter in waiters for task_id in ids_of(waiter())]
    assert sorted(got) == [f"alice-{n}" for n in range(8)]
    assert time.monotonic() - began < 4


def test_a_wait_ends_with_its_time(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client) as queue:
        began = time.monotonic()
        assert queue.claim("w", wait=0.05) == []
        assert 0.05 <= time.monotonic() - began < 2


def test_a_wait_ends_when_a_delayed_task_is_due(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client) as queue:
        push(queue, "t1", delay=0.05)
        redis_client.delete(queue.keys["wake"])
        began = time.monotonic()
        assert ids_of(queue.claim("w", wait=30)) == ["t1"]
        assert time.monotonic() - began < 2


def test_a_wait_without_redis_says_so(own_server: OwnServer) -> None:
    server = own_server()
    with TaskQueue.from_url(server.url, timeout=0.2) as queue:
        waiter = in_thread(lambda: queue.claim("w", wait=60))
        with redis.Redis.from_url(server.url) as client:
            until_blocked(client)
        server.stop()
        with pytest.raises(RedisUnavailable):
            waiter()


# --- moving ---------------------------------------------------------------------------------------


def test_a_waiting_task_is_moved_to_later(world: World) -> None:
    world.fill("alice", 2)
    assert world.queue.reschedule("alice-0", delay=5)
    assert world.places() == {"delayed": ["alice-0"], "ready": ["alice-1"]}
    assert world.info("alice-0").due_at == from_ms(world.clock.now_ms() + 5000)
    world.advance(5)
    assert ids_of(world.queue.claim("w", limit=2)) == [
        "alice-0",
        "alice-1",
    ]  # it is as old as it was


@pytest.mark.parametrize("at", [None, 1.0])
def test_a_delayed_task_is_moved_to_now(world: World, at: float | None) -> None:
    world.push("t1", delay=500)
    assert world.queue.reschedule("t1", at=at)
    assert world.queue.size() == 1
    assert world.claim_one().due_ms == world.clock.now_ms()


def test_a_moved_task_keeps_its_attempts(queue: TaskQueue) -> None:
    push(queue, "t1")
    queue.retry(claim_one(queue), "no", delay=500)
    assert queue.reschedule("t1")
    assert claim_one(queue).attempt == 2


@pytest.mark.parametrize("state", ["running", "finished", "buried", "cancelled"])
def test_a_task_that_was_claimed_or_has_ended_is_not_moved(world: World, state: str) -> None:
    world.push("t1")
    bring_to(world, "t1", state)
    before = world.dump()
    assert world.queue.reschedule("t1", delay=5) is False
    assert {key.split(".")[0] for key in changes(before, world.dump())} <= {"ops"}


@pytest.mark.parametrize(
    "when", [{"delay": -1}, {"delay": "soon"}, {"at": "today"}, {"at": -1}, {"delay": 1, "at": 2}]
)
def test_a_task_is_not_moved_to_no_time(world: World, when: dict[str, Any]) -> None:
    world.push("t1")
    before = world.dump()
    with pytest.raises(InvalidTask):
        world.queue.reschedule("t1", **when)
    assert world.dump() == before


def test_an_unknown_task_is_not_moved(queue: TaskQueue) -> None:
    with pytest.raises(UnknownTask, match="'nobody'"):
        queue.reschedule("nobody")


# --- settings -------------------------------------------------------------------------------------


def test_settings_start_as_the_defaults_and_are_shared(world: World) -> None:
    assert world.queue.settings() == QueueSettings()
    wanted = QueueSettings(
        max_attempts=2,
        max_waiting=10,
        keep_finished=3,
        keep_finished_for=1.5,
        keep_dead=4,
        keep_dead_for=60.0,
        cost="time",
        critical_share=0.25,
        ageing=30.0,
        max_schedules=8,
        min_interval=2.5,
    )
    assert (
        world.queue.configure(
            max_attempts=2,
            max_waiting=10,
            keep_finished=3,
            keep_finished_for=timedelta(seconds=1.5),
            keep_dead=4,
            keep_dead_for=60,
            cost="time",
            critical_share=0.25,
            ageing=30,
            max_schedules=8,
            min_interval=timedelta(seconds=2.5),
        )
        == wanted
    )
    assert world.queue.configure() == wanted
    with TaskQueue(world.redis) as another:
        assert another.settings() == wanted
    with TaskQueue(world.redis, name="elsewhere") as elsewhere:
        assert elsewhere.settings() == QueueSettings()


@pytest.mark.parametrize("state", ["ready", "delayed", "running"])
def test_ageing_can_be_changed_only_while_no_task_is_queued(world: World, state: str) -> None:
    world.push("t1")
    bring_to(world, "t1", state)
    before = world.dump()
    with pytest.raises(ConfigurationError, match="ageing 5"):
        world.queue.configure(max_attempts=9, ageing=5)
    assert all(key.startswith("ops.") for key in changes(before, world.dump()))
    assert world.queue.configure(max_attempts=9, ageing=0).max_attempts == 9


def test_ageing_can_be_changed_when_all_tasks_have_ended(queue: TaskQueue) -> None:
    push(queue, "t1")
    queue.finish(claim_one(queue))
    assert queue.configure(ageing=5).ageing == 5.0


def test_settings_of_a_user_are_changed_field_by_field(world: World) -> None:
    assert world.queue.get_user("alice") == UserSettings()
    world.queue.set_user("alice", weight=2.5, max_running=3)
    world.queue.set_user("alice", rate=0.1, paused=True, max_waiting=7)
    wanted = UserSettings(weight=2.5, max_running=3, rate=0.1, paused=True, max_waiting=7)
    wanted = replace(wanted, paused_at=world.now())
    assert world.queue.set_user("alice") == wanted
    assert world.queue.get_user("alice") == wanted
    assert world.queue.get_user("bob") == UserSettings()
    world.queue.set_user("alice", max_running=None, rate=None, max_waiting=None, paused=False)
    assert world.queue.set_user("alice", weight=1) == UserSettings()


# --- the object -----------------------------------------------------------------------------------


def test_a_closed_queue_says_so(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client) as queue:
        queue.size()
    for call in (queue.size, queue.inspect, lambda: queue.push(make_task())):
        with pytest.raises(RedisRefused, match="closed"):
            call()
    queue.close()


def test_closing_leaves_no_connection(own_server: OwnServer) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client:
        with TaskQueue(client) as queue:
            push(queue, "t1")
            queue.claim("w", limit=5, wait=0.01)
            queue.claim("w", wait=0.01)
        client.client_setname("me")
        names = [row["name"] for row in client.client_list()]
        assert names == ["me"]


def test_queues_do_not_see_each_other(world: World) -> None:
    with TaskQueue(world.redis, name="other", clock=world.queue.link.clock) as other:
        world.push("t1")
        assert other.size() == 0
        assert other.get("t1") is None
        assert other.claim("w") == []
        world.redis.delete(*other.keys.all())


@pytest.mark.parametrize("client_options", [{"decode_responses": True}, {"protocol": 3}])
def test_any_client_will_do(
    redis_client: redis.Redis, redis_url: str, client_options: dict[str, Any]
) -> None:
    client = redis.Redis.from_url(redis_url, **client_options)
    with client, TaskQueue(client) as queue:
        queue.set_user("alice", weight=2.0)
        queue.push_many([make_task(task_id=f"t{n}", payload={"é": n}) for n in range(3)])
        one, two, three = queue.claim("w", limit=3, wait=1)
        assert one.task.payload == {"é": 0}
        assert queue.extend([one]) == ["extended"]
        queue.finish(one, {"ok": True})
        queue.retry(two, "again", delay=60)
        queue.bury(three, "no")
        assert queue.cancel("t1")
        assert queue.inspect().dead == 1
        assert queue.claim("w", wait=0.01) == []
        assert info_of(queue, "t0").result == {"ok": True}
    check_consistency(redis_client)


def test_a_queue_works_after_a_fork(redis_client: redis.Redis, redis_url: str) -> None:
    program = textwrap.dedent(
        """
        import os, sys
        from fairqueue import Task, TaskQueue

        queue = TaskQueue.from_url(sys.argv[1])
        queue.push(Task.create(user_id="alice", task_id="parent"))
        children = []
        for n in range(4):
            pid = os.fork()
            if pid == 0:
                for i in range(50):
                    queue.push(Task.create(user_id=f"u{n}", task_id=f"child-{n}-{i}"))
                os._exit(0)
            children.append(pid)
        for i in range(50):
            assert queue.get("parent").task_id == "parent"
        assert [os.waitpid(pid, 0)[1] for pid in children] == [0] * 4
        print(queue.size())
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, redis_url],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("201\n", 0), done.stderr


def test_hundreds_of_threads_share_one_queue(world: World) -> None:
    world.queue.configure(keep_finished=10_000)
    total, threads = 2000, 200
    done: list[str] = []
    failures: list[BaseException] = []
    start = threading.Barrier(threads)

    def work(number: int) -> None:
        try:
            start.wait(30)
            for n in range(total // threads):
                world.push(f"t-{number}-{n}", user_id=f"u{number % 17}")
            while len(done) < total:
                claims = world.queue.claim(f"w{number}", limit=3)
                for claim in claims:
                    world.queue.finish(claim, number)
                done.extend(ids_of(claims))
                if not claims and world.queue.size() == 0:
                    return
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert failures == []
    claims = world.queue.claim("late", limit=1000)  # a worker may leave before the last is pushed
    world.queue.finish_many((claim, None) for claim in claims)
    done += ids_of(claims)
    assert sorted(done) == sorted(f"t-{k}-{n}" for k in range(threads) for n in range(10))
    assert world.stats() == {"pushed": total, "claimed": total, "finished": total}
    assert len(world.places()["finished"]) == total


# --- damage ---------------------------------------------------------------------------------------


def mutating_calls(world: World, claims: list[Claim]) -> dict[str, Callable[[], object]]:
    """Each mutating call; the first word is its script."""
    return {
        "push": lambda: world.push("new"),
        "push of another user": lambda: world.push("new 2", user_id="bob"),
        "push later": lambda: world.push("new 3", delay=5),
        "push critical": lambda: world.push("new 4", priority=Priority.CRITICAL),
        "push many": lambda: world.push("new 5", "newer"),
        "push for a tenant": lambda: world.push("new 6", tenant="acme"),
        "push to a pool": lambda: world.push("new 7", pool="gpu", limit_keys=["k"]),
        "push of a unique one": lambda: world.push("new 8", unique="u", expires=60, delay=5),
        "push again": lambda: world.push("alice-9"),
        "claim": lambda: world.queue.claim("w"),
        "finish": lambda: world.queue.finish(claims[0]),
        "retry": lambda: world.queue.retry(claims[1], "x", delay=1),
        "release": lambda: world.queue.release(claims[2]),
        "bury": lambda: world.queue.bury(claims[3], "x"),
        "cancel": lambda: world.queue.cancel("alice-9"),
        "extend": lambda: world.queue.extend(claims),
        "reschedule": lambda: world.queue.reschedule("alice-8"),
        "set_user": lambda: world.queue.set_user("alice", weight=3.0),
        "set_limits": lambda: world.queue.set_limits("default", slots=3),
        "configure": lambda: world.queue.configure(max_attempts=7),
        "heartbeat": lambda: world.queue.link.run(
            "heartbeat", worker="w", record="{", ttl_ms=9, limits="", can_alert=""
        ),
    }


# What a lone push for a user who is being served has nothing to do with.
NOT_TOUCHED_BY_A_LONE_PUSH = {
    *("critical", "parked", "idle", "running", "throttle", "averages", "usage", "served"),
    *("leases", "delayed", "delayed_index", "delayed_users", "held", "slot_line", "open"),
    *("tenants", "tenant_users"),
    *("user_tenants", "rings", "tags", "clocks", "pool_tasks", "uniques", "expiring"),
    *("gate_times", "gate_order", "gate_passes"),
    *("kinds", *(key for key in KEY_TYPES if key.startswith("wake_"))),
}


@pytest.mark.untidy
@pytest.mark.parametrize("key", KEY_TYPES)
def test_a_key_of_a_wrong_type_is_named_and_nothing_else_changes(world: World, key: str) -> None:
    """A call that does not touch the key goes through, and leaves it as it is."""
    world.fill("alice", 10)
    claims = world.queue.claim("w", limit=4)
    world.spoil(key)
    before = world.dump()
    refused = []
    for name, call in mutating_calls(world, claims).items():
        script = name.split()[0]
        if key not in load_script(script).keys:
            continue
        if name == "push" and key in NOT_TOUCHED_BY_A_LONE_PUSH:
            continue
        try:
            call()
        except RedisRefused as error:
            refused.append((name, str(error)))
            changed = changes(before, world.dump())
        else:
            may_be_left = only_lazy_keys(script)
            may_be_left |= NOT_TOUCHED_BY_A_LONE_PUSH if name.startswith("push") else set()
            assert key in may_be_left, name
            changed = {}
            after = world.dump()
            assert after[key] == before[key]
            before = after
        assert changed == {}, name
    assert all(world.keys[key].decode() in text for _, text in refused)
    # The end of a task may pause its schedule; the rest is no business of the queue.
    schedules = {key for key in KEY_TYPES if key.startswith("schedule")}
    schedules |= {"broken", "leader", "epoch", "moments", "changes", "tenant_schedules"}
    stores = {"credentials", "credential_ends", "api_keys", "sessions", "api_pace"}
    stores |= {"replies", "replies_before", "audit", "samples"}
    stores |= {"permits", "moving", "repartition"}  # of partitions, and of moves between queues
    needed = not any(
        key in only_lazy_keys(name.split()[0]) for name in mutating_calls(world, claims)
    )
    assert bool(refused) or not needed or key in schedules | stores


@pytest.mark.untidy
@pytest.mark.parametrize("key", sorted(NOT_TOUCHED_BY_A_LONE_PUSH))
def test_a_push_that_does_not_touch_a_spoilt_key_is_whole(world: World, key: str) -> None:
    world.fill("alice", 2)
    world.spoil(key)
    before = world.dump()
    world.push("new")
    after = changes(before, world.dump())
    rank = "3" + "3".zfill(14)
    assert after.keys() == {
        "tasks.new",
        "status.new",
        f"backlog.alice\0{rank}\0new\0default",
        "waiting.new",
        "fair.seq",
    }


BROKEN_STATUS = {
    "none": None,
    "no JSON": b"\xff{",
    "a list": b"[]",
    "a number": b"7",
    "empty": b"",
    "an empty object": b"{}",
    "no attempts": b'{"user":"alice","state":"%s","rank":"3"}',
    "attempts as text": b'{"user":"alice","state":"%s","rank":"3","attempts":"many"}',
    "user is no text": b'{"user":[],"state":"%s","rank":"3","attempts":1}',
    "rank is null": b'{"user":"alice","state":"%s","rank":null,"attempts":1}',
    "times as text": b'{"user":"alice","state":"%s","rank":"3","attempts":1,"claimed":"x",'
    b'"charge":"y","worker":[],"token":"t"}',
}


@pytest.mark.untidy
@pytest.mark.parametrize("kind", BROKEN_STATUS)
@pytest.mark.parametrize("state", ["ready", "delayed", "running"])
def test_a_broken_status_does_not_stop_other_tasks(world: World, kind: str, state: str) -> None:
    world.push("bad", priority=Priority.CRITICAL)
    claim = bring_to(world, "bad", state)
    world.fill("alice", 3)
    world.fill("bob", 3)
    text = BROKEN_STATUS[kind]
    if text is None:
        world.redis.hdel(world.keys["status"], "bad")
    else:
        world.redis.hset(world.keys["status"], "bad", text.replace(b"%s", state.encode()))
    if text is not None:
        with pytest.raises(BrokenRecord, match="'bad'"):
            world.queue.get("bad")
    if claim is not None:
        assert world.queue.finish_many([(claim, None)]) == ["lost_lease"]
    world.advance(100)
    claims = []
    for _ in range(8):
        claims += world.queue.claim("w")
    wanted = ["alice-0", "alice-1", "alice-2", "bob-0", "bob-1", "bob-2"]
    assert sorted(set(ids_of(claims)) - {"bad"}) == wanted
    good = [c for c in claims if c.task.task_id != "bad"]
    assert world.queue.finish_many((c, None) for c in good) == ["finished"] * 6
    assert world.queue.size() == 0
    for key in ("ready", "critical", "parked"):
        assert key not in world.dump()


@pytest.mark.untidy
def test_a_broken_status_record_does_not_use_up_its_users_cap(world: World) -> None:
    world.queue.set_user("alice", max_running=1)
    world.fill("alice", 2)
    world.claim_one(lease=1)
    world.redis.hset(world.keys["status"], "alice-0", "broken")
    world.advance(1)
    world.queue.claim("w")
    assert "alice-1" in world.dump()["leases"]


@pytest.mark.untidy
@pytest.mark.parametrize(
    "document",
    [None, b"", b"[]", b"{}", b"\xff", b'{"user":"alice"}', b"[" * 100_000],
    ids=["none", "empty", "list", "no fields", "no text", "few fields", "deep"],
)
def test_an_unreadable_task_is_buried_alone(world: World, document: bytes | None) -> None:
    world.fill("alice", 3)
    if document is None:
        world.redis.hdel(world.keys["tasks"], "alice-0")
    else:
        world.redis.hset(world.keys["tasks"], "alice-0", document)
    assert ids_of(world.queue.claim("w", limit=3)) == ["alice-1", "alice-2"]
    info = world.info("alice-0")
    assert (info.state, info.task) == ("buried", None)
    assert info.error is not None
    assert "'alice-0' is damaged" in info.error


@pytest.mark.untidy
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "nonsense",
        '{"weight":"heavy"}',
        '{"max_running":"many"}',
        '{"rate":"fast"}',
        '{"weight":0}',
        '{"rate":0}',
        '{"max_waiting":[]}',
        '{"weight":-1}',
    ],
)
def test_broken_settings_of_a_user_do_not_stop_anybody(world: World, text: str) -> None:
    world.redis.hset(world.keys["users"], "alice", text)
    world.fill("alice", 2)
    world.fill("bob", 2)
    assert len(world.queue.claim("w", limit=4)) == 4
    assert world.queue.set_user("alice", weight=2.0).weight == 2.0


@pytest.mark.untidy
@pytest.mark.parametrize(
    "name",
    [
        "max_attempts",
        "keep_finished",
        "keep_dead_ms",
        "ageing_ms",
        "max_waiting",
        "critical_share",
        "unknown",
    ],
)
def test_broken_settings_of_the_queue_count_as_the_defaults(world: World, name: str) -> None:
    world.redis.hset(world.keys["settings"], name, "nonsense")
    world.fill("alice", 2)
    world.queue.finish(world.claim_one())
    world.claim_one(lease=1)
    world.advance(1)
    assert ids_of(world.queue.claim("w")) == ["alice-1"]


# --- the server -----------------------------------------------------------------------------------


def test_scripts_that_the_server_forgot_are_sent_again(world: World) -> None:
    world.fill("alice", 9)
    claims = world.queue.claim("w", limit=4)
    pushes = 0
    for name, call in mutating_calls(world, claims).items():
        if name.startswith("push "):
            continue
        world.redis.script_flush()
        call()
        pushes += name == "push"
    world.redis.script_flush()
    world.queue.push_many([make_task(task_id=f"many-{n}") for n in range(1000)])
    # One more was claimed, one released; what is retried is delayed.
    assert world.queue.size() == 1000 + 9 + pushes - 4 - 1 + 1


def test_a_full_server_refuses_pushes_and_drains(own_server: OwnServer) -> None:
    server = own_server(config={"maxmemory": "6mb", "maxmemory-policy": "noeviction"})
    with redis.Redis.from_url(server.url) as client, TaskQueue(client) as queue:
        stored: list[str] = []
        with suppress(RedisRefused):
            for n in range(1000):
                stored += push(queue, f"t{n}", user_id=f"u{n % 5}", payload={"x": "y" * 30_000})
        refused_at = len(stored)
        assert 10 < refused_at < 1000
        check_consistency(client)
        before = dump(client)
        calls = (
            lambda: push(queue, "more"),
            lambda: queue.push_many(make_task(task_id=f"many-{n}") for n in range(600)),
            lambda: queue.configure(max_attempts=3),
            lambda: queue.set_user("u1", weight=2.0),
        )
        for call in calls:
            with pytest.raises(RedisRefused, match="memory"):
                call()
        assert dump(client) == before
        assert places(client) == {"ready": sorted(stored)}
        # Bring it over the limit for good, so that draining does not make room meanwhile.
        client.config_set("maxmemory", "1mb")
        claims = queue.claim("w", limit=4)
        assert queue.extend(claims) == ["extended"] * 4
        queue.finish(claims[0])
        queue.retry(claims[1], "again")
        queue.release(claims[2])
        queue.bury(claims[3], "no")
        waiting = [member for member in stored if member not in ids_of(claims)]
        assert queue.cancel(waiting[0])
        finished = 0
        while claims := queue.claim("w", limit=10):
            finished += len(queue.finish_many((claim, None) for claim in claims))
        assert finished == refused_at - 3
        check_consistency(client)
        assert stats(client)["finished"] == refused_at - 2


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random", "allkeys-lfu"])
def test_a_server_that_throws_data_away_is_refused(own_server: OwnServer, policy: str) -> None:
    server = own_server(config={"maxmemory-policy": policy})
    with redis.Redis.from_url(server.url) as client, TaskQueue(client) as queue:
        for call in (
            lambda: push(queue, "t1"),
            lambda: queue.push(make_task()),
            lambda: queue.claim("w"),
            queue.check,
        ):
            with pytest.raises(ConfigurationError, match=policy):
                call()
        assert client.dbsize() == 0
        client.config_set("maxmemory-policy", "noeviction")
        push(queue, "t1")


def test_without_redis_every_call_says_so_in_time() -> None:
    queue = TaskQueue.from_url("redis://127.0.0.1:1/0", timeout=0.2)
    calls: dict[str, Callable[[], object]] = {
        "push": lambda: queue.push(make_task()),
        "push_many": lambda: queue.push_many([make_task(), make_task()]),
        "claim": lambda: queue.claim("w", wait=5),
        "get": lambda: queue.get("t1"),
        "size": queue.size,
        "check": queue.check,
        "settings": queue.settings,
    }
    for name, call in calls.items():
        began = time.monotonic()
        with pytest.raises(RedisUnavailable):
            call()
        assert time.monotonic() - began < 1.5, name


def test_a_server_that_does_not_answer_is_given_up_in_time(own_server: OwnServer) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client, TaskQueue(client, timeout=0.3) as queue:
        push(queue, "t1")
        client.client_pause(60_000, all=False)  # what may write
        began = time.monotonic()
        with pytest.raises(RedisUnavailable):
            push(queue, "t2")
        assert time.monotonic() - began < 2
        client.client_unpause()
        push(queue, "t2")  # recognised, whether it was applied or not
        assert queue.size() == 2


def test_a_read_only_replica_is_asked_again_until_it_is_the_primary(own_server: OwnServer) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client, TaskQueue(client, timeout=10) as queue:
        queue.check()
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        pushing = in_thread(lambda: push(queue, "t1"))
        deadline = time.monotonic() + 10
        while client.info("errorstats").get("errorstat_READONLY") is None:
            assert time.monotonic() < deadline
        client.execute_command("REPLICAOF", "NO", "ONE")
        assert pushing() == ["t1"]
        assert queue.size() == 1


@pytest.mark.own_user
def test_a_server_that_wants_a_password_is_refused_at_once(own_server: OwnServer) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client:
        client.config_set("requirepass", "secret")
        client.execute_command("AUTH", "secret")
        with TaskQueue.from_url(server.url) as queue, pytest.raises(RedisRefused):
            queue.push(make_task())
        client.config_set("requirepass", "")


def test_a_user_without_rights_is_refused(own_server: OwnServer) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "reader", "on", "nopass", "~*", "+@read")
        options = {**client.connection_pool.connection_kwargs, "username": "reader"}
        path = str(options["path"])
        limited = redis.Redis(unix_socket_path=path, username="reader", password="any")
        with limited, TaskQueue(limited, timeout=1) as queue, pytest.raises(RedisRefused):
            queue.push(make_task())


def test_a_restarted_server_is_used_again(
    own_server: OwnServer, tmp_path: os.PathLike[str]
) -> None:
    server = own_server(tmp_path)
    with TaskQueue.from_url(server.url, timeout=5) as queue:
        push(queue, "t1")
        with redis.Redis.from_url(server.url) as client:
            client.client_kill_filter(_type="normal", skipme=True)
        push(queue, "t2")
        assert queue.size() == 2


def test_all_errors_are_ours() -> None:
    assert issubclass(RedisUnavailable, FairQueueError)
    assert issubclass(RedisRefused, FairQueueError)
    assert not issubclass(RedisRefused, ValueError)


def test_operations_are_not_repeated_after_redis_forgot_them(redis_client: redis.Redis) -> None:
    with pytest.raises(ConfigurationError, match=r"timeout must .*not 30\.1"):
        TaskQueue(redis_client, timeout=30.1)
    (replay,) = (part for part in parts_of("push") if part.name == "replay")
    assert "local REPLAY_MS = 60000" in replay.text
    assert isinstance(TaskQueue(redis_client, timeout=30).link, Link)


def test_push_many_says_so_when_other_batches_were_stored(world: World) -> None:
    world.push("t600", payload={"other": True})
    tasks = [make_task(task_id=f"t{i}") for i in range(1000)]
    with pytest.raises(
        InvalidTask, match=r"'t600'.*batch was not stored, other .* may have been stored"
    ):
        world.queue.push_many(tasks)
    stored = set(world.dump()["status"])
    assert {"t0", "t600"} <= stored
    assert "t599" not in stored, "a batch is stored as a whole or not at all"
    world.queue.push_many(task for task in tasks if task.task_id != "t600")
    assert world.queue.size() == 1000


def test_old_records_go_with_time_also_when_nothing_ends(world: World) -> None:
    world.queue.configure(keep_finished_for=60)
    world.push("t1", "t2")
    world.queue.finish(world.claim_one())
    world.queue.bury(world.claim_one())
    world.advance(100)
    assert world.queue.claim("w") == []
    assert world.places() == {"buried": ["t2"]}


def test_a_claim_wakes_a_blocked_worker_when_it_brings_the_next_moment_nearer(world: World) -> None:
    wake = world.keys["wake"]
    assert world.queue.claim("idle") == []
    world.push("t1", "t2")
    world.redis.delete(wake)
    world.queue.claim("w", limit=2, lease=1)
    assert world.redis.llen(wake) == 1, "there is a lease to watch now"
    world.redis.delete(wake)
    assert world.queue.claim("idle") == []  # which knows of the lease from here on
    world.push("t3")
    world.redis.delete(wake)
    world.queue.claim("w", lease=2)
    assert world.redis.llen(wake) == 0, "somebody watches for an earlier moment already"


def test_a_url_that_is_none_is_refused_with_its_value() -> None:
    with pytest.raises(ConfigurationError, match="None is not a Redis URL"):
        TaskQueue.from_url(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["kinds", "wake_1"])
def test_a_push_asks_the_keys_of_waiting_workers_first(world: World, key: str) -> None:
    world.fill("alice", 2)
    world.queue.claim("w", names=["other"])
    world.spoil(key)
    before = world.dump()
    with pytest.raises(RedisRefused, match=key):
        world.push("t1")
    assert world.dump() == before


def test_a_large_claim_is_split(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(queue, "alice", 600)
    asked: list[int] = []
    claim_once = queue._claim_once

    def noted(worker_id: str, limit: int, *arguments: Any) -> Any:
        asked.append(limit)
        return claim_once(worker_id, limit, *arguments)

    monkeypatch.setattr(queue, "_claim_once", noted)
    assert ids_of(queue.claim("w", limit=550)) == [f"alice-{n}" for n in range(550)]
    assert asked == [550, 300, 50]
    assert len(queue.claim("w", limit=1000)) == 50
    assert len(asked) == 4


def test_tasks_that_are_claimed_reach_the_caller_though_redis_goes_away_then(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(queue, "alice", 600)
    claim_once = queue._claim_once

    def once(*arguments: Any) -> Any:
        answer = claim_once(*arguments)
        monkeypatch.setattr(queue, "_claim_once", gone)
        return answer

    def gone(*arguments: Any) -> Any:
        raise RedisUnavailable("gone")

    monkeypatch.setattr(queue, "_claim_once", once)
    assert len(queue.claim("w", limit=600)) == 250
