"""One test for each guard of tenants, pools, keys, unique tasks and expiry.

`scripts/mutants.py` removes the guards one by one, and each time one of these has to fail.
"""

import pytest
from helpers.tasks import fill, ids_of, push
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
