"""Expiry: a task that has not started in time ends as expired, wherever it waits."""

from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import count_commands
from helpers.tasks import ids_of, make_task
from helpers.world import World

from fairqueue.errors import InvalidTask, LeaseLost
from fairqueue.history.records import Run
from fairqueue.queue.queue import TaskQueue


def claimed(world: World, limit: int = 10, **options: Any) -> list[str]:
    return ids_of(world.queue.claim("w", limit=limit, **options))


def run_of(world: World, task_id: str) -> Run:
    details = world.history.get(task_id)
    assert details is not None
    return details.run


# --- when -----------------------------------------------------------------------------------------


def test_a_leader_ends_expired_tasks_when_no_worker_is_alive(world: World) -> None:
    world.push("a", expires=10)
    world.push("g", pool="gpu", expires=10)
    world.push("b")
    world.advance(10)
    world.scheduler.tick()
    assert [world.info(each).state for each in ("a", "g", "b")] == ["expired", "expired", "ready"]


@pytest.mark.parametrize("how", ["seconds", "timedelta", "datetime"])
def test_what_has_not_started_by_then_ends_as_expired(world: World, how: str) -> None:
    at = world.now() + timedelta(seconds=10)
    given: dict[str, Any] = {"seconds": 10, "timedelta": timedelta(seconds=10), "datetime": at}
    world.push("a", expires=given[how])
    world.push("b", expires=given[how])
    assert world.info("a").expires_at == at
    world.advance(9.999)
    assert claimed(world, limit=1) == ["a"]
    world.advance(0.001)
    assert claimed(world) == []
    info = world.info("b")
    assert (info.state, info.ended_at, info.attempts) == ("expired", at, 0)
    assert world.info("a").state == "running"


def test_a_task_that_has_started_does_not_expire(world: World) -> None:
    world.push("a", expires=10)
    claim = world.claim_one(lease=5)
    assert world.info("a").expires_at is None
    world.advance(20)  # the lease is lost, and the task is offered again
    (again,) = world.queue.claim("w")
    world.queue.retry(again, "no", delay=50)
    world.advance(60)
    (last,) = world.queue.claim("w")
    assert last.attempt == 3
    with pytest.raises(LeaseLost):
        world.queue.finish(claim)
    world.queue.finish(last)
    assert world.info("a").state == "finished"


def test_a_task_that_is_given_back_can_expire_again(world: World) -> None:
    world.push("a", expires=10)
    claim = world.claim_one()
    world.advance(4)
    world.queue.release(claim)
    assert world.info("a").expires_at == world.now() + timedelta(seconds=6)
    world.advance(6)
    assert claimed(world) == []
    assert world.info("a").state == "expired"


def test_an_expiry_does_not_move_with_the_task(world: World) -> None:
    world.push("a", expires=10)
    assert world.queue.reschedule("a", delay=20)
    world.advance(20)
    claimed(world)
    assert world.info("a").state == "expired"


# --- wherever it waits ----------------------------------------------------------------------------

Wait = Callable[[World], None]


def behind_a_pause(world: World) -> None:
    world.queue.pause_user("alice")
    world.push("t", expires=10)


def of_a_paused_tenant(world: World) -> None:
    world.queue.set_tenant("acme", paused=True)
    world.push("t", tenant="acme", expires=10)


def behind_a_cap(world: World) -> None:
    world.queue.set_user("alice", max_running=1)
    world.push("first")
    world.claim_one(lease=1000)
    world.push("t", expires=10)


def behind_a_rate(world: World) -> None:
    world.queue.set_user("alice", rate=0.01)
    world.push("first")
    world.claim_one(lease=1000)
    world.push("t", expires=10)


def held_by_a_name(world: World) -> None:
    world.queue.set_limits("default", slots=1)
    world.push("first")
    world.claim_one(lease=1000)
    world.push("t", expires=10)
    assert claimed(world) == []


def held_by_keys(world: World) -> None:
    world.queue.set_limit("*", slots=1, ordered=True)
    world.push("first", limit_keys=["a"])
    world.claim_one(lease=1000)
    world.push("t", limit_keys=["a", "b"], expires=10, tenant="acme")
    assert claimed(world) == []


def delayed(world: World) -> None:
    world.push("t", delay=9, expires=10)
    world.queue.reschedule("t", delay=500)


def in_a_pool_without_workers(world: World) -> None:
    world.push("t", pool="gpu", expires=10)


def behind_a_running_one(world: World) -> None:
    world.push("first", unique="u")
    world.claim_one(lease=1000)
    world.push("t", unique="u", on_duplicate="replace", expires=10)


def unwanted(world: World) -> None:
    world.push("t", name="unknown", expires=10)


WAITS = [
    behind_a_pause,
    of_a_paused_tenant,
    behind_a_cap,
    behind_a_rate,
    held_by_a_name,
    held_by_keys,
    delayed,
    in_a_pool_without_workers,
    behind_a_running_one,
    unwanted,
]


@pytest.mark.parametrize("wait", WAITS)
def test_a_task_expires_wherever_it_waits(world: World, wait: Wait) -> None:
    wait(world)
    world.advance(9.9)
    assert claimed(world, avoid=["unknown"]) == []
    assert world.info("t").state in ("ready", "delayed")
    world.advance(0.1)
    assert claimed(world, avoid=["unknown"]) == []
    assert world.info("t").state == "expired"
    world.check()
    state = world.dump()
    assert "expiring" not in state
    assert "pool_tasks" not in state
    assert world.queue.size() == 0


