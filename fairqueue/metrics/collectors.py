"""Metrics for Prometheus: those of schedulers and workers in this process, and those of a queue.

Counts that must add up over processes and restarts are stored in Redis by the scripts and read by
one `QueueCollector`; timings and errors of a process are ordinary metrics of that process. No
metric has a label for users or keys: there may be a million of them. Tenants have one only if they
are named, and a queue has at most 100 pools and 256 partitions.
"""

import io
import operator
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from weakref import WeakKeyDictionary
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fairqueue.errors import (
    LONGEST_SHOWN,
    ConfigurationError,
    FairQueueError,
    RedisUnavailable,
    kind_of,
    truncate,
)
from fairqueue.link.partitions import tolerate_missing
from fairqueue.metrics.processes import Merged
from fairqueue.models import QueueSnapshot
from fairqueue.queue.pools import PoolInfo, pool_infos
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.fork import reset_in_child
from fairqueue.stats.users import TenantInfo, UserStats
from fairqueue.validation import check_count, check_items, check_tenant

ERROR_TYPES = ("redis", "lock_timeout", "deserialization", "push", "cron", "internal")
SCRAPE_TIMEOUT_S = 1.0  # how long a scrape waits for Redis
LOCK_OUTCOMES = ("acquired", "contended", "lost")

_LATENESS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    60,
    600,
)
_RUN_BUCKETS = (0.001, 0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800, 7200)
_CYCLE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)

# counter in Redis -> (metric, what it counts)
_COUNTERS = {
    "pushed": "Tasks stored, by pushes and by schedules.",
    "duplicates": "Pushes of a task that was already stored.",
    "refused": "Pushes and fires refused by a limit of the queue or of a user.",
    "claimed": "Tasks handed to workers.",
    "finished": "Tasks that finished.",
    "retried": "Attempts that failed and will be retried.",
    "released": "Tasks that workers gave back without running them.",
    "buried": "Tasks moved to the dead letters.",
    "timed_out": "Dead letters whose last attempt timed out.",
    "cancelled": "Tasks that were cancelled.",
    "expired": "Leases that expired because their worker did not extend them.",
    "expired_tasks": "Tasks that ended as expired: no worker had started them in time.",
    "not_unique": "Pushes that were answered with another task that has the same unique key.",
    "replaced": "Waiting tasks that got the payload and the time of a later push.",
    "lost_leases": "Calls refused because the lease was lost.",
    "broken_tasks": "Unreadable task records.",
    "fired": "Tasks enqueued by schedules.",
    "missed": "Fire times of schedules that passed without a fire.",
    "skipped": "Fire times of schedules skipped by their overlap policy.",
    "stale_runs": "Runs that went on for a lease after their time-out or cancellation.",
    "moved": "Waiting tasks that were moved to another tenant.",
    "revived": "Dead letters that were retried.",
    "discarded": "Dead letters deleted by an operator.",
    "auto_paused": "Schedules paused after too many failures in a row.",
    "backfilled": "Tasks enqueued for past fire times of schedules.",
    "terms": "Terms of leadership.",
    "set_aside_broken": "Schedules disabled because their record is unreadable.",
    "set_aside_cron": "Schedules disabled because their cron has no next fire time.",
}

_GAUGES = {
    "ready": "Tasks that wait for a worker.",
    "delayed": "Tasks that wait for their start time.",
    "running": "Tasks that a worker holds.",
    "dead": "Dead letters.",
    "active_users": "Users with waiting tasks; those with tasks in several pools count in each.",
    "parked_users": "Users with waiting tasks who are paused, capped or over their rate.",
    "active_tenants": "Tenants with waiting tasks.",
    "parked_tenants": "Tenants with waiting tasks that are paused, capped or over their rate.",
    "held": "Waiting tasks that wait for room in the limits of their name or of a key.",
    "slots_in_use": "Slots of names and keys that running tasks hold.",
    "unique_keys": "Unique keys that tasks have, or whose window has not ended.",
    "schedules": "Stored schedules.",
    "active_schedules": "Schedules with a next fire time.",
    "set_aside": "Schedules that cannot run.",
    "epoch": "Number of the current term of leadership.",
}

