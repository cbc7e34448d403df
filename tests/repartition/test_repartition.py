"""A queue at rest is moved to another one: everything, once, in its order, whatever happens."""

import random
from collections import Counter
from itertools import pairwise

import pytest
import redis
from helpers.moving import (
    Open,
    all_content_of,
    at_rest,
    claim_all,
    content_of,
    end_leases,
    live_a_little,
    move_with_deaths,
    texts_of,
    with_groups,
)
from helpers.recorded import RECORDED, load

from fairqueue.access.audit import AuditLog
from fairqueue.access.credentials import AccessStore
from fairqueue.clock import ManualClock
from fairqueue.history.runs import History
from fairqueue.queue.queue import TaskQueue
from fairqueue.repartition import Repartition, count
from fairqueue.runtime.cluster import EmbeddedCluster
from fairqueue.scheduler.scheduler import TaskScheduler

# --- at rest --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", RECORDED)
def test_everything_that_versions_have_stored_moves_and_stays_the_same(
    file: str, clients: list[redis.Redis], clock: ManualClock, open_queue: Open
) -> None:
    recorded = load(clients[0], file)
    clock.set(recorded["at_ms"] / 1000)
    old, new = at_rest(open_queue(0, 1), clock), open_queue(1, 4)
    before, settings = content_of(old), texts_of(old, "users")
    audit = len(AuditLog(old.link).entries(limit=100))
    report = Repartition(old, new).run()
    assert report.is_complete
    assert report.verified
    assert content_of(new) == with_groups(before)
    for owner, text in settings.items():
        assert texts_of(new, "users")[owner] == text
    assert AccessStore(new.link.parts[0]).admit(recorded["secret"], rate=1, burst=9)
    assert len(AuditLog(new.link.parts[0]).entries(limit=100)) == audit
    assert count(old).total == 0


@pytest.mark.parametrize("file", RECORDED[:1])
def test_a_moved_queue_works_and_ends_each_task_once(
    file: str, clients: list[redis.Redis], clock: ManualClock, open_queue: Open
) -> None:
    clock.set(load(clients[0], file)["at_ms"] / 1000)
    old, new = at_rest(open_queue(0, 1), clock), open_queue(1, 4)
    Repartition(old, new).run()
    for user in ("paused",):
        new.part_of(user, None).set_user(user, paused=False)
    ids = {i for i, s in texts_of(new, "status").items() if s["state"] in ("ready", "delayed")}
    claimed = [claim.task.task_id for claim in claim_all(new, clock)]
    assert sorted(claimed) == sorted(ids)
    assert claim_all(old, clock) == []
    active = {i for i, state in texts_of(new, "schedule_state").items() if state["active"]}
    for link in new.link.parts:
        TaskScheduler(new.at(link), f"s{link.keys.partition}").tick()
    fired = claim_all(new, clock)
    schedules = {each.task.schedule_id for each in fired}
    assert len({each.task.task_id for each in fired}) == len(fired)
    assert schedules <= active
    assert {"plain", "seconds", "interval"} <= schedules


# --- processes that die ------------------------------------------------------------------------

CHAIN = (1, 4, 1, 4, 16)


@pytest.mark.parametrize("seed", range(3))
def test_a_queue_moves_on_and_on_and_stays_the_same(
    seed: int, clock: ManualClock, open_queue: Open
) -> None:
    rng = random.Random(seed)
    queues = [open_queue(i, partitions) for i, partitions in enumerate(CHAIN)]
    live_a_little(queues[0], rng, clock, 0)
    end_leases(queues[0], clock)
    before, deaths = all_content_of(queues[0]), 0
    for old, new in pairwise(queues):
        report, died = move_with_deaths(old, new, rng, lambda: None)
        assert report.is_complete
        assert report.verified
        assert not report.refused
        assert all_content_of(new) == before
        deaths += died
    assert deaths


@pytest.mark.parametrize("seed", range(3))
def test_tasks_end_once_though_the_move_dies_and_both_queues_go_on(
    seed: int, clock: ManualClock, open_queue: Open
) -> None:
    rng = random.Random(seed)
    old, new = open_queue(0, 1), open_queue(1, 4)
    live_a_little(old, rng, clock, 0)
    left = count(old)
    assert left.running
    waiting = {i for i, s in texts_of(old, "status").items() if "ended" not in s}
    ended: Counter[str] = Counter()
    stores = [old, new]

    def work(most: int = 3) -> None:
        for store in stores:
            for claim in store.claim("w", limit=most, lease=50, pools=["default", "gpu", "slow"]):
                store.finish(claim)
                ended[claim.task.task_id] += 1
            History(store).prune(0)  # nothing is known of a task once it has ended
        clock.advance(rng.choice([0.1, 70.0, 200.0]))  # tombstones end

    for store in stores:
        store.configure(keep_finished=0, keep_dead=0)
    report = None
    while report is None or not report.is_complete:
        report, _ = move_with_deaths(old, new, rng, work, drain=True)
        work()
    for _ in range(60):
        work(20)
    assert count(old).total == 0
    assert count(new).total == 0
    assert max(ended.values()) == 1
    assert ended.keys() <= waiting


def test_a_queue_moves_from_a_server_to_a_cluster_and_back(
    clock: ManualClock, open_queue: Open, cluster: EmbeddedCluster
) -> None:
    rng = random.Random(7)
    old, back = open_queue(0, 1), open_queue(1, 2)
    live_a_little(old, rng, clock, 0)
    end_leases(old, clock)
    before = all_content_of(old)
    with TaskQueue.from_url(cluster.url, partitions=8, clock=clock) as new:
        there, _ = move_with_deaths(old, new, rng, lambda: None)
        assert all_content_of(new) == before
        again, _ = move_with_deaths(new, back, rng, lambda: None)
    assert there.verified
    assert again.verified
    assert all_content_of(back) == before
