"""Keep the leases of what a worker runs, tell runs of cancels and losses, end overdue ones."""

import ctypes
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import Gauge

from fairqueue.errors import TimedOut
from fairqueue.logs import log_event
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import BEAT_S
from fairqueue.runtime.threads import keep_going
from fairqueue.worker.context import TaskContext
from fairqueue.worker.handlers import Handler
from fairqueue.worker.heartbeat import Presence

logger = logging.getLogger("fairqueue.worker")
_log = partial(log_event, logger)

KEEP_PART = 1 / 3  # of a lease: so often are all held leases extended, in one call


@dataclass(slots=True, eq=False)
class Run:
    """One claim and what becomes of it."""

    claim: Claim
    context: TaskContext
    handler: Handler | None
    thread: int | None = None  # set while a handler with a time-out runs
    deadline: float | None = None
    overdue: bool = False
    stuck: Gauge | None = None  # where it is counted, once it goes on in spite of TimedOut
    said: float = 0.0  # when it was last said that it is overdue
    seconds: float = 0.0  # how long the handler ran
    skipped: bool = False
    since: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, deadline: float) -> None:
        """Let the time-out run. From here on TimedOut may be raised between any two instructions.

        Also inside the methods of a Condition, which would then stay locked: so this comes last.
        """
        self.deadline = deadline
        with self.lock:
            self.thread = threading.get_ident()

    def settle(self) -> None:
        """The handler has ended: a time-out that is on its way must not hit what comes after it.

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
        """Raise TimedOut in the thread of the run; False if it has ended by now.

        An async handler is ended by its event loop.
        """
        with self.lock:
            if self.thread is None or self.handler is None:
                return False
            self.overdue, self.said = True, now
            self.context.stop()
            if not self.handler.is_async:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self.thread), ctypes.py_object(TimedOut)
                )
            return True

    def count_stuck(self, gauge: Gauge, now: float) -> bool:
        """It goes on in spite of TimedOut; False if it has ended by now."""
        with self.lock:
            if self.thread is None:
                return False
            self.said = now
            if self.stuck is None:
                self.stuck = gauge
                gauge.inc()
            return True


class Keeper:
    """A thread that extends all held leases in one call, and ends runs that are over their time.

    `stuck_gauge` says where a run is counted that goes on after it was ended. It also says for its
    worker that it is alive. `on_death` is called if it ends without having been told to.
    """

    def __init__(
        self,
        queue: TaskQueue,
        lease: float,
        stuck_gauge: Callable[[Run], Gauge],
        presence: Presence,
        on_death: Callable[[str], None],
    ) -> None:
        self._queue = queue
        self._lease = lease
        self._stuck_gauge = stuck_gauge
        self._presence = presence
        self._runs: set[Run] = set()
        self._changed = threading.Condition()
        self._ending = False
        self._wakes = 0.0  # when the thread looks again by itself
        self._beat_failed = -math.inf  # when a heartbeat last failed
        self._on_death = on_death
        self._thread = threading.Thread(target=self._run, name="fairqueue-leases", daemon=True)
        self._thread.start()

    def add(self, runs: Sequence[Run]) -> None:
        """Keep the leases of these from now on."""
        with self._changed:
            if not self._runs:
                self._changed.notify()
            self._runs.update(runs)

    def expect(self, deadline: float) -> None:
        """A run that is kept has to end by then: look at that moment at the latest."""
        with self._changed:
            if deadline < self._wakes:
                self._changed.notify()

    def remove(self, runs: Sequence[Run]) -> None:
        """These have ended."""
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
        """Extend one lease now, and tell its run. Raises RedisUnavailable."""
        (word,) = self._queue.extend([claim], self._lease)
        _tell(context, word)

    def _run(self) -> None:
        try:
            keep_going(self._keep, lambda: self._ending)
        finally:
            if not self._ending:
                self._on_death(f"{self._thread.name} has ended")

    def _keep(self) -> None:
        next_extension = time.monotonic() + self._lease * KEEP_PART
        while True:
            with self._changed:
                if self._ending:
                    return
                if not self._runs:
                    self._wait_for(math.inf)
                    next_extension = time.monotonic() + self._lease * KEEP_PART
                else:
                    self._wait_for(min([next_extension, *self._deadlines()]))
                runs = list(self._runs)
            now = time.monotonic()
            for run in runs:
                self._look_after(run, now)
            lost = False
            if now >= next_extension:
                lost = self._extend(runs)
                next_extension = time.monotonic() + self._lease * KEEP_PART
            # A run beyond its deadline loses its lease. The heartbeat sees to it that its task is
            # ended, also where nobody claims because all slots are stuck.
            if lost or now >= self._next_beat():
                self._say_alive(runs)

    def _deadlines(self) -> list[float]:
        return [run.deadline for run in self._runs if run.deadline and not run.overdue]

    def _wait_for(self, moment: float) -> None:
        """Wait until that moment, the next heartbeat, or until something changes."""
        self._wakes = min(moment, self._next_beat())
        if self._wakes == math.inf:
            self._changed.wait()
        else:
            self._changed.wait(max(0.001, self._wakes - time.monotonic()))

    def _next_beat(self) -> float:
        return max(self._presence.next_beat, self._beat_failed + BEAT_S)

    def _say_alive(self, runs: list[Run]) -> None:
        try:
            oldest_first = sorted(runs, key=lambda run: run.since)
            self._presence.beat(run.claim.task.task_id for run in oldest_first)
        except Exception as error:  # whatever it is: the leases have to be kept
            self._beat_failed = time.monotonic()
            _log("heartbeat_failed", logging.WARNING, queue=self._queue.name, error=str(error))

    def _look_after(self, run: Run, now: float) -> None:
        """End a run that is over its time, and say once per lease that it still goes on."""
        deadline = run.deadline
        if deadline is None or now < deadline:
            return
        if not run.overdue:
            if run.end_overdue(now):
                _log("task_overdue", logging.WARNING, **about(run.claim))
        elif now >= run.said + self._lease and run.count_stuck(self._stuck_gauge(run), now):
            seconds = round(now - deadline, 3)
            _log("task_stuck", logging.WARNING, **about(run.claim), seconds=seconds)

    def _extend(self, runs: list[Run]) -> bool:
        """Extend the leases of runs, and tell them; whether one has lost its lease."""
        runs = [run for run in runs if not run.context.lease_lost]
        try:
            timeouts = [run.handler.timeout if run.handler else None for run in runs]
            words = self._queue.extend([run.claim for run in runs], self._lease, timeouts=timeouts)
        except Exception as error:  # whatever it is: the next time may go well
            _log("extend_failed", logging.WARNING, queue=self._queue.name, error=str(error))
            return False
        lost = False
        for run, word in zip(runs, words, strict=True):
            # One that has ended in the meantime has lost nothing.
            if word != "lost_lease" or run in self._runs:
                _tell(run.context, word)
                lost = lost or word == "lost_lease"
        return lost


def _tell(context: TaskContext, word: str) -> None:
    """Tell a run what was answered when its lease was extended."""
    if word == "cancel":
        context.stop()
    elif word == "lost_lease":
        context.stop(lease_lost=True)


def about(claim: Claim) -> dict[str, Any]:
    """What a log event says of a task; never its payload, which may hold personal data."""
    task = claim.task
    return {
        "task": task.task_id,
        "task_name": task.name,
        "user": task.user_id,
        "attempt": claim.attempt,
    }
