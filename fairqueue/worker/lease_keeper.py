"""Extend the leases of running tasks, tell runs about cancels and lost leases, end overdue runs."""

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import Gauge

from fairqueue.errors import TimedOut
from fairqueue.logs import event_logger, whose
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import BEAT_S
from fairqueue.runtime.threads import keep_going
from fairqueue.worker.context import TaskContext
from fairqueue.worker.handlers import Handler
from fairqueue.worker.heartbeat import Heartbeat

_log = event_logger("fairqueue.worker")

EXTEND_PART = 1 / 3  # part of a lease after which all held leases are extended, in one call


@dataclass(slots=True, eq=False)
class ActiveRun:
    """A claimed task and the state of its run."""

    claim: Claim
    context: TaskContext
    handler: Handler | None
    thread: int | None = None  # the thread's id while a handler with a time-out runs
    deadline: float | None = None
    overdue: bool = False
    stuck: Gauge | None = None  # the gauge that counts it, once it goes on in spite of TimedOut
    logged_at: float = 0.0  # when it was last logged that it is overdue
    seconds: float = 0.0  # how long the handler ran
    skipped: bool = False
    mates: "Sequence[ActiveRun]" = ()  # the others of its batch, if it has the time-out of the call
    since: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, deadline: float) -> None:
        """Start the time-out: from now on TimedOut may be raised between any two instructions.

        Call it last: a Condition in whose methods TimedOut is raised would stay locked.
        """
        self.deadline = deadline
        with self.lock:
            self.thread = threading.get_ident()

    def settle(self) -> None:
        """End the time-out, so that a pending TimedOut does not hit code after the handler.

        May be called again.
        """
        if self.deadline is None:
            return
        with self.lock:
            thread, self.thread, self.deadline = self.thread, None, None
            if self.overdue and thread is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)
            if self.stuck is not None:
                self.stuck.dec()
                self.stuck = None

    def end_overdue(self, now: float) -> bool:
        """Raise TimedOut in the thread of the run; False if the run has ended.

        An async handler is ended by its event loop instead.
        """
        with self.lock:
            if self.thread is None or self.handler is None:
                return False
            self.overdue, self.logged_at = True, now
            for run in (self, *self.mates):
                run.context.stop()
            if not self.handler.is_async:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread), ctypes.py_object(TimedOut)
                )
            return True

    def count_stuck(self, gauge: Gauge, now: float) -> bool:
        """Count a run that goes on in spite of TimedOut; False if it has ended."""
        with self.lock:
            if self.thread is None:
                return False
            self.logged_at = now
            if self.stuck is None:
                self.stuck = gauge
                gauge.inc()
            return True


