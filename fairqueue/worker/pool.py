"""The threads of a started worker: one that claims and records, and one for each slot."""

import logging
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from fairqueue.errors import FairQueueError, RedisUnavailable
from fairqueue.link.listener import Waiter
from fairqueue.logs import error_line, event_logger
from fairqueue.queue.claim import LONGEST_WAIT_S, Answer
from fairqueue.queue.end import FINISH_CHUNK, NOT_RECORDED
from fairqueue.runtime.threads import keep_going
from fairqueue.worker.batches import Batches, Unit
from fairqueue.worker.core import WorkerCore
from fairqueue.worker.event_loop import Runner
from fairqueue.worker.executor import Done, Slot
from fairqueue.worker.heartbeat import Heartbeat
from fairqueue.worker.lease_keeper import ActiveRun, about

_log = event_logger("fairqueue.worker")

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
QUIET_S = 1.0  # how long a stopping worker waits for the answer to its last claim
QUICK_S = 0.005  # tasks that usually take less than this are claimed ahead of free slots
AHEAD = 240  # tasks claimed ahead, so that slots stay busy during a round trip
DEADLINE_CHECK_S = 0.2  # how often `stop` checks whether its deadline has moved closer
# A claimed task that has waited this long for a slot, or for this part of its lease, is released:
# its time-out counts from the claim.
UNBEGUN_S, UNBEGUN_PART = 0.5, 0.5
# How long running tasks may go on in a process that is being replaced or whose parent died, and in
# a process that has run its `max_tasks`. Tasks that have not ended by then are released.
DRAIN_S, WORN_OUT_S = 30.0, 600.0
RECORD_AGAIN_S = 1.0  # how long the runs of a partition that does not answer wait to be recorded


