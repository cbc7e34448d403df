"""A queue in a cluster: where its keys are, slots that move, lost replies, forks, permissions."""

import multiprocessing
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from hashlib import sha1
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.network import LossyProxy, Port
from helpers.tasks import ids_of, make_task
from helpers.waiting import in_thread

from fairqueue.aio import AsyncTaskQueue
from fairqueue.errors import ConfigurationError, RedisRefused, RedisUnavailable
from fairqueue.link.acl import acl_line
from fairqueue.link.cluster import ClusterAddress
from fairqueue.link.connection import Link
from fairqueue.link.keys import SLOTS
from fairqueue.link.operation import Ask, Call, Gather, Operation, Wait
from fairqueue.link.urls import open_client
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.cluster import EmbeddedCluster, EmbeddedNode, SlotMove
from fairqueue.runtime.cluster import _Ports as Ports

PARTITIONS = 8


@pytest.fixture
def queue(cluster: EmbeddedCluster) -> Iterator[TaskQueue]:
    """A queue with some partitions on each node."""
    with TaskQueue.from_url(cluster.url, partitions=PARTITIONS) as queue:
        yield queue


def users(count: int = 40) -> list[str]:
    return [f"user-{number}" for number in range(count)]


def push_for(queue: TaskQueue, names: list[str]) -> list[str]:
    """Push a task for each user; the ids."""
    return [queue.push(make_task(user_id=name, task_id=f"of-{name}")) for name in names]


def finish_all(queue: TaskQueue) -> list[str]:
    """Claim and finish everything; the ids."""
    found: list[str] = []
    while claims := queue.claim("w", limit=100):
        for claim in claims:
            queue.finish(claim)
        found += ids_of(claims)
    return sorted(found)


def elsewhere(cluster: EmbeddedCluster, slot: int) -> EmbeddedNode:
    """A node that does not serve a slot."""
    owner = cluster.owner(slot)
    return next(node for node in cluster.nodes if node is not owner)


def slots_of(queue: TaskQueue) -> list[int]:
    return [part.keys.slot for part in queue.link.parts]


@contextmanager
def moved(cluster: EmbeddedCluster, *slots: int) -> Iterator[None]:
    """Slots are at other nodes until the end of the block."""
    homes = {slot: cluster.owner(slot) for slot in slots}
    try:
        for slot in slots:
            cluster.moving_slot(slot, elsewhere(cluster, slot)).finish()
        yield
    finally:
        for slot, home in homes.items():
            if cluster.owner(slot) is not home:
                cluster.moving_slot(slot, home).finish()


@contextmanager
def moving(cluster: EmbeddedCluster, slot: int) -> Iterator[SlotMove]:
    """A slot is on its way to another node; at the end of the block it moves there, and back."""
    move = cluster.moving_slot(slot, elsewhere(cluster, slot))
    try:
        yield move
    finally:
        move.finish()
        cluster.moving_slot(slot, move.source).finish()


def address_of(cluster: EmbeddedCluster) -> ClusterAddress:
    address = open_client(cluster.url)
    assert isinstance(address, ClusterAddress)
    return address


# --- where things are -----------------------------------------------------------------------------


def test_partitions_are_on_all_nodes_and_their_links_say_where(
    cluster: EmbeddedCluster, queue: TaskQueue
) -> None:
    pushed = push_for(queue, users())
    assert queue.size() == 40
    nodes = [part.node for part in queue.link.parts]
    assert nodes == [cluster.owner(slot).address for slot in slots_of(queue)]
    assert set(nodes) == {node.address for node in cluster.nodes}
    assert finish_all(queue) == sorted(pushed)


def test_a_queue_without_partitions_is_at_the_node_of_its_slot(cluster: EmbeddedCluster) -> None:
    with TaskQueue.from_url(cluster.url) as queue:
        queue.push(make_task(task_id="a"))
        assert queue.link.node == cluster.owner(queue.keys.slot).address
        assert finish_all(queue) == ["a"]


def test_a_client_of_redis_py_may_be_given(cluster: EmbeddedCluster) -> None:
    with (
        redis.RedisCluster("127.0.0.1", cluster.nodes[1].port, decode_responses=True) as client,
        TaskQueue(client, partitions=PARTITIONS) as queue,
    ):
        pushed = push_for(queue, users(10))
        assert finish_all(queue) == sorted(pushed)


def test_addresses_are_those_that_a_client_maps_them_to(cluster: EmbeddedCluster) -> None:
    known = address_of(cluster)
    there = ClusterAddress(
        nodes=known.nodes, pool=known.pool, remap=lambda address: ("localhost", address[1])
    )
    with TaskQueue(there, partitions=PARTITIONS) as queue:
        push_for(queue, users(10))
        assert all(str(part.node).startswith("localhost:") for part in queue.link.parts)


