"""Run a scheduler in the thread of the caller: once, or paced until it is stopped."""

import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, fields

import redis

from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    RedisUnavailable,
    WrongPartitions,
)
from fairqueue.link.listener import Waiter
from fairqueue.logs import error_line, event_logger
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.scheduler import (
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    RENEW_PART,
    TaskScheduler,
)
from fairqueue.validation import check_count, check_seconds

_log = event_logger("fairqueue.daemon")

SECOND = 1_000_000_000  # nanoseconds, the unit of pacing
LEAST_INTERVAL_S, MOST_INTERVAL_S = 0.01, 1200.0  # the leader's term is an hour at most
USUAL_TERM_S = 10.0  # how long others wait for a killed leader, unless the interval is long
LEAST_WAIT_S = 0.001  # of a follower: it does not poll a term that is just ending
RESIGN_S = 1.0  # for giving up leadership at the end; without Redis the term ends by itself

# The counts of a pass: each integer of its report.
COUNTS = tuple(each.name for each in fields(TickReport) if each.type is int)

# Why a daemon has ended.
STOPPED, OVERRUNS, OUTAGE = "stopped", "overruns", "outage"


@dataclass(slots=True, kw_only=True)
class Totals:
    """The sums of what passes have done."""

    passes: int = 0
    is_leader: bool = False  # in the last pass
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, report: TickReport) -> None:
        """Add the report of one pass."""
        self.passes += 1
        self.is_leader = report.is_leader
        self.counts.update({name: getattr(report, name) for name in COUNTS})

    @property
    def failed(self) -> bool:
        """Whether a schedule cannot run, or a limit of the queue refused a fire."""
        return self.counts["set_aside"] + self.counts["refused"] > 0

    def as_dict(self) -> dict[str, int]:
        """Return the counts by name, zeros included."""
        return {name: self.counts[name] for name in COUNTS}


def run_once(scheduler: TaskScheduler, is_over: Callable[[], bool] = lambda: False) -> Totals:
    """Fire until nothing is due, or another scheduler leads; then give up leadership.

    `is_over` is called between passes. Raises RedisUnavailable and RedisRefused; what was not fired
    then is fired by the next leader.
    """
    totals = Totals()
    try:
        while not is_over():
            report = scheduler.tick()
            totals.add(report)
            if not report.is_leader or report.wait > 0:
                break
    finally:
        scheduler.stop(RESIGN_S)
    return totals


class Pacer:
    """Plans ticks at start + k * interval, however long passes take.

    It has no clock. Times are integers, nanoseconds of a monotonic clock, so that no error adds up
    in months of ticking. Between planned ticks there may be more passes, at fire times.
    """

    def __init__(self, start: int, interval: int) -> None:
        self._start = start
        self._interval = interval
        self._next = 0  # number of the tick that is planned next
        self._began = start
        self.overruns = 0
        self.overruns_in_a_row = 0
        self.ticks_skipped = 0

    @property
    def planned(self) -> int:
        """When the next tick is planned."""
        return self._start + self._next * self._interval

    def begin(self, now: int) -> None:
        """Begin a pass. It counts for all ticks that were planned until now: no burst follows."""
        self._began = now
        ticks = (now - self._start) // self._interval + 1
        if ticks > self._next:
            self.ticks_skipped += ticks - self._next - 1
            self._next = ticks

    def end(self, now: int) -> bool:
        """End the pass; return whether it was an overrun: longer than the interval."""
        overran = now - self._began > self._interval
        self.overruns += overran
        self.overruns_in_a_row = self.overruns_in_a_row + 1 if overran else 0
        return overran

    def next_wait(self, now: int) -> float:
        """Return the seconds until the next planned tick; 0 if it is late."""
        return max(0, self.planned - now) / SECOND


def term_for(interval: float, lock_timeout: float | None = None) -> float:
    """Return the lock_timeout for a daemon with this interval, or the given one if it suffices.

    Raises ConfigurationError if a leader could not renew its term in time.
    """
    check_seconds(
        interval, "interval", ConfigurationError, least=LEAST_INTERVAL_S, most=MOST_INTERVAL_S
    )
    least = interval / RENEW_PART
    if lock_timeout is None:
        return max(USUAL_TERM_S, least)
    if lock_timeout < least:
        raise ConfigurationError(
            f"lock timeout must be at least {least:g} seconds for ticks every {interval:g} s, "
            f"which renew the leader's term, not {lock_timeout!r}"
        )
    return lock_timeout