_POOL_GAUGES = {
    "waiting": "Tasks that wait for a worker of the pool.",
    "running": "Tasks that run on the live workers of the pool.",
    "workers": "Live workers that serve the pool, without those that drain.",
    "slots": "Tasks that these workers can run at a time.",
    "unserved": "1 if tasks wait, no live worker serves the pool, and nobody claimed lately.",
}
_PARTITION_GAUGES = {
    "ready": "Tasks of the partition that wait for a worker.",
    "delayed": "Tasks of the partition that wait for their start time.",
    "running": "Tasks of the partition that a worker holds.",
    "oldest_wait_seconds": "How long the oldest waiting task of the partition has waited.",
    "leader_present": "1 if a scheduler leads the partition.",
}
_TENANT_GAUGES = {
    "waiting": "Tasks of the tenant that wait for a worker.",
    "running": "Tasks of the tenant that a worker holds.",
    "delayed": "Tasks of the tenant that wait for their start time.",
    "received": "Part of the runs of the last five minutes that were the tenant's.",
    "entitled": "Part that the tenant would have got by its weight and demand.",
    "paused": "1 if the tenant is paused.",
}
SHARE_WINDOW = timedelta(minutes=5)  # for which the shares of tenants are computed
MAX_TENANTS = 100  # that a collector exports


class SchedulerMetrics:
    """The metrics of schedulers: one set in a registry, labelled by queue."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(
                f"fairqueue_scheduler_{name}", text, ["queue", *labels], registry=registry
            )

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(
                f"fairqueue_scheduler_{name}", text, ["queue", "scheduler"], registry=registry
            )

        self.cycles = counter("cycles", "Successful passes of the scheduler loop.")
        self.processed = counter("schedules_processed", "Due schedules that were processed.")
        self.lock = counter("lock", "Attempts to lead, and terms lost.", "outcome")
        self.pushes = counter("pushes", "Fires, by outcome.", "outcome")
        self.missed = counter(
            "missed_moments", "Fire times that were missed; at most 1,000 counted for each fire."
        )
        self.errors = counter("errors", "Errors, by type.", "type")
        self.cycle_seconds = Histogram(
            "fairqueue_scheduler_cycle_seconds",
            "Duration of a pass of the scheduler loop.",
            ["queue"],
            buckets=_CYCLE_BUCKETS,
            registry=registry,
        )
        self.lateness_seconds = Histogram(
            "fairqueue_scheduler_fire_lateness_seconds",
            "How long after its nominal time a fire was enqueued.",
            ["queue"],
            buckets=_LATENESS_BUCKETS,
            registry=registry,
        )
        self.last_cycle = gauge(
            "last_successful_cycle_timestamp_seconds", "Time of the last successful pass."
        )
        self.started = gauge(
            "start_timestamp_seconds", "Start time of the scheduler thread; 0 if it is not running."
        )
        self.is_leader = gauge("is_leader", "1 if this scheduler is the leader.")
        self.partitions_led = gauge("partitions_led", "Partitions that this scheduler leads.")
        self.redis_up = gauge("redis_up", "1 if Redis answers this scheduler.")

    def prepare(self, queue: str, scheduler: str) -> None:
        """Show all series of a scheduler from the start, so that a rate sees the first error."""
        for name in ERROR_TYPES:
            self.errors.labels(queue, name)
        for name in LOCK_OUTCOMES:
            self.lock.labels(queue, name)
        for name in ("ok", "failed"):
            self.pushes.labels(queue, name)
        for metric in (self.cycles, self.processed, self.missed):
            metric.labels(queue)
        for histogram in (self.cycle_seconds, self.lateness_seconds):
            histogram.labels(queue)
        gauges = (self.last_cycle, self.started, self.is_leader, self.partitions_led, self.redis_up)
        for gauge in gauges:
            gauge.labels(queue, scheduler)


class WorkerMetrics:
    """The metrics of workers: one set in a registry, labelled by queue and task.

    A task is labelled by the name of its handler, so that unknown names do not become series.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.runs = Counter(
            "fairqueue_worker_runs",
            "Tasks that were run, by outcome.",
            ["queue", "task", "outcome"],
            registry=registry,
        )
        self.run_seconds = Histogram(
            "fairqueue_worker_run_seconds",
            "How long handlers ran.",
            ["queue", "task"],
            buckets=_RUN_BUCKETS,
            registry=registry,
        )
        self.stuck_runs = Gauge(
            "fairqueue_worker_stuck_runs",
            "Runs that still go on more than a lease after their time-out.",
            ["queue", "task"],
            registry=registry,
        )


