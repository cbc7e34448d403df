"""The names of tenants, pools, keys, unique tasks, expiry, cost and quotes that users rely on."""

from datetime import UTC, datetime, timedelta

import pytest
from helpers.world import World

from fairqueue import Task, TaskQueue, Worker
from fairqueue.errors import DuplicateTask, FairQueueError


def test_a_tenant_is_set_as_a_user_is(queue: TaskQueue) -> None:
    queue.set_tenant(
        "acme", weight=2.0, max_running=None, max_waiting=None, rate=None, paused=False
    )
    assert queue.get_tenant("acme").weight == 2.0
    queue.set_tenant("acme", rate=5.0)
    assert queue.get_tenant("acme").weight == 2.0


def test_a_task_takes_all_options_at_once(world: World) -> None:
    task = Task.create(
        user_id="alice",
        tenant="acme",
        name="reports.build",
        payload={"report": 7},
        pool="gpu",
        limit_keys=["account:42"],
        unique="report:7",
        on_duplicate="ignore",
        unique_for="unfinished",
        debounce=None,
        max_wait=None,
        expires=None,
        cost=1.0,
    )
    assert world.queue.push(task) == task.task_id
    assert world.queue.claim("w", limit=10, lease=30.0) == []
    (claim,) = world.queue.claim("w", limit=10, lease=30.0, pools=["gpu"])
    assert claim.task == task
    world.queue.finish(claim, cost=2.5)


@pytest.mark.parametrize("on_duplicate", ["ignore", "replace", "error"])
@pytest.mark.parametrize("unique_for", ["unfinished", "waiting", 60, 60.0, timedelta(minutes=1)])
def test_each_reaction_works_with_each_scope(
    world: World, on_duplicate: str, unique_for: str | float | timedelta
) -> None:
    def push(number: int) -> str:
        return world.queue.push(
            Task.create(
                user_id="alice",
                task_id=f"t{number}",
                payload={"n": number},
                unique="report:7",
                on_duplicate=on_duplicate,
                unique_for=unique_for,
            )
        )

    assert push(1) == "t1"
    if on_duplicate == "error":
        with pytest.raises(DuplicateTask) as caught:
            push(2)
        assert isinstance(caught.value, FairQueueError)
    else:
        assert push(2) == "t1"
    (claim,) = world.queue.claim("w", limit=10)
    assert claim.task.payload == {"n": 2 if on_duplicate == "replace" else 1}


def test_with_debounce_the_payload_of_the_last_push_runs(world: World) -> None:
    for number in range(3):
        task = Task.create(user_id="a", payload={"n": number}, unique="u", debounce=5, max_wait=60)
        first = world.queue.push(task)
        world.advance(4)
    world.advance(1)
    (claim,) = world.queue.claim("w")
    assert (claim.task.task_id, claim.task.payload) == (first, {"n": 2})


@pytest.mark.parametrize("expires", [5, 5.0, timedelta(seconds=5), "datetime"])
def test_an_expiry_is_in_seconds_or_an_aware_datetime(
    world: World, expires: float | timedelta | str
) -> None:
    given = world.now() + timedelta(seconds=5) if isinstance(expires, str) else expires
    task = Task.create(user_id="alice", expires=given)
    world.queue.push(task)
    world.advance(5)
    assert world.queue.claim("w") == []
    assert world.info(task.task_id).state == "expired"


def test_a_worker_serves_pools(world: World) -> None:
    done: list[str] = []
    world.push("cpu")
    world.push("gpu", pool="gpu")
    handler = lambda task: done.append(task.task_id)  # noqa: E731
    Worker(world.queue, handler, pools=["gpu"]).run_once()
    assert done == ["gpu"]
    Worker(world.queue, handler).run_once()
    assert done == ["gpu", "cpu"]


def test_a_limit_is_of_a_key_or_of_all_that_begin_so(world: World) -> None:
    world.queue.set_limit(
        "account:*", slots=1, rate=None, ordered=False, through_retries=False, scope="queue"
    )
    for account in ("account:1", "account:2"):
        world.push(f"{account}/a", f"{account}/b", limit_keys=[account])
    assert len(world.queue.claim("w", limit=10)) == 2  # each key has its own slots


def test_a_quote_has_times_or_a_reason(world: World) -> None:
    quote = world.queue.quote("alice", tenant="acme", name="reports.build")
    assert (quote.starts_about, quote.earliest, quote.latest) == (None, None, None)
    assert quote.reason is not None
    world.beat()
    quote = world.queue.quote("alice", tenant="acme", name="reports.build")
    assert quote.reason is None
    for moment in (quote.starts_about, quote.earliest, quote.latest):
        assert isinstance(moment, datetime)
        assert moment.tzinfo == UTC
    (task_id,) = world.push("a")
    found = world.queue.explain(task_id)
    assert found is not None
    assert found.starts_about is not None
