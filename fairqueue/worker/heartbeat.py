"""Say that a worker is alive and what it runs, and learn which tasks are for others."""

import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from fairqueue.alerts import Alerts
from fairqueue.errors import RedisUnavailable
from fairqueue.logs import log_event
from fairqueue.queue.delays import index_delayed
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import ANY, BEAT_S, MAX_CURRENT, Beat, Notice, WorkerStore

logger = logging.getLogger("fairqueue.worker")
_log = partial(log_event, logger)


def _version() -> str:
    try:
        return version("fairqueue")
    except PackageNotFoundError:
        return "not installed"


VERSION = _version()


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a worker says of itself; `names` of its handlers, with their limits.

    http: where its HTTP tasks may go, by name; see HttpTasks.http_policy.
    """

    worker_id: str
    slots: int
    limits: Mapping[str, Mapping[str, float]]
    takes_any: bool
    http: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which tasks a worker claims, as `TaskQueue.claim` takes it."""

    names: tuple[str, ...] | None = None
    avoid: tuple[str, ...] = ()


class Presence:
    """The heartbeats of one worker, until it leaves.

    `choice` leaves tasks to other workers that can run them where this one cannot. A task of a name
    that nobody can run is left to nobody; it is claimed, and fails with that reason.

    `on_drain` is called when the worker was asked to take no more and end; `is_draining` says so
    from then on.
    """

    def __init__(
        self,
        queue: TaskQueue,
        facts: Callable[[], Facts],
        alerts: Alerts,
        on_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._queue = queue
        self._store = WorkerStore(queue.link)
        self._facts = facts
        self._alerts = alerts
        self._on_drain = on_drain
        self._lock = threading.Lock()  # one heartbeat at a time: the newest is the last
        self._said: Facts | None = None
        self._left = False
        self._started_ms = 0
        self._next = 0.0  # monotonic seconds
        self._heard: list[bytes] = []  # notices that were passed on, and are to be told no more
        self.choice = Choice()
        self.is_draining = False

    @property
    def next_beat(self) -> float:
        """When the next heartbeat is due, on the monotonic clock."""
        return self._next

    def begin(self) -> None:
        """Be known before the first claim. Raises RedisUnavailable and its kin."""
        if self._said is None:
            self.beat(())

    def beat(self, current: Iterable[str]) -> None:
        """Say what runs now, and learn of the others. Raises RedisUnavailable and its kin.

        Nothing happens after `leave`: a thread that is late must not bring the worker back.
        """
        try:
            with self._lock:
                if self._left:
                    return
                facts = self._facts()
                heard = len(self._heard)
                beat = self._say(facts, list(current))
                self._said = facts
                del self._heard[:heard]
                self._next = time.monotonic() + BEAT_S
        except RedisUnavailable:
            # A worker whose slots are all taken talks to Redis in no other way.
            self._alerts.redis_failed()
            raise
        self._alerts.redis_ok()
        self._learn(beat, facts)  # first: some of it is told only once
        index_delayed(self._queue.link)
        if self._alerts.has_recipients:
            self._alerts.watch(self._queue.inspect())

    def _say(self, facts: Facts, current: list[str]) -> Beat:
        if not self._started_ms:
            self._started_ms = self._queue.link.now_ms()
        return self._store.beat(
            {
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "version": VERSION,
                "slots": facts.slots,
                "names": [*facts.limits, *([ANY] if facts.takes_any else [])],
                "current": current[:MAX_CURRENT],
                "running": len(current),
                "started": self._started_ms,
                **({"http": facts.http} if facts.http else {}),
            },
            facts.worker_id,
            facts.limits if facts != self._said else None,
            can_alert=self._alerts.has_recipients,
            heard=self._heard,
        )

    def _learn(self, beat: Beat, facts: Facts) -> None:
        self.choice = _choose(beat.handled, facts)
        for notice in beat.notices:
            report(notice, self._alerts)
        if self._alerts.has_recipients:
            with self._lock:
                self._heard += [notice.text for notice in beat.notices]
        for worker_id in beat.gone:
            _log("worker_gone", logging.WARNING, worker=worker_id, queue=self._queue.name)
        if beat.drained_by is not None and not self.is_draining:
            self.is_draining = True
            _log("worker_draining", worker=facts.worker_id, by=beat.drained_by)
            self._on_drain()

    def leave(self) -> None:
        """Say once that the worker ends, if it ever said a word. Raises RedisUnavailable."""
        with self._lock:
            self._left, self._next = True, math.inf
            if self._said is not None:
                self._store.leave(self._said.worker_id, self._heard)
                self._said = None


def _choose(handled: frozenset[str], facts: Facts) -> Choice:
    """What a worker claims, where workers with these names are alive."""
    own = facts.limits.keys()
    if facts.takes_any:
        return Choice()
    if ANY in handled and own:  # somebody takes whatever this one does not know
        return Choice(names=tuple(sorted(own)))
    return Choice(avoid=tuple(sorted(handled - own - {ANY})))


def report(notice: Notice, alerts: Alerts) -> None:
    """Say that a task has ended without a word of its worker, to the log and to people."""
    fields = {"task": notice.task_id, "user": notice.user_id, "worker": notice.worker_id}
    run = notice.stale_run
    if run is not None:
        _log("stale_run", logging.WARNING, **fields, seconds=run.seconds, outcome=notice.outcome)
        alerts.stale_run(run)
    if notice.outcome != "cancelled":
        _log("task_given_up", logging.WARNING, **fields, error=notice.error)
        alerts.task_given_up(notice)
