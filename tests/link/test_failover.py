"""Another server takes over, on real servers: work goes on by itself, and what is lost is bounded.

Replication is asynchronous, so a failover may lose the last acknowledged writes: how many is
printed, and none is promised. What survives agrees with itself, and whatever is done again is done
under the same task id.
"""

import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import datetime
from typing import Self, cast

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.schedules import fire_id
from helpers.state import check_consistency, places
from helpers.tasks import make_task
from helpers.waiting import eventually, in_thread, until_blocked
from prometheus_client import CollectorRegistry
from redis.backoff import ConstantBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel

from fairqueue.errors import ConfigurationError, RedisRefused, RedisUnavailable
from fairqueue.link import dialer as dialing
from fairqueue.link import listener as listening
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.worker import Worker
from faults.fleet import HOST, Fleet, Node, free_port
from faults.proxy import Proxy

pytestmark = pytest.mark.processes


PATIENCE_S = 30.0
TIMEOUT_S = 3.0  # of each operation: half of it is spent on a server that is frozen
BATCH = 30  # so many pushes of each producer, before and after
PACE_S = 0.002  # between two pushes
EVERY_SECOND = "* * * * * *"


@pytest.fixture(scope="module")
def shared_fleet() -> Iterator[Fleet]:
    with Fleet.start() as fleet:
        yield fleet


@pytest.fixture
def fleet(shared_fleet: Fleet) -> Fleet:
    """A primary with a replica and three sentinels, all well, and nothing stored."""
    shared_fleet.mend()
    shared_fleet.primary.ask("FLUSHALL")
    return shared_fleet


class Load:
    """Producers, a worker and two schedulers, as a program has them; none is ever made anew."""

    def __init__(self, url: str) -> None:
        self._stack = ExitStack()
        self.queue = self._open(url)
        # Enough of each that a failed attempt is never the last, and that nothing is forgotten.
        self.queue.configure(max_attempts=1000, keep_finished=10**6, keep_finished_for=10**6)
        self.ran: list[tuple[str, datetime | None]] = []
        self.acknowledged: dict[str, list[str]] = {"ann": [], "bob": []}
        self.away = 0  # how often a push gave up, and was repeated
        self._ending = threading.Event()
        self.worker = Worker(self._open(url), self._note, lease=1.0, registry=CollectorRegistry())
        self.schedulers = [
            TaskScheduler(
                self._open(url),
                name,
                check_interval=0.1,
                lock_timeout=1.0,
                registry=CollectorRegistry(),
            )
            for name in ("one", "two")
        ]
        self.schedulers[0].add_schedule(EVERY_SECOND, "cron", schedule_id="tick")
        self.producers = [
            threading.Thread(target=self._produce, args=(name,), daemon=True)
            for name in self.acknowledged
        ]

    def _open(self, url: str) -> TaskQueue:
        return self._stack.enter_context(TaskQueue.from_url(url, timeout=TIMEOUT_S))

    def __enter__(self) -> Self:
        self.worker.start()
        for scheduler in self.schedulers:
            scheduler.start()
        for thread in self.producers:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._ending.set()
        for scheduler in self.schedulers:
            scheduler.stop(PATIENCE_S)
        self.worker.stop(PATIENCE_S)
        for thread in self.producers:
            thread.join(PATIENCE_S)
        self._stack.close()

    def _note(self, task: Task) -> None:
        self.ran.append((task.task_id, task.scheduled_for))

    def _produce(self, name: str) -> None:
        for number in range(10**6):
            task = make_task(name, f"{name}-{number}")
            while not self._pushed(task):
                if self._ending.is_set():
                    return
            self.acknowledged[name].append(task.task_id)
            if self._ending.wait(PACE_S):
                return

    def _pushed(self, task: Task) -> bool:
        try:
            self.queue.push(task)
        except RedisUnavailable:
            self.away += 1
            return False
        return True

    # --- what is awaited --------------------------------------------------------------------------

    def goes_on(self) -> list[str]:
        """Wait until each producer, the worker and a scheduler have done more; what was pushed."""
        starts = {name: len(ids) for name, ids in self.acknowledged.items()}
        fires = len(self.fires())
        enough = {name: start + BATCH for name, start in starts.items()}
        eventually(
            lambda: all(len(self.acknowledged[name]) >= count for name, count in enough.items()),
            f"{BATCH} more pushes of each producer",
            within=PATIENCE_S,
        )
        pushed = [i for name in enough for i in self.acknowledged[name][starts[name] :]]
        eventually(lambda: set(pushed) <= self.ids(), "all of them ran", within=PATIENCE_S)
        eventually(lambda: len(self.fires()) > fires, "a schedule fired", within=PATIENCE_S)
        return pushed

    def ends(self, client: redis.Redis) -> None:
        """End the producers and schedulers, and wait until nothing is left to do."""
        leading = [scheduler for scheduler in self.schedulers if scheduler.is_leader]
        assert len(leading) <= 1
        self._ending.set()
        for thread in self.producers:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        for scheduler in self.schedulers:
            assert scheduler.stop(PATIENCE_S)
        eventually(lambda: places(client).keys() == {"finished"}, "all done", within=PATIENCE_S)
        assert self.worker.stop(PATIENCE_S)

    def ids(self) -> set[str]:
        return {task_id for task_id, _ in list(self.ran)}

    def fires(self) -> set[datetime]:
        return {moment for _, moment in list(self.ran) if moment is not None}

    # --- what must hold ---------------------------------------------------------------------------

    def lost(self, client: redis.Redis) -> list[str]:
        """What was acknowledged and is not there. Checks that all else is as it should be."""
        check_consistency(client)
        present = set(places(client)["finished"])
        acknowledged = {i for ids in self.acknowledged.values() for i in ids}
        lost = sorted(acknowledged - present)
        twice = sum(count - 1 for count in Counter(i for i, _ in self.ran).values())
        sys.stdout.write(
            f"acknowledged {len(acknowledged)}, lost {len(lost)}, ran again {twice}, "
            f"pushes that gave up and were repeated {self.away}\n"
        )
        # Nobody runs what nobody wanted, and a moment has one id, however often it was fired.
        fired = {task_id for task_id, moment in self.ran if moment is not None}
        pushed = self.ids() - fired
        assert all(i.partition("-")[0] in self.acknowledged for i in pushed)
        assert fired == {fire_id("tick", moment) for moment in self.fires()}
        return lost

    def check_tail(self, lost: list[str]) -> None:
        """The replica had the beginning of each producer's history: no gap, but the end may lack.

        After it comes what the new primary has acknowledged, and that is there.
        """
        for ids in self.acknowledged.values():
            missing = [number for number, i in enumerate(ids) if i in set(lost)]
            assert missing == list(range(missing[0], missing[-1] + 1)) if missing else True


