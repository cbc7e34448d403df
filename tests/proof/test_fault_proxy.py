"""The network of the fault harness does what it says, and FairQueue comes through each fault."""

import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import check_consistency, stats
from helpers.tasks import claim_one, ids_of, make_task, push
from helpers.waiting import eventually, in_thread
from helpers.waiting import until_blocked as until_waiting
from prometheus_client import CollectorRegistry
from redis.backoff import NoBackoff
from redis.retry import Retry

from fairqueue.clock import ManualClock
from fairqueue.errors import FairQueueError, RedisUnavailable
from fairqueue.link import listener as listening
from fairqueue.models import Task
from fairqueue.queue.queue import TaskQueue
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.worker.worker import Worker
from faults.proxy import Counts, Proxy, ProxyError

Fault = Callable[[Proxy], object]

# Longer than anything takes here, on a busy machine too: only what hangs is caught by it.
ENDS_WITHIN_S = 30.0
ADD_ONE = "return redis.call('INCR', KEYS[1])"
EVERY_SECOND = "* * * * * *"


@pytest.fixture(scope="module")
def home() -> Iterator[EmbeddedServer]:
    """The server behind the proxies of all tests here."""
    with EmbeddedServer.start() as server:
        yield server


@pytest.fixture
def near(home: EmbeddedServer) -> Iterator[redis.Redis]:
    """A client that needs no network. At the end of the test, all counts must agree."""
    with redis.Redis.from_url(home.url) as client:
        eventually(lambda: waiting(client) == 0, "nobody waits who was here before")
        client.flushdb()
        yield client
        check_consistency(client)


@pytest.fixture
def near_queue(home: EmbeddedServer, near: redis.Redis) -> Iterator[TaskQueue]:
    """The same queue as `far`, without the network between."""
    with TaskQueue.from_url(home.url) as queue:
        yield queue


@pytest.fixture
def proxy(home: EmbeddedServer) -> Iterator[Proxy]:
    with Proxy.start(home.socket_path) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: Proxy, near: redis.Redis) -> Iterator[TaskQueue]:
    """A queue at the other end of the network, which gives up after a second."""
    with TaskQueue.from_url(proxy.url, timeout=1.0) as queue:
        queue.check()
        yield queue


@pytest.fixture
def patient(proxy: Proxy, near: redis.Redis) -> Iterator[TaskQueue]:
    """A queue at the other end of the network, which tries for long."""
    with TaskQueue.from_url(proxy.url, timeout=20.0) as queue:
        queue.check()
        yield queue


