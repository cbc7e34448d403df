"""Fire schedules when they are due: the loop, as a thread or as single ticks."""

import logging
import math
import os
import random
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import Any, TypeVar

import redis
from prometheus_client import CollectorRegistry

from fairqueue.alerts import Alerts
from fairqueue.clock import from_ms, to_ms
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    RedisRefused,
    RedisUnavailable,
    WrongPartitions,
    kind_of,
)
from fairqueue.http_tasks.checks import Outgoing
from fairqueue.link.connection import Link
from fairqueue.link.listener import Waiter
from fairqueue.link.operation import Gather, Operation, steps
from fairqueue.link.partitions import tolerate_missing
from fairqueue.logs import error_line, error_text, event_logger
from fairqueue.metrics.collectors import scheduler_metrics
from fairqueue.models import new_id
from fairqueue.queue.pools import idle_pools
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.runtime.fork import reset_in_child
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.leadership import Leadership, Reading
from fairqueue.scheduler.post import Post
from fairqueue.scheduler.roster import Roster
from fairqueue.scheduler.spread import Spread
from fairqueue.schedules.places import finish_moves
from fairqueue.schedules.replan import Replanner
from fairqueue.schedules.service import Schedules
from fairqueue.stats.samples import SampleStore
from fairqueue.validation import check_name, check_seconds
from fairqueue.worker.heartbeat import report

_log = event_logger("fairqueue.scheduler")

READ_LIMIT = 2000  # due schedules read in one round trip
ROUNDS = 200  # readings in one tick at most, so that stop() takes effect during a long catch-up
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
CHECK_TIMEOUT_S = 0.5  # how long the constructor and health() wait for Redis
REPLAN_S, REPLAN_PAUSE_S = 0.1, 0.05  # after a tick a leader replans this long, then pauses
ANSWER_PART, LEAST_ANSWER_S = 0.1, 0.2  # of lock_timeout: how long a partition may take to answer
RENEW_PART = 1 / 3  # of lock_timeout: how often an idle leader renews its term

T = TypeVar("T")

STOPPED, STARTING, RUNNING, STOPPING, ERROR = "stopped", "starting", "running", "stopping", "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerHealth:
    """The health of a scheduler.

    `lag` is how late the most overdue schedule is, in seconds. A schedule that a limit of the queue
    refuses does not count as late; it has a counter of its own. `leaders` are those of each
    partition that answers, by its number; None: nobody leads it. A queue without partitions has
    the number 0. `leader` names all of them, or None if a partition has none.
    """

    state: str
    up_since: datetime | None
    last_good_cycle: datetime | None
    redis_up: bool
    is_leader: bool
    leader: str | None
    lag: float | None
    last_error: str | None
    leaders: dict[int, str | None] = field(default_factory=dict)