def test_one_living_node_of_the_url_is_enough(cluster: EmbeddedCluster) -> None:
    url = f"redis+cluster://127.0.0.1:1,localhost:{cluster.nodes[2].port}/"
    with TaskQueue.from_url(url, partitions=PARTITIONS) as queue:
        push_for(queue, users(10))
        assert len(finish_all(queue)) == 10


def test_no_node_at_all_is_reported_at_once() -> None:
    with TaskQueue.from_url("redis+cluster://127.0.0.1:1,127.0.0.1:2/", partitions=4) as queue:
        began = time.monotonic()
        with pytest.raises(RedisUnavailable, match=r"no node of the cluster.*:1: .*:2: "):
            queue.size()
        assert time.monotonic() - began < 2.0


def test_a_node_that_cannot_be_reached_is_named(cluster: EmbeddedCluster) -> None:
    known = address_of(cluster)
    lost = cluster.owner(slots_of_default()[0])
    nodes = tuple(("127.0.0.1", node.port) for node in cluster.nodes if node is not lost)
    away = ClusterAddress(
        nodes=nodes,
        pool=known.pool,
        remap=lambda address: ("127.0.0.1", 1) if address[1] == lost.port else address,
    )
    with TaskQueue(away, partitions=PARTITIONS, timeout=0.5) as queue:
        queue.link.is_begun = True
        with pytest.raises(RedisUnavailable, match=r"127\.0\.0\.1:1: .*refused"):
            queue.link.parts[0].perform(asking(queue.link.parts[0]))


def slots_of_default() -> list[int]:
    with TaskQueue.from_url("redis+cluster://127.0.0.1:1", partitions=PARTITIONS) as queue:
        return slots_of(queue)


def test_a_node_that_names_no_host_is_at_the_host_that_was_asked(own_server: OwnServer) -> None:
    ports = Ports()
    config = {"cluster-enabled": "yes", "cluster-port": str(ports.bus_port)}
    server = own_server(config=config, port=ports.open_for_server())
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, SLOTS - 1)
    with TaskQueue.from_url(f"redis+cluster://localhost:{ports.port}", partitions=4) as queue:
        push_for(queue, users(10))
        assert {part.node for part in queue.link.parts} == {f"localhost:{ports.port}"}
    ports.close()


def asking(part: Link) -> Operation[Any]:
    return (yield Ask(("HLEN", part.keys["tasks"]), ("HLEN", part.keys["status"])))


def test_a_closed_queue_connects_no_more(queue: TaskQueue) -> None:
    queue.push(make_task())
    queue.close()
    with pytest.raises(RedisRefused, match="the queue is closed"):
        queue.size()


# --- clients that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_plain_client_is_refused_by_a_node_of_a_cluster(
    cluster: EmbeddedCluster, partitions: int
) -> None:
    with TaskQueue.from_url(cluster.url) as queue:
        other = elsewhere(cluster, queue.keys.slot)
    with (
        TaskQueue.from_url(f"redis://{other.address}", partitions=partitions) as queue,
        pytest.raises(ConfigurationError, match=r"connect with redis\+cluster://"),
    ):
        push_for(queue, users())


def test_a_plain_client_cannot_wait_for_lists_of_several_slots(
    cluster: EmbeddedCluster, queue: TaskQueue
) -> None:
    wake = [part.keys["wake"] for part in queue.link.parts]
    with (
        TaskQueue.from_url(f"redis://{cluster.nodes[0].address}") as plain,
        pytest.raises(ConfigurationError, match=r"connect with redis\+cluster://"),
    ):
        plain.link.perform(waiting_for(wake))


def waiting_for(keys: list[bytes]) -> Operation[Any]:
    return (yield Wait(keys, 1.0))


class NoCluster(Port):
    """A port of a server that is not in a cluster."""

    def _serve(self, client: Any) -> None:
        with client:
            while data := client.recv(65536):
                if b"SLOTS" in data:
                    client.sendall(b"-ERR This instance has cluster support disabled\r\n")
                else:
                    client.sendall(b"+PONG\r\n" * data.count(b"*"))


def test_a_plain_server_is_not_taken_for_a_cluster() -> None:
    with NoCluster() as port, TaskQueue.from_url(f"redis+cluster://127.0.0.1:{port.port}") as queue:
        with pytest.raises(ConfigurationError, match="is not in a cluster: connect with redis://"):
            queue.size()
        queue.close()


def test_the_asynchronous_queue_refuses_a_cluster(cluster: EmbeddedCluster) -> None:
    with pytest.raises(ConfigurationError, match="does not support Redis Cluster yet"):
        AsyncTaskQueue.from_url(cluster.url)