class LeaseKeeper:
    """A thread that extends all held leases in one call, ends overdue runs, and sends heartbeats.

    `stuck_gauge` returns the gauge for a run that goes on after its time-out. `on_death` is called
    if the thread ends before `stop`.
    """

    def __init__(
        self,
        queue: TaskQueue,
        lease: float,
        stuck_gauge: Callable[[ActiveRun], Gauge],
        heartbeat: Heartbeat,
        on_death: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self._lease = lease
        self._stuck_gauge = stuck_gauge
        self._heartbeat = heartbeat
        self._runs: set[ActiveRun] = set()
        self._changed = threading.Condition()
        self._ending = False
        self._wakes = 0.0  # when the thread's current wait ends
        self._beat_failed = -math.inf  # when a heartbeat last failed
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name="fairqueue-leases", daemon=True)
        self._thread.start()

    def add(self, runs: Sequence[ActiveRun]) -> None:
        """Extend the leases of these runs from now on."""
        with self._changed:
            if not self._runs:
                self._changed.notify()
            self._runs.update(runs)

    def expect(self, deadline: float) -> None:
        """Check at `deadline` at the latest: a run has to end by then."""
        with self._changed:
            if deadline < self._wakes:
                self._changed.notify()

    def remove(self, runs: Sequence[ActiveRun]) -> None:
        """Stop extending the leases of runs that have ended."""
        with self._changed:
            self._runs.difference_update(runs)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def beat(self, claim: Claim, context: TaskContext) -> None:
        """Extend one lease now, and pass the answer to its run. Raises RedisUnavailable."""
        (word,) = self._queue.extend([claim], self._lease)
        _tell(context, word)

    def _run(self) -> None:
        try:
            keep_going(self._keep, lambda: self._ending)
        finally:
            if not self._ending:
                self._on_death(f"{self._thread.name} has ended")

    def _keep(self) -> None:
        next_extension = time.monotonic() + self._lease * EXTEND_PART
        while True:
            with self._changed:
                if self._ending:
                    return
                if not self._runs:
                    self._wait_for(math.inf)
                    next_extension = time.monotonic() + self._lease * EXTEND_PART
                else:
                    self._wait_for(min([next_extension, *self._deadlines()]))
                runs = list(self._runs)
            now = time.monotonic()
            for run in runs:
                self._check_overdue(run, now)
            lost = False
            if now >= next_extension:
                lost = self._extend(runs)
                next_extension = time.monotonic() + self._lease * EXTEND_PART
            # An overdue run loses its lease. The heartbeat ends its task even if all slots are
            # stuck, so that no claim would.
            if lost or now >= self._next_beat():
                self._beat(runs)

    def _deadlines(self) -> list[float]:
        return [run.deadline for run in self._runs if run.deadline and not run.overdue]

    def _wait_for(self, moment: float) -> None:
        """Wait until that time, the next heartbeat, or a change, whichever comes first."""
        self._wakes = min(moment, self._next_beat())
        if self._wakes == math.inf:
            self._changed.wait()
        else:
            self._changed.wait(max(0.001, self._wakes - time.monotonic()))

    def _next_beat(self) -> float:
        return max(self._heartbeat.next_beat, self._beat_failed + BEAT_S)

    def _beat(self, runs: list[ActiveRun]) -> None:
        try:
            oldest_first = sorted(runs, key=lambda run: run.since)
            self._heartbeat.beat(run.claim.task.task_id for run in oldest_first)
        except Exception as error:  # leases must be extended whatever happens
            self._beat_failed = time.monotonic()
            _log("heartbeat_failed", logging.WARNING, queue=self._queue.name, error=str(error))

    def _check_overdue(self, run: ActiveRun, now: float) -> None:
        """End an overdue run; if it goes on, log that once per lease."""
        deadline = run.deadline
        if deadline is None or now < deadline:
            return
        if not run.overdue:
            if run.end_overdue(now):
                _log("task_overdue", logging.WARNING, **about(run.claim))
        elif now >= run.logged_at + self._lease and run.count_stuck(self._stuck_gauge(run), now):
            seconds = round(now - deadline, 3)
            _log("task_stuck", logging.WARNING, **about(run.claim), seconds=seconds)

    def _extend(self, runs: list[ActiveRun]) -> bool:
        """Extend the leases of runs and pass on the answers; True if a lease was lost."""
        runs = [run for run in runs if not run.context.lease_lost]
        try:
            timeouts = [run.handler.timeout if run.handler else None for run in runs]
            words = self._queue.extend([run.claim for run in runs], self._lease, timeouts=timeouts)
        except Exception as error:  # the next attempt may succeed
            _log("extend_failed", logging.WARNING, queue=self._queue.name, error=str(error))
            return False
        lost = False
        for run, word in zip(runs, words, strict=True):
            # A run that has ended meanwhile has lost nothing.
            if word != "lost_lease" or run in self._runs:
                _tell(run.context, word)
                lost = lost or word == "lost_lease"
        return lost


def _tell(context: TaskContext, word: str) -> None:
    """Pass the answer to an extension of a lease to its run."""
    if word == "cancel":
        context.stop()
    elif word == "lost_lease":
        context.stop(lease_lost=True)


def about(claim: Claim) -> dict[str, Any]:
    """Return the log fields of a task; never its payload, which may hold personal data."""
    task = claim.task
    return {
        "task": task.task_id,
        "task_name": task.name,
        **whose(task.user_id, task.tenant),
        "attempt": claim.attempt,
    }
