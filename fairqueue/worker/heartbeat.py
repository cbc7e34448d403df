"""Report that a worker is alive and what it runs, and learn which tasks other workers handle."""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from fairqueue.alerts import Alerts
from fairqueue.errors import RedisUnavailable
from fairqueue.link.partitions import tolerate_missing
from fairqueue.logs import event_logger
from fairqueue.queue.claim import DEFAULT_POOLS
from fairqueue.queue.delays import DelayIndex
from fairqueue.queue.pools import idle_pools
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import ANY, BEAT_S, MAX_CURRENT, Beat, Notice, WorkerStore

_log = event_logger("fairqueue.worker")

try:
    VERSION = version("fairqueue")
except PackageNotFoundError:
    VERSION = "not installed"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerProfile:
    """What a worker reports about itself.

    limits: the limits of each of its handlers, by task name. http: where its HTTP tasks may send
    requests, by task name; see HttpTasks.http_policy.
    """

    worker_id: str
    slots: int
    limits: Mapping[str, Mapping[str, float]]
    takes_any: bool
    pools: tuple[str, ...] = DEFAULT_POOLS
    http: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimFilter:
    """Which tasks a worker claims, as arguments of `TaskQueue.claim`."""

    names: tuple[str, ...] | None = None
    avoid: tuple[str, ...] = ()
    pools: tuple[str, ...] = DEFAULT_POOLS


class Heartbeat:
    """The heartbeats of one worker, until it leaves.

    `claim_filter` leaves tasks that this worker cannot run to workers that can, among those that
    serve one of its pools. Tasks of a name that no such worker handles are claimed anyway, and fail
    for that reason.

    `on_drain` is called when the worker is asked to claim no more tasks and end; `is_draining` is
    True from then on.
    """

    def __init__(
        self,
        queue: TaskQueue,
        profile: Callable[[], WorkerProfile],
        alerts: Alerts,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._store = WorkerStore(queue.link)
        self._profile = profile
        self._alerts = alerts
        self._on_drain = on_drain
        self._lock = threading.Lock()  # one heartbeat at a time, so that the newest comes last
        self._sent: WorkerProfile | None = None
        self._declared: WorkerProfile | None = None  # what all partitions know the limits of
        self._left = False
        self._started_ms = 0
        self._next = 0.0  # monotonic seconds
        self._heard: list[bytes] = []  # notices that were handled, to be acknowledged
        self.claim_filter = ClaimFilter()
        self.is_draining = False

    @property
    def next_beat(self) -> float:
        """When the next heartbeat is due, on the monotonic clock."""
        return self._next

    def begin(self) -> None:
        """Send the first heartbeat, before the first claim. Raises as `beat`."""
        if self._sent is None:
            self.beat(())

    def beat(self, current: Iterable[str]) -> None:
        """Report the ids of the running tasks, and learn about other workers.

        Does nothing after `leave`: a late thread must not bring the worker back. Raises
        RedisUnavailable and other errors of Redis.
        """
        try:
            with self._lock:
                if self._left:
                    return
                profile = self._profile()
                heard = len(self._heard)
                beat = self._send(profile, list(current))
                self._sent = profile
                if beat.partitions == self._queue.partitions:
                    self._declared = profile
                del self._heard[:heard]
                self._next = time.monotonic() + BEAT_S
        except RedisUnavailable:
            # A worker whose slots are all taken contacts Redis in no other way.
            self._alerts.redis_failed()
            raise
        self._alerts.redis_ok()
        self._learn(beat, profile)  # first, because notices are delivered only once
        with tolerate_missing():
            DelayIndex(self._queue.link).update()
            if self._alerts.has_recipients:
                snapshot = self._queue.inspect()
                self._alerts.watch(snapshot, self._store.alive() if idle_pools(snapshot) else ())

    def _send(self, profile: WorkerProfile, current: list[str]) -> Beat:
        if not self._started_ms:
            self._started_ms = self._queue.link.now_ms()
        return self._store.beat(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "version": VERSION,
                "slots": profile.slots,
                **({} if profile.pools == DEFAULT_POOLS else {"pools": profile.pools}),
                "names": [*profile.limits, *([ANY] if profile.takes_any else [])],
                "current": current[:MAX_CURRENT],
                "running": len(current),
                "started": self._started_ms,
                **({"http": profile.http} if profile.http else {}),
            },
            profile.worker_id,
            profile.limits if profile != self._declared else None,
            can_alert=self._alerts.has_recipients,
            heard=self._heard,
        )

    def _learn(self, beat: Beat, profile: WorkerProfile) -> None:
        self.claim_filter = _claim_filter(beat.handled, profile)
        for notice in beat.notices:
            report(notice, self._alerts)
        if self._alerts.has_recipients:
            with self._lock:
                self._heard += [notice.text for notice in beat.notices]
        for worker_id in beat.gone:
            _log("worker_gone", logging.WARNING, worker=worker_id, queue=self._queue.name)
        if beat.drained_by is not None and not self.is_draining:
            self.is_draining = True
            _log("worker_draining", worker=profile.worker_id, by=beat.drained_by)
            self._on_drain()

    def leave(self) -> None:
        """Report once that the worker has ended, if it ever sent a heartbeat.

        Raises RedisUnavailable.
        """
        with self._lock:
            self._left, self._next = True, math.inf
            if self._sent is not None:
                self._store.leave(self._sent.worker_id, self._heard)
                self._sent = None


def _claim_filter(handled: frozenset[str], profile: WorkerProfile) -> ClaimFilter:
    """Return what a worker claims, given the names that living workers of its pools handle."""
    own, pools = profile.limits.keys(), profile.pools
    if profile.takes_any:
        return ClaimFilter(pools=pools)
    if ANY in handled and own:  # another worker takes all other names
        return ClaimFilter(names=tuple(sorted(own)), pools=pools)
    return ClaimFilter(avoid=tuple(sorted(handled - own - {ANY})), pools=pools)


def report(notice: Notice, alerts: Alerts) -> None:
    """Log and alert that a task has ended without a report of its worker."""
    fields = {"task": notice.task_id, "user": notice.user_id, "worker": notice.worker_id}
    run = notice.stale_run
    if run is not None:
        _log("stale_run", logging.WARNING, **fields, seconds=run.seconds, outcome=notice.outcome)
        alerts.stale_run(run)
    if notice.outcome != "cancelled":
        _log("task_given_up", logging.WARNING, **fields, error=notice.error)
        alerts.task_given_up(notice)