@pytest.fixture
def quickly_alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that wait for a token count as dead after less than a second of silence."""
    monkeypatch.setattr(listening, "BLOCK_S", 0.1)
    monkeypatch.setattr(listening, "SILENCE_S", 0.3)


@pytest.fixture
def start_worker() -> Iterator[Callable[..., Worker]]:
    """Start workers, which are stopped at the end."""
    started: list[Worker] = []

    def start(queue: TaskQueue, handler: Callable[[Task], Any], **settings: Any) -> Worker:
        worker = Worker(queue, handler, registry=CollectorRegistry(), **settings)
        worker.start()
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.stop(ENDS_WITHIN_S)


@pytest.fixture
def start_scheduler() -> Iterator[Callable[..., TaskScheduler]]:
    """Start schedulers, which are stopped at the end."""
    started: list[TaskScheduler] = []

    def start(queue: TaskQueue, **settings: Any) -> TaskScheduler:
        scheduler = TaskScheduler(queue, registry=CollectorRegistry(), **settings)
        scheduler.start()
        started.append(scheduler)
        return scheduler

    yield start
    for scheduler in started:
        assert scheduler.stop(ENDS_WITHIN_S)


def far_client(proxy: Proxy) -> redis.Redis:
    """A client of one connection that tells what happens to it."""
    return redis.Redis.from_url(
        proxy.url, single_connection_client=True, retry=Retry(NoBackoff(), 0)
    )


def dial(proxy: Proxy) -> socket.socket:
    """A bare connection."""
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=ENDS_WITHIN_S)


def say(sock: socket.socket, command: str) -> None:
    """Send a command, without waiting for the answer."""
    sock.sendall(command.encode() + b"\r\n")


def ask(sock: socket.socket, command: str) -> bytes:
    """Send a command; its short answer."""
    say(sock, command)
    return sock.recv(1000)


def waiting(near: redis.Redis) -> int:
    """How many clients the server knows that wait for a token."""
    return cast(dict[str, int], near.info("clients"))["blocked_clients"]


def together(actions: list[Callable[[], object]]) -> list[object]:
    """Do all at the same time: what each returned, or the type of what it raised."""
    with ThreadPoolExecutor(len(actions)) as pool:
        futures: list[Future[object]] = [pool.submit(action) for action in actions]
        errors = [future.exception(ENDS_WITHIN_S) for future in futures]
    return [
        future.result() if error is None else type(error)
        for future, error in zip(futures, errors, strict=True)
    ]


def fill_pool(queue: TaskQueue, count: int) -> None:
    """Let so many threads use the queue at once, so that it has so many open connections."""
    meeting = threading.Barrier(count)

    def use() -> None:
        with queue.link.connections.one():
            meeting.wait(ENDS_WITHIN_S)

    together([use] * count)
    assert len(queue.link.connections._free) == count


# --- the proxy ------------------------------------------------------------------------------------


def test_a_healthy_proxy_carries_all_bytes_both_ways(proxy: Proxy, near: redis.Redis) -> None:
    text = os.urandom(3_000_000)
    with far_client(proxy) as client:
        client.set("x", text)
        assert client.get("x") == text
        assert (proxy.counts.connections, proxy.counts.open) == (1, 1)
        assert proxy.counts.bytes > 2 * len(text)
    eventually(lambda: proxy.counts.open == 0, "the connection is closed")
    near.delete("x")


def test_many_connections_get_their_own_answers(proxy: Proxy) -> None:
    def talk(number: int) -> bool:
        with far_client(proxy) as client:
            return all(client.echo(f"{number}-{i}") == f"{number}-{i}".encode() for i in range(50))

    assert together([lambda n=n: talk(n) for n in range(20)]) == [True] * 20  # type: ignore[misc]


def test_a_server_may_be_named_by_host_and_port(proxy: Proxy) -> None:
    with Proxy.start(f"127.0.0.1:{proxy.port}") as second, far_client(second) as client:
        assert client.ping()
        proxy.refuse()
        proxy.reset()
        for _ in range(2):  # the connection that is open, and one that is made
            with pytest.raises(redis.ConnectionError):
                client.ping()
        proxy.clear()
        assert client.ping()


def test_a_moved_address_leads_to_the_other_server(own_server: OwnServer) -> None:
    one, two = own_server(), own_server()
    with Proxy.start(one.socket_path) as proxy, far_client(proxy) as client:
        client.set("at", "one")
        proxy.set_upstream(two.socket_path)
        assert client.get("at") == b"one", "what is open stays"
        proxy.reset()
        with pytest.raises(redis.ConnectionError):
            client.get("at")
        assert client.get("at") is None


def test_a_server_that_is_away_is_a_connection_that_breaks(own_server: OwnServer) -> None:
    server = own_server()
    with Proxy.start(server.socket_path) as proxy, far_client(proxy) as client:
        server.kill()
        for _ in range(2):  # the connection that is open, and one that is made
            with pytest.raises(redis.ConnectionError):
                client.ping()
        server.restart()
        assert client.ping()


def test_a_reset_ends_open_connections_without_a_farewell(proxy: Proxy) -> None:
    with dial(proxy) as sock, dial(proxy) as other:
        assert ask(sock, "PING") == ask(other, "PING") == b"+PONG\r\n"
        proxy.reset()
        for each in (sock, other):
            with pytest.raises(ConnectionResetError):
                each.recv(1)
    with dial(proxy) as sock:
        assert ask(sock, "PING") == b"+PONG\r\n"


def test_a_refusing_port_lets_open_connections_be_and_is_the_same_afterwards(proxy: Proxy) -> None:
    with dial(proxy) as sock:
        assert ask(sock, "PING") == b"+PONG\r\n"
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            dial(proxy)
        assert ask(sock, "PING") == b"+PONG\r\n"
        proxy.clear()
        with dial(proxy) as second:
            assert ask(second, "PING") == b"+PONG\r\n"
        assert ask(sock, "PING") == b"+PONG\r\n", "it has lost nothing"


def test_a_black_hole_takes_all_bytes_both_ways(proxy: Proxy, near: redis.Redis) -> None:
    with dial(proxy) as sock, dial(proxy) as listener:
        assert ask(sock, "PING") == b"+PONG\r\n"
        say(listener, "BLPOP letters 0")
        until_waiting(near)
        proxy.black_hole()
        with dial(proxy) as new:  # accepted all the same
            near.rpush("letters", "for the listener")
            assert near.llen("letters") == 0, "the server has said it"
            for each in (sock, new):
                say(each, "SET x 1")
            proxy.clear()
            for each in (sock, listener, new):
                with pytest.raises(ConnectionResetError):
                    each.recv(1)
    assert near.get("x") is None


def test_a_server_does_not_notice_a_client_in_a_black_hole(proxy: Proxy, near: redis.Redis) -> None:
    with dial(proxy) as sock:
        say(sock, "BLPOP letters 0")
        until_waiting(near)
        proxy.black_hole()
    eventually(lambda: proxy.counts.open == 0, "the proxy has seen it")
    assert waiting(near) == 1
    proxy.clear()
    eventually(lambda: waiting(near) == 0, "the server has seen it")


def test_of_a_half_open_connection_only_the_server_knows(proxy: Proxy, near: redis.Redis) -> None:
    with dial(proxy) as sock:
        say(sock, "BLPOP letters 0")
        until_waiting(near)
        proxy.half_open()
        eventually(lambda: waiting(near) == 0, "the server has seen it")
        say(sock, "SET x 1")
        with dial(proxy) as new:
            assert ask(new, "PING") == b"+PONG\r\n"
        assert not select.select([sock], [], [], 0)[0], "no word, and no end"
        proxy.clear()
        with pytest.raises(ConnectionResetError):
            sock.recv(1)
    assert near.get("x") is None


def test_delayed_chunks_come_later_and_in_order(proxy: Proxy) -> None:
    with far_client(proxy) as client:
        client.ping()
        proxy.delay(0.05, jitter=0.05)
        began = time.monotonic()
        with client.pipeline(transaction=False) as pipe:
            for number in range(100):
                pipe.echo(f"{number}" * 1000)
            assert pipe.execute() == [f"{number}".encode() * 1000 for number in range(100)]
        assert time.monotonic() - began >= 0.1, "there and back"


def test_single_bytes_reach_the_server_in_many_pieces(proxy: Proxy, near: redis.Redis) -> None:
    def reads() -> int:
        return cast(dict[str, int], near.info("stats"))["total_reads_processed"]

    text = os.urandom(20_000)
    with far_client(proxy) as client:
        client.ping()
        proxy.one_byte_chunks()
        before = reads()
        client.set("x", text)
        # A socket has room for a few hundred pieces, whatever their size.
        assert reads() - before > 20
        assert client.get("x") == text
    near.delete("x")


def test_a_dropped_reply_is_one_to_a_script_that_was_run(proxy: Proxy, near: redis.Redis) -> None:
    with far_client(proxy) as client:
        proxy.drop_replies(1)
        assert client.set("plain", "x") is True
        with pytest.raises(redis.ResponseError):
            client.eval("return redis.error_reply('ERR no')", 0)
        assert proxy.dropped == 0
        with pytest.raises(redis.ConnectionError):
            client.eval(ADD_ONE, 1, "n")
        assert proxy.dropped == 1
        assert client.eval(ADD_ONE, 1, "n") == 2
        assert proxy.dropped == 1
    near.delete("plain", "n")


def test_each_so_many_th_reply_is_dropped_so_many_times(proxy: Proxy, near: redis.Redis) -> None:
    kept = []
    with far_client(proxy) as client:
        client.ping()
        proxy.drop_replies(2, every=3)
        for _ in range(9):
            try:
                kept.append(client.eval(ADD_ONE, 1, "n"))
            except redis.ConnectionError:
                kept.append("dropped")
    assert kept == [1, 2, "dropped", 4, 5, "dropped", 7, 8, 9]
    near.delete("n")


def test_clear_ends_all_faults(proxy: Proxy) -> None:
    proxy.delay(1000)
    proxy.one_byte_chunks()
    proxy.drop_replies(1000)
    proxy.refuse()
    proxy.black_hole()
    proxy.clear()
    with far_client(proxy) as client:
        assert client.eval("return 'x'", 0) == b"x"


@pytest.mark.parametrize("upstream", ["", "localhost", "localhost:", ":6379", "localhost:redis"])
def test_an_upstream_that_is_no_address_is_refused(upstream: str) -> None:
    with pytest.raises(ProxyError, match=f"'{upstream}' is neither"):
        Proxy.start(upstream)


def test_values_that_make_no_sense_are_refused_and_change_nothing(proxy: Proxy) -> None:
    with pytest.raises(ProxyError, match="-1"):
        proxy.delay(-1)
    with pytest.raises(ProxyError, match="every 0"):
        proxy.drop_replies(1, every=0)
    with far_client(proxy) as client:
        assert client.eval("return 'x'", 0) == b"x"


def test_a_closed_proxy_still_tells_what_it_has_counted(home: EmbeddedServer) -> None:
    proxy = Proxy.start(home.socket_path)
    with dial(proxy) as sock:
        assert ask(sock, "PING") == b"+PONG\r\n"
        proxy.close()
        proxy.close()
    assert proxy.counts == Counts(connections=1, open=1, bytes=13, dropped=0)
    with pytest.raises(ProxyError):
        proxy.clear()
    with pytest.raises(ConnectionRefusedError):
        dial(proxy)


def test_a_proxy_that_was_killed_says_so(home: EmbeddedServer) -> None:
    with Proxy.start(home.socket_path) as proxy:
        os.kill(proxy.pid, signal.SIGKILL)
        with pytest.raises(ProxyError, match="does not answer to 'clear'"):
            proxy.clear()


OWNER = """
import os, signal, sys, time
from faults.proxy import Proxy

