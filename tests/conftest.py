"""Fixtures: a real server for all tests, own servers for some, and the world around a queue."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import pytest
import redis
from helpers.browser import chromium, open_page, site, web
from helpers.fixtures import Logged, OwnServer
from helpers.moving import clients, open_queue
from helpers.network import LossyProxy
from helpers.processes import DEADLINE, PROGRAM, Start
from helpers.rest import Api, make_api
from helpers.state import check_consistency
from helpers.workers import Gate, Person
from helpers.world import World
from limited.sitecustomize import is_on, make_user
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.cluster import EmbeddedCluster
from fairqueue.runtime.embedded import EmbeddedServer
from fairqueue.scheduler.scheduler import TaskScheduler

# Fixtures of the web tests, and of moves to other queues.
__all__ = ["chromium", "clients", "open_page", "open_queue", "site", "web"]


# Of the queues `queue` and `live`. Tests that look into keys hold only for 1.
PARTITIONS = int(os.environ.get("FAIRQUEUE_TEST_PARTITIONS", "1"))
# Whether the server that all tests share is a cluster.
ON_CLUSTER = "FAIRQUEUE_TEST_CLUSTER" in os.environ


def pytest_xdist_auto_num_workers() -> int:
    """Number of processes: none if all tests must share one server."""
    return 0 if "FAIRQUEUE_TEST_URL" in os.environ else min(4, os.cpu_count() or 1)


# What `make test` leaves out and `make test-slow` runs: modules and folders by the kind of test
# in them. Tests with the marker `processes` are slow too.
SLOW = {
    "browser": ["browser"],
    "fuzzing and the model": ["test_fuzz", "test_rest_fuzz", "test_model", "test_partition_model"],
    "fault injection": [
        "test_failpoints",
        "test_fault_proxy",
        "test_fault_checker",
        "test_soak",
        "test_cluster_storm",
    ],
    "failover and TLS": [
        "test_cluster_failover",
        "test_cluster_leaders",
        "test_failover",
        "test_tls",
    ],
    "several processes": [
        *("test_cli_alerts", "test_cli_metrics", "test_cli_processes", "test_guides", "test_peers"),
        *("test_processes", "test_scheduler_processes", "test_server", "test_service"),
        "test_worker_processes",
    ],
}
MORE = "make proof, make fuzz, make acl, make test-oldest, long storms (make faults) and soaks"


def pytest_configure(config: pytest.Config) -> None:
    """Register markers for tests that make no sense with some settings of a test run."""
    config.addinivalue_line("markers", "own_user: chooses the Redis user of FairQueue itself")
    config.addinivalue_line("markers", "one_partition: looks into a queue without partitions")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests, and skip those that make no sense with the settings of this run."""
    slow = {name for names in SLOW.values() for name in names}
    for item in items:
        places = {item.path.stem, item.path.parent.name}
        if places & slow or item.get_closest_marker("processes"):
            item.add_marker("slow")
        if PARTITIONS > 1 and item.get_closest_marker("one_partition"):
            item.add_marker(pytest.mark.skip(reason="looks into a queue without partitions"))
        if is_on() and item.get_closest_marker("own_user"):
            item.add_marker(pytest.mark.skip(reason="chooses the Redis user itself"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was left out."""
    selected = terminalreporter.config.option.markexpr
    if selected == "not slow":
        groups = "; ".join(SLOW)
        terminalreporter.write_line(f"Left out (run them with make test-all): {groups}.")
    elif selected == "slow":
        terminalreporter.write_line(f"Not part of make test-all: {MORE}.")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Replace characters that UTF-8 cannot encode: xdist sends the log to another process."""
    report = yield
    report.sections = [
        (name, text.encode(errors="replace").decode()) for name, text in report.sections
    ]
    return report


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Restore Ctrl-C here and in processes that tests start: background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)


class Server(Protocol):
    """What tests may use of the shared server."""

    @property
    def url(self) -> str: ...


@dataclass(frozen=True)
class ExternalServer:
    """The server of FAIRQUEUE_TEST_URL, which the tests neither start nor stop."""

    url: str


@pytest.fixture(scope="session")
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """The server that all tests share."""
    url = os.environ.get("FAIRQUEUE_TEST_URL")
    if ON_CLUSTER:
        yield request.getfixturevalue("shared_cluster")
    elif url:
        if is_on():
            with redis.Redis.from_url(url) as client:
                make_user(client)
        yield ExternalServer(url)
    else:
        with EmbeddedServer.start() as embedded:
            yield embedded


@pytest.fixture
def redis_url(server: Server) -> str:
    """The address of the shared server."""
    return server.url


@pytest.fixture
def redis_client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the shared server, whose database is empty when the test begins."""
    with client_of(redis_url) as client:
        client.flushdb()
        yield client


def client_of(url: str) -> redis.Redis:
    """A client of redis-py, also for a cluster."""
    if not url.startswith("redis+cluster://"):
        return redis.Redis.from_url(url)
    first = url.partition("://")[2].partition(",")[0].strip("/")
    return cast(redis.Redis, redis.RedisCluster.from_url(f"redis://{first}"))


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[EmbeddedCluster]:
    """The cluster of `cluster`."""
    with EmbeddedCluster.start(3) as embedded:
        yield embedded


@pytest.fixture
def cluster(shared_cluster: EmbeddedCluster) -> EmbeddedCluster:
    """A cluster of three primaries that all tests share, empty when the test begins.

    A test may move slots, but leaves the nodes as they are.
    """
    shared_cluster.flush()
    return shared_cluster


@pytest.fixture
def own_cluster() -> Iterator[Callable[..., EmbeddedCluster]]:
    """Start clusters for one test, with the arguments of `EmbeddedCluster.start`."""
    with ExitStack() as clusters:

        def start(*arguments: Any, **settings: Any) -> EmbeddedCluster:
            return clusters.enter_context(EmbeddedCluster.start(*arguments, **settings))

        yield start


@pytest.fixture
def own_server() -> Iterator[Callable[..., EmbeddedServer]]:
    """Start servers for one test, with the arguments of `EmbeddedServer.start`."""
    with ExitStack() as servers:

        def start(*arguments: object, **settings: object) -> EmbeddedServer:
            embedded = EmbeddedServer.start(*arguments, **settings)  # type: ignore[arg-type]
            return servers.enter_context(embedded)

        yield start


@pytest.fixture
def proxy(own_server: OwnServer) -> Iterator[LossyProxy]:
    """A network that loses replies, in front of a server of its own."""
    with LossyProxy(own_server().socket_path) as proxy:
        yield proxy


@pytest.fixture
def far(proxy: LossyProxy) -> Iterator[TaskQueue]:
    """A queue behind `proxy`, on the server's clock."""
    with TaskQueue.from_url(proxy.url, timeout=10) as queue:
        queue.check()
        yield queue


@pytest.fixture
def near(proxy: LossyProxy) -> Iterator[redis.Redis]:
    """A client of the same server. At the end of the test, all counts must agree."""
    with redis.Redis.from_url(proxy.url) as client:
        yield client
        check_consistency(client)


@pytest.fixture
def clock(request: pytest.FixtureRequest) -> ManualClock:
    """The clock of `queue`, which the test moves. It begins at START of the module, if any."""
    return ManualClock(getattr(request.module, "START", 1_700_000_000.0))


@pytest.fixture
def queue(
    request: pytest.FixtureRequest, redis_client: redis.Redis, clock: ManualClock
) -> Iterator[TaskQueue]:
    """A queue whose counts and indexes must agree at the end of the test, unless it is `untidy`."""
    with TaskQueue(redis_client, clock=clock, partitions=PARTITIONS) as queue:
        if PARTITIONS > 1:
            queue.check()  # programs that open it find the number
        yield queue
    if request.node.get_closest_marker("untidy") is None:
        check_consistency(redis_client, partitions=PARTITIONS)


@pytest.fixture
def live(redis_client: redis.Redis) -> Iterator[TaskQueue]:
    """A queue on the server's clock, whose counts and indexes must agree at the end."""
    with TaskQueue(redis_client, partitions=PARTITIONS) as queue:
        if PARTITIONS > 1:
            queue.check()  # programs that open it find the number
        yield queue
    check_consistency(redis_client, partitions=PARTITIONS)


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry without the metrics of other tests."""
    return CollectorRegistry()


@pytest.fixture
def world(
    redis_client: redis.Redis,
    clock: ManualClock,
    queue: TaskQueue,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[World]:
    """`queue` with its clock, its server and everything that works on it."""
    world = World(redis_client, clock, queue, registry, monkeypatch)
    yield world
    world.close()


@pytest.fixture
def scheduler(world: World) -> TaskScheduler:
    """A scheduler of `queue` that acts only when the test ticks it."""
    return world.scheduler


@pytest.fixture
def other(world: World) -> TaskScheduler:
    """A second scheduler with its own connections, as in another process."""
    return world.other


@pytest.fixture
def history(world: World) -> History:
    return world.history


@pytest.fixture
def workers(world: World) -> WorkerStore:
    return world.workers


@pytest.fixture
def inspector(world: World) -> Inspector:
    return world.inspector


@pytest.fixture
def api(world: World) -> Api:
    """The REST API of `queue`, which has one of everything."""
    return make_api(world)


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A handler that waits until the test, or its end, lets it go on."""
    gate = Gate("late")
    yield gate
    gate.go_on.set()


@pytest.fixture
def people() -> Iterator[Callable[..., Person]]:
    """Make recipients of alerts, with the settings of `Alerts`."""
    with ExitStack() as made:

        def make(**settings: object) -> Person:
            person = Person(**settings)
            made.callback(person.alerts.close)
            return person

        yield make


@pytest.fixture
def person(people: Callable[..., Person]) -> Person:
    return people()


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Logged:
    """Return the log records of an event so far, each as a dict of its fields."""

    def logged(event: str) -> list[dict[str, Any]]:
        return [vars(each) for each in caplog.records if vars(each).get("event") == event]

    return logged


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """Start a command, or a program that calls it, in `tmp_path`; killed at the end."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, program: str | None = None) -> "subprocess.Popen[str]":
        begin = PROGRAM if program is None else (sys.executable, "-c", program)
        process = subprocess.Popen(
            [*begin, *arguments],
            cwd=tmp_path,
            env={**os.environ, "FAIRQUEUE_URL": redis_url},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield start
    kill_all(started)


def kill_all(processes: list["subprocess.Popen[str]"]) -> None:
    for process in processes:
        process.kill()
        process.wait(DEADLINE)
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


@pytest.fixture
def spawn() -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Run Python programs in processes, which are killed at the end of the test."""
    started: list[subprocess.Popen[str]] = []

    def spawn(program: str, *arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield spawn
    kill_all(started)
