"""Leaders of partitions on a real cluster, one node of which stops to answer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
from helpers.waiting import eventually
from prometheus_client import CollectorRegistry

from fairqueue.link.partitions import partition_of
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.cluster import EmbeddedCluster
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.service import Schedules

PARTS = 8


@pytest.fixture
def cluster(own_cluster: Callable[..., EmbeddedCluster]) -> EmbeddedCluster:
    """A cluster whose nodes go on without one of them."""
    return own_cluster(3, config={"cluster-require-full-coverage": "no"})


@pytest.fixture
def schedulers(cluster: EmbeddedCluster) -> Iterator[list[TaskScheduler]]:
    """Two schedulers that share the partitions."""
    with ExitStack() as stack:
        made = []
        for name in ("one", "two"):
            queue = stack.enter_context(TaskQueue.from_url(cluster.url, partitions=PARTS))
            scheduler = TaskScheduler(queue, name, lock_timeout=3, registry=CollectorRegistry())
            stack.callback(scheduler.stop)
            made.append(scheduler)
        yield made


def user_in(number: int) -> str:
    """A user of a partition."""
    users = (f"user{n}" for n in range(1000))
    return next(each for each in users if partition_of(each, None, PARTS) == number)


def test_a_node_that_freezes_delays_no_schedule_of_the_others(
    cluster: EmbeddedCluster, schedulers: list[TaskScheduler]
) -> None:
    one, two = schedulers
    one.add_schedules(
        {"every": 1, "user_id": user_in(n), "schedule_id": str(n)} for n in range(PARTS)
    )
    one.start()
    two.start()
    eventually(lambda: [len(one.leads), len(two.leads)] == [4, 4], "shared", within=30)
    # The node of the home, which has the list of schedulers.
    parts = one.link.parts
    frozen = cluster.owner(parts[0].keys.slot)
    others = [n for n in range(PARTS) if cluster.owner(parts[n].keys.slot) is not frozen]
    schedules = Schedules(one.queue)

    def runs(number: int) -> tuple[int, int]:
        found = schedules.at(parts[number]).get_schedule(str(number))
        assert found is not None
        return found.run_count, found.missed_count

    def has_run(number: int, least: int) -> bool:
        return runs(number)[0] >= least

    before = {number: runs(number) for number in others}
    frozen.freeze()
    for number in others:
        least = before[number][0] + 6
        eventually(partial(has_run, number, least), "fired", within=20, every=0.1)
    # A few may be late on a machine that is busy; without care, nearly all would be.
    assert max(runs(number)[1] - before[number][1] for number in others) <= 2
    frozen.thaw()
    every = list(range(PARTS))
    eventually(lambda: sorted([*one.leads, *two.leads]) == every, "all are led", within=20)
    one.stop()
    eventually(lambda: len(two.leads) == PARTS, "two leads all", within=20)
    assert two.health().leaders == dict.fromkeys(range(PARTS), "two")
