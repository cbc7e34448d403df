"""Waiting for tokens of several slots of a cluster, one blocked connection for each."""

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from helpers.tasks import ids_of, make_task
from helpers.waiting import eventually, in_thread

from fairqueue.link import group_listener
from fairqueue.link.group_listener import GroupListener, SlotEar
from fairqueue.link.listener import Waiter
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.cluster import EmbeddedCluster
from fairqueue.worker.worker import Worker

PARTITIONS = 8
Make = Callable[[], Waiter]


@pytest.fixture
def queue(cluster: EmbeddedCluster) -> Iterator[TaskQueue]:
    """A queue with some partitions on each node."""
    with TaskQueue.from_url(cluster.url, partitions=PARTITIONS) as queue:
        yield queue


def wake_of(queue: TaskQueue) -> list[bytes]:
    return [part.keys["wake"] for part in queue.link.parts]


@pytest.fixture
def make(queue: TaskQueue) -> Iterator[Make]:
    """Make listeners for all partitions, which are closed at the end."""
    made: list[Waiter] = []

    def make() -> Waiter:
        made.append(queue.link.listener(*wake_of(queue)))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def listener(make: Make) -> Waiter:
    return make()


def add_token(queue: TaskQueue, number: int) -> None:
    part = queue.link.parts[number]
    part.ask(("LPUSH", part.keys["wake"], "1"))


def blocked(cluster: EmbeddedCluster) -> int:
    """How many clients are blocked at all nodes together."""
    found = 0
    for node in cluster.nodes:
        for line in node.ask("INFO", "clients").decode().splitlines():
            if line.startswith("blocked_clients:"):
                found += int(line.partition(":")[2])
    return found