def test_what_waited_for_an_expired_task_goes_on(world: World) -> None:
    """Its unique key is free, its place in the order is free, and its user is not stuck."""
    world.queue.set_limit("k", slots=1, ordered=True)
    world.push("first", limit_keys=["k"])
    claim = world.claim_one(lease=1000)
    world.push("t", limit_keys=["k"], unique="u", expires=10)
    world.push("next", limit_keys=["k"], user_id="bob")
    assert claimed(world) == []
    world.advance(10)
    world.queue.finish(claim)
    assert claimed(world) == ["next"]
    assert world.push("again", unique="u") == ["again"]


# --- it is counted --------------------------------------------------------------------------------


def test_expired_tasks_are_counted_and_in_the_history(world: World) -> None:
    for n in range(3):
        world.push(f"t{n}", expires=10, tenant="acme" if n else None, name="report")
    world.advance(10)
    claimed(world)
    assert world.queue.inspect().counters["expired_tasks"] == 3
    assert [run.task_id for run in world.history.runs("expired", tenant="acme")] == ["t2", "t1"]
    assert len(world.history.runs("expired", name="report")) == 3
    run = run_of(world, "t0")
    assert (run.status, run.ended_at) == ("expired", world.now())
    found = world.queue.explain("t0")
    assert found is not None
    assert (found.state, found.reasons[0].code) == ("expired", "expired")


def test_an_expired_task_is_no_service_and_no_failure(world: World) -> None:
    world.push("a", expires=1)
    world.advance(1)
    claimed(world)
    counters = world.queue.inspect().counters
    assert counters.get("buried", 0) == counters.get("finished", 0) == 0
    assert world.history.runs("failed") == []
    assert not world.queue.cancel("a")
    assert not world.queue.reschedule("a")


def test_expired_tasks_are_dropped_as_finished_ones_are(world: World) -> None:
    world.queue.configure(keep_finished=2)
    for n in range(10):
        world.push(f"t{n}", expires=1)
    world.advance(1)
    for _ in range(5):
        claimed(world)
    assert len(world.dump()["ended"]) == 2


def test_a_repeated_push_of_an_expired_task_does_not_bring_it_back(world: World) -> None:
    task = make_task(task_id="a", expires=10)
    world.queue.push(task)
    world.advance(10)
    claimed(world)
    assert world.queue.push(task) == "a"
    assert world.info("a").state == "expired"
    assert claimed(world) == []


# --- bounded --------------------------------------------------------------------------------------


def test_many_that_expire_together_are_ended_in_bounded_steps(world: World) -> None:
    world.queue.configure(keep_finished=10_000)
    for user in range(5):
        tasks = [make_task(f"u{user}", expires=10) for _ in range(200)]
        world.queue.push_many(tasks)
    world.push("good", user_id="zoe")
    world.advance(10)
    ended, rounds, got = 0, 0, []
    while ended < 1000:
        before = ended
        claims = world.queue.claim("w", limit=1)
        got += ids_of(claims)
        ended = world.queue.inspect().counters.get("expired_tasks", 0)
        assert ended - before <= 200
        rounds += 1
        assert rounds < 20
    # Nobody waits for the sweep: the good task is not behind a thousand dead ones.
    assert got == ["good"]
    assert world.queue.size() == 0


def test_a_claim_ends_some_expired_tasks_of_one_user_and_the_worker_comes_back_at_once(
    world: World,
) -> None:
    world.queue.configure(keep_finished=10_000)
    world.push(*(f"late-{n}" for n in range(700)), expires=10)
    world.push("good")
    world.advance(10)
    for left in (500, 300, 100):
        _, claims, hint = world.queue.finish_and_claim([], "w", 1)
        assert (claims, hint, world.queue.size()) == ([], 0, left + 1)
    assert ids_of(world.queue.claim("w")) == ["good"]


def test_tasks_without_an_expiry_do_not_pay_for_it(own_server: OwnServer) -> None:
    """A claim reads one range for all tasks that expire, however many wait for their time."""

    def cost(expiring: int) -> Counter[str]:
        with redis.Redis.from_url(own_server().url) as client, TaskQueue(client) as queue:
            queue.push(make_task(expires=1000))
            queue.push_many(make_task("bob", expires=500, delay=400) for _ in range(expiring))
            before = count_commands(client)
            (claim,) = queue.claim("w")
            queue.finish(claim)
            after = count_commands(client)
            after.subtract(before)
            return Counter({name: n for name, n in after.items() if n and name != "info"})

    assert cost(500) == cost(1)


@pytest.mark.parametrize("delay", [None, 100])
def test_a_task_that_no_claim_has_found_expired_says_so(world: World, delay: float | None) -> None:
    world.beat()
    at = world.now() + timedelta(seconds=60 + (delay or 0))
    world.push("t", expires=at, delay=delay)
    before = world.queue.explain("t")
    assert before is not None
    assert [each.code for each in before.reasons][-1] == "expires"
    world.advance((at - world.now()).total_seconds())
    found = world.queue.explain("t")
    assert found is not None
    assert [(each.code, each.values) for each in found.reasons] == [("expiring", {"until": at})]
    assert found.starts_about is None


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expires", "said"),
    [
        (0, "expires must be 0.001 to 3155760000 seconds, not 0"),
        (-5, "not -5"),
        (float("nan"), "not nan"),
        (True, "not True"),
        ("tomorrow", "not 'tomorrow'"),
        (datetime(2100, 1, 1), "a datetime with a time zone"),
        (datetime(2001, 2, 3, tzinfo=UTC), "not '2001-02-03T00:00:00+00:00', which is past"),
    ],
    ids=repr,
)
def test_a_bad_expiry_is_named_and_nothing_is_stored(world: World, expires: Any, said: str) -> None:
    with pytest.raises(InvalidTask) as caught:
        world.push("t", expires=expires)
    assert said in str(caught.value)
    assert world.dump() == {}