def server(node: Node) -> redis.Redis:
    return redis.Redis.from_url(node.url)


def test_a_primary_is_killed_under_load(fleet: Fleet) -> None:
    with Load(fleet.sentinel_url()) as load:
        load.goes_on()
        fleet.primary.kill()
        primary = fleet.wait_for_failover()
        after = load.goes_on()
        with server(primary) as client:
            load.ends(client)
            lost = load.lost(client)
    load.check_tail(lost)
    assert not set(after) & set(lost)


def test_a_primary_freezes_under_load_and_comes_back_as_one_that_is_stale(fleet: Fleet) -> None:
    with Load(fleet.sentinel_url()) as load:
        load.goes_on()
        old = fleet.primary
        old.pause()
        primary = fleet.wait_for_failover()
        after = load.goes_on()
        old.resume()
        fleet.wait_for_replica(old)
        after += load.goes_on()
        with server(primary) as client:
            load.ends(client)
            lost = load.lost(client)
        fleet.wait_for_sync()
    load.check_tail(lost)
    assert not set(after) & set(lost)


def test_a_planned_failover_under_load(fleet: Fleet) -> None:
    with Load(fleet.sentinel_url()) as load:
        load.goes_on()
        old = fleet.primary
        fleet.failover()
        primary = fleet.wait_for_failover()
        fleet.wait_for_replica(old)
        # From here on there is one primary. Until then the old one may still have acknowledged.
        after = load.goes_on()
        with server(primary) as client:
            load.ends(client)
            lost = load.lost(client)
    assert not set(after) & set(lost)


def test_a_replica_in_sync_is_promoted_by_hand_without_loss() -> None:
    with (
        Fleet.start(sentinels=0) as fleet,
        Proxy.start(f"{HOST}:{fleet.primary.port}") as address,
        Load(address.url) as load,
    ):
        load.goes_on()
        old = fleet.primary
        old.ask("CLIENT", "PAUSE", 60_000, "WRITE")
        fleet.wait_for_sync()
        primary = fleet.promote()
        address.set_upstream(f"{HOST}:{primary.port}")
        old.ask("CLIENT", "UNPAUSE")  # what has waited is answered with READONLY
        load.goes_on()
        with server(primary) as client:
            load.ends(client)
            assert load.lost(client) == []