def commands(cluster: EmbeddedCluster, name: str) -> int:
    """How often a command was called at all nodes together."""
    found = 0
    for node in cluster.nodes:
        for line in node.ask("INFO", "commandstats").decode().splitlines():
            if line.startswith(f"cmdstat_{name}:calls="):
                found += int(line.partition("=")[2].partition(",")[0])
    return found


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The lists for which a server was asked for a token so far."""
    found: list[bytes] = []
    first = SlotEar.ask

    def ask(ear: SlotEar, block_s: float) -> Any:
        found.extend(ear.keys)
        return first(ear, block_s)

    monkeypatch.setattr(SlotEar, "ask", ask)
    return found


def until_blocked(cluster: EmbeddedCluster, count: int = PARTITIONS) -> None:
    eventually(lambda: blocked(cluster) >= count, f"{count} clients are blocked")


def test_a_token_of_any_partition_ends_a_wait(
    cluster: EmbeddedCluster, queue: TaskQueue, listener: Waiter
) -> None:
    for number in range(PARTITIONS):
        waiting = in_thread(lambda: listener.wait(60))
        until_blocked(cluster)
        add_token(queue, number)
        assert waiting() is True
        assert listener.token_from == wake_of(queue)[number]


def test_a_wait_ends_with_its_time(listener: Waiter) -> None:
    assert listener.wait(0) is False
    assert listener.wait(0.05) is False
    assert listener.token_from is None


def test_tokens_between_waits_are_not_missed(queue: TaskQueue, listener: Waiter) -> None:
    assert listener.wait(0.05) is False
    for number in (2, 5):
        add_token(queue, number)
    found = set()
    for _ in range(2):
        assert listener.wait(60) is True
        found.add(listener.token_from)
    assert found == {wake_of(queue)[number] for number in (2, 5)}
    assert listener.wait(0.01) is False


def test_another_thread_ends_a_wait(cluster: EmbeddedCluster, listener: Waiter) -> None:
    waiting = in_thread(lambda: listener.wait(60))
    until_blocked(cluster)
    listener.nudge()
    assert waiting() is True
    assert listener.token_from is None
    listener.interrupt()
    assert listener.wait(60) is True
    assert listener.wait_for_nudge(60) is True


def test_other_lists_can_be_waited_for(
    cluster: EmbeddedCluster, queue: TaskQueue, listener: Waiter, asked: list[bytes]
) -> None:
    assert listener.wait(0.05) is False
    kept = wake_of(queue)[:3]
    added = queue.link.parts[3].keys["wake_1"]
    asked.clear()
    listener.listen_to(*kept, added)
    assert listener.wait(0.05) is False
    assert asked == [added], "the others are pending still"
    queue.link.parts[3].ask(("LPUSH", added, "1"))
    assert listener.wait(60) is True
    assert listener.token_from == added
    eventually(lambda: blocked(cluster) <= 3, "lists that nobody waits for are left")


def test_64_partitions_cost_next_to_nothing_while_nothing_happens(
    cluster: EmbeddedCluster, asked: list[bytes]
) -> None:
    with TaskQueue.from_url(cluster.url, partitions=64) as queue:
        listener = queue.link.listener(*wake_of(queue))
        for _ in range(5):
            assert listener.wait(0.1) is False
        assert asked == wake_of(queue)
        listener.close()


def test_the_server_is_asked_again_when_its_own_time_out_ends_a_wait(
    queue: TaskQueue, listener: Waiter, asked: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_listener, "GROUP_BLOCK_S", 0.05)
    waiting = in_thread(lambda: listener.wait(60))
    eventually(lambda: len(asked) > 2 * PARTITIONS, "asked again")
    add_token(queue, 1)
    assert waiting() is True


# --- busy workers ---------------------------------------------------------------------------------


def test_a_token_that_comes_to_a_busy_worker_goes_to_another_one(
    cluster: EmbeddedCluster, queue: TaskQueue, make: Make, asked: list[bytes]
) -> None:
    busy, idle = make(), make()
    assert busy.wait(0.05) is False
    resting = in_thread(lambda: busy.wait_for_nudge(60))
    waiting = in_thread(lambda: idle.wait(60))
    until_blocked(cluster, 2 * PARTITIONS)
    add_token(queue, 4)
    assert waiting() is True
    assert idle.token_from == wake_of(queue)[4]
    busy.nudge()
    assert resting() is True
    asked.clear()
    assert busy.wait(0.05) is False
    assert asked == [wake_of(queue)[4]], "where it gave a token back"


def test_a_busy_worker_keeps_its_connections(cluster: EmbeddedCluster, listener: Waiter) -> None:
    assert listener.wait(0.05) is False
    until_blocked(cluster)
    before = commands(cluster, "ping")  # one for each new connection
    for _ in range(5):
        assert listener.wait_for_nudge(0.01) is False
        assert listener.wait(0.01) is False
    assert commands(cluster, "ping") == before


def test_a_worker_takes_tasks_of_all_partitions(cluster: EmbeddedCluster) -> None:
    done = threading.Semaphore(0)
    with (
        TaskQueue.from_url(cluster.url, partitions=PARTITIONS) as queue,
        TaskQueue.from_url(cluster.url, partitions=PARTITIONS) as other,
    ):
        worker = Worker(queue, lambda task: done.release(), concurrency=2)
        worker.start()
        try:
            until_blocked(cluster)
            for number in range(30):
                other.push(make_task(user_id=f"user-{number}", task_id=f"t{number}"))
                assert done.acquire(timeout=30)
        finally:
            assert worker.stop(10)


def test_a_waiting_claim_is_woken_by_a_push_to_any_partition(
    cluster: EmbeddedCluster, queue: TaskQueue
) -> None:
    with TaskQueue.from_url(cluster.url, partitions=PARTITIONS) as other:
        for number in range(6):
            waiting = in_thread(lambda: queue.claim("w", wait=60))
            until_blocked(cluster)
            other.push(make_task(user_id=f"user-{number}", task_id=f"t{number}"))
            began = time.monotonic()
            assert ids_of(waiting()) == [f"t{number}"]
            assert time.monotonic() - began < 2.0
            eventually(lambda: blocked(cluster) == 0, "nobody waits")


# --- nodes that fail and slots that move ----------------------------------------------------------


def test_a_broken_node_is_asked_again_and_the_others_are_not(
    cluster: EmbeddedCluster, queue: TaskQueue, listener: Waiter, asked: list[bytes]
) -> None:
    assert listener.wait(0.05) is False
    broken = [
        part.keys["wake"] for part in queue.link.parts if part.node == cluster.nodes[0].address
    ]
    asked.clear()
    cluster.nodes[0].ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert listener.wait(0.5) is False
    assert sorted(asked) == sorted(broken)
    for number in range(PARTITIONS):
        add_token(queue, number)
        assert listener.wait(60) is True
        assert listener.token_from == wake_of(queue)[number]


def test_while_a_node_is_down_tokens_of_others_come(
    queue: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = make()
    assert isinstance(listener, GroupListener)
    listener.wait(0.05)
    (slot, ear), *_ = listener._ears.items()
    tries = []

    def refuse() -> Any:
        tries.append(time.monotonic())
        raise ConnectionRefusedError

    monkeypatch.setattr(ear._lender, "lend", refuse)
    ear.forget()
    assert listener.wait(1.0) is False
    assert 2 <= len(tries) <= 6, "with pauses that grow"
    number = next(n for n, part in enumerate(queue.link.parts) if part.keys.slot != slot)
    add_token(queue, number)
    assert listener.wait(60) is True
    monkeypatch.undo()
    add_token(queue, [part.keys.slot for part in queue.link.parts].index(slot))
    assert listener.wait(60) is True, "the broken one has come back"


def test_a_silent_node_is_given_up(
    cluster: EmbeddedCluster, queue: TaskQueue, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_listener, "GROUP_BLOCK_S", 0.2)
    monkeypatch.setattr("fairqueue.link.listener.SILENCE_S", 0.1)
    listener = make()
    assert listener.wait(0.05) is False
    cluster.nodes[0].freeze()
    try:
        assert listener.wait(1.0) is False
    finally:
        cluster.nodes[0].thaw()
    waiting = in_thread(lambda: listener.wait(60))
    add_token(queue, 0)
    assert waiting() is True


@pytest.mark.parametrize("how", ["step by step", "at once"])
def test_a_slot_is_followed_to_its_next_node(
    cluster: EmbeddedCluster, queue: TaskQueue, listener: Waiter, how: str
) -> None:
    number = 2
    slot = queue.link.parts[number].keys.slot
    home = cluster.owner(slot)
    target = next(node for node in cluster.nodes if node is not home)
    waiting = in_thread(lambda: listener.wait(60))
    until_blocked(cluster)
    if how == "at once":
        cluster.move_slots(slot, slot, target)
    else:
        cluster.moving_slot(slot, target).finish()
    eventually(lambda: blocked(cluster) == PARTITIONS, "it waits at the next node")
    add_token(queue, number)
    assert waiting() is True
    cluster.moving_slot(slot, home).finish()
