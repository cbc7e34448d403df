"""Clusters whose nodes fail, come and go."""

import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from helpers.tasks import ids_of, make_task
from helpers.tls import Authority, TlsFront
from helpers.waiting import eventually, in_thread

from fairqueue.errors import RedisUnavailable
from fairqueue.link.keys import SLOTS
from fairqueue.link.partitions import tolerate_missing
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.cluster import EmbeddedCluster
from fairqueue.worker.worker import Worker

OwnCluster = Callable[..., EmbeddedCluster]


def test_nodes_of_an_embedded_cluster_come_and_go(own_cluster: OwnCluster) -> None:
    cluster = own_cluster(1, 1, fsync="always")
    (primary,) = cluster.primaries
    primary.ask("SET", "a", "1")
    added = cluster.add()
    cluster.move_slots(0, SLOTS // 2, added)
    assert cluster.primaries == [primary, added]
    cluster.remove(added)
    assert cluster.owner(0) is primary
    replica = cluster.fail_over(primary)
    assert cluster.primaries == [replica]
    primary.kill()
    replica.kill()
    replica.restart()
    primary.restart()
    cluster.wait()
    assert cluster.primaries[0].ask("GET", "a") == b"1", "kept by fsync"


USERS = [f"user-{number}" for number in range(20)]
PARTITIONS = 6


def push_all(queue: TaskQueue, prefix: str) -> list[str]:
    return [queue.push(make_task(user_id=name, task_id=f"{prefix}-{name}")) for name in USERS]


def finish_all(queue: TaskQueue) -> list[str]:
    found: list[str] = []
    while claims := queue.claim("w", limit=100):
        for claim in claims:
            queue.finish(claim)
        found += ids_of(claims)
    return sorted(found)


@pytest.fixture(scope="module")
def replicated() -> Iterator[EmbeddedCluster]:
    """A cluster whose primaries have a replica each, for all tests here that leave it whole."""
    with EmbeddedCluster.start(3, 1, fsync="everysec", node_timeout=1.0) as cluster:
        yield cluster


@pytest.fixture
def cluster(replicated: EmbeddedCluster) -> Iterator[EmbeddedCluster]:
    """The replicated cluster, empty at first; all its nodes run again at the end."""
    replicated.flush()
    yield replicated
    for node in replicated.nodes:
        node.thaw()
        if not node.is_running:
            node.restart()
    replicated.wait()


@pytest.fixture
def queue(cluster: EmbeddedCluster) -> Iterator[TaskQueue]:
    """A queue whose calls may take as long as a failover."""
    with TaskQueue.from_url(cluster.url, partitions=PARTITIONS, timeout=10.0) as queue:
        yield queue


class Pushing:
    """Pushes tasks in a thread until told to stop."""

    def __init__(self, queue: TaskQueue) -> None:
        self.pushed: list[str] = []
        self.longest_s = 0.0
        self._queue = queue
        self._stop = threading.Event()
        self._ended = in_thread(self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            number = len(self.pushed)
            began = time.monotonic()
            task = make_task(user_id=USERS[number % len(USERS)], task_id=f"t{number}")
            self.pushed.append(self._queue.push(task))
            self.longest_s = max(self.longest_s, time.monotonic() - began)

    def stop(self) -> list[str]:
        """End it after some more tasks; the ids."""
        enough = len(self.pushed) + 2 * len(USERS)
        eventually(lambda: len(self.pushed) >= enough, "tasks are pushed again", within=20)
        self._stop.set()
        self._ended()
        return sorted(self.pushed)


def test_a_planned_failover_loses_nothing(cluster: EmbeddedCluster, queue: TaskQueue) -> None:
    pushing = Pushing(queue)
    for primary in cluster.primaries[:2]:
        eventually(lambda: len(pushing.pushed) > 20, "tasks are pushed")
        cluster.fail_over(primary)
    pushed = pushing.stop()
    assert pushing.longest_s < 3.0
    assert finish_all(queue) == pushed


def test_the_replica_of_a_killed_primary_is_found(
    cluster: EmbeddedCluster, queue: TaskQueue
) -> None:
    push_all(queue, "before")
    lost = cluster.owner(queue.link.parts[0].keys.slot)
    time.sleep(0.3)  # replication is asynchronous
    lost.kill()
    pushed = push_all(queue, "after")
    assert queue.link.parts[0].node != lost.address
    assert len(pushed) == len(USERS)
    found = finish_all(queue)
    assert set(pushed) <= set(found)
    assert len(found) == 2 * len(USERS)


def test_the_replica_of_a_frozen_primary_is_found(
    cluster: EmbeddedCluster, queue: TaskQueue
) -> None:
    push_all(queue, "before")
    frozen = cluster.owner(queue.link.parts[0].keys.slot)
    frozen.freeze()
    began = time.monotonic()
    push_all(queue, "after")
    assert time.monotonic() - began < 10.0
    assert queue.link.parts[0].node != frozen.address
    frozen.thaw()
    cluster.wait()
    push_all(queue, "late")
    assert set(finish_all(queue)) >= {f"late-{name}" for name in USERS}


def test_many_partitions_on_a_frozen_node_take_no_longer_than_one(
    cluster: EmbeddedCluster,
) -> None:
    with TaskQueue.from_url(cluster.url, partitions=48, timeout=2.0) as queue:
        push_all(queue, "before")
        listener = queue.link.listener(*(part.keys["wake"] for part in queue.link.parts))
        listener.wait(0.1)
        frozen = cluster.nodes[0] if cluster.nodes[0].is_primary else cluster.nodes[3]
        assert frozen.is_primary
        frozen.freeze()
        for _ in range(2):
            began = time.monotonic()
            with suppress(RedisUnavailable):
                queue.size()
            assert time.monotonic() - began < 4.0
        began = time.monotonic()
        listener.wait(1.0)
        assert time.monotonic() - began < 4.0
        listener.close()


def test_a_partition_whose_node_stays_away_is_reported_and_the_others_go_on(
    own_cluster: OwnCluster,
) -> None:
    cluster = own_cluster(3, config={"cluster-require-full-coverage": "no"}, fsync="always")
    with TaskQueue.from_url(cluster.url, partitions=6, timeout=2.0) as queue:
        push_all(queue, "before")
        lost = cluster.nodes[0]
        lost.kill()
        parts = [part for part in queue.link.parts if part.node == lost.address]
        assert len(parts) == 2
        began = time.monotonic()
        with pytest.raises(RedisUnavailable, match="Redis did not answer"):
            queue.size()
        assert time.monotonic() - began < 4.0
        with tolerate_missing() as missing:
            assert 0 < queue.size() < len(USERS)
        assert sorted(missing.partitions) == sorted(part.keys.partition for part in parts)
        lost.restart()
        cluster.wait()
        assert queue.size() == len(USERS)


def test_nodes_that_come_and_go_are_followed(cluster: EmbeddedCluster, queue: TaskQueue) -> None:
    pushing = Pushing(queue)
    added = cluster.add()
    first = queue.link.parts[0].keys.slot
    cluster.move_slots(first, first, added)
    eventually(lambda: queue.link.parts[0].node == added.address, "the added node is used")
    cluster.remove(added)
    eventually(lambda: queue.link.parts[0].node != added.address, "the removed one is left")
    pushed = pushing.stop()
    assert finish_all(queue) == pushed


def test_tasks_run_once_each_while_slots_move_and_primaries_change(
    cluster: EmbeddedCluster, queue: TaskQueue
) -> None:
    runs: Counter[str] = Counter()
    with TaskQueue.from_url(cluster.url, partitions=PARTITIONS, timeout=10.0) as other:
        worker = Worker(other, lambda task: runs.update([task.task_id]), concurrency=4)
        worker.start()
        pushing = Pushing(queue)
        try:
            for part in queue.link.parts[:3]:
                slot = part.keys.slot
                target = next(n for n in cluster.primaries if n is not cluster.owner(slot))
                move = cluster.moving_slot(slot, target)
                move.move_keys(*move.keys()[::2])
                cluster.nodes[0].ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                move.finish()
                cluster.fail_over(target)
                home = next(n for n in cluster.primaries if n is not cluster.owner(slot))
                cluster.move_slots(slot, slot, home)
            pushed = pushing.stop()
            eventually(lambda: len(runs) == len(pushed), "all have run", within=20)
        finally:
            assert worker.stop(20)
    assert sorted(runs.elements()) == pushed
    assert queue.size() == 0


def test_all_nodes_may_be_replaced_one_by_one(own_cluster: OwnCluster) -> None:
    cluster = own_cluster(1, fsync="always")
    with TaskQueue.from_url(cluster.url, partitions=2, timeout=10.0) as queue:
        push_all(queue, "before")
        (old,) = cluster.nodes
        new = cluster.add()
        cluster.move_slots(0, SLOTS - 1, new)
        push_all(queue, "between")
        cluster.remove(old)
        assert finish_all(queue) == sorted(
            f"{prefix}-{name}" for prefix in ("before", "between") for name in USERS
        )
        assert queue.link.node == new.address


def test_a_cluster_that_restarts_as_a_whole_is_awaited(own_cluster: OwnCluster) -> None:
    cluster = own_cluster(2, fsync="always")
    with TaskQueue.from_url(cluster.url, partitions=4, timeout=20.0) as queue:
        before = push_all(queue, "before")
        for node in cluster.nodes:
            node.kill()
        pushing = in_thread(lambda: push_all(queue, "after"))
        for node in cluster.nodes:
            node.restart()
        assert finish_all_of(queue, pushing()) == sorted([*before, *push_names("after")])


def push_names(prefix: str) -> list[str]:
    return [f"{prefix}-{name}" for name in USERS]


def finish_all_of(queue: TaskQueue, pushed: list[str]) -> list[str]:
    assert len(pushed) == len(USERS)
    return finish_all(queue)


def test_a_waiting_worker_finds_the_new_primary(cluster: EmbeddedCluster, queue: TaskQueue) -> None:
    wake = [part.keys["wake"] for part in queue.link.parts]
    push_all(queue, "before")
    finish_all(queue)
    listener = queue.link.listener(*wake)
    while listener.wait(0.1):
        pass
    lost = cluster.owner(queue.link.parts[0].keys.slot)
    lost.kill()
    eventually(lambda: cluster.owner(queue.link.parts[0].keys.slot) is not lost, "failover")
    queue.link.parts[0].ask(("LPUSH", wake[0], "1"))
    heard = []
    for _ in range(20):
        if listener.wait(1.0):
            heard.append(listener.token_from)
            break
    assert heard == [wake[0]]
    listener.close()


# --- TLS ------------------------------------------------------------------------------------------


@pytest.fixture
def fronts(tmp_path: Path, own_cluster: OwnCluster) -> Iterator[tuple[EmbeddedCluster, Path]]:
    """A cluster whose nodes announce TLS ports, with a certificate for localhost."""
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.issue("node", "DNS:localhost"))
    cluster = own_cluster(2, config={"cluster-preferred-endpoint-type": "hostname"})
    with ExitStack() as stack:
        for node in cluster.nodes:
            front = stack.enter_context(TlsFront(node.server.socket_path, context))
            node.ask("CONFIG", "SET", "cluster-announce-client-port", front.port)
            node.ask("CONFIG", "SET", "cluster-announce-hostname", "localhost")
        announced = {node.address for node in cluster.nodes}
        eventually(
            lambda: all(
                row[2][0] == b"localhost" and f"127.0.0.1:{row[2][1]}" not in announced
                for node in cluster.nodes
                for row in node.ask("CLUSTER", "SLOTS")
            ),
            "all nodes know the ports",
        )
        yield cluster, authority.path


def test_a_cluster_over_tls(fronts: tuple[EmbeddedCluster, Path]) -> None:
    cluster, authority = fronts
    port = next(row[2][1] for row in cluster.nodes[0].ask("CLUSTER", "SLOTS"))
    url = f"rediss+cluster://localhost:{port}/?ssl_ca_certs={authority}"
    with TaskQueue.from_url(url, partitions=4) as queue:
        pushed = push_all(queue, "over-tls")
        assert len({part.node for part in queue.link.parts}) == 2
        listener = queue.link.listener(*(part.keys["wake"] for part in queue.link.parts))
        assert listener.wait(10.0)
        listener.close()
        assert finish_all(queue) == sorted(pushed)
    with (
        TaskQueue.from_url(f"rediss+cluster://127.0.0.1:{port}/?ssl_ca_certs={authority}") as queue,
        pytest.raises(RedisUnavailable, match="certificate"),
    ):
        queue.size()
