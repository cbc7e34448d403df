"""Pools: each has its own order and its own wake-ups; limits of users hold over all of them."""

import threading
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import count_commands
from helpers.tasks import fill, ids_of, make_task, push
from helpers.world import World

from fairqueue.errors import InvalidTask
from fairqueue.models import Claim, Task
from fairqueue.queue.pools import pool_infos
from fairqueue.queue.queue import TaskQueue
from fairqueue.validation import Priority


def serve(queue: TaskQueue, count: int, *pools: str) -> list[Task]:
    """Claim and finish `count` tasks, one by one."""
    found = []
    for _ in range(count):
        for claim in queue.claim("w", pools=pools):
            found.append(claim.task)
            queue.finish(claim)
    return found


def users(tasks: Sequence[Task]) -> Counter[str]:
    return Counter(task.user_id for task in tasks)


def pools_of(tasks: Sequence[Task]) -> Counter[str]:
    return Counter(task.pool for task in tasks)


# --- what a pool is -------------------------------------------------------------------------------


def test_a_claim_takes_tasks_of_its_pools_only(world: World) -> None:
    world.push("plain")
    world.push("g", pool="gpu")
    world.push("m", pool="mail")
    assert ids_of(world.queue.claim("w", limit=9)) == ["plain"]
    assert ids_of(world.queue.claim("w", limit=9, pools=["gpu"])) == ["g"]
    assert world.queue.claim("w", limit=9, pools=["gpu", "default"]) == []
    assert ids_of(world.queue.claim("w", limit=9, pools=iter(["mail"]))) == ["m"]
    world.check()


def test_a_user_who_waits_in_one_pool_is_not_starved_by_work_in_another(queue: TaskQueue) -> None:
    """With one clock for all, whoever came later got all of the GPU."""
    fill(queue, "b", 200, pool="gpu")
    for n in range(10):
        fill(queue, f"cpu-{n}", 100)
    serve(queue, 1, "gpu")
    serve(queue, 500, "default")
    fill(queue, "a", 200, pool="gpu")
    assert users(serve(queue, 120, "gpu")) == {"a": 60, "b": 60}


def test_a_user_has_one_share_in_each_pool(queue: TaskQueue) -> None:
    for user in ("ann", "bob"):
        push(queue, *(f"{user}-{n}" for n in range(40)), user_id=user)
    push(queue, *(f"gpu-ann-{n}" for n in range(40)), user_id="ann", pool="gpu")
    push(queue, *(f"gpu-cy-{n}" for n in range(40)), user_id="cy", pool="gpu")
    assert users(serve(queue, 40, "default")) == {"ann": 20, "bob": 20}
    assert users(serve(queue, 40, "gpu")) == {"ann": 20, "cy": 20}


def test_tenants_and_their_users_have_a_share_in_each_pool(queue: TaskQueue) -> None:
    queue.set_tenant("acme", weight=2.0)
    for pool in ("default", "gpu"):
        for tenant, user in (("acme", "ann"), ("acme", "bob"), ("globex", "cy")):
            ids = (f"{pool}-{user}-{n}" for n in range(60))
            push(queue, *ids, user_id=user, tenant=tenant, pool=pool)
    serve(queue, 20, "default")
    found = serve(queue, 60, "gpu")
    assert users(found) == {"ann": 20, "bob": 20, "cy": 20}


def test_a_new_weight_acts_in_each_pool(queue: TaskQueue) -> None:
    for user in ("ann", "bob"):
        push(queue, *(f"{user}-{n}" for n in range(90)), user_id=user, pool="gpu")
    serve(queue, 10, "gpu")
    queue.set_user("ann", weight=4.0)
    assert users(serve(queue, 50, "gpu"))["ann"] in (39, 40, 41)


# --- a worker of several pools --------------------------------------------------------------------


def test_a_worker_of_two_pools_serves_both_evenly(queue: TaskQueue) -> None:
    fill(queue, "a", 100)
    push(queue, *(f"g{n}" for n in range(100)), user_id="a", pool="gpu")
    assert pools_of(serve(queue, 60, "default", "gpu")) == {"default": 30, "gpu": 30}


def test_a_pool_with_more_users_gets_its_part(queue: TaskQueue) -> None:
    """Two users of one pool and one of the other have the same share, as in one pool."""
    for user in ("a", "b"):
        fill(queue, user, 100)
    push(queue, *(f"g{n}" for n in range(100)), user_id="c", pool="gpu")
    assert users(serve(queue, 90, "default", "gpu")) == {"a": 30, "b": 30, "c": 30}


