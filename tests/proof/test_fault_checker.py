"""The checker of the fault harness: each kind of broken promise is seen, and only that."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from helpers.tasks import claim_one, make_task

from fairqueue.clock import ManualClock
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from faults.checker import Verdict, check
from faults.journal import Journal, read_journals
from faults.nursery import Nursery
from faults.storm import Profile, run_storm

pytestmark = pytest.mark.untidy  # that is what the checker is to see

# Of a verdict that finds nothing.
COUNTS = ("lost", "unexpected", "duplicated", "doubled", "repeated_completions", "unfinished")


class Storm:
    """A queue on which two tasks were pushed and run, with the journals of who did it."""

    def __init__(self, queue: TaskQueue, client: redis.Redis, folder: Path) -> None:
        self.queue, self.client, self.folder = queue, client, folder
        self.producer = Journal(folder / "p0-0.journal")
        self.worker = Journal(folder / "w0-0.journal")
        self.push(0, "ok")
        self.push(1, "ok")
        for _ in range(2):
            self.work()

    def push(self, number: int, outcome: str, *, store: bool = True) -> None:
        self.producer.note("push", number, 1, "intent")
        if store:
            self.queue.push(make_task(task_id=f"p0-0.{number}"))
        self.producer.note("push", number, 1, outcome)

    def work(self) -> Claim:
        claim = claim_one(self.queue)
        self.worker.note("run", claim.task.task_id, claim.task.user_id, 0.0, None)
        self.queue.finish(claim)
        self.worker.note("done", [claim.task.task_id])
        return claim

    def verdict(self, **settings: bool) -> Verdict:
        return check(self.queue, self.folder, **settings)


@pytest.fixture
def storm(redis_client: redis.Redis, clock: ManualClock, tmp_path: Path) -> Iterator[Storm]:
    with TaskQueue(redis_client, clock=clock) as queue:
        queue.configure(keep_finished=1000, keep_dead=1000)
        yield Storm(queue, redis_client, tmp_path)


def found(verdict: Verdict) -> dict[str, int]:
    """What a verdict holds against the queue."""
    names = (*COUNTS, "schedules_wrong", "disagreements")
    return {name: getattr(verdict, name) for name in names if getattr(verdict, name)}


def test_a_storm_in_which_nothing_went_wrong_has_no_violation(storm: Storm) -> None:
    verdict = storm.verdict()
    assert found(verdict) == {}
    assert (verdict.tasks, verdict.runs, verdict.acknowledged) == (2, 2, 2)
    assert verdict.violations(durable=True) == 0


def test_a_task_that_was_acknowledged_and_is_not_there_is_lost(storm: Storm) -> None:
    storm.push(2, "ok", store=False)
    verdict = storm.verdict()
    assert found(verdict) == {"lost": 1}
    assert verdict.violations(durable=True) == 1
    assert verdict.violations(durable=False) == 0


def test_what_nobody_knows_may_be_there_or_not(storm: Storm) -> None:
    storm.push(2, "unknown", store=False)
    storm.push(3, "unknown")
    storm.work()
    assert found(storm.verdict()) == {}


def test_a_task_that_nobody_meant_to_push_is_unexpected(storm: Storm) -> None:
    storm.queue.push(make_task(task_id="p9-9.1"))
    storm.work()
    assert found(storm.verdict()) == {"unexpected": 1}


def test_a_refused_task_is_found(storm: Storm) -> None:
    storm.push(2, "failed")
    storm.work()
    assert found(storm.verdict()) == {"unexpected": 1}


def test_a_task_that_has_not_ended_is_seen(storm: Storm) -> None:
    storm.push(2, "ok")
    assert found(storm.verdict()) == {"unfinished": 1}


def test_a_task_that_was_finished_and_never_run_is_seen(storm: Storm) -> None:
    storm.push(2, "ok")
    storm.queue.finish(claim_one(storm.queue))
    assert found(storm.verdict()) == {"unfinished": 1}


def test_a_task_that_was_enqueued_twice_is_seen(storm: Storm) -> None:
    storm.client.hincrby(storm.queue.keys["fair"], "seq", 1)
    assert found(storm.verdict()) == {"duplicated": 1}


def test_a_completion_that_was_counted_twice_is_seen(storm: Storm) -> None:
    storm.client.hincrby(storm.queue.keys["stats"], "finished", 1)
    assert found(storm.verdict()) == {"doubled": 1}


def test_a_completion_that_two_workers_were_told_of_is_seen(storm: Storm) -> None:
    storm.worker.note("done", ["p0-0.0"])
    verdict = storm.verdict()
    assert found(verdict) == {"repeated_completions": 1}
    assert verdict.violations(durable=False) == 0


def test_a_completion_that_was_acknowledged_and_is_not_there_is_lost(storm: Storm) -> None:
    storm.push(2, "ok")
    claim = claim_one(storm.queue)
    storm.worker.note("run", "p0-0.2", "alice", 0.0, None)
    storm.worker.note("done", ["p0-0.2"])
    storm.queue.bury(claim, "no")
    assert found(storm.verdict()) == {"lost": 1}


def test_structures_that_do_not_agree_are_seen(storm: Storm) -> None:
    storm.client.hset(storm.queue.keys["running"], "alice", 3)
    assert found(storm.verdict()) == {"disagreements": 1}


def steady(storm: Storm, clock: ManualClock) -> TaskScheduler:
    """A scheduler with a schedule of every second, which has fired twice."""
    scheduler = TaskScheduler(storm.queue)
    scheduler.add_schedule("* * * * * *", "alice", schedule_id="steady-0")
    for _ in range(2):
        clock.advance(1)
        scheduler.tick()
        storm.work()
    return scheduler


def test_moments_that_add_up_are_right(storm: Storm, clock: ManualClock) -> None:
    scheduler = steady(storm, clock)
    clock.advance(3)  # two are missed
    scheduler.tick()
    storm.work()
    verdict = storm.verdict()
    assert (found(verdict), verdict.fires, verdict.missed) == ({}, 3, 2)


@pytest.mark.parametrize("count", ["runs", "missed"])
def test_moments_that_do_not_add_up_are_seen(storm: Storm, clock: ManualClock, count: str) -> None:
    steady(storm, clock)
    key = storm.queue.keys["schedule_state"]
    state: dict[str, Any] = json.loads(storm.client.hget(key, "steady-0") or b"")
    state[count] = state.get(count, 0) + 1
    storm.client.hset(key, "steady-0", json.dumps(state))
    assert found(storm.verdict()) == {"schedules_wrong": 2 if count == "runs" else 1}


def test_schedules_are_lost_or_left(storm: Storm) -> None:
    scheduler = TaskScheduler(storm.queue)
    editor = Journal(storm.folder / "e0-0.journal")
    for name in ("kept", "left"):
        scheduler.add_schedule("0 9 * * *", "alice", schedule_id=name)
    for name in ("kept", "left", "lost"):
        editor.note("add", name, "intent")
        editor.note("add", name, "ok")
    editor.note("remove", "left", "intent")
    editor.note("remove", "left", "ok")
    assert found(storm.verdict()) == {"lost": 1, "unexpected": 1}


def test_a_line_that_was_torn_is_left_out(tmp_path: Path) -> None:
    Journal(tmp_path / "a.journal").note("run", "x")
    with (tmp_path / "a.journal").open("ab") as file:
        file.write(b'["run","y')
    assert list(read_journals(tmp_path)) == [("a", ["run", "x"])]


@pytest.mark.processes
def test_the_nursery_tells_how_an_actor_ended() -> None:
    with Nursery() as nursery:
        pid = nursery.start("no such role", {})
        assert nursery.wait(pid) == 1
        assert not nursery.signal(pid, 9)


@pytest.mark.processes
def test_a_storm_leaves_nothing_behind() -> None:
    said: list[str] = []
    say: Callable[[str], None] = said.append
    profile = Profile(
        name="small", faults={"kill": 1}, goals={"kill": 3}, gap=0.05, workers=1, proxied=False
    )
    result = run_storm(profile, 1, say=say)
    assert (result.violations, result.verdict.details) == (0, [])
    assert result.faults["kill"] >= 3
    assert result.verdict.fires > 0