Metrics = TypeVar("Metrics")
_made: WeakKeyDictionary[CollectorRegistry, dict[Any, Any]] = WeakKeyDictionary()
_made_lock = threading.Lock()


def made_once(
    kind: Callable[[CollectorRegistry], Metrics], registry: CollectorRegistry | None
) -> Metrics:
    """Return the metrics of a registry (the default one if None); make them in the first call."""
    registry = REGISTRY if registry is None else registry
    if not isinstance(registry, CollectorRegistry):
        raise ConfigurationError(f"registry must be a CollectorRegistry, not {kind_of(registry)}")
    with _made_lock:
        made = _made.setdefault(registry, {})
        if kind not in made:
            made[kind] = kind(registry)
        metrics: Metrics = made[kind]
        return metrics


def scheduler_metrics(registry: CollectorRegistry | None = None) -> SchedulerMetrics:
    """Return the metrics of schedulers in a registry (the default one if None), made once."""
    return made_once(SchedulerMetrics, registry)


def worker_metrics(registry: CollectorRegistry | None = None) -> WorkerMetrics:
    """Return the metrics of workers in a registry (the default one if None), made once."""
    return made_once(WorkerMetrics, registry)


class QueueCollector(Collector):
    """Reads the counts of a queue from Redis at each scrape, in a few bounded reads.

    Register it in one exporter for a queue, not in every process: all would export the same.
    `tenants` are those that get metrics of their own, at most 100: a label for each tenant of a
    queue could make too many series. Raises ConfigurationError naming the value.
    """

    def __init__(self, queue: TaskQueue, tenants: Sequence[str] = ()) -> None:
        self._queue = queue
        self._tenants = check_tenants(tenants)
        self._counters: dict[int, Mapping[str, int]] = {}  # of each partition, as last heard
        self._workers, self._shares = WorkerStore(queue.link), UserStats(queue.link)

    def collect(self) -> Iterable[Metric]:
        """Yield the current metrics; only `fairqueue_redis_up` 0 if Redis does not answer.

        Without partitions that do not answer, except for counters, which must not go back: those
        are as last heard, or missing.
        """
        try:
            with tolerate_missing():
                snapshot = self._queue.inspect(timeout=SCRAPE_TIMEOUT_S)
                pools = pool_infos(snapshot, self._workers.alive(timeout=SCRAPE_TIMEOUT_S))
                tenants = self._read_tenants(snapshot)
        except FairQueueError as error:
            answered = not isinstance(error, RedisUnavailable)
            yield self._gauge("redis_up", "1 if Redis answered this scrape.", answered)
            return
        yield self._gauge("redis_up", "1 if Redis answered this scrape.", 1)
        yield from self._metrics(snapshot)
        yield from self._of_pools(pools)
        yield from self._of_tenants(tenants)
        yield from self._of_partitions(snapshot)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering must not need Redis."""
        return []

    def _read_tenants(self, snapshot: QueueSnapshot) -> Sequence[TenantInfo]:
        if not self._tenants:
            return ()
        return self._shares.read_tenants(self._tenants, snapshot.at - SHARE_WINDOW)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        metric = GaugeMetricFamily(f"fairqueue_{name}", text, labels=["queue"])
        metric.add_metric([self._queue.name], value)
        return metric

    def _by_label(self, label: str, name: str, text: str, values: Mapping[str, float]) -> Metric:
        metric = GaugeMetricFamily(f"fairqueue_{label}_{name}", text, labels=["queue", label])
        for each, value in values.items():
            metric.add_metric([self._queue.name, each], value)
        return metric

    def _metrics(self, snapshot: QueueSnapshot) -> Iterator[Metric]:
        for part in snapshot.parts or (snapshot,):
            self._counters[part.partition] = part.counters
        known = [*self._counters.values()]
        if len(known) == self._queue.partitions:
            for name, text in _COUNTERS.items():
                counter = CounterMetricFamily(f"fairqueue_{name}", text, labels=["queue"])
                count = sum(counters.get(name, 0) for counters in known)
                counter.add_metric([self._queue.name], count)
                yield counter
        for name, text in _GAUGES.items():
            yield self._gauge(name, text, getattr(snapshot, name))
        yield self._gauge(
            "oldest_wait_seconds",
            "How long the oldest waiting task has waited.",
            snapshot.oldest_wait,
        )
        yield self._gauge(
            "overdue_seconds", "How late the most overdue schedule is.", snapshot.overdue
        )
        yield self._gauge("leader_present", "1 if a scheduler is the leader.", snapshot.is_led)
        if snapshot.jain_index is not None:
            yield self._gauge(
                "jain_index",
                "Jain's fairness index of backlogged tenants and users without one, by weight, in "
                "the last window.",
                snapshot.jain_index,
            )

    def _of_pools(self, pools: Sequence[PoolInfo]) -> Iterator[Metric]:
        for name, text in _POOL_GAUGES.items():
            field = "is_unserved" if name == "unserved" else name
            values = {pool.pool: float(getattr(pool, field)) for pool in pools}
            yield self._by_label("pool", name, text, values)
        waits = {pool.pool: pool.oldest_wait for pool in pools}
        yield self._by_label(
            "pool",
            "oldest_wait_seconds",
            "How long the oldest waiting task of the pool has waited.",
            {pool: wait for pool, wait in waits.items() if wait is not None},
        )

    def _of_partitions(self, snapshot: QueueSnapshot) -> Iterator[Metric]:
        if not snapshot.parts:
            return
        parts = {part.partition: part for part in snapshot.parts}
        up = {str(number): float(number in parts) for number in range(self._queue.partitions)}
        yield self._by_label("partition", "up", "1 if the partition answered this scrape.", up)
        read: dict[str, Callable[[QueueSnapshot], float]] = {
            "oldest_wait_seconds": lambda part: part.oldest_wait,
            "leader_present": lambda part: part.is_led,
        }
        for name, text in _PARTITION_GAUGES.items():
            value = read.get(name, operator.attrgetter(name))
            values = {str(number): float(value(part)) for number, part in parts.items()}
            yield self._by_label("partition", name, text, values)

    def _of_tenants(self, tenants: Sequence[TenantInfo]) -> Iterator[Metric]:
        if not tenants:
            return
        read: dict[str, Callable[[TenantInfo], float]] = {
            "waiting": lambda tenant: tenant.backlog,
            "paused": lambda tenant: tenant.settings.paused,
        }
        for name, text in _TENANT_GAUGES.items():
            value = read.get(name, operator.attrgetter(name))
            values = {tenant.tenant: float(value(tenant)) for tenant in tenants}
            yield self._by_label("tenant", name, text, values)
        waits = {tenant.tenant: tenant.oldest_wait for tenant in tenants}
        yield self._by_label(
            "tenant",
            "oldest_wait_seconds",
            "How long the oldest waiting task of the tenant has waited.",
            {tenant: wait or 0.0 for tenant, wait in waits.items()},
        )


def check_tenants(tenants: object) -> tuple[str, ...]:
    """Check the tenants that get metrics of their own. Raises ConfigurationError."""
    named = check_items(tenants, "tenants", "names", ConfigurationError)
    if len(named) > MAX_TENANTS:
        raise ConfigurationError(
            f"tenants must be at most {MAX_TENANTS} names, not {len(named)}: each has metrics of "
            "its own"
        )
    return tuple(dict.fromkeys(check_tenant(each, ConfigurationError) for each in named))


REQUEST_S = 10.0  # time for a client to send its request, and to read the answer
_CLOSE_CHECK_S = 0.1  # how often the server checks whether to close


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _TimedReader(socket.SocketIO):
    """Reads from a client up to a deadline, however often bytes arrive."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        super().__init__(connection, "r")
        self._connection = connection
        self._deadline = deadline

    def readinto(self, buffer: Any) -> int | None:
        """Read into a buffer. Raises TimeoutError after the deadline."""
        self._connection.settimeout(max(0.001, self._deadline - time.monotonic()))
        try:
            return super().readinto(buffer)
        finally:
            self._connection.settimeout(REQUEST_S)