def test_a_pool_that_was_idle_has_no_service_stored_up(queue: TaskQueue) -> None:
    fill(queue, "a", 300)
    serve(queue, 100, "default", "gpu")
    push(queue, *(f"g{n}" for n in range(100)), user_id="b", pool="gpu")
    assert pools_of(serve(queue, 60, "default", "gpu"))["gpu"] in (29, 30, 31)


def test_a_pool_that_others_served_has_no_debt_with_a_worker_of_both(queue: TaskQueue) -> None:
    for pool in ("default", "gpu"):
        push(queue, *(f"{pool}-{n}" for n in range(300)), user_id="a", pool=pool)
    serve(queue, 10, "default", "gpu")
    serve(queue, 150, "gpu")
    assert pools_of(serve(queue, 60, "default", "gpu"))["default"] >= 30


@pytest.mark.parametrize("limit", [2, 7, 50])
def test_turns_do_not_depend_on_the_claims_size(world: World, limit: int) -> None:
    def order(limit: int) -> list[str]:
        world.redis.flushdb()
        for pool, many in (("default", 17), ("gpu", 9), ("mail", 23)):
            for user in ("ann", "bob", "cy")[: 1 + many % 3]:
                for tenant in (None, "acme"):
                    ids = (f"{pool}-{tenant}-{user}-{n}" for n in range(many))
                    world.push(*ids, user_id=user, tenant=tenant, pool=pool)
        found: list[str] = []
        while claims := world.queue.claim("w", limit=limit, pools=["gpu", "mail", "default"]):
            found += ids_of(claims)
        return found

    assert order(limit) == order(1)


def test_the_critical_share_holds_in_each_pool(queue: TaskQueue) -> None:
    queue.configure(critical_share=0.5)
    for user, level in (("calm", Priority.NORMAL), ("hasty", Priority.CRITICAL)):
        ids = (f"{user}-{n}" for n in range(50))
        push(queue, *ids, user_id=user, pool="gpu", priority=level)
    assert users(serve(queue, 40, "gpu"))["hasty"] <= 31


# --- limits hold over all pools -------------------------------------------------------------------


def test_a_cap_holds_over_all_pools(world: World) -> None:
    world.queue.set_user("ann", max_running=2)
    for pool in ("default", "gpu", "mail"):
        world.push(f"{pool}-1", f"{pool}-2", user_id="ann", pool=pool)
    pools = ["default", "gpu", "mail"]
    claims = [*world.queue.claim("w", limit=9), *world.queue.claim("w", limit=9, pools=["gpu"])]
    assert len(claims) == 2
    assert world.queue.claim("w", limit=9, pools=pools) == []
    world.queue.finish(claims[0])
    assert len(world.queue.claim("w", limit=9, pools=["mail"])) == 1
    world.check()


def test_a_rate_holds_over_all_pools(world: World) -> None:
    world.queue.set_user("ann", rate=1.0)
    for pool in ("default", "gpu"):
        world.push(*(f"{pool}-{n}" for n in range(9)), user_id="ann", pool=pool)
    begun: list[Claim] = []
    for n in range(40):
        begun += world.queue.claim("w", limit=9, pools=["gpu"] if n % 2 else ["default"])
        world.advance(0.1)
    assert len(begun) == 4  # in four seconds


def test_a_pause_holds_in_all_pools(world: World) -> None:
    world.push("g", user_id="ann", tenant="acme", pool="gpu")
    world.push("d", user_id="ann", tenant="acme")
    world.queue.set_tenant("acme", paused=True)
    assert world.queue.claim("w", limit=9, pools=["gpu", "default"]) == []
    world.queue.set_tenant("acme", paused=False)
    assert len(world.queue.claim("w", limit=9, pools=["gpu", "default"])) == 2
    world.check()


@pytest.mark.parametrize("what", ["delay", "retry", "lapse", "release", "dead letter"])
def test_a_task_comes_back_to_its_pool(world: World, what: str) -> None:
    task_id = "g"
    world.push(task_id, pool="gpu", delay=5.0 if what == "delay" else None)
    if what != "delay":
        (claim,) = world.queue.claim("w", pools=["gpu"], lease=3.0)
        if what == "retry":
            world.queue.retry(claim, "no", delay=5.0)
        elif what == "release":
            world.queue.release(claim)
        elif what == "dead letter":
            world.queue.bury(claim, "no")
            task_id = world.history.retry("g")
    world.advance(6)
    assert world.queue.claim("w") == []
    assert ids_of(world.queue.claim("w", pools=["gpu"])) == [task_id]
    world.check()


