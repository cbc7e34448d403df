"""Fire schedules when they are due: the loop, as a thread or as single ticks."""

import logging
import os
import random
import socket
import threading
import time
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import redis
from prometheus_client import CollectorRegistry

from fairqueue.alerts import Alerts
from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    RedisRefused,
    RedisUnavailable,
    kind_of,
)
from fairqueue.http_tasks.checks import Outgoing
from fairqueue.link.listener import Waiter
from fairqueue.link.operation import steps
from fairqueue.logs import error_line, error_text, event_logger
from fairqueue.metrics.collectors import scheduler_metrics
from fairqueue.models import new_id
from fairqueue.queue.pools import idle_pools
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.fork import reset_in_child
from fairqueue.scheduler.firing import Firing, TickReport
from fairqueue.scheduler.leadership import Leadership, Reading
from fairqueue.schedules.replan import Replanner
from fairqueue.schedules.service import Schedules
from fairqueue.stats.samples import SampleStore
from fairqueue.validation import check_name, check_seconds
from fairqueue.worker.heartbeat import report

_log = event_logger("fairqueue.scheduler")

READ_LIMIT = 2000  # due schedules read in one round trip
ROUNDS = 200  # readings in one tick at most, so that stop() takes effect during a long catch-up
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
LOOK_OVER_MS = 10_000  # how often a leader ends runs that do not respond and checks the backlog
CHECK_TIMEOUT_S = 0.5  # how long the constructor and health() wait for Redis
REPLAN_S, REPLAN_PAUSE_S = 0.1, 0.05  # after a tick a leader replans this long, then pauses
RENEW_PART = 1 / 3  # of lock_timeout: how often an idle leader renews its term

STOPPED, STARTING, RUNNING, STOPPING, ERROR = "stopped", "starting", "running", "stopping", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerHealth:
    """The health of a scheduler.

    `lag` is how late the most overdue schedule is, in seconds. A schedule that a limit of the queue
    refuses does not count as late; it has a counter of its own.
    """

    state: str
    up_since: datetime | None
    last_good_cycle: datetime | None
    redis_up: bool
    is_leader: bool
    leader: str | None
    lag: float | None
    last_error: str | None


