"""One test for each guard of tenants, pools, keys, unique tasks and expiry.

`scripts/mutants.py` removes the guards one by one, and each time one of these has to fail.
"""

from typing import Any

import pytest
from helpers.tasks import fill, ids_of, make_task, push
from helpers.world import World

from fairqueue.queue.queue import TaskQueue


def test_settings_that_move_hold_for_tasks_that_waited_there(queue: TaskQueue) -> None:
    push(queue, "theirs", user_id="ann", tenant="acme")
    push(queue, "moved", user_id="ann")
    queue.set_user("ann", paused=True)
    queue.move_user("ann", "acme")
    assert ids_of(queue.claim("w", limit=5)) == []


def test_the_first_pool_has_no_service_stored_up(queue: TaskQueue) -> None:
    fill(queue, "ann", 60)
    for _ in range(30):
        queue.finish(queue.claim("w")[0])
    fill(queue, "bob", 20, pool="gpu")
    claims = queue.claim("w", limit=20, pools=["default", "gpu"])
    assert [claim.task.pool for claim in claims].count("gpu") == 10


@pytest.mark.untidy
def test_an_unreadable_entry_of_a_ring_stops_nobody(world: World) -> None:
    push(world.queue, "t1", user_id="ann", tenant="acme")
    world.redis.zadd(world.keys["rings"], {b"r\2acme\0" + b"0\0\2acme\2eve": 0})
    assert ids_of(world.queue.claim("w", limit=5)) == ["t1"]


def test_a_tenant_without_critical_tasks_is_in_no_lane(world: World) -> None:
    push(world.queue, "urgent", user_id="ann", tenant="acme", priority=6)
    push(world.queue, "usual", user_id="ann", tenant="acme")
    assert world.dump()["critical"].keys() == {"\x02acme"}
    world.queue.cancel("urgent")
    assert "critical" not in world.dump()


def test_a_large_task_of_a_newcomer_waits_for_its_turn(queue: TaskQueue) -> None:
    fill(queue, "bob", 100)
    queue.claim("w", limit=5)
    push(queue, "large", user_id="ann", cost=20)
    assert "large" not in ids_of(queue.claim("w", limit=15))
    assert "large" in ids_of(queue.claim("w", limit=15))


def test_the_longest_pattern_counts_whatever_was_set_last(queue: TaskQueue) -> None:
    queue.set_limit("a:b:*", slots=3)
    queue.set_limit("a:*", slots=1)
    push(queue, "t1", "t2", "t3", "t4", limit_keys=["a:b:c"])
    assert len(queue.claim("w", limit=5)) == 3


def test_a_task_with_keys_that_is_given_back_has_its_unique_key_again(queue: TaskQueue) -> None:
    options: dict[str, Any] = {"limit_keys": ["k"], "unique": "u", "unique_for": "waiting"}
    assert queue.push(make_task(task_id="a", **options)) == "a"
    queue.release(queue.claim("w")[0])
    assert queue.push(make_task(task_id="b", **options)) == "a"


def test_a_task_is_not_put_off_for_longer_than_it_may(world: World) -> None:
    for n in range(4):
        assert world.queue.claim("w") == []
        world.queue.push(make_task(task_id=f"t{n}", unique="u", debounce=5, max_wait=12))
        world.advance(3.9)
    assert ids_of(world.queue.claim("w")) == ["t0"]


def test_a_task_that_waits_again_has_its_key_though_another_had_it(queue: TaskQueue) -> None:
    options: dict[str, Any] = {"unique": "u", "unique_for": "waiting"}
    queue.push(make_task(task_id="a", **options))
    first = queue.claim("w")[0]
    queue.push(make_task(task_id="b", **options))
    assert ids_of(queue.claim("w")) == ["b"]
    queue.release(first)
    assert queue.push(make_task(task_id="c", **options)) == "a"