proxy = Proxy.start(sys.argv[1])
child = os.fork()
if child == 0:
    proxy.close()  # not its own: nothing happens
    time.sleep(60)
    os._exit(0)
print(proxy.port, child, flush=True)
time.sleep(60)
"""


def test_the_proxy_ends_with_its_owner_though_a_forked_copy_lives_on(
    home: EmbeddedServer, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    def is_open() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    owner = spawn(OWNER, home.socket_path)
    assert owner.stdout is not None
    port, child = map(int, owner.stdout.readline().split())
    try:
        assert is_open()
        owner.kill()
        eventually(lambda: not is_open(), "the port is gone")
    finally:
        os.kill(child, signal.SIGKILL)


# --- calls ----------------------------------------------------------------------------------------


def cut(proxy: Proxy) -> None:
    """Nobody gets through, and everybody knows."""
    proxy.refuse()
    proxy.reset()


@pytest.mark.parametrize("fault", [Proxy.black_hole, cut], ids=["black hole", "refused"])
def test_calls_end_while_the_network_is_down_and_go_on_when_it_is_back(
    far: TaskQueue, proxy: Proxy, near: redis.Redis, fault: Fault
) -> None:
    push(far, "t1", "t2")
    first, second = far.claim("w", limit=2)
    scheduler = TaskScheduler(far, registry=CollectorRegistry())
    fill_pool(far, 10)
    calls: list[Callable[[], object]] = [
        lambda: far.push(make_task(task_id="t3")),
        lambda: far.push_many([make_task(task_id=f"many-{n}") for n in range(600)]),
        lambda: far.claim("w"),
        lambda: far.claim("w", wait=600),
        lambda: far.finish(first),
        lambda: far.extend([first, second]),
        lambda: far.retry(second),
        lambda: far.inspect(),
        lambda: scheduler.add_schedule("0 9 * * *", "alice", schedule_id="s"),
        lambda: scheduler.tick(),
    ]
    fault(proxy)
    assert together(calls) == [RedisUnavailable] * len(calls)
    assert not scheduler.is_leader

    proxy.clear()
    assert far.push(make_task(task_id="t3")) == "t3"
    far.finish(first)
    far.finish(second)
    assert ids_of(far.claim("w")) == ["t3"]
    assert scheduler.add_schedule("0 9 * * *", "alice", schedule_id="s") == "s"
    assert scheduler.tick().is_leader
    assert stats(near) == {"pushed": 3, "claimed": 3, "finished": 2, "terms": 1}


@pytest.mark.parametrize("fault", [Proxy.reset, Proxy.half_open], ids=["reset", "half-open"])
def test_a_call_survives_dead_connections(proxy: Proxy, near: redis.Redis, fault: Fault) -> None:
    with TaskQueue.from_url(proxy.url, timeout=2.0) as queue:
        queue.check()
        fill_pool(queue, 40)
        fault(proxy)
        assert queue.push(make_task(task_id="t1")) == "t1"
        queue.finish(claim_one(queue))
    assert stats(near) == {"pushed": 1, "claimed": 1, "finished": 1}


def test_a_late_arrival_is_done_once(far: TaskQueue, proxy: Proxy, near: redis.Redis) -> None:
    push(far, "t0", "t1")
    far.finish(claim_one(far))  # so that the server knows the script
    claim = claim_one(far)
    fill_pool(far, 2)
    proxy.delay(0.8)
    late: list[Callable[[], object]] = [
        lambda: far.push(make_task(task_id="t2")),
        lambda: far.finish(claim),
    ]
    assert together(late) == [RedisUnavailable] * 2
    done = {"pushed": 3, "claimed": 2, "finished": 2}
    eventually(lambda: stats(near) == done, "both are done")
    proxy.clear()
    proxy.reset()
    far.push(make_task(task_id="t2"))
    far.finish(claim)
    assert stats(near) == {**done, "duplicates": 1}


def test_a_short_deadline_is_kept_though_a_connection_has_to_be_made(proxy: Proxy) -> None:
    with TaskQueue.from_url(proxy.url, timeout=30.0) as queue:
        proxy.black_hole()
        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(queue.inspect, timeout=0.1)
            try:
                error = future.exception(8)
            finally:
                proxy.clear()
        assert isinstance(error, RedisUnavailable)


# --- replies that are lost ------------------------------------------------------------------------


def test_lost_replies_repeat_no_call(patient: TaskQueue, proxy: Proxy, near: redis.Redis) -> None:
    count = 15
    # Each second one: the first to a call, and not the one to its repetition.
    proxy.drop_replies(10_000, every=2)
    for number in range(count):
        patient.push(make_task(task_id=f"t{number}"))
    claims = [claim_one(patient) for _ in range(count)]
    for claim in claims:
        patient.finish(claim, {"ok": True})
    assert proxy.dropped >= 3 * count - 1
    proxy.clear()

    assert sorted(ids_of(claims)) == sorted(f"t{number}" for number in range(count))
    counted = stats(near)
    assert counted.pop("duplicates") >= count - 1
    assert counted == {"pushed": count, "claimed": count, "finished": count}


def test_a_worker_runs_each_task_once_though_replies_are_dropped(
    patient: TaskQueue, proxy: Proxy, near: redis.Redis, start_worker: Callable[..., Worker]
) -> None:
    runs: Counter[str] = Counter()
    lock = threading.Lock()

    def handle(task: Task) -> None:
        with lock:
            runs[task.task_id] += 1

    ids = [f"t{number}" for number in range(400)]
    proxy.drop_replies(10_000, every=3)
    worker = start_worker(patient, handle, concurrency=4)
    for start in range(0, 400, 20):
        push(patient, *ids[start : start + 20])
    eventually(lambda: stats(near).get("finished") == 400, "all done", within=ENDS_WITHIN_S)
    assert worker.stop(ENDS_WITHIN_S)
    assert proxy.dropped > 10
    assert runs == dict.fromkeys(ids, 1)
    counted = stats(near)
    counted.pop("duplicates", None)
    assert counted == {"pushed": 400, "claimed": 400, "finished": 400}


def test_dropped_replies_fire_once(proxy: Proxy, near: redis.Redis, clock: ManualClock) -> None:
    with TaskQueue.from_url(proxy.url, timeout=20.0, clock=clock) as queue:
        scheduler = TaskScheduler(queue, registry=CollectorRegistry())
        proxy.drop_replies(10_000, every=2)
        for number in range(10):
            scheduler.add_schedule("* * * * *", "alice", schedule_id=f"s{number}")
        reports = []
        for _ in range(5):
            clock.advance(60)
            reports.append(scheduler.tick())
        assert proxy.dropped >= 10
        proxy.clear()
        assert [report.fired for report in reports] == [10] * 5
        assert all(report.is_leader for report in reports)
        assert stats(near)["pushed"] == 50
        assert scheduler.stop()


# --- bytes that come one by one -------------------------------------------------------------------


def test_answers_may_come_byte_by_byte(patient: TaskQueue, proxy: Proxy, near: redis.Redis) -> None:
    proxy.one_byte_chunks()
    tasks = [
        make_task("alice", f"t{number}", payload={"text": "ü" * 500, "number": number})
        for number in range(20)
    ]
    patient.push_many(tasks)
    claims = patient.claim("w", limit=20)
    assert [claim.task.payload for claim in claims] == [task.payload for task in tasks]
    words = patient.finish_many((claim, claim.task.payload) for claim in claims)
    assert words == ["finished"] * 20
    scheduler = TaskScheduler(patient, registry=CollectorRegistry())
    ids = [
        scheduler.add_schedule("0 9 * * *", "alice", schedule_id=f"s{number}")
        for number in range(5)
    ]
    assert [each.schedule_id for each in scheduler.list_schedules()] == ids
    assert scheduler.tick().is_leader
    assert scheduler.stop()
    assert stats(near) == {"pushed": 20, "claimed": 20, "finished": 20, "terms": 1}


# --- threads --------------------------------------------------------------------------------------


def goes_dark(proxy: Proxy, scheduler: TaskScheduler) -> None:
    proxy.black_hole()
    eventually(lambda: scheduler.state == "error", "it has noticed", within=ENDS_WITHIN_S)
    proxy.clear()


def loses_the_server_side(proxy: Proxy, _: TaskScheduler) -> None:
    proxy.half_open()  # for good: whoever wants to go on needs a new connection


def is_reset(proxy: Proxy, _: TaskScheduler) -> None:
    proxy.reset()


@pytest.mark.parametrize("network", [goes_dark, loses_the_server_side, is_reset])
def test_a_scheduler_and_a_worker_go_on_by_themselves_after_the_network(
    far: TaskQueue,
    near_queue: TaskQueue,
    proxy: Proxy,
    near: redis.Redis,
    quickly_alarmed: None,
    start_worker: Callable[..., Worker],
    start_scheduler: Callable[..., TaskScheduler],
    network: Callable[[Proxy, TaskScheduler], None],
) -> None:
    scheduler = start_scheduler(far, check_interval=0.2, lock_timeout=3)
    scheduler.add_schedule(EVERY_SECOND, "alice", schedule_id="s")
    runs: Counter[str] = Counter()
    worker = start_worker(far, lambda task: runs.update([task.task_id]), concurrency=4)
    eventually(lambda: runs, "a first run", within=ENDS_WITHIN_S)

    network(proxy, scheduler)
    healthy_ms = near_queue.link.now_ms()

    def has_run() -> bool:
        return any(int(each.removeprefix("s:")) > healthy_ms for each in list(runs))

    eventually(has_run, "a run of a moment since then", within=ENDS_WITHIN_S)
    eventually(lambda: scheduler.state == "running", "it runs", within=ENDS_WITHIN_S)
    assert worker.stop(ENDS_WITHIN_S)
    assert scheduler.stop(ENDS_WITHIN_S)
    assert max(runs.values()) == 1
    assert stats(near)["finished"] == len(runs)


def test_a_worker_whose_waiting_connection_died_in_silence_hears_again(
    far: TaskQueue,
    near_queue: TaskQueue,
    proxy: Proxy,
    near: redis.Redis,
    quickly_alarmed: None,
    start_worker: Callable[..., Worker],
) -> None:
    ran = threading.Event()
    start_worker(far, lambda task: ran.set())
    until_waiting(near)
    proxy.half_open()
    eventually(lambda: waiting(near) == 0, "the server has seen it")
    until_waiting(near)
    push(near_queue, "t1")
    assert ran.wait(ENDS_WITHIN_S)


def test_a_leader_whose_waiting_connection_died_in_silence_hears_again(
    far: TaskQueue,
    near_queue: TaskQueue,
    proxy: Proxy,
    near: redis.Redis,
    quickly_alarmed: None,
    start_scheduler: Callable[..., TaskScheduler],
) -> None:
    start_scheduler(far, check_interval=600, lock_timeout=1800)
    until_waiting(near)
    proxy.half_open()
    eventually(lambda: waiting(near) == 0, "the server has seen it")
    until_waiting(near)
    other = TaskScheduler(near_queue, registry=CollectorRegistry())
    other.add_schedule(EVERY_SECOND, "alice", schedule_id="s")
    assert near_queue.claim("w", wait=ENDS_WITHIN_S)


def test_a_claim_whose_waiting_connection_died_in_silence_hears_again(
    far: TaskQueue, near_queue: TaskQueue, proxy: Proxy, near: redis.Redis, quickly_alarmed: None
) -> None:
    claims = in_thread(lambda: far.claim("w", wait=600))
    until_waiting(near)
    proxy.half_open()
    eventually(lambda: waiting(near) == 0, "the server has seen it")
    until_waiting(near)
    push(near_queue, "t1")
    assert ids_of(claims()) == ["t1"]


def test_a_claim_that_waits_ends_when_its_network_turns_into_a_black_hole(
    far: TaskQueue, proxy: Proxy, near: redis.Redis, quickly_alarmed: None
) -> None:
    claims = in_thread(lambda: far.claim("w", wait=600))
    until_waiting(near)
    proxy.black_hole()
    with pytest.raises(RedisUnavailable):
        claims()


def test_a_worker_and_a_scheduler_can_be_stopped_in_a_black_hole(
    far: TaskQueue,
    near_queue: TaskQueue,
    proxy: Proxy,
    start_worker: Callable[..., Worker],
    start_scheduler: Callable[..., TaskScheduler],
) -> None:
    running, end = threading.Event(), threading.Event()

    def handle(task: Task) -> None:
        running.set()
        end.wait(ENDS_WITHIN_S)

    scheduler = start_scheduler(far, check_interval=0.1)
    worker = start_worker(far, handle, concurrency=1)
    push(near_queue, "t1", "t2")
    assert running.wait(ENDS_WITHIN_S)
    proxy.black_hole()
    stops: list[Callable[[], object]] = [
        lambda: worker.stop(0.5),
        lambda: scheduler.stop(ENDS_WITHIN_S),
    ]
    assert together(stops) == [False, True], "what runs could not be given back"
    end.set()


def test_a_queue_can_be_closed_without_the_network(far: TaskQueue, proxy: Proxy) -> None:
    fill_pool(far, 5)
    proxy.black_hole()
    in_thread(far.close)()
    eventually(lambda: proxy.counts.open == 0, "all connections are closed")
    with pytest.raises(FairQueueError):
        far.push(make_task())