# --- wake-ups -------------------------------------------------------------------------------------


def wait_in(queue: TaskQueue, *pools: str, found: list[str]) -> threading.Thread:
    def wait() -> None:
        found.extend(ids_of(queue.claim("w", pools=pools, wait=30.0)))

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("options", [{"pool": "gpu"}, {"pool": "gpu", "tenant": "acme"}])
def test_a_push_wakes_a_worker_of_its_pool(world: World, options: dict[str, str]) -> None:
    found: list[str] = []
    thread = wait_in(world.queue, "gpu", found=found)
    world.until_blocked()
    world.push("plain")
    assert found == []
    world.push("g", **options)
    thread.join(20)
    assert found == ["g"]


def test_a_worker_of_several_pools_is_woken_by_each(world: World) -> None:
    for pool in ("default", "gpu", "mail"):
        found: list[str] = []
        thread = wait_in(world.queue, "default", "gpu", "mail", found=found)
        world.until_blocked()
        world.push(f"of-{pool}", pool=pool)
        thread.join(20)
        assert found == [f"of-{pool}"]


def test_idle_workers_of_other_pools_cost_a_push_nothing(own_server: OwnServer) -> None:
    """Twenty workers wait in other pools. They are not woken, and a push does no more for them."""

    def cost(waiting: int) -> Counter[str]:
        with redis.Redis.from_url(own_server().url) as client, TaskQueue(client) as queue:
            push(queue, "first", pool="other")
            queue.finish(queue.claim("w", pools=["other"])[0])
            queues, threads = [], []
            for _ in range(waiting):
                queues.append(TaskQueue(client))
                threads.append(wait_in(queues[-1], "other", found=[]))
            if waiting:
                World.until_blocked(World(client, *[None] * 4), waiting)  # type: ignore[arg-type]
            before = count_commands(client)
            fill(queue, "ann", 20)
            queue.finish_many((claim, None) for claim in queue.claim("w", limit=20))
            after = count_commands(client)
            push(queue, *(f"end-{n}" for n in range(waiting)), pool="other")
            for thread in threads:
                thread.join(20)
            for each in queues:
                each.close()
            after.subtract(before)
            return Counter({name: n for name, n in after.items() if n and name != "info"})

    assert cost(20) == cost(0)


# --- how many -------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False])
def test_a_queue_has_at_most_a_hundred_pools_with_tasks(world: World, together: bool) -> None:
    tasks = [make_task(task_id=f"t{n}", pool=f"p{n}") for n in range(101)]
    said = "'t100' was not stored: its pool is new, and a queue can have at most 100 pools"
    if together:
        with pytest.raises(InvalidTask, match=said):
            world.queue.push_many(tasks)
        assert world.queue.size() == 0
    world.queue.push_many(tasks[:100])
    with pytest.raises(InvalidTask, match=said):
        world.queue.push(tasks[100])
    world.check()


def test_a_pool_without_tasks_makes_room_for_another(world: World) -> None:
    for n in range(100):
        world.push(f"t{n}", pool=f"p{n}")
    (claim,) = world.queue.claim("w", pools=["p7"])
    world.push("new", pool="new")
    assert ids_of(world.queue.claim("w", pools=["new"])) == ["new"]
    # A task that comes back to a pool which lost its place gets one again.
    world.push("newer", pool="newer")
    world.queue.release(claim)
    assert ids_of(world.queue.claim("w", pools=["p7"])) == ["t7"]
    world.check()


def known_pools(world: World) -> list[str]:
    return str(world.dump()["fair"]["pools"]).split("\n")


def test_claims_from_ever_new_pools_add_no_more_than_a_hundred(world: World) -> None:
    for n in range(98):
        world.push(f"t{n}", pool=f"p{n}")
    for n in range(10):
        assert world.queue.claim("w", pools=[f"new{2 * n}", f"new{2 * n + 1}"]) == []
    assert len(known_pools(world)) == 100
    world.push("late", pool="late")  # an unused one makes room
    assert ids_of(world.queue.claim("w", pools=["late", "other"])) == ["late"]
    assert len(known_pools(world)) == 100


