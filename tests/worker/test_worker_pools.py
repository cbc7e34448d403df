"""Workers of different kinds: each takes the tasks of its own pools."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from helpers.tasks import beat, info_of, push
from helpers.waiting import eventually, until_blocked
from helpers.world import World

from fairqueue import TaskQueue, Worker
from fairqueue.errors import ConfigurationError, InvalidTask
from fairqueue.queue.workers import WorkerStore


@contextmanager
def running(*workers: Worker) -> Iterator[None]:
    for worker in workers:
        worker.start()
    try:
        yield
    finally:
        assert [worker.stop(30) for worker in workers] == [True] * len(workers)


def done(queue: TaskQueue, task_id: str) -> None:
    eventually(lambda: info_of(queue, task_id).state == "finished", f"{task_id} is finished")


@pytest.mark.parametrize(
    ("pools", "taken"),
    [
        ([], {"plain"}),
        (["default"], {"plain"}),
        (["gpu"], {"gpu"}),
        (("gpu", "default", "gpu"), {"plain", "gpu"}),
        ({"gpu", "disk"}, {"gpu", "disk"}),
    ],
)
def test_a_worker_takes_the_tasks_of_its_pools(world: World, pools: Any, taken: set[str]) -> None:
    world.push("plain")
    world.push("gpu", pool="gpu")
    world.push("disk", pool="disk")
    settings = {"pools": pools} if pools else {}
    worker = Worker(world.queue, lambda task: None, **settings)
    worker.run_until_empty()
    ended = {each for each in ("plain", "gpu", "disk") if world.info(each).state == "finished"}
    assert ended == taken


@pytest.mark.parametrize(
    ("pools", "message"),
    [
        ([], "pools must name at least one pool"),
        ("gpu", "pools must be a list of names, such as \\['gpu'\\], not 'gpu'"),
        (None, "pools must be a list of names"),
        ([""], "pool must be"),
        (["a\nb"], "pool must be"),
        ([7], "pool must be"),
        ([f"p{n}" for n in range(21)], "at most 20 pools, not 21"),
    ],
)
def test_bad_pools_are_refused(queue: TaskQueue, pools: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Worker(queue, pools=pools)


def test_users_of_each_pool_have_their_share_whoever_else_works(world: World) -> None:
    """Long CPU work of others does not keep anybody from the GPU."""
    for n in range(30):
        world.push(f"cpu-{n}", user_id="busy")
        for user in ("busy", "calm"):
            world.push(f"{user}-{n}", user_id=user, pool="gpu")
    served: list[str] = []
    Worker(world.queue, lambda task: None).run_until_empty()
    gpu = Worker(world.queue, lambda task: served.append(task.user_id), pools=["gpu"])
    gpu.run_once()
    gpu.run_once()
    assert {user: served.count(user) for user in ("busy", "calm")} == {"busy": 8, "calm": 8}


# --- handlers with a pool -------------------------------------------------------------------------


def test_the_helper_of_a_handler_pushes_to_its_pool(world: World) -> None:
    worker = Worker(world.queue, pools=["gpu"])

    @worker.task("render", pool="gpu")
    def render(payload: dict[str, Any]) -> str:
        return "done"

    ids = [
        render.push("alice"),
        render.delay(1).push("alice"),
        render.options(priority=5).push("alice"),
        render.options(pool="default").push("alice"),
    ]
    world.advance(2)
    assert worker.run_until_empty() == 3
    assert [world.info(each).pool for each in ids] == ["gpu", "gpu", "gpu", "default"]
    assert [world.info(each).state for each in ids] == ["finished"] * 3 + ["ready"]


def test_the_pool_of_a_handler_does_not_change_what_its_worker_takes(world: World) -> None:
    worker = Worker(world.queue)
    render = worker.register("render", lambda payload: None, pool="gpu")
    task_id = render.push("alice")
    assert worker.run_until_empty() == 0
    assert world.info(task_id).state == "ready"


def test_options_of_a_helper_take_the_flow_of_a_task(world: World) -> None:
    build = Worker(world.queue).register("build", lambda payload: None)
    nightly = build.options(unique="nightly", expires=60, cost=2.5, limit_keys=["account:42"])
    first = nightly.push("alice", page=1)
    assert nightly.push("alice", page=2) == first
    info = world.info(first)
    assert (info.cost, info.limit_keys) == (2.5, ("account:42",))
    with pytest.raises(InvalidTask, match="cost must be"):
        build.options(cost=0)
    with pytest.raises(InvalidTask, match="on_duplicate needs unique"):
        build.options(on_duplicate="replace")


def test_a_bad_pool_of_a_handler_is_refused(queue: TaskQueue) -> None:
    with pytest.raises(ConfigurationError, match="pool must be"):
        Worker(queue).task("render", pool="")


# --- heartbeats -----------------------------------------------------------------------------------


def test_workers_say_which_pools_they_serve(world: World) -> None:
    Worker(world.queue, worker_id="a").run_once()
    Worker(world.queue, worker_id="b", pools=["gpu", "disk"]).run_once()
    assert [(each.worker_id, each.pools) for each in world.workers.alive()] == [
        ("a", ("default",)),
        ("b", ("disk", "gpu")),
    ]
    assert "pools" not in world.record("workers", "a")


def test_a_pool_without_a_living_worker_is_unserved(world: World) -> None:
    world.push("t", pool="gpu")

    def unserved() -> list[str]:
        return [each.pool for each in world.inspector.system.pools() if each.is_unserved]

    assert unserved() == ["gpu"]
    Worker(world.queue, pools=["disk"]).run_once()
    assert unserved() == ["gpu"]
    beat(world.queue, pools=["gpu"])
    assert unserved() == []


def test_a_pool_whose_only_worker_was_killed_is_unserved_once_its_task_waits_again(
    world: World,
) -> None:
    def unserved() -> list[str]:
        return [each.pool for each in world.inspector.system.pools() if each.is_unserved]

    world.push("a", "b", pool="gpu")
    beat(world.queue, pools=["gpu"])
    world.queue.claim("w", pools=["gpu"], lease=30)
    world.advance(40)  # no heartbeat, and nobody renews the lease
    world.workers.look_over()  # as a leader does
    assert world.queue.inspect().running == 0
    assert unserved() == ["gpu"]


def handled(world: World, worker_id: str, names: list[str], *pools: str) -> frozenset[str]:
    fields: dict[str, Any] = {"pools": [*pools]} if pools else {}
    record = {"pid": 7, "slots": 1, **fields, "names": names, "current": [], "started": 0}
    return world.workers.beat(record, worker_id).handled


def test_names_are_those_of_workers_that_share_a_pool(world: World) -> None:
    assert handled(world, "a", ["mail"]) == {"mail"}
    assert handled(world, "g", ["render"], "gpu") == {"render"}
    assert handled(world, "both", ["copy"], "gpu", "default") == {"mail", "render", "copy"}
    assert handled(world, "a", ["mail"]) == {"mail", "copy"}
    assert handled(world, "g", ["render"], "gpu") == {"render", "copy"}
    assert handled(world, "d", ["*"], "disk") == {"*"}
    # A worker changes its pools, and another one leaves.
    assert handled(world, "both", ["copy"], "disk") == {"copy", "*"}
    assert handled(world, "a", ["mail"]) == {"mail"}
    world.workers.leave("d")
    assert handled(world, "both", ["copy"], "disk") == {"copy"}
    for worker_id in ("both", "g"):
        world.workers.leave(worker_id)
    assert handled(world, "a", ["mail"]) == {"mail"}
    assert world.dump()["workers"].keys() == {"a", ""}


def test_names_of_workers_that_are_gone_are_forgotten_in_each_pool(world: World) -> None:
    handled(world, "g", ["render"], "gpu")
    world.advance(20)
    handled(world, "h", ["copy"], "gpu")
    world.advance(20)
    assert handled(world, "h", ["copy"], "gpu") == {"copy"}


def test_a_worker_does_not_leave_its_tasks_to_workers_of_other_pools(world: World) -> None:
    """It would wait for one that never takes it."""
    beat(world.queue, "other", names=["render"], pools=["gpu"])
    world.push("t", name="render")
    worker = Worker(world.queue)
    worker.register("mail", lambda payload: None)
    assert worker.run_once() == 1
    assert world.info("t").error == "no handler for task 'render' here"


def test_a_worker_leaves_tasks_to_workers_of_the_same_pool(world: World) -> None:
    beat(world.queue, "other", names=["render"], pools=["gpu"])
    world.push("t", name="render", pool="gpu")
    worker = Worker(world.queue, pools=["gpu"])
    worker.register("mail", lambda payload: None)
    assert worker.run_once() == 0


# --- in threads and in processes ------------------------------------------------------------------


def test_an_idle_worker_is_woken_by_tasks_of_its_pools_only(
    live: TaskQueue, redis_client: redis.Redis
) -> None:
    both = Worker(live, lambda task: "both", pools=["gpu", "disk"], worker_id="both")
    plain = Worker(live, lambda task: "plain", worker_id="plain")
    with running(both, plain):
        until_blocked(redis_client, 2)
        for task_id, fields, worker in (
            ("g", {"pool": "gpu"}, "both"),
            ("p", {}, "plain"),
            ("d", {"pool": "disk"}, "both"),
        ):
            began = time.monotonic()
            push(live, task_id, **fields)
            done(live, task_id)
            assert time.monotonic() - began < 4  # an idle worker looks for itself after 5 s
            assert info_of(live, task_id).result == worker
            until_blocked(redis_client, 2)


def test_a_delayed_task_wakes_a_worker_of_its_pool(
    live: TaskQueue, redis_client: redis.Redis
) -> None:
    worker = Worker(live, lambda task: None, pools=["gpu"])
    with running(worker):
        until_blocked(redis_client)
        push(live, "later", pool="gpu", delay=0.2)
        done(live, "later")


@pytest.mark.processes
def test_each_process_of_a_worker_serves_its_pools(live: TaskQueue) -> None:
    worker = Worker(live, lambda task: None, pools=["gpu"], processes=2, worker_id="w")
    push(live, "plain")
    with running(worker):
        push(live, *(f"g{n}" for n in range(20)), pool="gpu")
        for n in range(20):
            done(live, f"g{n}")
        alive = WorkerStore(live.link).alive()
        assert {each.pools for each in alive} == {("gpu",)}
    assert info_of(live, "plain").state == "ready"


def isolated(payload: dict[str, Any]) -> str:
    return "isolated"


@pytest.mark.processes
def test_isolated_handlers_run_tasks_of_pools(live: TaskQueue) -> None:
    worker = Worker(live, pools=["gpu"])
    task = worker.register("isolated", isolated, isolation="process", pool="gpu")
    task_id = task.push("alice")
    assert worker.run_once() == 1
    assert info_of(live, task_id).result == "isolated"