class TaskScheduler(Schedules):
    """Stores schedules, and fires them while it leads. Safe to use from many threads.

    Any number of schedulers may run on a queue. One leads; when it ends, another takes over within
    `lock_timeout` seconds. `check_interval` is the longest time that the thread waits.
    """

    def __init__(
        self,
        queue: TaskQueue,
        scheduler_id: str | None = None,
        check_interval: float = 1.0,
        lock_timeout: float = 10.0,
        *,
        registry: CollectorRegistry | None = None,
        alerts: Alerts | None = None,
    ) -> None:
        """Check the arguments, then Redis. `alerts` tells people about problems.

        Raises ConfigurationError naming the argument, or RedisUnavailable at once.
        """
        if not isinstance(queue, TaskQueue):
            raise ConfigurationError(f"queue must be a TaskQueue, not {kind_of(queue)}")
        super().__init__(queue, steps(Outgoing(queue.link).check))
        self.queue: TaskQueue = queue
        if scheduler_id is None:
            scheduler_id = f"{socket.gethostname()}:{os.getpid()}:{new_id()[:6]}"
        self.scheduler_id = check_name(scheduler_id, "scheduler_id", ConfigurationError)
        self.check_interval = check_seconds(
            check_interval, "check_interval", ConfigurationError, least=0.01, most=3600
        )
        self.lock_timeout = check_seconds(
            lock_timeout, "lock_timeout", ConfigurationError, least=0.1, most=3600
        )
        if alerts is not None and not isinstance(alerts, Alerts):
            raise ConfigurationError(f"alerts must be an Alerts, not {kind_of(alerts)}")
        self._alerts = alerts or Alerts()
        self._metrics = scheduler_metrics(registry)
        queue.check(timeout=CHECK_TIMEOUT_S)
        self._metrics.prepare(queue.name, self.scheduler_id)
        self._begin_life()
        reset_in_child(self, TaskScheduler._begin_life)

    def _begin_life(self) -> None:
        """Reset to a scheduler that has not run: in the constructor, and in a child after a fork.

        In the child the thread is gone, locks may be held for ever, and the term is the parent's.
        """
        self._leadership = Leadership(self.link, self.scheduler_id, self.lock_timeout)
        self._firing = Firing(
            self.store, self._leadership, self._metrics, self._alerts, self.queue.name
        )
        self._tick_lock = threading.Lock()
        self._life_lock = threading.RLock()  # a signal handler may stop what is being stopped
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._listener: Waiter | None = None
        self._state = STOPPED
        self._up_since: float | None = None
        self._last_cycle: float | None = None
        self._last_error: str | None = None
        self._looked_ms: int | None = None  # when it last looked over the queue
        self._heard: list[bytes] = []  # notices that it passed on then
        self._replanner: Replanner | None = None  # from its election until all is replanned

    # --- one pass ---------------------------------------------------------------------------------

    def tick(self, now: datetime | float | None = None) -> TickReport:
        """Run one pass: lead if possible, fire all that is due, and report what was done.

        `now` is for tests; without it the server's clock decides. Raises RedisUnavailable and
        RedisRefused; what was not fired is fired by the next pass.
        """
        now_ms = None if now is None else to_ms(now, "now")
        started = time.monotonic()
        labels = self.queue.name
        with self._tick_lock:
            try:
                report = self._pass(now_ms)
            except FairQueueError as error:
                self._leadership.doubt()
                self._count_failure(error)
                if isinstance(error, RedisUnavailable):
                    self._alerts.redis_failed()
                raise
        self._alerts.redis_ok()
        self._last_cycle = time.time()
        self._last_error = None
        metrics = self._metrics
        metrics.cycles.labels(labels).inc()
        metrics.cycle_seconds.labels(labels).observe(time.monotonic() - started)
        metrics.last_cycle.labels(labels, self.scheduler_id).set(self._last_cycle)
        metrics.redis_up.labels(labels, self.scheduler_id).set(1)
        metrics.is_leader.labels(labels, self.scheduler_id).set(report.is_leader)
        return report

    def _pass(self, now_ms: int | None) -> TickReport:
        report = TickReport()
        for _ in range(ROUNDS):
            reading = self._read(now_ms)
            report.is_leader = reading.is_leader
            if not reading.is_leader:
                report.wait = (reading.ends_ms - reading.now_ms) / 1000
                break
            if reading.due and not self._handle(reading, report, now_ms):
                report.is_leader = False
                break
            if reading.next_ms is None:
                report.wait = self.check_interval
            else:
                elapsed = time.monotonic() - reading.read_at
                report.wait = max(0.0, (reading.next_ms - reading.now_ms) / 1000 - elapsed)
            # Only when nothing is due: what was fired has a new fire time, maybe the next one.
            if not reading.due or self._stopping.is_set():
                break
        else:
            report.wait = 0.0  # there may be more
        if report.is_leader:
            self._look_over(reading.now_ms, now_ms)
        return report

    def _look_over(self, at_ms: int, now_ms: int | None) -> None:
        """End runs that do not respond, compare the queue with the alerts' limits, sample it."""
        if self._looked_ms is not None and abs(at_ms - self._looked_ms) < LOOK_OVER_MS:
            return
        self._looked_ms = at_ms
        can_alert = self._alerts.has_recipients
        notices = WorkerStore(self.link).look_over(now_ms, can_alert=can_alert, heard=self._heard)
        for notice in notices:
            report(notice, self._alerts)
        self._heard = [notice.text for notice in notices] if can_alert else []
        if can_alert:
            snapshot = self.queue.inspect()
            workers = WorkerStore(self.link).alive() if idle_pools(snapshot) else ()
            self._alerts.watch(snapshot, workers)
        try:
            SampleStore(self.link).take(now_ms)
        except FairQueueError as error:  # schedules are fired whether or not there are charts
            self._count_failure(error)
            _log("sample_failed", logging.WARNING, queue=self.queue.name, error=str(error))

    def _read(self, now_ms: int | None) -> Reading:
        reading = self._leadership.lead(READ_LIMIT, now_ms)
        if reading.elected:
            self._count_lock("acquired")
            _log("lock_acquired", **self._who(), epoch=reading.epoch)
            self._replanner = Replanner(self.store)
        elif not reading.is_leader:
            self._count_lock("contended")
            left_ms = reading.ends_ms - reading.now_ms
            _log("lock_contended", logging.DEBUG, **self._who(), term_left_ms=left_ms)
        if reading.lost:
            self._lost_lock()
        return reading

    def _handle(self, reading: Reading, report: TickReport, now_ms: int | None) -> bool:
        """Fire what is due; return False if another scheduler leads."""
        if self._firing.fire(reading, report, now_ms):
            return True
        self._lost_lock()
        self._leadership.lose()
        return False

    # --- the thread -------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """stopped, starting, running, stopping, or error (Redis fails; it recovers by itself)."""
        thread = self._thread
        if thread is None or not thread.is_alive():
            return STOPPED
        return self._state

    @property
    def is_leader(self) -> bool:
        """Whether this scheduler leads, and its term is not about to end."""
        return self._leadership.is_leader

    def start(self) -> None:
        """Start the thread, unless it runs already.

        Raises FairQueueError while a thread that `stop` did not wait for is still ending.
        """
        with self._life_lock:
            if self._thread is not None and self._thread.is_alive():
                if self._stopping.is_set():
                    raise FairQueueError(
                        "the scheduler is still stopping: call stop() until it returns True"
                    )
                return
            self._stopping.clear()
            self._state = STARTING
            self._listener = self.link.listener("scheduler_wake")
            self._up_since = time.time()
            self._metrics.started.labels(self.queue.name, self.scheduler_id).set(self._up_since)
            self._thread = threading.Thread(
                target=self._run, name=f"fairqueue-scheduler-{self.queue.name}", daemon=True
            )
            self._thread.start()
        _log("scheduler_started", **self._who())

    def stop(self, timeout: float = 10.0) -> bool:
        """Finish the pass, give up leadership and end; return whether it ended within `timeout`.

        A thread that has not ended in time ends by itself as soon as it can.
        """
        check_seconds(timeout, "timeout", ConfigurationError)
        with self._life_lock:
            thread = self._thread
            if thread is None or not thread.is_alive():
                if self._state == STARTING:  # this call has interrupted start()
                    self._stopping.set()
                if self.is_leader:
                    self._resign(timeout)
                return True
            self._state = STOPPING
            self._stopping.set()
            if self._listener is not None:
                self._listener.interrupt()
            thread.join(timeout)
            ended = not thread.is_alive()
        level = logging.INFO if ended else logging.WARNING
        _log("scheduler_stopped", level, **self._who(), in_time=ended)
        return ended

    def _run(self) -> None:
        listener = self._listener
        assert listener is not None  # noqa: S101 - made by start()
        backoff = FIRST_BACKOFF_S
        try:
            while not self._stopping.is_set():
                try:
                    report = self.tick()
                    self._enter(RUNNING)
                    if report.is_leader and self._replan_some():
                        report.wait = min(report.wait, REPLAN_PAUSE_S)
                    self._rest(listener, report)
                    backoff = FIRST_BACKOFF_S
                except Exception as error:
                    self._enter(ERROR)
                    self._note_failure(error)
                    listener.forget()
                    self._stopping.wait(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                    backoff = min(2 * backoff, LONGEST_BACKOFF_S)
        finally:
            self._resign(min(self.queue.link.timeout, 1.0))
            listener.close()
            self._metrics.started.labels(self.queue.name, self.scheduler_id).set(0)

    def _replan_some(self) -> bool:
        """Replan some schedules if the zone data is new; return whether there are more."""
        replanner = self._replanner
        if replanner is None:
            return False
        started = time.monotonic()
        while replanner.is_begun or replanner.is_needed():
            if not replanner.step():
                _log("schedules_replanned", **asdict(replanner.report))
                break
            if time.monotonic() - started > REPLAN_S:
                return True
        self._replanner = None
        return False

    def _enter(self, state: str) -> None:
        if not self._stopping.is_set():
            self._state = state

    def _rest(self, listener: Waiter, report: TickReport) -> None:
        """Wait for the next fire time, a wake-up or the end; at most check_interval."""
        seconds = min(report.wait, self.check_interval)
        if report.is_leader:
            listener.wait(min(seconds, RENEW_PART * self.lock_timeout))
        else:
            # Tokens are for the leader.
            listener.forget()
            self._stopping.wait(max(seconds, 0.001))

    def _resign(self, timeout: float) -> None:
        self._metrics.is_leader.labels(self.queue.name, self.scheduler_id).set(0)
        try:
            if self._leadership.resign(timeout):
                _log("lock_released", **self._who())
        except FairQueueError as error:
            # The term ends by itself.
            _log("resign_failed", logging.WARNING, **self._who(), error=str(error))

    def _note_failure(self, error: Exception) -> None:
        self._leadership.doubt()
        self._last_error = error_text(error)
        if isinstance(error, FairQueueError):
            _log("cycle_failed", logging.WARNING, **self._who(), error=str(error))
        elif isinstance(error, redis.RedisError | OSError):
            self._count_failure(RedisUnavailable(str(error)))
            _log("wait_failed", logging.WARNING, **self._who(), error=str(error))
        else:
            self._metrics.errors.labels(self.queue.name, "internal").inc()
            line = error_line(error)
            _log("cycle_failed", logging.ERROR, exc_info=True, **self._who(), error=line)

    def _who(self) -> dict[str, Any]:
        """Return which scheduler a log event is about."""
        return {"scheduler": self.scheduler_id, "queue": self.queue.name}

    # --- counting ---------------------------------------------------------------------------------

    def _count_lock(self, outcome: str) -> None:
        self._metrics.lock.labels(self.queue.name, outcome).inc()

    def _lost_lock(self) -> None:
        self._count_lock("lost")
        self._metrics.is_leader.labels(self.queue.name, self.scheduler_id).set(0)
        _log("lock_lost", logging.WARNING, **self._who())
        self._alerts.lock_failed()

    def _count_failure(self, error: FairQueueError) -> None:
        labels = self.queue.name
        self._metrics.is_leader.labels(labels, self.scheduler_id).set(0)
        if isinstance(error, RedisUnavailable):
            self._metrics.redis_up.labels(labels, self.scheduler_id).set(0)
            self._metrics.errors.labels(labels, "redis").inc()
            if isinstance(error.__cause__, redis.TimeoutError):
                self._metrics.errors.labels(labels, "lock_timeout").inc()
        elif isinstance(error, RedisRefused):
            full = isinstance(error.__cause__, redis.exceptions.OutOfMemoryError)
            kind = "push" if full else "redis"
            self._metrics.errors.labels(labels, kind).inc()

    # --- health -----------------------------------------------------------------------------------

    def health(self) -> SchedulerHealth:
        """Return the health of this scheduler; asks Redis once, briefly."""
        leader, lag, redis_up, problem = None, None, True, self._last_error
        try:
            snapshot = self.queue.inspect(timeout=CHECK_TIMEOUT_S)
            lag = snapshot.overdue
            if snapshot.leader_until is not None and snapshot.leader_until > snapshot.at:
                leader = snapshot.leader
        except FairQueueError as error:
            redis_up, problem = not isinstance(error, RedisUnavailable), str(error)
        running = self.state != STOPPED
        return SchedulerHealth(
            state=self.state,
            up_since=_moment(self._up_since) if running else None,
            last_good_cycle=_moment(self._last_cycle),
            redis_up=redis_up,
            is_leader=self.is_leader,
            leader=leader,
            lag=lag,
            last_error=problem,
        )


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else from_ms(round(seconds * 1000))