class _QuietHandler(WSGIRequestHandler):
    def setup(self) -> None:
        """Limit the time of a request: each connection has a thread, which must not be held."""
        super().setup()
        self.connection.settimeout(REQUEST_S)
        self.rfile = io.BufferedReader(_TimedReader(self.connection, time.monotonic() + REQUEST_S))

    def handle(self) -> None:
        """Answer one request; ignore a client that is too slow or disconnects."""
        with suppress(TimeoutError, ConnectionError):
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log scrapes."""


class MetricsServer:
    """An HTTP server for scrapes. The constructor binds the port; `start` begins to answer.

    A process may fork between the two: there is no thread yet, and the port is bound.
    """

    def __init__(self, port: int, host: str) -> None:
        """Raise ConfigurationError for a bad argument, or if the port is taken."""
        check_count(port, "port", ConfigurationError, most=65_535)
        if not isinstance(host, str):
            raise ConfigurationError(f"host must be a string, not {kind_of(host)}")
        where = f"{repr(truncate(host, LONGEST_SHOWN))[1:-1]}:{port}"  # escaped
        try:
            self._server = _Server((host, port), _QuietHandler)
        except (OSError, ValueError, TypeError) as error:  # the last two: what no name can have
            raise ConfigurationError(f"cannot serve metrics on {where}: {error}") from error
        self.port = int(self._server.server_port)
        self.url = f"http://{host}:{self.port}/metrics"
        self._thread: threading.Thread | None = None
        # A forked copy would keep the port from the program that is started in place of its parent.
        reset_in_child(self, MetricsServer.leave)

    def start(
        self,
        *registries: CollectorRegistry,
        queue: TaskQueue | None = None,
        tenants: Sequence[str] = (),
    ) -> None:
        """Answer from now on, in a thread, with the metrics of this process and its children.

        Pass `queue` to include its metrics: one exporter is enough for a queue; with `tenants`
        also those of these tenants.
        """
        everything = CollectorRegistry()
        if queue is not None:
            everything.register(QueueCollector(queue, tenants))
        everything.register(Merged(*registries))
        self._server.set_app(make_wsgi_app(everything))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_CLOSE_CHECK_S,),
            name="fairqueue-metrics",
            daemon=True,
        )
        self._thread.start()

    def is_alive(self) -> bool:
        """Whether it answers."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Stop answering and free the port."""
        if self.is_alive():  # or else it would wait for a thread that is gone
            self._server.shutdown()
        self._server.server_close()
        if self._thread is not None:
            self._thread.join()

    def leave(self) -> None:
        """Close the port in a forked child, where no thread answers."""
        self._server.socket.close()

    def __enter__(self) -> "MetricsServer":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def serve_metrics(
    queue: TaskQueue,
    port: int = 9109,
    host: str = "127.0.0.1",
    registry: CollectorRegistry | None = None,
    tenants: Sequence[str] = (),
) -> MetricsServer:
    """Serve the metrics of the queue and of this process.

    `registry` is the one that was passed to the schedulers and workers (the default one if None);
    the metrics of the processes of a worker are added up. `tenants` are those that get metrics of
    their own, at most 100. Port 0 chooses a free port, which the
    `port` of the result shows. Raises ConfigurationError for a bad argument, or if the port is
    taken.
    """
    if not isinstance(queue, TaskQueue):
        raise ConfigurationError(f"queue must be a TaskQueue, not {kind_of(queue)}")
    registry = REGISTRY if registry is None else registry
    if not isinstance(registry, CollectorRegistry):
        raise ConfigurationError(f"registry must be a CollectorRegistry, not {kind_of(registry)}")
    named = check_tenants(tenants)
    server = MetricsServer(port, host)
    server.start(registry, queue=queue, tenants=named)
    return server