class ThreadPool:
    """The threads of a started worker.

    They end by themselves after `most` tasks, and when the worker was asked to drain. `ended` is
    called when they claim no more tasks.
    """

    def __init__(self, core: WorkerCore, most: float, ended: Callable[[], None]) -> None:
        self._core = core
        self._ended = ended
        self._executor = core.executor
        self._listener: Waiter = core.queue.link.listener("wake")
        self._heartbeat = core.new_heartbeat(self._listener.nudge)
        self._capture = core.new_log_capture()
        self._claiming = threading.Lock()  # held while a claim is in flight
        self._work = threading.Condition()
        # All of these under _work. A run is held from its claim until its end is recorded.
        self._held: set[ActiveRun] = set()
        self._batches = Batches(UNBEGUN_PART * core.lease)
        self._waiting: deque[Unit] = deque()
        self._running = 0  # units
        self._done: deque[tuple[ActiveRun, Done]] = deque()
        # Of partitions that did not answer, and when to record them.
        self._unrecorded: list[tuple[ActiveRun, Done]] = []
        self._record_at = math.inf
        self._woken_by: bytes | None = None  # the list whose token ended the last wait
        self._usual_s = QUICK_S  # claim nothing ahead until tasks have proved quick
        self._stopping = False
        self._over = False
        self._left = most  # how many more runs may end here
        self.failure: str | None = None  # why it ended, or is about to, without being asked
        self._unbegun_s = min(UNBEGUN_S, UNBEGUN_PART * core.lease)
        self._give_up_at = math.inf  # when to stop waiting for runs that go on
        self._threads = [
            threading.Thread(target=self._slot, name=f"fairqueue-slot-{i}", daemon=True)
            for i in range(core.concurrency)
        ]
        self._dispatcher = threading.Thread(
            target=self._dispatch, name="fairqueue-worker", daemon=True
        )
        # Last, because its thread starts at once.
        self._keeper = core.new_lease_keeper(self._heartbeat, self._fail)

    def start(self) -> None:
        """Start the threads."""
        for thread in (*self._threads, self._dispatcher):
            thread.start()

    def is_alive(self) -> bool:
        """Whether tasks are still claimed or recorded."""
        return self._dispatcher.is_alive()

    def is_draining(self) -> bool:
        """Whether the worker was asked to end."""
        return self._heartbeat.is_draining

    def stop(self, deadline: Callable[[], float]) -> bool:
        """Drain; True if all runs ended in time. `deadline` is read again while waiting."""
        self._claim_no_more()
        self._listener.nudge()
        while self._dispatcher.is_alive() and (left := deadline() - time.monotonic()) > 0:
            self._dispatcher.join(min(left, DEADLINE_CHECK_S))
        in_time = not self._release_held()
        self._end()
        return in_time

    def _claim_no_more(self) -> None:
        with self._work:
            self._stopping = True
            # Runs that no slot has begun are released at once.
            unbegun = self._take_waiting() + self._batches.take_all()
        self._release(unbegun)

    def _take_waiting(self) -> list[ActiveRun]:
        """Return the runs that wait for a slot, which then wait no more."""
        runs = [run for unit in self._waiting for run in unit.runs]
        self._waiting.clear()
        return runs

    def _fail(self, reason: str) -> None:
        """End the worker because one of its threads is gone: it would only look alive.

        Runs may go on, but not for longer than their leases, which may no longer be extended.
        """
        if self.failure is not None:
            return
        self.failure = reason
        _log("worker_broken", logging.ERROR, worker=self._core.worker_id, reason=reason)
        with self._work:
            self._give_up_at = time.monotonic() + min(DRAIN_S, self._core.lease)
        self._claim_no_more()
        leave(self._heartbeat)
        self._listener.nudge()

    def _end(self) -> None:
        """End the threads and report that the worker is gone. May be called again."""
        with self._work:
            self._over = True
            self._work.notify_all()
        self._listener.nudge()
        self._keeper.stop()
        leave(self._heartbeat)
        if self._capture is not None:
            self._capture.detach()

    def _release_held(self) -> bool:
        """Release all runs that have not ended; True if there were any."""
        if not self._dispatcher.is_alive() and not self._held:
            return False
        # A claim in flight would take the released tasks again.
        quiet = self._claiming.acquire(timeout=QUIET_S)
        try:
            with self._work:
                left = list(self._held)
            self._release(left)
        finally:
            if quiet:
                self._claiming.release()
        return True

    def _release(self, runs: list[ActiveRun]) -> None:
        """Release runs for other workers. Once Redis is unreachable, their leases must expire."""
        reachable = True
        for run in runs:
            if reachable:
                outcome = self._executor.end(self._core.queue.release, run.claim)
                reachable = outcome != "not_recorded"
            # Only now: a run that is killed must not be recorded as failed.
            run.context.stop()
            self._forget(run, has_run=False)

    def _forget(self, run: ActiveRun, *, has_run: bool) -> None:
        with self._work:
            self._held.discard(run)
            self._left -= has_run
        self._keeper.remove([run])

    # --- the dispatcher ---------------------------------------------------------------------------

    def _dispatch(self) -> None:
        try:
            keep_going(self._take_turns, self._is_drained)
        finally:
            if not self._is_drained():
                self._fail(f"{threading.current_thread().name} has ended")
            self._listener.close()
            if self.failure is not None:
                self._release_held()
            if self.failure is not None or self.is_draining():
                self._end()  # `stop` may never be called
            self._ended()

    def _take_turns(self) -> None:
        backoff = FIRST_BACKOFF_S
        while not self._is_drained():
            try:
                self._turn()
                backoff = FIRST_BACKOFF_S
            except Exception as error:  # usually Redis is unreachable: try again
                if isinstance(error, RedisUnavailable):
                    self._core.alerts.redis_failed()
                _log(
                    "worker_failed",
                    logging.WARNING,
                    worker=self._core.worker_id,
                    queue=self._core.queue.name,
                    error=error_line(error),
                )
                time.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)

    def _is_drained(self) -> bool:
        with self._work:
            if self._stopping and (not self._held or time.monotonic() >= self._give_up_at):
                return True
            return self._over

    def _turn(self) -> None:
        """Record finished runs, claim for the free slots, and wait if there was neither."""
        self._heartbeat.begin()
        if self.is_draining():
            self._claim_no_more()
            if self._is_drained():
                return
        with self._claiming:
            with self._work:
                self._take_unrecorded()
                done = list(self._done)[:FINISH_CHUNK]
                room = 0 if self._stopping else self._room()
            if done or room:
                claims, hint, wake, *_ = self._exchange(done, room)
            if self._batches and not (room and len(claims) < room):
                self._fill_batches()
            again = max(0.001, self._record_at - time.monotonic())
            rest = min(self._begin_batches(), self._release_unbegun(), again)
        if not done and not room:
            self._listener.wait_for_nudge(rest)
        elif not done and not claims:
            self._listener.listen_to(*self._core.queue.link.full(wake))
            self._listener.wait(min(hint, rest))
            self._woken_by = self._listener.token_from

    def _exchange(self, done: list[tuple[ActiveRun, Done]], room: int) -> Answer:
        """Record finished runs and claim up to `room` tasks, in one round trip."""
        wanted = self._heartbeat.claim_filter
        woken_by, self._woken_by = self._woken_by, None
        words, answer = self._core.queue.exchange(
            [each for _, each in done],
            self._core.worker_id,
            room,
            self._core.lease,
            names=wanted.names,
            avoid=wanted.avoid,
            pools=wanted.pools,
            woken_by=woken_by,
        )
        self._core.alerts.redis_ok()
        self._recorded([run for run, _ in done], words)
        if answer.claims:
            self._hand_out([self._core.new_run(claim, self._keeper) for claim in answer.claims])
        return answer

    def _room(self) -> int:
        """How many tasks may be claimed: each may need a slot of its own.

        More than there are slots while tasks are quick, but never more than may still run here.
        """
        ahead = AHEAD if self._usual_s < QUICK_S else 0
        taken = self._running + len(self._waiting) + len(self._batches)
        room = self._core.concurrency + ahead - taken
        return max(0, int(min(room, self._left - len(self._held))))

    def _fill_batches(self) -> None:
        """Claim more tasks for the batches that are being gathered, fairly as always."""
        with self._work:
            missing = {} if self._stopping else self._batches.missing()
        for name, count in missing.items():
            with self._work:
                limit = int(min(count, self._left - len(self._held)))
            if limit > 0:
                _, answer = self._core.queue.exchange(
                    [],
                    self._core.worker_id,
                    limit,
                    self._core.lease,
                    names=[name],
                    pools=self._core.pools,
                )
                self._hand_out([self._core.new_run(each, self._keeper) for each in answer.claims])

    def _begin_batches(self) -> float:
        """Hand out the batches that have waited long enough; return seconds until the next one."""
        now = time.monotonic()
        with self._work:
            self._enqueue(self._batches.due(now))
            until = self._batches.until()
        return LONGEST_WAIT_S if until is None else max(0.001, until - now)

    def _release_unbegun(self) -> float:
        """Release runs that waited too long for a slot; return seconds until the next check."""
        with self._work:
            if not self._waiting:
                return LONGEST_WAIT_S
            wait = self._waiting[0].since + self._unbegun_s - time.monotonic()
            late = self._take_waiting() if wait <= 0 else []
            if late:
                self._usual_s = QUICK_S  # tasks are no longer quick
        self._release(late)
        return max(0.001, wait)

    def _recorded(self, runs: list[ActiveRun], words: list[str]) -> None:
        answers = {run: word for run, word in zip(runs, words, strict=True) if word != NOT_RECORDED}
        ended = list(answers)
        self._executor.recorded(ended, list(answers.values()))
        with self._work:
            for _ in runs:
                run, done = self._done.popleft()
                if run in answers:
                    self._held.discard(run)
                else:
                    self._unrecorded.append((run, done))
                    self._record_at = time.monotonic() + RECORD_AGAIN_S
            self._left -= len(ended)
        self._keeper.remove(ended)

    def _take_unrecorded(self) -> None:
        """Record again what a partition did not. Called under _work."""
        if time.monotonic() >= self._record_at:
            self._done.extend(self._unrecorded)
            self._unrecorded, self._record_at = [], math.inf

    def _hand_out(self, runs: list[ActiveRun]) -> None:
        self._keeper.add(runs)
        with self._work:
            self._held.update(runs)
            stopping = self._stopping
            if not stopping:
                now = time.monotonic()
                self._enqueue([unit for run in runs for unit in self._batches.add(run, now)])
        if stopping:  # stopped while this claim was in flight
            self._release(runs)

    def _enqueue(self, units: list[Unit]) -> None:
        """Let slots run these. Called under _work."""
        self._waiting.extend(units)
        self._work.notify(len(units))

    # --- the slots --------------------------------------------------------------------------------

    def _slot(self) -> None:
        try:
            keep_going(self._run_tasks, lambda: self._over)
        finally:
            if not self._over:
                self._fail(f"{threading.current_thread().name} has ended")

    def _run_tasks(self) -> None:
        with Runner() as runner:
            slot = Slot(runner=runner, keeper=self._keeper, capture=self._capture)
            while (unit := self._next_unit()) is not None:
                self._run_unit(unit, slot)

    def _run_unit(self, unit: Unit, slot: Slot) -> None:
        began = time.monotonic()
        results: list[Done | None] = [None] * len(unit.runs)
        try:
            if unit.is_batch:
                results = self._executor.execute_batch(unit.runs, slot)
            else:
                results = [self._executor.execute(unit.runs[0], slot)]
        except Exception as error:
            fields = about(unit.runs[0].claim) | {"error": error_line(error)}
            _log("slot_failed", logging.ERROR, exc_info=True, **fields)
        finally:
            # After an error the leases are no longer extended, and the tasks are offered again when
            # they expire.
            seconds = time.monotonic() - began
            gone = []
            with self._work:
                self._running -= 1
                self._usual_s += (seconds - self._usual_s) / 8
                for run, result in zip(unit.runs, results, strict=True):
                    if result is not None and run in self._held:
                        self._done.append((run, result))
                    else:
                        gone.append(run)
            for run in gone:
                self._forget(run, has_run=True)
            self._listener.nudge()

    def _next_unit(self) -> Unit | None:
        with self._work:
            while not self._waiting:
                if self._over:
                    return None
                self._work.wait()
            unit = self._waiting.popleft()
            self._running += 1
            if not self._waiting and not self._batches and self._left <= len(self._held):
                # That was the last one to begin here.
                self._stopping, self._give_up_at = True, time.monotonic() + WORN_OUT_S
            return unit


def leave(heartbeat: Heartbeat) -> None:
    """Report that a worker is gone; if Redis is unreachable, it counts as gone after a while."""
    with suppress(FairQueueError):
        heartbeat.leave()