def test_delayed_tasks_of_too_many_pools_wait_for_room(world: World) -> None:
    """Otherwise they could fill a queue with pools, when they become due together."""
    for n in range(100):
        world.push(f"t{n}", pool=f"p{n}", delay=10)
        world.push(f"later{n}", pool=f"more{n}", delay=20)
    world.advance(10)
    for _ in range(3):
        world.queue.claim("w")
    assert len(known_pools(world)) == 100
    world.advance(10)
    for _ in range(3):
        world.queue.claim("w")
    assert len(known_pools(world)) == 100
    assert (world.queue.size(), world.queue.inspect().delayed) == (100, 100)
    world.check()
    done: list[str] = []
    for _ in range(30):
        pools = known_pools(world)
        for at in range(0, 100, 20):
            claims = world.queue.claim("w", limit=100, pools=pools[at : at + 20])
            done += ids_of(claims)
            world.queue.finish_many((claim, None) for claim in claims)
        world.advance(1)
    assert len(set(done)) == 200
    assert len(known_pools(world)) == 100
    world.check()


@pytest.mark.parametrize(
    ("pools", "said"),
    [
        ([], "pools must name at least one pool"),
        ("gpu", r"pools must be a list of names, such as \['gpu'\], not 'gpu'"),
        (["a\0b"], "control characters"),
        ([None], "not None"),
        ([f"p{n}" for n in range(21)], "at most 20 pools, not 21"),
    ],
    ids=repr,
)
def test_pools_that_cannot_be_are_refused(queue: TaskQueue, pools: object, said: str) -> None:
    with pytest.raises(InvalidTask, match=said):
        queue.claim("w", pools=pools)  # type: ignore[arg-type]


def test_the_snapshot_counts_the_tasks_of_each_pool(world: World) -> None:
    world.push("a", "b", pool="gpu")
    world.push("c", pool="mail")
    world.push("d")
    world.advance(3)
    found = {pool.pool: (pool.waiting, pool.oldest_wait) for pool in world.queue.inspect().pools}
    assert found == {"default": (1, 3.0), "gpu": (2, 3.0), "mail": (1, 3.0)}


def test_the_snapshot_tells_when_a_pool_was_last_claimed_from(world: World) -> None:
    world.push("a", "b", pool="gpu")
    world.push("c")
    world.queue.claim("w", pools=["gpu"])
    world.advance(5)
    found = {pool.pool: pool.last_claim for pool in world.queue.inspect().pools}
    assert found == {"default": None, "gpu": world.now() - timedelta(seconds=5)}


def test_a_pool_is_unserved_once_nobody_has_taken_its_tasks_for_a_while(world: World) -> None:
    def unserved() -> list[str]:
        return [pool.pool for pool in pool_infos(world.queue.inspect(), []) if pool.is_unserved]

    assert unserved() == []
    world.push("a", "b", pool="gpu")
    assert unserved() == ["gpu"]
    (claim,) = world.queue.claim("w", pools=["gpu"], lease=3600)
    world.advance(599)  # a program without heartbeats may be busy with the task
    assert unserved() == []
    world.advance(2)
    assert unserved() == ["gpu"]
    world.queue.finish(claim)
    world.push("c", pool="gpu")
    world.queue.finish(world.queue.claim("w", pools=["gpu"])[0])
    world.advance(35)
    assert unserved() == []
    world.advance(1)  # nothing runs: nobody is there
    assert unserved() == ["gpu"]


def reasons_of(queue: TaskQueue, task_id: str) -> list[str]:
    explanation = queue.explain(task_id)
    assert explanation is not None
    return [reason.code for reason in explanation.reasons]


def test_a_claim_without_heartbeats_counts_as_a_worker_of_its_pool_for_a_while(
    world: World,
) -> None:
    world.push("a", "b", "c", pool="gpu")
    world.push("d")
    assert world.queue.claim("own", lease=3600)  # holds a lease, of another pool
    assert reasons_of(world.queue, "b")[0] == "no_pool_worker"
    explanation = world.queue.explain("b")
    assert explanation is not None
    assert explanation.summary.startswith("No live worker serves pool 'gpu'.")
    world.beat("cpu")
    assert reasons_of(world.queue, "b")[0] == "no_pool_worker"

    assert ids_of(world.queue.claim("own", pools=["gpu"])) == ["a"]
    world.beat("cpu")
    assert "no_pool_worker" not in reasons_of(world.queue, "b")
    world.advance(timedelta(minutes=10, seconds=1))
    world.beat("cpu")
    assert reasons_of(world.queue, "b")[0] == "no_pool_worker"


def test_explain_says_soon_that_the_only_worker_of_a_pool_was_killed(world: World) -> None:
    world.push("a", "b", pool="gpu")
    world.queue.claim("w", pools=["gpu"], lease=30)
    world.advance(40)
    world.beat("cpu")
    world.workers.look_over()  # the lease is over
    assert reasons_of(world.queue, "b")[0] == "no_pool_worker"
