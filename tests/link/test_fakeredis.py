"""A user's own tests can run on fakeredis: a quick part of what the real server is tested for."""

from collections.abc import Iterator

import fakeredis
import pytest
from helpers.tasks import claim_one, fill, ids_of, info_of, make_task, push, served_users

from fairqueue.clock import ManualClock
from fairqueue.errors import InvalidTask, LeaseLost
from fairqueue.queue.queue import TaskQueue


@pytest.fixture(params=[False, True], ids=["bytes", "decoded"])
def queue(request: pytest.FixtureRequest, clock: ManualClock) -> Iterator[TaskQueue]:
    client = fakeredis.FakeRedis(decode_responses=request.param)
    with TaskQueue(client, clock=clock) as queue:
        yield queue
    client.close()


def test_a_task_is_pushed_claimed_and_finished(queue: TaskQueue) -> None:
    queue.push(make_task(task_id="t1", payload={"n": 1}))
    queue.push(make_task(task_id="t1", payload={"n": 1}))
    with pytest.raises(InvalidTask):
        queue.push(make_task(task_id="t1", payload={"n": 2}))
    claim = claim_one(queue)
    assert claim.task.payload == {"n": 1}
    queue.finish(claim, {"ok": True})
    info = info_of(queue, "t1")
    assert (info.state, info.result) == ("finished", {"ok": True})
    assert queue.claim("w") == []


def test_many_tasks_at_once(queue: TaskQueue) -> None:
    fill(queue, "alice", 600)
    claims = queue.claim("w", limit=1000)
    assert len(claims) == 600
    assert queue.finish_many((claim, None) for claim in claims) == ["finished"] * 600


def test_a_retried_task_comes_back_in_time(queue: TaskQueue, clock: ManualClock) -> None:
    push(queue, "t1")
    queue.retry(claim_one(queue), "failed", delay=10)
    assert queue.claim("w") == []
    clock.advance(10)
    again = claim_one(queue)
    assert again.attempt == 2
    clock.advance(31)
    third = claim_one(queue)
    with pytest.raises(LeaseLost):
        queue.finish(again)
    queue.release(third)
    queue.bury(claim_one(queue), "no")
    assert queue.inspect().dead == 1


def test_a_finished_task_that_is_not_kept_is_still_finished(queue: TaskQueue) -> None:
    queue.configure(keep_finished=0)
    push(queue, "t1")
    claim = claim_one(queue)
    queue.finish(claim)
    queue.finish(claim)
    assert queue.get("t1") is None
    push(queue, "t1")
    assert queue.size() == 0


def test_a_task_is_cancelled(queue: TaskQueue) -> None:
    push(queue, "t1", "t2")
    assert queue.cancel("t1") is True
    assert queue.cancel("nobody") is False
    assert ids_of(queue.claim("w", limit=5)) == ["t2"]


def test_limits_of_a_user(queue: TaskQueue, clock: ManualClock) -> None:
    fill(queue, "alice", 4)
    queue.set_user("alice", paused=True)
    assert queue.claim("w") == []
    queue.set_user("alice", paused=False, max_running=1)
    claims = queue.claim("w", limit=4)
    assert len(claims) == 1
    queue.finish(claims[0])
    queue.set_user("alice", max_running=None, rate=1.0)
    assert len(queue.claim("w", limit=4)) == 1
    clock.advance(1)
    assert len(queue.claim("w", limit=4)) == 1


def test_users_take_turns(queue: TaskQueue) -> None:
    queue.set_user("carol", weight=2.0)
    for user in ("alice", "bob", "carol"):
        fill(queue, user, 12)
    users = served_users(queue, 24)
    assert (users.count("alice"), users.count("bob"), users.count("carol")) == (6, 6, 12)


def test_a_worker_may_wait(queue: TaskQueue) -> None:
    assert queue.claim("w", wait=0.05) == []
    push(queue, "t1")
    assert ids_of(queue.claim("w", wait=5)) == ["t1"]