class Daemon:
    """Ticks a scheduler until it is stopped. It survives outages of Redis.

    A pass begins at each planned tick, at each fire time in between, and when a schedule is added
    that is due earlier. A pass that fails neither counts as an overrun nor ends a row of them.
    """

    def __init__(
        self,
        scheduler: TaskScheduler,
        *,
        interval: float = 1.0,
        max_overruns: int | None = None,
        exit_on_outage: bool = False,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """It ends after `max_overruns` in a row, and at an outage of Redis if `exit_on_outage`.

        Raises ConfigurationError for an unusable interval or number.
        """
        term_for(interval, scheduler.lock_timeout)
        if max_overruns is not None:
            check_count(max_overruns, "max_overruns", ConfigurationError, least=1)
        self.totals = Totals()
        self.errors = 0  # passes that failed
        self.outages = 0  # of Redis
        self._scheduler = scheduler
        self._max_overruns = max_overruns
        self._exit_on_outage = exit_on_outage
        self._clock = clock
        self._began = clock()
        self.pacer = Pacer(self._began, round(interval * SECOND))
        self._backoff = FIRST_BACKOFF_S
        self._redis_away = False
        self._stopping = False
        self._listener: Waiter | None = None

    def stop(self) -> None:
        """End after the current pass. Takes no lock, so signal handlers may call it."""
        self._stopping = True
        listener = self._listener
        if listener is not None:
            listener.nudge()

    def run(self) -> str:
        """Tick until the end, give up leadership and return STOPPED, OVERRUNS or OUTAGE."""
        with closing(self._scheduler.queue.link.listener(*self._scheduler.wake_keys)) as listener:
            self._listener = listener  # from here on stop() ends a wait, and the next one
            _log("daemon_started", scheduler=self._scheduler.scheduler_id)
            try:
                while (end := self._end()) is None:
                    report = self._pass()
                    if self._end() is None:
                        self._rest(listener, report)
            finally:
                self._scheduler.stop(RESIGN_S)
        _log("daemon_ended", reason=end)
        return end

    def _end(self) -> str | None:
        if self._stopping:
            return STOPPED
        in_a_row = self.pacer.overruns_in_a_row
        if self._max_overruns is not None and in_a_row >= self._max_overruns:
            return OVERRUNS
        if self._exit_on_outage and self._redis_away:
            return OUTAGE
        return None

    def _pass(self) -> TickReport | None:
        """Run one pass; return None if it failed, which is counted."""
        self.pacer.begin(self._clock())
        try:
            report = self._scheduler.tick()
        except WrongPartitions:
            raise  # it was not known when this process began: it has to begin anew
        except Exception as error:  # whatever it is, the next pass may succeed
            self._count_failure(error)
            return None
        self.totals.add(report)
        self._backoff = FIRST_BACKOFF_S
        if self._redis_away:
            self._redis_away = False
            _log("redis_back")
        if self.pacer.end(self._clock()):
            _log("pass_overran", logging.WARNING, in_a_row=self.pacer.overruns_in_a_row)
        return report

    def _count_failure(self, error: Exception) -> None:
        self.errors += 1
        if isinstance(error, RedisUnavailable) and not self._redis_away:
            self.outages += 1
            self._redis_away = True
        if isinstance(error, FairQueueError):
            _log("pass_failed", logging.WARNING, error=str(error))
        else:
            _log("pass_failed", logging.ERROR, exc_info=True, error=error_line(error))

    def _rest(self, listener: Waiter, report: TickReport | None) -> None:
        """Wait for the next fire time, the next planned tick, a wake-up or the end."""
        if report is None:
            listener.wait_for_nudge(self._backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
            self._backoff = min(2 * self._backoff, LONGEST_BACKOFF_S)
            return
        seconds = min(report.wait, self.pacer.next_wait(self._clock()))
        keys = self._scheduler.wake_keys
        if not (report.is_leader and keys):
            # Wake-ups are for the leader.
            listener.wait_for_nudge(max(seconds, LEAST_WAIT_S))
            return
        try:
            listener.listen_to(*keys)
            listener.wait(seconds)
        except (redis.RedisError, OSError) as error:
            # Without wake-ups a new schedule is seen at the next planned tick.
            _log("wait_failed", logging.WARNING, error=str(error))
            listener.wait_for_nudge(seconds)

    def statistics(self) -> dict[str, float]:
        """Return what has happened so far, by name; `uptime` in seconds."""
        return {
            "uptime": round((self._clock() - self._began) / SECOND, 3),
            "passes": self.totals.passes,
            "overruns": self.pacer.overruns,
            "ticks_skipped": self.pacer.ticks_skipped,
            "outages": self.outages,
            "errors": self.errors,
            **self.totals.as_dict(),
        }