def test_a_new_primary_wakes_old_waits(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "BLOCK_S", 1.0)
    monkeypatch.setattr(listening, "SILENCE_S", 0.5)
    with TaskQueue.from_url(fleet.sentinel_url(), timeout=TIMEOUT_S) as queue:
        listener = queue.link.listener("wake")
        assert not listener.wait(0.01)  # the old primary knows the wish now
        fleet.primary.pause()
        primary = fleet.wait_for_failover()
        heard = in_thread(lambda: wait_for_token(listener))
        with server(primary) as client:
            client.lpush(queue.keys["wake"], "1")
        assert heard()
        listener.close()


def wait_for_token(listener: listening.Waiter) -> bool:
    """As callers do: for a while, and again if there was none or the connection failed."""
    for _ in range(100):
        try:
            if listener.wait(5.0):
                return True
        except (redis.ConnectionError, redis.TimeoutError, OSError):
            pass  # no primary yet
    return False


def test_a_waiting_claim_survives_its_server_becoming_a_replica(
    own_server: OwnServer,
) -> None:
    with (
        redis.Redis.from_url(own_server().url) as client,
        TaskQueue(client, timeout=PATIENCE_S) as queue,
    ):
        claiming = in_thread(lambda: queue.claim("w", wait=PATIENCE_S))
        until_blocked(client)
        client.execute_command("REPLICAOF", HOST, "1")
        eventually(lambda: client.info("errorstats").get("errorstat_READONLY"), "asked again")
        client.execute_command("REPLICAOF", "NO", "ONE")
        queue.push(make_task(task_id="t1"))
        assert [claim.task.task_id for claim in claiming()] == ["t1"]


# --- finding the primary --------------------------------------------------------------------------


def test_sentinels_that_are_gone_or_silent_are_passed_over(fleet: Fleet) -> None:
    with socket.create_server((HOST, 0)) as silent, socket.socket() as gone:
        gone.bind((HOST, 0))  # and does not listen
        ports = [gone.getsockname()[1], silent.getsockname()[1], fleet.sentinels[0].port]
        hosts = ",".join(f"{HOST}:{port}" for port in ports)
        with TaskQueue.from_url(f"redis+sentinel://{hosts}/main", timeout=10.0) as queue:
            queue.push(make_task(task_id="t1"))
            silent.settimeout(PATIENCE_S)
            silent.accept()[0].close()  # it was asked
    with server(fleet.primary) as client:
        assert places(client) == {"ready": ["t1"]}


def test_connections_follow_the_sentinels_although_the_old_primary_still_answers(
    fleet: Fleet, own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialing, "LOOK_S", 0.0)
    port = free_port()
    other = own_server(port=port)
    sentinel = fleet.sentinels[0]
    sentinel.ask("SENTINEL", "MONITOR", "moving", HOST, fleet.primary.port, 2)
    with TaskQueue.from_url(f"redis+sentinel://{HOST}:{sentinel.port}/moving") as queue:
        queue.push(make_task(task_id="t1"))
        listener = queue.link.listener("wake")
        assert listener.wait(PATIENCE_S), "the token of t1"
        sentinel.ask("SENTINEL", "REMOVE", "moving")
        sentinel.ask("SENTINEL", "MONITOR", "moving", HOST, port, 2)
        queue.push(make_task(task_id="t2"))
        assert listener.wait(PATIENCE_S), "the token of t2"
        listener.close()
        sentinel.ask("SENTINEL", "REMOVE", "moving")
    with server(fleet.primary) as one, redis.Redis.from_url(other.url) as two:
        assert (places(one), places(two)) == ({"ready": ["t1"]}, {"ready": ["t2"]})


def test_a_client_of_ones_own_sentinels_will_do(fleet: Fleet) -> None:
    sentinels = Sentinel(
        [(HOST, sentinel.port) for sentinel in fleet.sentinels], socket_timeout=600.0
    )
    client = sentinels.master_for(
        "main", decode_responses=True, protocol=3, retry=Retry(ConstantBackoff(60), 10)
    )
    with TaskQueue(client, timeout=TIMEOUT_S) as queue:
        queue.push(make_task(task_id="t1"))
        assert [claim.task.task_id for claim in queue.claim("w")] == ["t1"]
        # With time-outs and retries that are ours.
        own = queue.link.connections.dialer.dial()
        assert cast(socket.socket, own._sock).gettimeout() == TIMEOUT_S / 2
        assert own.retry._retries == 0
        own.disconnect()
    for each in sentinels.sentinels:
        each.close()


