import math
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, cast

import pytest
import redis
from helpers.fixtures import OwnServer
from helpers.state import places
from helpers.tasks import make_task, push
from helpers.waiting import eventually, in_thread, until_blocked
from helpers.world import World
from prometheus_client import CollectorRegistry
from redis.connection import AbstractConnection
from redis.sentinel import Sentinel

import fairqueue.worker.pool
from fairqueue import Worker
from fairqueue.errors import RedisRefused, RedisUnavailable, WrongPartitions
from fairqueue.history.runs import History
from fairqueue.link import dialer as dialing
from fairqueue.link import listener as listening
from fairqueue.link.dialer import connection_maker
from fairqueue.link.driver import BATCH_BYTES, Talk, in_batches
from fairqueue.link.listener import Listener
from fairqueue.link.operation import Call
from fairqueue.queue.push import push_row
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler
from faults.proxy import Proxy


def test_a_wait_ends_when_another_thread_nudges_it(queue: TaskQueue) -> None:
    listener = queue.link.listener("wake")
    threading.Thread(target=listener.nudge).start()
    assert listener.wait(60) is True
    assert listener.wait(0.001) is False, "one nudge ends one wait"
    listener.close()


def test_an_interrupted_listener_waits_no_more(queue: TaskQueue) -> None:
    listener = queue.link.listener("wake")
    listener.interrupt()
    assert listener.wait(60) is True
    assert listener.wait(60) is True
    listener.close()


def test_a_wait_for_another_thread_ends_with_its_time_a_nudge_or_for_good(world: World) -> None:
    listener = world.queue.link.listener("wake")
    assert listener.wait_for_nudge(0) is False
    assert listener.wait_for_nudge(0.001) is False
    listener.nudge()
    assert listener.wait_for_nudge(60) is True
    listener.interrupt()
    assert listener.wait_for_nudge(0) is True
    assert listener.wait_for_nudge(60) is True
    assert listener.wait_for_nudge(60) is True
    listener.close()


def test_a_token_between_waits_is_not_missed(queue: TaskQueue) -> None:
    listener = queue.link.listener("wake")
    assert listener.wait(0.001) is False
    queue.link.ask(("LPUSH", queue.keys["wake"], "1"))
    assert listener.wait(60) is True
    listener.close()


def test_a_listener_says_which_list_a_token_came_from(queue: TaskQueue) -> None:
    listener = queue.link.listener("wake_1", "wake")
    queue.link.ask(("LPUSH", queue.keys["wake"], "1"))
    found = []
    for _ in range(2):
        assert listener.wait(60) is True
        found.append(listener.token_from)
        listener.nudge()
    assert found == [queue.keys["wake"], None]
    listener.close()


def test_a_listener_wants_its_token_for_longer_than_the_server_waits(world: World) -> None:
    world.patch(listening, "BLOCK_S", 0.01)
    listener = world.queue.link.listener("wake")
    before = world.count_commands()["blpop"]
    waiting = in_thread(lambda: listener.wait(60))
    eventually(lambda: world.count_commands()["blpop"] >= before + 3, "asked again")
    world.redis.lpush(world.keys["wake"], "1")
    assert waiting() is True
    listener.close()


def test_a_listener_whose_connection_is_dead_without_having_been_told_makes_a_new_one(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "BLOCK_S", 0.2)
    monkeypatch.setattr(listening, "SILENCE_S", 0.2)
    server = own_server()
    with Proxy.start(server.socket_path) as proxy, TaskQueue.from_url(proxy.url) as queue:
        listener = queue.link.listener("wake")
        assert listener.wait(0.001) is False
        proxy.half_open()
        with redis.Redis.from_url(server.url) as client:
            client.lpush(queue.keys["wake"], "1")
        assert listener.wait(60) is True
        listener.close()


def test_a_dead_connection_condemns_the_others_to_its_address(own_server: OwnServer) -> None:
    """Time for two attempts is enough, although more connections are dead than that."""
    server = own_server()
    with (
        Proxy.start(server.socket_path) as proxy,
        TaskQueue.from_url(proxy.url, timeout=4.0) as queue,
        redis.Redis.from_url(server.url) as client,
    ):
        with ExitStack() as used:
            for _ in range(5):
                used.enter_context(queue.link.connections.one())
        proxy.half_open()
        push(queue, "t1")
        assert places(client) == {"ready": ["t1"]}


