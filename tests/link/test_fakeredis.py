"""A user's own tests can run on fakeredis: a quick part of what the real server is tested for."""

from collections.abc import Iterator
from typing import Any

import fakeredis
import pytest
from helpers.tasks import claim_one, fill, ids_of, info_of, make_task, push, served_users

from fairqueue.clock import ManualClock
from fairqueue.errors import DuplicateTask, InvalidTask, LeaseLost
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.worker import Worker


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


# --- tenants, pools, keys and the other options of tasks ------------------------------------------


def test_tenants_take_turns_and_then_their_users(queue: TaskQueue) -> None:
    queue.set_tenant("globex", weight=2.0)
    for user in ("ann", "bob", "carol"):
        push(queue, *(f"a-{user}-{n}" for n in range(9)), user_id=user, tenant="acme")
    push(queue, *(f"g-{n}" for n in range(30)), user_id="ann", tenant="globex")
    claims = [claim_one(queue).task for _ in range(27)]
    assert [task.tenant for task in claims].count("globex") == 18
    users = [task.user_id for task in claims if task.tenant == "acme"]
    assert [users.count(user) for user in ("ann", "bob", "carol")] == [3, 3, 3]


def test_limits_of_a_tenant(queue: TaskQueue, clock: ManualClock) -> None:
    for user in ("ann", "bob"):
        push(queue, f"{user}-1", f"{user}-2", user_id=user, tenant="acme")
    queue.set_tenant("acme", paused=True)
    assert queue.claim("w", limit=9) == []
    queue.set_tenant("acme", paused=False, max_running=1)
    (claim,) = queue.claim("w", limit=9)
    queue.finish(claim)
    queue.set_tenant("acme", max_running=None, rate=1.0)
    assert len(queue.claim("w", limit=9)) == 1
    clock.advance(1)
    assert len(queue.claim("w", limit=9)) == 1
    assert queue.size("ann", tenant="acme") + queue.size("bob", tenant="acme") == 1
    assert queue.tenants_of("ann") == ["acme"]
    moved = [queue.move_user(user, "globex", tenant="acme") for user in ("ann", "bob")]
    assert sum(moved) == queue.size(tenant="globex") == 1


def test_a_worker_takes_tasks_of_its_pools(queue: TaskQueue) -> None:
    push(queue, "g", pool="gpu")
    push(queue, "d")
    assert ids_of(queue.claim("w", limit=9)) == ["d"]
    worker = Worker(queue, lambda payload: None, pools=["gpu"])
    assert worker.run_until_empty() == 1
    assert info_of(queue, "g").state == "finished"
    assert {pool.pool: pool.waiting for pool in queue.inspect().pools} == {"default": 0, "gpu": 0}


def test_keys_limit_what_runs_and_how_fast(queue: TaskQueue, clock: ManualClock) -> None:
    queue.set_limit("account:*", slots=1, ordered=True)
    queue.set_limit("sms", rate=1.0)
    push(queue, "a", "b", limit_keys=["account:1"])
    push(queue, "c", limit_keys=["account:2", "sms"])
    push(queue, "d", limit_keys=["sms"])
    claims = {claim.task.task_id: claim for claim in queue.claim("w", limit=9)}
    assert claims.keys() == {"a", "c"}
    queue.finish(claims["a"])
    assert ids_of(queue.claim("w", limit=9)) == ["b"]
    clock.advance(1)
    assert ids_of(queue.claim("w", limit=9)) == ["d"]


def test_a_unique_key_has_one_task(queue: TaskQueue, clock: ManualClock) -> None:
    def ask(task_id: str, **fields: Any) -> str:
        return queue.push(make_task(task_id=task_id, unique="report:7", **fields))

    assert [ask("one"), ask("two"), ask("two")] == ["one", "one", "one"]
    assert ask("three", payload={"n": 3}, on_duplicate="replace") == "one"
    with pytest.raises(DuplicateTask):
        ask("four", on_duplicate="error")
    claim = claim_one(queue)
    assert claim.task.payload == {"n": 3}
    queue.finish(claim)
    assert ask("five", unique_for=60) == "five"
    queue.finish(claim_one(queue))
    assert ask("six", unique_for=60) == "five"
    clock.advance(60)
    assert ask("seven", unique_for=60) == "seven"


def test_debounced_pushes_run_once(queue: TaskQueue, clock: ManualClock) -> None:
    options: dict[str, Any] = {"unique": "index", "debounce": 5.0, "max_wait": 8.0}
    for number in range(3):
        queue.push(make_task(task_id=f"t{number}", payload={"n": number}, **options))
        assert queue.claim("w") == []
        clock.advance(3)
    assert claim_one(queue).task.payload == {"n": 2}  # 8 seconds are over


def test_a_task_expires(queue: TaskQueue, clock: ManualClock) -> None:
    push(queue, "t1", expires=5.0)
    clock.advance(6)
    assert queue.claim("w") == []
    assert info_of(queue, "t1").state == "expired"
    assert queue.inspect().counters["expired_tasks"] == 1


def test_cost_counts_for_shares_and_rates(queue: TaskQueue, clock: ManualClock) -> None:
    fill(queue, "alice", 9, cost=3.0)
    fill(queue, "bob", 9)
    users = served_users(queue, 12)
    assert users.count("bob") == 3 * users.count("alice")
    queue.set_user("carol", rate=2.0)
    fill(queue, "carol", 2, cost=10.0, pool="own")
    claim = queue.claim("w", pools=["own"])[0]
    queue.finish(claim, cost=4.0)  # less than it was charged
    clock.advance(1.9)
    assert queue.claim("w", pools=["own"]) == []
    clock.advance(1.1)
    assert len(queue.claim("w", pools=["own"])) == 1


def test_a_quote_and_an_explanation(queue: TaskQueue, clock: ManualClock) -> None:
    fill(queue, "bob", 40)
    for _ in range(20):
        queue.finish(claim_one(queue))
        clock.advance(1)
    push(queue, "t1", user_id="ann", tenant="acme")
    explanation = queue.explain("t1")
    assert explanation is not None
    assert explanation.starts_about is not None
    quote = queue.quote("ann", tenant="acme")
    assert quote.starts_about is not None
    assert quote.earliest is not None
    assert quote.latest is not None
    assert quote.earliest <= quote.starts_about <= quote.latest


def test_schedules_push_to_pools_once_for_each_key(queue: TaskQueue, clock: ManualClock) -> None:
    scheduler = TaskScheduler(queue)
    flow: dict[str, Any] = {"pool": "gpu", "unique": "nightly", "tenant": "acme", "expires": 3600}
    scheduler.add_schedule("* * * * *", "ann", schedule_id="s", **flow)
    for _ in range(3):
        clock.advance(60)
        scheduler.tick()
    assert queue.size("ann", tenant="acme") == 1
    (claim,) = queue.claim("w", limit=9, pools=["gpu"])
    assert (claim.task.tenant, claim.task.pool) == ("acme", "gpu")