def test_a_client_for_replicas_is_refused() -> None:
    client = Sentinel([(HOST, 1)]).slave_for("main")
    with pytest.raises(ConfigurationError, match=r"replicas of 'main'.*master_for"):
        TaskQueue(client)


def refusal(url: str) -> str:
    """What a push at this address is told, which must be that there is no primary now."""
    with TaskQueue.from_url(url, timeout=0.5) as queue, pytest.raises(RedisUnavailable) as error:
        queue.push(make_task())
    return str(error.value)


def test_what_is_not_a_primary_is_not_taken_for_one(fleet: Fleet) -> None:
    sentinel, replica = fleet.sentinels[0], fleet.replicas[0]
    sentinel.ask("SENTINEL", "MONITOR", "stale", HOST, replica.port, 2)
    try:
        told = refusal(f"redis+sentinel://{HOST}:{sentinel.port}/stale")
    finally:
        sentinel.ask("SENTINEL", "REMOVE", "stale")
    assert f"{HOST}:{replica.port} is a slave, not the primary" in told


def test_an_unknown_service_is_named(fleet: Fleet) -> None:
    assert "has no service 'other'" in refusal(fleet.sentinel_url("other"))


def test_sentinels_that_are_all_gone_are_named() -> None:
    told = refusal(f"redis+sentinel://{HOST}:1,{HOST}:2/main")
    assert "no sentinel named a primary of 'main'" in told
    assert f"sentinel {HOST}:1: " in told
    assert f"sentinel {HOST}:2: " in told


def test_servers_and_sentinels_have_passwords_of_their_own(fleet: Fleet) -> None:
    def allow(node: Node, user: str, password: str) -> Callable[[], object]:
        node.ask("ACL", "SETUSER", user, "reset", "on", f">{password}", "+@all", "~*", "&*")
        return lambda: node.ask("ACL", "DELUSER", user)

    sentinel = fleet.sentinels[0]
    with ExitStack() as users:
        users.callback(allow(fleet.primary, "app", "p@ss"))
        users.callback(allow(sentinel, "guard", "s&cret"))
        start = f"redis+sentinel://app:p%40ss@{HOST}:{sentinel.port}/main?sentinel_username=guard"
        with TaskQueue.from_url(f"{start}&sentinel_password=s%26cret") as queue:
            queue.push(make_task(task_id="t1"))
            assert queue.size() == 1
        for url in (
            f"{start}&sentinel_password=wrong-one",
            f"{start}&sentinel_password=s%26cret".replace("p%40ss", "wrong-one"),
        ):
            with TaskQueue.from_url(url) as queue, pytest.raises(RedisRefused) as error:
                queue.push(make_task(task_id="t2"))
            assert "refused the login" in str(error.value)
            assert "wrong-one" not in str(error.value)


def test_a_primary_without_replicas_is_asked_until_it_has_them(
    own_server: OwnServer,
) -> None:
    server = own_server()
    with (
        redis.Redis.from_url(server.url) as client,
        TaskQueue(client, timeout=PATIENCE_S) as patient,
        TaskQueue(client, timeout=0.3) as hasty,
    ):
        patient.push(make_task(task_id="t1"))
        (claim,) = patient.claim("w")
        client.config_set("min-replicas-to-write", 1)
        assert is_refused(lambda: hasty.push(make_task()))
        assert is_refused(lambda: hasty.finish(claim)), "finishing writes too"
        pushing = in_thread(lambda: patient.push(make_task(task_id="t2")))
        refused = refusals(client)
        eventually(lambda: refusals(client) > refused, "asked again")
        client.config_set("min-replicas-to-write", 0)
        assert pushing() == "t2"
        patient.finish(claim)
        assert places(client) == {"finished": ["t1"], "ready": ["t2"]}


def refusals(client: redis.Redis) -> int:
    """How often a server has said that it lacks replicas."""
    return int(client.info("errorstats")["errorstat_NOREPLICAS"]["count"])


def is_refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except RedisRefused as error:
        return "NOREPLICAS" in str(error)
    return False