def test_file_descriptors_beyond_the_reach_of_select_can_be_waited_for(
    queue: TaskQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2200:
        monkeypatch.setattr(listening, "SELECTABLE", 0)
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2200), hard))
    opened: list[socket.socket] = []
    try:
        while listening.SELECTABLE and (not opened or opened[-1].fileno() < 1100):
            opened.append(socket.socket())
        listener = queue.link.listener("wake")
        assert listener.wait(0.001) is False
        queue.link.ask(("LPUSH", queue.keys["wake"], "1"))
        assert listener.wait(60) is True
        listener.close()
    finally:
        for sock in opened:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def answering(answer: bytes, to: bytes = b"") -> Iterator[str]:
    """The address of one who is no Redis: this is the answer to what contains `to`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    client, _ = listener.accept()
                except OSError:
                    return
                with client, suppress(OSError):
                    while said := client.recv(65_536):
                        client.sendall(answer if to in said else b"+OK\r\n" * said.count(b"*"))

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


def test_one_who_is_no_redis_is_as_good_as_none() -> None:
    with (
        answering(b"HTTP/1.1 502 Bad Gateway\r\n\r\n") as url,
        TaskQueue.from_url(url, timeout=0.2) as queue,
    ):
        with pytest.raises(RedisUnavailable, match="did not answer"):
            queue.size()
        with pytest.raises(RedisUnavailable, match="did not answer"):
            queue.claim("w", wait=0.1)


def test_a_sentinel_that_names_no_address_is_passed_over() -> None:
    with (
        answering(b"*1\r\n$4\r\nmain\r\n", to=b"SENTINEL") as url,
        TaskQueue.from_url(url.replace("redis", "redis+sentinel") + "/m", timeout=0.2) as queue,
        pytest.raises(RedisUnavailable, match="named no address"),
    ):
        queue.size()


def test_a_retry_keeps_the_deadline(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def dial(within: float) -> None:
        given.append(within)
        raise redis.ConnectionError("nobody is there")

    monkeypatch.setattr(queue.link.connections, "_free", [])
    monkeypatch.setattr(queue.link.connections.dialer, "dial", dial)
    monkeypatch.setattr(queue.link, "timeout", 0.3)
    with pytest.raises(RedisUnavailable):
        queue.size()
    first, *others = given
    assert first == float("inf")
    assert others == sorted(others, reverse=True)
    assert others[0] < 0.3


def test_a_partly_refused_operation_is_not_reported_as_unchanged(
    world: World,
) -> None:
    claim = world.push_and_claim("a")
    world.redis.set(world.keys["served_before"], "no hash")
    with pytest.raises(RedisUnavailable, match="it is not known whether it was done before"):
        world.queue.finish_and_claim([(claim, None, None)], "w", 1)
    assert world.info("a").state == "finished"
    world.redis.delete(world.keys["served_before"])


def test_what_is_written_is_utf_8_whatever_the_url_says() -> None:
    with TaskQueue.from_url("redis://localhost?encoding=latin-1") as queue:
        assert queue.link.connections.dialer._options["encoding"] == "utf-8"


def test_batches_are_bounded_by_number_and_by_size() -> None:
    def sizes(items: list[int], most: int) -> list[list[int]]:
        return [list(batch) for batch in in_batches(items, most, lambda size: size)]

    million = BATCH_BYTES
    assert sizes([], 2) == []
    assert sizes([1, 1, 1, 1, 1], 2) == [[1, 1], [1, 1], [1]]
    assert sizes([million, million, 1], 10) == [[million], [million], [1]]
    assert sizes([3 * million], 10) == [[3 * million]], "one that is too large goes alone"


@pytest.mark.parametrize(("timeout", "step"), [(10.0, 1.0), (1.0, 0.5)])
def test_no_step_of_connecting_takes_longer_than_a_second(timeout: float, step: float) -> None:
    client = Sentinel([("127.0.0.1", 1)]).master_for("main")
    with TaskQueue(client, timeout=timeout) as queue:
        options = queue.link.connections.dialer._options
    assert options["socket_timeout"] == options["socket_connect_timeout"] == step


# --- what may have been done ----------------------------------------------------------------------


def failing(*errors: Exception) -> Callable[[], Talk]:
    """A conversation that fails with each of the errors in turn, and then succeeds."""
    left = list(errors)

    def talk() -> Talk:
        yield (("PING",),)
        if left:
            raise left.pop(0)
        return "done"

    return talk


def test_a_refusal_after_a_lost_answer_does_not_say_that_nothing_was_done(world: World) -> None:
    refusal = redis.ResponseError("OOM command not allowed")
    with pytest.raises(RedisRefused):
        world.queue.link._repeat(failing(refusal), None)
    with pytest.raises(RedisUnavailable, match=r"OOM.* it is not known whether it was done"):
        world.queue.link._repeat(failing(redis.ConnectionError("lost"), refusal), None)


def test_what_may_have_been_done_is_not_sent_again_after_its_deadline(queue: TaskQueue) -> None:
    long_ago = time.monotonic() - 2 * queue.link.timeout
    sent: list[str] = []

    def talk() -> Talk:
        sent.append("sent")
        yield (("PING",),)

    with pytest.raises(RedisUnavailable):
        queue.link._repeat(talk, None, sent_at=long_ago)
    assert sent == []


class Stub:
    """A connection that answers once, and breaks."""

    def __init__(self) -> None:
        self._answers: list[Any] = [[b"pushed", 1]]

    def send_command(self, *command: object) -> None:
        pass

    def read_response(self) -> Any:
        if not self._answers:
            raise redis.ConnectionError("lost")
        return self._answers.pop()


def test_sent_batches_keep_the_deadline(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not sent yet have one of their own."""
    link, since = queue.link, []
    repeat, connection = link._repeat, link.connections.one

    @contextmanager
    def stub() -> Iterator[Stub]:
        monkeypatch.setattr(link.connections, "one", connection)
        yield Stub()

    def watched(action: Any, timeout: float | None, *, sent_at: float | None = None) -> Any:
        since.append(sent_at)
        return repeat(action, timeout, sent_at=sent_at)

    monkeypatch.setattr(link.connections, "one", stub)
    monkeypatch.setattr(link, "_repeat", watched)
    calls = (Call("push", rest=push_row(make_task(f"t{n}"))) for n in range(4))
    before = time.monotonic()
    assert list(link._stream(calls)) == [[b"pushed", 1]] * 4
    assert [sent_at is not None for sent_at in since] == [True, True, False]
    assert all(sent_at >= before for sent_at in since if sent_at is not None)