# --- slots that have moved ------------------------------------------------------------------------

KINDS: dict[str, Callable[[TaskQueue], object]] = {
    "a call": lambda queue: push_for(queue, users()),
    "a stream of calls": lambda queue: queue.push_many(
        [make_task(user_id=name, task_id=f"of-{name}") for name in users()]
    ),
    "plain commands": lambda queue: [part.perform(asking(part)) for part in queue.link.parts],
    "all partitions at once": lambda queue: queue.link.perform(gathering(queue)),
    "finishing": lambda queue: finish_all(queue),
}


def gathering(queue: TaskQueue) -> Operation[Any]:
    return (yield Gather([(part, asking(part)) for part in queue.link.parts]))


@pytest.mark.parametrize("kind", KINDS)
def test_slots_that_have_moved_are_followed(
    cluster: EmbeddedCluster, queue: TaskQueue, kind: str
) -> None:
    pushed = push_for(queue, users())
    with moved(cluster, *slots_of(queue)[2:5]):
        began = time.monotonic()
        KINDS[kind](queue)
        assert time.monotonic() - began < 2.0
        nodes = [part.node for part in queue.link.parts]
        if kind != "finishing":
            assert nodes == [cluster.owner(slot).address for slot in slots_of(queue)]
            assert finish_all(queue) == sorted(pushed)
        assert queue.size() == 0


def test_a_slot_moves_in_one_step_while_tasks_are_pushed(
    cluster: EmbeddedCluster, queue: TaskQueue
) -> None:
    slot = slots_of(queue)[0]
    home, target = cluster.owner(slot), elsewhere(cluster, slot)
    stop = threading.Event()
    pushed: list[str] = []

    def go_on() -> None:
        while not stop.is_set():
            task = make_task(user_id=f"user-{len(pushed) % 40}", task_id=f"t{len(pushed)}")
            pushed.append(queue.push(task))

    pushing = in_thread(go_on)
    for node in (target, home) * 3:
        cluster.move_slots(slot, slot, node)
    stop.set()
    pushing()
    assert finish_all(queue) == sorted(pushed)


# --- slots that are half moved --------------------------------------------------------------------


@pytest.fixture
def part(queue: TaskQueue) -> Link:
    """A partition with some tasks, whose slot the tests move."""
    push_for(queue, users())
    return queue.link.parts[1]


def peeking(timeout: float) -> Operation[Any]:
    return (yield Call("peek", timeout=timeout, pools=""))


def lengths(part: Link) -> list[int]:
    found: list[int] = part.ask(
        *(("HLEN", part.keys[name]) for name in ("tasks", "status")),
        ("ZCARD", part.keys["backlog"]),
    )
    return found


def test_what_is_at_the_next_node_already_is_asked_there(
    cluster: EmbeddedCluster, part: Link
) -> None:
    before = lengths(part)
    with moving(cluster, part.keys.slot) as move:
        move.move_keys(part.keys["status"], part.keys["fair"])
        assert lengths(part) == before
        assert part.node == move.source.address, "the slot has not moved yet"
        move.move_keys()
        assert lengths(part) == before
        move.finish()
        assert lengths(part) == before


def test_a_script_is_loaded_where_its_slot_goes(cluster: EmbeddedCluster, part: Link) -> None:
    text = f"return redis.call('HLEN', KEYS[1]) -- {time.monotonic_ns()}"
    script = SimpleNamespace(text=text, sha=sha1(text.encode()).hexdigest())
    command = ["EVALSHA", script.sha, 1, part.keys["tasks"]]

    def run() -> Any:
        return part._repeat(lambda: part._run_script(cast(Any, script), list(command)), 5.0)

    with moving(cluster, part.keys.slot) as move:
        move.move_keys()
        assert run() == lengths(part)[0] > 0
        move.finish()
        assert run() == lengths(part)[0]


@pytest.mark.parametrize("moved_keys", [(), ("tasks", "status")])
def test_a_call_waits_until_its_half_moved_slot_is_at_the_next_node(
    cluster: EmbeddedCluster, queue: TaskQueue, part: Link, moved_keys: tuple[str, ...]
) -> None:
    with moving(cluster, part.keys.slot) as move:
        if moved_keys:
            move.move_keys(*(part.keys[name] for name in moved_keys))
        pushing = in_thread(lambda: push_for(queue, [f"late-{number}" for number in range(20)]))
        timer = threading.Timer(0.3, move.finish)
        timer.start()
        assert len(pushing()) == 20
        timer.join()
        assert queue.size() == 60
        assert len(finish_all(queue)) == 60


def test_a_call_waits_no_longer_than_its_deadline_for_a_slot(
    cluster: EmbeddedCluster, part: Link
) -> None:
    with moving(cluster, part.keys.slot):
        began = time.monotonic()
        with pytest.raises(RedisUnavailable, match="Redis did not answer"):
            part.perform(peeking(0.3))
        assert 0.1 < time.monotonic() - began < 1.0