class TaskScheduler(Schedules):
    """Stores schedules, and fires them while it leads. Safe to use from many threads.

    Any number of schedulers may run on a queue. One leads; when it ends, another takes over within
    `lock_timeout` seconds. `check_interval` is the longest time that the thread waits. A queue with
    partitions has a leader for each; schedulers share them evenly.
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
        self._posts = [self._post(part) for part in self.link.parts or (self.link,)]
        self._spread: Spread | None = None
        # A partition that does not answer delays the others for this long.
        self._answer_s = min(
            self.link.timeout, max(LEAST_ANSWER_S, ANSWER_PART * self.lock_timeout)
        )
        if self.link.parts:
            term_ms = round(self.lock_timeout * 1000)
            every_ms = round(1000 * min(self.check_interval, RENEW_PART * self.lock_timeout))
            self._roster = Roster(self.link.parts[0], self.scheduler_id, term_ms)
            self._spread = Spread(self._posts, self._roster, term_ms, every_ms)
        self._tick_lock = threading.Lock()
        self._life_lock = threading.RLock()  # a signal handler may stop what is being stopped
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._listener: Waiter | None = None
        self._state = STOPPED
        self._up_since: float | None = None
        self._last_cycle: float | None = None
        self._last_error: str | None = None

    def _post(self, link: Link) -> Post:
        leadership = Leadership(link, self.scheduler_id, self.lock_timeout)
        return Post(self.store, link, leadership, self._metrics, self._alerts, self.queue.name)

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
                self._doubt()
                self._count_failure(error)
                if isinstance(error, RedisUnavailable):
                    self._alerts.redis_failed()
                raise
        is_up = not any(post.is_failing for post in self._posts)
        if is_up:
            self._alerts.redis_ok()
            self._last_error = None
        else:
            self._alerts.redis_failed()
        self._last_cycle = time.time()
        metrics = self._metrics
        metrics.cycles.labels(labels).inc()
        metrics.cycle_seconds.labels(labels).observe(time.monotonic() - started)
        metrics.last_cycle.labels(labels, self.scheduler_id).set(self._last_cycle)
        metrics.redis_up.labels(labels, self.scheduler_id).set(is_up)
        metrics.is_leader.labels(labels, self.scheduler_id).set(report.is_leader)
        metrics.partitions_led.labels(labels, self.scheduler_id).set(len(self.leads))
        return report

    def _pass(self, now_ms: int | None) -> TickReport:
        report = TickReport()
        asked = self._begin_pass(now_ms)
        led: dict[int, Reading] = {}  # the last reading of each post that it leads
        waits: dict[int, float] = {}
        errors: list[FairQueueError] = []
        answered = False
        for _ in range(ROUNDS):
            readings = self._read(asked, now_ms, errors)
            answered = answered or bool(readings)
            if errors and not answered:
                raise errors[0]
            due = []
            for post, reading in readings:
                waits[post.number] = self._wait_after(reading)
                led.pop(post.number, None)
                if reading.is_leader:
                    led[post.number] = reading
                    due += [(post, reading)] if reading.due else []
            for post in self._fire(due, report, now_ms):
                del led[post.number]
                waits[post.number] = 0.0
            # Only where something was due: what was fired has a new fire time, maybe the next one.
            asked = [post for post, _ in due if post.number in led]
            if not asked or self._stopping.is_set():
                break
        else:
            waits[-1] = 0.0  # there may be more
        report.is_leader = bool(led)
        self._end_pass(led, waits, report, now_ms)
        return report

    def _begin_pass(self, now_ms: int | None) -> list[Post]:
        """Return the posts to ask whether this scheduler leads there."""
        spread = self._spread
        if spread is None:
            return self._posts
        spread.begin(now_ms)
        if spread.is_news:
            self._tell(spread, now_ms)
        asked, given = spread.choose()
        for post, resigned in self._together(
            [(post, steps(post.leadership.resign)()) for post in given], []
        ):
            spread.note_given(post)
            if resigned:
                _log("lock_released", **self._who(post))
        return asked

    def _tell(self, spread: Spread, now_ms: int | None) -> None:
        """Tell the other schedulers what this one leads, and read of them."""
        try:
            self.link.perform(spread.tell(now_ms, self._answer_s / 2))
        except (RedisUnavailable, RedisRefused) as error:
            # Partitions are led all the same; they are shared again when the home is back.
            level = logging.DEBUG if spread.is_quiet else logging.WARNING
            _log("roster_failed", level, **self._who(), error=str(error))
            spread.be_quiet()

    def _end_pass(
        self,
        led: Mapping[int, Reading],
        waits: Mapping[int, float],
        report: TickReport,
        now_ms: int | None,
    ) -> None:
        leading = [waits[number] for number in led]
        if self._spread is None:
            report.wait = min(waits.values())
        else:
            if self._spread.has_changed:
                self._tell(self._spread, now_ms)
            report.wait = min(*leading, waits.get(-1, math.inf), self._spread.wait_s)
        self._look_over(led, now_ms)

    def _wait_after(self, reading: Reading) -> float:
        """For how long there is nothing to do where this was read."""
        if not reading.is_leader:
            return (reading.ends_ms - reading.now_ms) / 1000
        if reading.next_ms is None:
            return self.check_interval
        elapsed = time.monotonic() - reading.read_at
        return max(0.0, (reading.next_ms - reading.now_ms) / 1000 - elapsed)

    def _together(
        self, asked: Sequence[tuple[Post, Operation[T]]], errors: list[FairQueueError]
    ) -> list[tuple[Post, T]]:
        """Do something at several posts at the same time; the results of those that answered.

        The errors of the others are counted, and added to `errors`. Raises them if there are no
        partitions.
        """
        if not self.link.parts:
            return [(post, self.link.perform(operation)) for post, operation in asked]
        if not asked:
            return []
        operations = [(post.link, operation) for post, operation in asked]
        results = self.link.perform(_gather(operations))
        found: list[tuple[Post, T]] = []
        for (post, _), result in zip(asked, results, strict=True):
            if isinstance(result, WrongPartitions) or not isinstance(result, FairQueueError):
                if isinstance(result, Exception):
                    raise result
                if post.is_failing:
                    _log("partition_back", **self._who(post))
                post.note_answer()
                found.append((post, result))
            else:
                level = logging.DEBUG if post.is_failing else logging.WARNING
                _log("partition_failed", level, **self._who(post), error=str(result))
                post.note_failure()
                self._count_failure(result)
                self._last_error = str(result)
                errors.append(result)
        return found

    def _look_over(self, led: Mapping[int, Reading], now_ms: int | None) -> None:
        """End runs that do not respond, compare the queue with the alerts' limits, sample it."""
        due = [post for post in self._posts if post.number in led and post.looks(led[post.number])]
        if not due:
            return
        can_alert = self._alerts.has_recipients
        looks = [
            (
                post,
                steps(WorkerStore(post.link).look_over)(
                    now_ms, can_alert=can_alert, heard=post.heard
                ),
            )
            for post in due
        ]
        for post, notices in self._together(looks, []):
            for notice in notices:
                report(notice, self._alerts)
            post.heard = [notice.text for notice in notices] if can_alert else []
        if due[0].number == 0:
            self._look_over_whole(can_alert=can_alert)
        samples = [(post, steps(SampleStore(post.link).take)(now_ms)) for post in due]
        try:
            self._together(samples, [])
        except FairQueueError as error:  # schedules are fired whether or not there are charts
            self._count_failure(error)
            _log("sample_failed", logging.WARNING, queue=self.queue.name, error=str(error))
        if self.link.parts:
            self._together([(post, finish_moves(self.store, post.link)) for post in due], [])

    def _look_over_whole(self, *, can_alert: bool) -> None:
        """Do what concerns all partitions: the task of the leader of the home."""
        if can_alert:
            self._watch()
        try:
            self.queue.catch_up()
        except FairQueueError as error:  # it is tried again with the next look
            self._count_failure(error)
            _log("catch_up_failed", logging.WARNING, queue=self.queue.name, error=str(error))

    def _watch(self) -> None:
        """Compare the queue with the limits of the alerts."""
        timeout = self._answer_s if self.link.parts else None
        with tolerate_missing():
            snapshot = self.queue.inspect(timeout)
            workers = WorkerStore(self.link).alive(timeout) if idle_pools(snapshot) else ()
        self._alerts.watch(snapshot, workers)

    def _read(
        self, asked: Sequence[Post], now_ms: int | None, errors: list[FairQueueError]
    ) -> list[tuple[Post, Reading]]:
        leads = []
        for post in asked:
            timeout = self._answer_s / (2 if post.is_failing else 1) if self.link.parts else None
            leads.append((post, steps(post.leadership.lead)(READ_LIMIT, now_ms, timeout)))
        readings = self._together(leads, errors)
        for post, reading in readings:
            if self._spread is not None:
                self._spread.note(post, reading)
            if reading.elected:
                self._count_lock("acquired")
                _log("lock_acquired", **self._who(post), epoch=reading.epoch)
                post.replanner = Replanner(post.store)
            elif not reading.is_leader:
                self._count_lock("contended")
                left_ms = reading.ends_ms - reading.now_ms
                _log("lock_contended", logging.DEBUG, **self._who(post), term_left_ms=left_ms)
            if reading.lost:
                self._lost_lock(post)
        return readings

    def _fire(
        self, due: Sequence[tuple[Post, Reading]], report: TickReport, now_ms: int | None
    ) -> list[Post]:
        """Fire what is due; return the posts where another scheduler leads, or that failed."""
        fires = [(post, steps(post.firing.fire)(each, report, now_ms)) for post, each in due]
        leads = dict(self._together(fires, []))
        for post, still_leads in leads.items():
            if not still_leads:
                self._lost_lock(post)
                post.leadership.lose()
        return [post for post, _ in due if not leads.get(post)]

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
        """Whether this scheduler leads, and its term is not about to end.

        Of a queue with partitions it leads one at least.
        """
        return any(post.leadership.is_leader for post in self._posts)

    @property
    def leads(self) -> tuple[int, ...]:
        """The partitions that this scheduler leads; (0,) or () if the queue has none."""
        return tuple(post.number for post in self._posts if post.leadership.is_leader)

    @property
    def wake_keys(self) -> tuple[bytes, ...]:
        """The lists in which tokens for this scheduler come: new schedules may be due earlier."""
        leads = self.leads
        return tuple(
            post.link.keys["scheduler_wake"]
            for post in self._posts
            if post.number in leads or len(self._posts) == 1
        )

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
            self._listener = self.link.listener(*self.wake_keys)
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
                if self.is_leader or (self._spread is not None and self._spread.is_listed):
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
        started = time.monotonic()
        for post in self._posts:
            replanner = post.replanner if post.leadership.is_leader else None
            if replanner is None or post.is_failing:
                continue
            try:
                while replanner.is_begun or replanner.is_needed():
                    if not replanner.step():
                        _log("schedules_replanned", **asdict(replanner.report))
                        break
                    if time.monotonic() - started > REPLAN_S:
                        return True
            except (RedisUnavailable, RedisRefused):
                if not self.link.parts:
                    raise
                continue  # as long as the partition does not answer
            post.replanner = None
        return False

    def _enter(self, state: str) -> None:
        if not self._stopping.is_set():
            self._state = state

    def _rest(self, listener: Waiter, report: TickReport) -> None:
        """Wait for the next fire time, a wake-up or the end; at most check_interval."""
        seconds = min(report.wait, self.check_interval)
        if report.is_leader and (keys := self.wake_keys):
            listener.listen_to(*keys)
            listener.wait(min(seconds, RENEW_PART * self.lock_timeout))
        else:
            # Tokens are for the leader.
            listener.forget()
            self._stopping.wait(max(seconds, 0.001))

    def _resign(self, timeout: float) -> None:
        for gauge in (self._metrics.is_leader, self._metrics.partitions_led):
            gauge.labels(self.queue.name, self.scheduler_id).set(0)
        posts = [post for post in self._posts if post.leadership.holds or not self.link.parts]
        resigns = [(post, steps(post.leadership.resign)(timeout)) for post in posts]
        try:
            for post, resigned in self._together(resigns, []):
                if resigned:
                    _log("lock_released", **self._who(post))
            if self._spread is not None and self._spread.is_listed:
                self._roster.leave(timeout)
        except FairQueueError as error:
            # The term ends by itself.
            _log("resign_failed", logging.WARNING, **self._who(), error=str(error))

    def _doubt(self) -> None:
        """Stop trusting what it leads until Redis has confirmed it."""
        for post in self._posts:
            post.leadership.doubt()

    def _note_failure(self, error: Exception) -> None:
        self._doubt()
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

    def _who(self, post: Post | None = None) -> dict[str, Any]:
        """Return which scheduler a log event is about, and which partition."""
        who: dict[str, Any] = {"scheduler": self.scheduler_id, "queue": self.queue.name}
        return who if post is None or not self.link.parts else who | {"partition": post.number}

    # --- counting ---------------------------------------------------------------------------------

    def _count_lock(self, outcome: str) -> None:
        self._metrics.lock.labels(self.queue.name, outcome).inc()

    def _lost_lock(self, post: Post) -> None:
        self._count_lock("lost")
        self._metrics.is_leader.labels(self.queue.name, self.scheduler_id).set(0)
        _log("lock_lost", logging.WARNING, **self._who(post))
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
        """Return the health of this scheduler; asks Redis once, briefly.

        Of a queue with partitions, those that do not answer are named in `last_error`.
        """
        leader, lag, redis_up, problem = None, None, True, self._last_error
        leaders: dict[int, str | None] = {}
        try:
            with tolerate_missing() as missing:
                snapshot = self.queue.inspect(timeout=CHECK_TIMEOUT_S)
            lag, leaders = snapshot.overdue, snapshot.leaders
            if snapshot.is_led and not missing:
                leader = snapshot.leader
            for number, why in missing.partitions.items():
                redis_up, problem = False, f"partition {number} does not answer: {why}"
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
            leaders=leaders,
        )


def _gather(operations: Sequence[tuple[Link, Operation[Any]]]) -> Operation[list[Any]]:
    results: list[Any] = yield Gather(operations, partial=True)
    return results


def _moment(seconds: float | None) -> datetime | None:
    return None if seconds is None else from_ms(round(seconds * 1000))