def test_a_long_push_leaves_a_replica(queue: TaskQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    push(queue, "first")  # a script that is not known yet would end the round trips by itself
    leads = iter([True, True, True, False])
    dials: list[float] = []
    dial = queue.link.connections.dialer.dial

    def watched(within: float) -> AbstractConnection:
        dials.append(within)
        return dial(within)

    monkeypatch.setattr(queue.link.connections, "_free", [])
    monkeypatch.setattr(queue.link.connections.dialer, "dial", watched)
    monkeypatch.setattr(queue.link.connections.dialer, "still_leads", lambda *_: next(leads, True))
    calls = [Call("push", rest=push_row(make_task(f"u{n}"))) for n in range(6)]
    assert [answer[0] for answer in queue.link._stream(calls)] == [b"pushed"] * 6
    assert len(dials) == 2
    assert queue.size() == 7


# --- connections ----------------------------------------------------------------------------------


def is_open(connection: AbstractConnection) -> bool:
    return connection._sock is not None


def test_a_connection_comes_back_to_a_closed_queue_and_is_closed(redis_client: redis.Redis) -> None:
    queue = TaskQueue(redis_client)
    with queue.link.connections.one() as used:
        queue.close()
        assert is_open(used)
    assert not is_open(used)
    assert queue.link.connections._free == []


def test_a_queue_that_was_closed_is_closed_after_a_fork_too(redis_client: redis.Redis) -> None:
    queue = TaskQueue(redis_client)
    queue.close()
    queue.link.connections._pid = -1  # of a parent
    with pytest.raises(RedisRefused, match="closed"):
        queue.size()


def test_the_clock_of_a_server_that_failed_is_forgotten(redis_client: redis.Redis) -> None:
    with TaskQueue(redis_client) as queue:
        queue.link.learn_time(0)
        with suppress(redis.ConnectionError), queue.link.connections.one():
            raise redis.ConnectionError("gone")
        assert queue.link.now_ms() > 60_000


class OwnPool(redis.ConnectionPool):
    """As of somebody who has changed something in it."""


def test_a_pool_class_of_ones_own_changes_neither_deadlines_nor_repeats() -> None:
    pool = OwnPool(socket_timeout=60)
    options = connection_maker(redis.Redis(connection_pool=pool), timeout=4.0)._options
    assert (options["socket_timeout"], options["retry"]._retries) == (2.0, 0)


@pytest.mark.parametrize(("given", "checked"), [({}, True), ({"ssl_cert_reqs": "none"}, False)])
def test_the_name_of_a_host_is_checked_with_every_redis_py(
    given: dict[str, Any], checked: bool
) -> None:
    pool = redis.ConnectionPool(connection_class=redis.SSLConnection, **given)
    options = connection_maker(redis.Redis(connection_pool=pool), timeout=4.0)._options
    assert options["ssl_check_hostname"] is checked


def test_asking_sentinels_keeps_the_callers_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[float] = []
    with TaskQueue.from_url("redis+sentinel://localhost:1/main") as queue:
        dialer = queue.link.connections.dialer

        def primary(sentinel: object, seconds: float) -> tuple[str, int]:
            asked.append(seconds)
            return "h", 1

        monkeypatch.setattr(dialer, "_primary", primary)
        dialer.still_leads(redis.Connection(host="h", port=1), 0.01)
    assert asked == [0.01]


# --- nobody is there ------------------------------------------------------------------------------


def closed_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def dials(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each attempt to connect; nothing is waited for."""
    made: list[float] = []
    dial = dialing.Dialer.dial

    def counted(self: dialing.Dialer, within: float = math.inf) -> AbstractConnection:
        made.append(within)
        return dial(self, within)

    monkeypatch.setattr(dialing.Dialer, "dial", counted)
    return made


def no_sleep(seconds: float) -> None:
    """Instead of `time.sleep`."""
    raise AssertionError(f"slept for {seconds} s")


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:{port}", "unix:///nowhere/redis.sock", "redis://nowhere.invalid:{port}"],
)
def test_who_was_never_there_is_asked_once(
    dials: list[float], monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setattr(time, "sleep", no_sleep)
    with TaskQueue.from_url(url.format(port=closed_port())) as queue:
        with pytest.raises(RedisUnavailable, match="Redis did not answer"):
            queue.push(make_task())
        assert len(dials) == 1
        with pytest.raises(RedisUnavailable, match="Redis did not answer"):
            TaskScheduler(queue, registry=CollectorRegistry())
        assert len(dials) == 2


def test_who_was_there_may_come_back_and_is_asked_until_the_deadline(
    queue: TaskQueue, dials: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    push(queue, "before")
    free, dial = queue.link.connections._free, queue.link.connections.dialer.dial
    while free:
        free.pop().disconnect()
    dials.clear()

    def refused_twice(within: float = math.inf) -> AbstractConnection:
        if len(dials) < 2:
            dials.append(within)
            raise dialing.NobodyThere("Connection refused")
        return dial(within)

    monkeypatch.setattr(queue.link.connections.dialer, "dial", refused_twice)
    push(queue, "after")
    assert len(dials) == 3


def test_sentinels_that_were_never_there_are_asked_once(
    dials: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", no_sleep)
    hosts = ",".join(f"127.0.0.1:{closed_port()}" for _ in range(2))
    with (
        TaskQueue.from_url(f"redis+sentinel://{hosts}/primary") as queue,
        pytest.raises(RedisUnavailable, match="no sentinel named a primary"),
    ):
        queue.push(make_task())


def test_a_dead_primary_is_awaited_while_sentinels_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """They name another one soon."""
    monkeypatch.setattr(dialing._Sentinel, "ask", lambda *_: ("127.0.0.1", closed_port()))
    with TaskQueue.from_url("redis+sentinel://127.0.0.1:1/primary") as queue:
        with pytest.raises(redis.ConnectionError, match="refused") as caught:
            queue.link.connections.dialer.dial()
        assert not isinstance(caught.value, dialing.NobodyThere)


# --- connections to wait on -----------------------------------------------------------------------


def connections_made(client: redis.Redis) -> int:
    """How many connections the server has accepted so far."""
    return int(cast(dict[str, int], client.info("stats"))["total_connections_received"])


@pytest.mark.parametrize("concurrency", [1, 2])
def test_a_worker_makes_no_new_connection_for_each_task(
    own_server: OwnServer, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    monkeypatch.setattr(fairqueue.worker.pool, "QUICK_S", 0.0)  # nothing is claimed ahead
    full = threading.Semaphore(0)
    first = Listener.wait_for_nudge

    def wait_for_nudge(listener: Listener, seconds: float) -> bool:
        full.release()
        return first(listener, seconds)

    monkeypatch.setattr(Listener, "wait_for_nudge", wait_for_nudge)
    server = own_server()
    with redis.Redis.from_url(server.url) as client, TaskQueue.from_url(server.url) as queue:
        go_on = threading.Semaphore(0)
        worker = Worker(queue, lambda task: go_on.acquire(timeout=30), concurrency=concurrency)
        worker.start()
        try:
            until_blocked(client)
            before = connections_made(client)
            for number in range(20):
                for slot in range(concurrency):
                    push(queue, f"t{number}-{slot}")
                assert full.acquire(timeout=30)  # all slots are taken, and no token is wanted
                for _ in range(concurrency):
                    go_on.release()
                until_blocked(client)
            assert connections_made(client) - before < 5
        finally:
            assert worker.stop(10)


def test_a_claim_that_waits_makes_no_new_connection_each_time(own_server: OwnServer) -> None:
    server = own_server()
    with redis.Redis.from_url(server.url) as client, TaskQueue.from_url(server.url) as queue:
        before = connections_made(client)
        for number in range(20):
            claim = in_thread(lambda: queue.claim("w", wait=30))
            until_blocked(client)
            push(queue, f"t{number}")
            (found,) = claim()
            queue.finish(found)
        assert connections_made(client) - before < 10


def test_a_free_connection_that_the_server_has_closed_is_not_waited_on(world: World) -> None:
    listener = world.queue.link.listener("wake")
    world.queue.size()
    world.redis.client_kill_filter(_type="normal", skipme=True)
    waiting = in_thread(lambda: listener.wait(30))
    world.until_blocked()
    listener.nudge()
    assert waiting()
    listener.close()


def test_a_connection_on_which_a_token_is_still_wanted_is_not_given_to_others(world: World) -> None:
    listener = world.queue.link.listener("wake")
    waiting = in_thread(lambda: listener.wait(30))
    world.until_blocked()
    listener.nudge()
    assert waiting()
    listener.close()
    assert world.queue.size() == 0
    assert cast(dict[str, int], world.redis.info("clients"))["blocked_clients"] == 0


@pytest.mark.parametrize(
    "read",
    [
        lambda queue: queue.size(),
        lambda queue: queue.get("t"),
        lambda queue: queue.settings(),
        lambda queue: History(queue).find(["t"]),
        lambda queue: queue.push(make_task("ann")),
    ],
)
def test_a_client_without_partitions_is_refused_by_a_queue_that_has_some(
    redis_client: redis.Redis, read: Callable[[TaskQueue], object]
) -> None:
    """It would see an empty queue."""
    with TaskQueue(redis_client, "parts", partitions=2) as whole:
        whole.push(make_task("ann", "t"))
        with TaskQueue(redis_client, "parts") as plain:
            for _ in range(2):
                with pytest.raises(WrongPartitions, match="has 2 partitions"):
                    read(plain)
        whole.destroy()