# --- lost replies ---------------------------------------------------------------------------------


@pytest.fixture
def proxies(cluster: EmbeddedCluster) -> Iterator[dict[int, LossyProxy]]:
    """A network that loses replies in front of each node, by the port of the node."""
    with ExitStack() as stack:
        yield {
            node.port: stack.enter_context(LossyProxy(node.server.socket_path))
            for node in cluster.nodes
        }


@pytest.fixture
def far(cluster: EmbeddedCluster, proxies: dict[int, LossyProxy]) -> Iterator[TaskQueue]:
    """A queue behind the proxies."""
    known = address_of(cluster)
    away = ClusterAddress(
        nodes=tuple((host, proxies[port].port) for host, port in known.nodes),
        pool=known.pool,
        remap=lambda address: (address[0], proxies[address[1]].port),
    )
    with TaskQueue(away, partitions=PARTITIONS, timeout=10) as queue:
        queue.check()
        yield queue


@pytest.mark.parametrize("times", [1, 2])
def test_nothing_is_done_twice_when_replies_are_lost(
    far: TaskQueue, proxies: dict[int, LossyProxy], times: int
) -> None:
    pushed = []
    for name in users():
        for proxy in proxies.values():
            proxy.drop_replies(times)
        pushed += push_for(far, [name])
    assert all(proxy.dropped for proxy in proxies.values())
    assert far.size() == 40
    claims = []
    while found := far.claim("w", limit=3):
        for proxy in proxies.values():
            proxy.drop_replies(1)
        claims += found
        far.finish(found[0])
    assert sorted(ids_of(claims)) == sorted(pushed)


def test_a_reply_that_is_lost_while_a_slot_moves_is_found_at_the_next_node(
    far: TaskQueue, proxies: dict[int, LossyProxy], cluster: EmbeddedCluster
) -> None:
    push_for(far, users())
    for slot in slots_of(far)[:3]:
        for proxy in proxies.values():
            proxy.drop_replies(1)
        with moved(cluster, slot):
            push_for(far, users())  # the same ids again
    for proxy in proxies.values():
        proxy.drop_replies(0)
    assert far.size() == 40


# --- forks and permissions ------------------------------------------------------------------------


def test_a_forked_child_uses_connections_of_its_own(queue: TaskQueue) -> None:
    push_for(queue, users(20))
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=lambda: results.put(push_for(queue, ["of-the-child"])))
    child.start()
    pushed = push_for(queue, users(40))
    assert results.get(timeout=30) == ["of-of-the-child"]
    child.join(30)
    assert finish_all(queue) == sorted([*pushed, "of-of-the-child"])


def test_the_documented_user_has_enough_rights(cluster: EmbeddedCluster) -> None:
    name, password = "documented", "of-this-test"
    for node in cluster.nodes:
        for line in (acl_line(name), f"ACL SETUSER {name} >{password}", "ACL LOG RESET"):
            node.ask(*shlex.split(line))
    try:
        nodes = cluster.url.partition("://")[2]
        url = f"redis+cluster://{name}:{password}@{nodes}"
        with TaskQueue.from_url(url, partitions=PARTITIONS) as queue:
            queue.check()
            pushed = push_for(queue, users())
            part = queue.link.parts[0]
            with moving(cluster, part.keys.slot) as move:
                move.move_keys(part.keys["status"])
                lengths(part)
            listener = queue.link.listener(*(each.keys["wake"] for each in queue.link.parts))
            assert listener.wait(10)
            listener.close()
            assert finish_all(queue) == sorted(pushed)
        refused = {
            row[row.index(b"object") + 1]
            for node in cluster.nodes
            for row in node.ask("ACL", "LOG")
        }
        assert refused <= {b"client|setinfo"}
    finally:
        for node in cluster.nodes:
            node.ask("ACL", "DELUSER", name)


@pytest.mark.parametrize("lacking", ["cluster|slots", "ping"])
def test_a_right_that_is_missing_is_named(cluster: EmbeddedCluster, lacking: str) -> None:
    name, password = "lacking", "of-this-test"
    for node in cluster.nodes:
        node.ask(*shlex.split(acl_line(name)), f"-{lacking}", f">{password}")
    try:
        nodes = cluster.url.partition("://")[2]
        with (
            TaskQueue.from_url(f"redis+cluster://{name}:{password}@{nodes}") as queue,
            pytest.raises(RedisRefused, match=lacking.partition("|")[0]),
        ):
            queue.push(make_task())
    finally:
        for node in cluster.nodes:
            node.ask("ACL", "DELUSER", name)
