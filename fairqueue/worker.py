"""Run tasks: claim them, hand them to threads, keep their leases, and say how they went."""

import asyncio
import ctypes
import json
import logging
import os
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry

from fairqueue.connection import Listener
from fairqueue.errors import ConfigurationError, FairQueueError, LeaseLost
from fairqueue.handlers import (
    Discard,
    Handler,
    Handlers,
    Retry,
    RetryPolicy,
    TaskContext,
    TimedOut,
)
from fairqueue.metrics import worker_metrics
from fairqueue.models import Claim, Task, new_id
from fairqueue.queue import FINISH_CHUNK, LONGEST_WAIT_S, TaskQueue
from fairqueue.validation import (
    MAX_RESULT_BYTES,
    check_count,
    check_name,
    check_seconds,
    encode_json,
)

logger = logging.getLogger("fairqueue.worker")

Target = TypeVar("Target", bound=Callable[..., Any])

# How a call that ends a claim is counted.
OUTCOMES = {"retry": "retried", "release": "released", "bury": "buried"}
KEEP_PART = 1 / 3  # of a lease: so often are all held leases extended, in one call
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
QUIET_S = 1.0  # how long a worker that gives up waits for the answer to its last claim
QUICK_S = 0.005  # tasks that usually take less than this are claimed ahead of free slots
AHEAD = 100  # so many: a round trip then serves many tasks
UNBEGUN_S = 0.5  # one that waits for a slot for longer goes back to the others
SHOWN_RESULT = 1000  # characters kept of a result that is no JSON
# A task that this worker does not know waits this long for one that does, then twice that, ...
UNKNOWN = RetryPolicy(retries=5, backoff=5.0, cap=300.0, jitter="none")


@dataclass(slots=True, eq=False)
class _Run:
    """One claim and what becomes of it."""

    claim: Claim
    context: TaskContext
    handler: Handler | None
    thread: int | None = None  # set while the handler runs, for its time-out
    deadline: float | None = None
    overdue: bool = False
    since: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Worker:
    """Runs tasks of a queue in `concurrency` threads, each task under a lease.

    `handler` gets every task that has no handler of its own, as a `Task`. A worker that dies leaves
    its tasks to the others when their leases end.
    """

    def __init__(
        self,
        queue: TaskQueue,
        handler: Callable[[Task], Any] | None = None,
        concurrency: int = 8,
        lease: float = 30.0,
        worker_id: str | None = None,
        *,
        registry: CollectorRegistry | None = None,
    ) -> None:
        """Raises ConfigurationError naming the argument. Opens no connection."""
        if not isinstance(queue, TaskQueue):
            raise ConfigurationError(f"queue {queue!r} is no TaskQueue")
        self.queue = queue
        self.concurrency = check_count(
            concurrency, "concurrency", ConfigurationError, least=1, most=FINISH_CHUNK
        )
        self.lease = check_seconds(lease, "lease", ConfigurationError, least=0.1, most=86_400)
        if worker_id is None:
            worker_id = f"{socket.gethostname()}:{os.getpid()}:{new_id()[:6]}"
        self.worker_id = check_name(worker_id, "worker_id", ConfigurationError)
        self._handlers = Handlers(handler)
        self._metrics = worker_metrics(registry)
        self._life = threading.Lock()
        self._pool: _Pool | None = None

    def task(
        self,
        name: str,
        *,
        retries: int = 5,
        backoff: float | Sequence[float] = 2.0,
        backoff_cap: float = 60.0,
        jitter: str = "full",
        timeout: float | None = None,
    ) -> Callable[[Target], Target]:
        """Register a function, `async def` or class with a method `handle` for tasks of a name.

        It gets the payload, or the payload and a `TaskContext`. What it returns is the result. When
        it raises, the task is offered again up to `retries` times, after `backoff` seconds that
        double each time up to `backoff_cap` (or a list of delays), with jitter "full" or "none";
        then it goes to the dead letters. `Retry` and `Discard` decide themselves. After `timeout`
        seconds `TimedOut` is raised inside it. Raises ConfigurationError naming the value.
        """
        policy = RetryPolicy.create(retries, backoff, backoff_cap, jitter)
        if timeout is not None:
            timeout = check_seconds(timeout, "timeout", ConfigurationError, least=0.001)

        def register(target: Target) -> Target:
            self._handlers.add(Handler(name, target, policy, timeout))
            return target

        return register

    # --- without threads of its own ---------------------------------------------------------------

    def run_once(self) -> int:
        """Run what is ready now, at most `concurrency` tasks, in this thread; how many."""
        done = 0
        keeper = _Keeper(self.queue, self.lease)
        try:
            with asyncio.Runner() as runner:
                while done < self.concurrency:
                    claims = self.queue.claim(self.worker_id, limit=1, lease=self.lease)
                    if not claims:
                        break
                    run = self._new_run(claims[0])
                    keeper.add([run])
                    result = self._execute(run, runner, keeper)
                    keeper.remove([run])
                    if result is not None:
                        self._record_words([run], self.queue.finish_many([result]))
                    done += 1
        finally:
            keeper.stop()
        return done

    def run_until_empty(self) -> int:
        """Run tasks in this thread until none is ready; how many. Delayed ones are left."""
        total = 0
        while count := self.run_once():
            total += count
        return total

    # --- with threads -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads; nothing happens if they run already."""
        with self._life:
            if self._pool is None or not self._pool.is_alive():
                self._pool = _Pool(self)
                self._pool.start()
        _log("worker_started", worker=self.worker_id, slots=self.concurrency)

    def stop(self, timeout: float = 30.0) -> bool:
        """Take no more tasks, wait for those that run, and end; True if all ended in time.

        What has not ended within `timeout` seconds is given back for others to run; its handler
        sees `context.cancelled`, and what it does afterwards is not recorded.
        """
        timeout = check_seconds(timeout, "timeout", ConfigurationError)
        with self._life:
            pool, self._pool = self._pool, None
        ended = True if pool is None else pool.stop(timeout)
        _log("worker_stopped", worker=self.worker_id, in_time=ended)
        return ended

    # --- one task ---------------------------------------------------------------------------------

    def _new_run(self, claim: Claim) -> _Run:
        return _Run(claim, TaskContext(claim), self._handlers.find(claim.task.name))

    def _execute(
        self, run: _Run, runner: asyncio.Runner, keeper: "_Keeper"
    ) -> tuple[Claim, Any] | None:
        """Run a task; (claim, result) to be recorded, or None: its end is recorded already.

        Raises nothing, but for the KeyboardInterrupt of whoever runs tasks in the main thread.
        """
        claim, handler = run.claim, run.handler
        if handler is None:
            self._fail(run, f"no handler for task {claim.task.name!r} here", UNKNOWN)
            return None
        try:
            began = time.monotonic()
            try:
                self._begin(run, handler, keeper)
                result = handler.run(run.context, runner)
            finally:
                _settle(run)
                self._observe(run, time.monotonic() - began)
        except Retry as error:
            self._fail(
                run, _text(error) or "the handler asked for a retry", handler.policy, error.in_
            )
        except Discard as error:
            self._end(self.queue.bury, claim, _text(error) or "the handler discarded it")
        except TimedOut as error:
            text = _text(error) or f"ran for more than {handler.timeout or 0:g} s"
            self._fail(run, f"timed out: {text}", handler.policy)
        except BaseException as error:  # also SystemExit: it is the handler's, not ours
            if _is_interrupt(error):
                self._end(self.queue.release, claim)
                raise
            logger.warning("task_failed", exc_info=True, extra=_fields("task_failed", claim))
            self._fail(run, f"{type(error).__name__}: {_text(error)}", handler.policy)
        else:
            return claim, _storable(result)
        return None

    def _begin(self, run: _Run, handler: Handler, keeper: "_Keeper") -> None:
        """Let the time-out run; that of an async handler is its event loop's."""
        if handler.timeout is not None and not handler.is_async:
            run.deadline = time.monotonic() + handler.timeout
            keeper.expect(run.deadline)
            # Last of all. From here on TimedOut may be raised between any two instructions, also
            # inside the methods of a Condition, which would then stay locked.
            with run.lock:
                run.thread = threading.get_ident()

    def _fail(self, run: _Run, error: str, policy: RetryPolicy, delay: float | None = None) -> None:
        """Offer the task again as its policy says, or put it among the dead letters."""
        wait = policy.delay(run.claim.attempt)
        if wait is None:
            self._end(self.queue.bury, run.claim, error)
        else:
            self._end(self.queue.retry, run.claim, error, wait if delay is None else delay)

    def _end(self, action: Callable[..., None], claim: Claim, *arguments: object) -> bool:
        """Record the end of a claim; False if Redis could not be told."""
        outcome = OUTCOMES[action.__name__]
        try:
            action(claim, *arguments)
        except LeaseLost:
            outcome = "lost_lease"
            logger.warning("lease_lost", extra=_fields("lease_lost", claim))
        except FairQueueError as error:
            # The lease ends by itself, and the task is offered again.
            outcome = "not_recorded"
            logger.warning("not_recorded: %s", error, extra=_fields("not_recorded", claim))
        self._count(claim, outcome)
        return outcome != "not_recorded"

    def _record_words(self, runs: Sequence[_Run], words: Sequence[str]) -> None:
        for run, word in zip(runs, words, strict=True):
            self._count(run.claim, word)
            if word == "lost_lease":
                logger.warning("lease_lost", extra=_fields("lease_lost", run.claim))

    def _count(self, claim: Claim, outcome: str) -> None:
        label = self._handlers.label(claim.task.name)
        self._metrics.runs.labels(self.queue.name, label, outcome).inc()

    def _observe(self, run: _Run, seconds: float) -> None:
        label = self._handlers.label(run.claim.task.name)
        self._metrics.run_seconds.labels(self.queue.name, label).observe(seconds)


class _Keeper:
    """Extends all held leases in one call, tells runs of cancels and losses, ends overdue ones."""

    def __init__(self, queue: TaskQueue, lease: float) -> None:
        self._queue = queue
        self._lease = lease
        self._runs: set[_Run] = set()
        self._changed = threading.Condition()
        self._ending = False
        self._wakes = 0.0  # when the thread looks again by itself
        self._thread = threading.Thread(target=self._keep, name="fairqueue-leases", daemon=True)
        self._thread.start()

    def add(self, runs: Sequence[_Run]) -> None:
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

    def remove(self, runs: Sequence[_Run]) -> None:
        """These have ended."""
        with self._changed:
            self._runs.difference_update(runs)

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        self._thread.join()

    def _keep(self) -> None:
        next_extension = time.monotonic() + self._lease * KEEP_PART
        while True:
            with self._changed:
                if self._ending:
                    return
                runs = list(self._runs)
                if not runs:
                    self._changed.wait()
                    next_extension = time.monotonic() + self._lease * KEEP_PART
                    continue
                deadlines = [run.deadline for run in runs if run.deadline and not run.overdue]
                self._wakes = min([next_extension, *deadlines])
                self._changed.wait(max(0.001, self._wakes - time.monotonic()))
            now = time.monotonic()
            for run in runs:
                _end_overdue(run, now)
            if now >= next_extension:
                self._extend(runs)
                next_extension = time.monotonic() + self._lease * KEEP_PART

    def _extend(self, runs: list[_Run]) -> None:
        runs = [run for run in runs if not run.context.lease_lost]
        try:
            words = self._queue.extend([run.claim for run in runs], self._lease)
        except FairQueueError as error:
            _log("extend_failed", logging.WARNING, error=str(error))
            return
        for run, word in zip(runs, words, strict=True):
            if word == "cancel":
                run.context.cancelled = True
            elif word == "lost_lease" and run in self._runs:
                run.context.lease_lost = run.context.cancelled = True


class _Pool:
    """The threads of a started worker: one that claims and records, and one for each slot."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._listener: Listener = worker.queue.link.listener("wake")
        self._keeper = _Keeper(worker.queue, worker.lease)
        self._talking = threading.Lock()  # while a claim is on its way
        self._work = threading.Condition()
        # All of these under _work. A run is held from its claim until its end is recorded.
        self._held: set[_Run] = set()
        self._waiting: deque[_Run] = deque()
        self._done: deque[tuple[_Run, Any]] = deque()
        self._usual_s = QUICK_S  # nothing is claimed ahead before tasks have shown to be quick
        self._stopping = False
        self._over = False
        self._threads = [
            threading.Thread(target=self._slot, name=f"fairqueue-slot-{i}", daemon=True)
            for i in range(worker.concurrency)
        ]
        self._dispatcher = threading.Thread(
            target=self._dispatch, name="fairqueue-worker", daemon=True
        )

    def start(self) -> None:
        for thread in (*self._threads, self._dispatcher):
            thread.start()

    def is_alive(self) -> bool:
        return self._dispatcher.is_alive()

    def stop(self, timeout: float) -> bool:
        """Drain; True if everything ended in time."""
        with self._work:
            self._stopping = True
            # What no slot has begun is given back at once.
            unbegun = list(self._waiting)
            self._waiting.clear()
        self._give_back(unbegun)
        self._listener.nudge()
        self._dispatcher.join(timeout)
        ended = not self._dispatcher.is_alive()
        if not ended:
            self._give_back_held()
        with self._work:
            self._over = True
            self._work.notify_all()
        self._listener.nudge()
        self._keeper.stop()
        return ended

    def _give_back_held(self) -> None:
        # A claim that is on its way would take again what is given back here.
        quiet = self._talking.acquire(timeout=QUIET_S)
        try:
            with self._work:
                left = list(self._held)
            self._give_back(left)
        finally:
            if quiet:
                self._talking.release()

    def _give_back(self, runs: list[_Run]) -> None:
        """Release runs for others; once Redis cannot be told, the leases end by themselves."""
        told = True
        for run in runs:
            run.context.cancelled = True
            told = told and self._worker._end(self._worker.queue.release, run.claim)
            self._forget(run)

    def _forget(self, run: _Run) -> None:
        with self._work:
            self._held.discard(run)
        self._keeper.remove([run])

    # --- the dispatcher ---------------------------------------------------------------------------

    def _dispatch(self) -> None:
        backoff = FIRST_BACKOFF_S
        try:
            while not self._is_drained():
                try:
                    self._turn()
                    backoff = FIRST_BACKOFF_S
                except Exception as error:  # Redis is away, or worse: go on when it is back
                    _log("worker_failed", logging.WARNING, error=repr(error))
                    time.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                    backoff = min(2 * backoff, LONGEST_BACKOFF_S)
        finally:
            self._listener.close()

    def _is_drained(self) -> bool:
        with self._work:
            return self._over or (self._stopping and not self._held)

    def _turn(self) -> None:
        """Record what is done, take as many as there is room for, wait if there was nothing."""
        with self._talking:
            with self._work:
                done = list(self._done)[:FINISH_CHUNK]
                room = 0 if self._stopping else self._room() + len(done)
            if done or room:
                claims, hint = self._talk(done, room)
        if not done and not room:
            self._listener.wait_for_nudge(self._return_unbegun())
        elif not done and not claims:
            self._listener.wait(min(hint, self._return_unbegun()))

    def _talk(self, done: list[tuple[_Run, Any]], room: int) -> tuple[list[Claim], float]:
        words, claims, hint = self._worker.queue.finish_and_claim(
            [(run.claim, result) for run, result in done],
            self._worker.worker_id,
            room,
            self._worker.lease,
        )
        self._recorded([run for run, _ in done], words)
        if claims:
            self._hand_out([self._worker._new_run(claim) for claim in claims])
        return claims, hint

    def _room(self) -> int:
        """How many more may be held: more than there are slots while tasks take no time at all."""
        ahead = AHEAD if self._usual_s < QUICK_S else 0
        return max(0, self._worker.concurrency + ahead - len(self._held))

    def _return_unbegun(self) -> float:
        """Give back what waits for a slot for too long; how many seconds until the next look."""
        with self._work:
            if not self._waiting:
                return LONGEST_WAIT_S
            wait = self._waiting[0].since + UNBEGUN_S - time.monotonic()
            late = list(self._waiting) if wait <= 0 else []
            if late:
                self._waiting.clear()
                self._usual_s = QUICK_S  # they are not so quick any more
        self._give_back(late)
        return max(0.001, wait)

    def _recorded(self, runs: list[_Run], words: list[str]) -> None:
        self._worker._record_words(runs, words)
        with self._work:
            for run in runs:
                self._done.popleft()
                self._held.discard(run)
        self._keeper.remove(runs)

    def _hand_out(self, runs: list[_Run]) -> None:
        self._keeper.add(runs)
        with self._work:
            self._held.update(runs)
            stopping = self._stopping
            if not stopping:
                self._waiting.extend(runs)
                self._work.notify(len(runs))
        if stopping:  # it was stopped while this claim was on its way
            self._give_back(runs)

    # --- the slots --------------------------------------------------------------------------------

    def _slot(self) -> None:
        with asyncio.Runner() as runner:
            while (run := self._next_run()) is not None:
                began = time.monotonic()
                result = self._worker._execute(run, runner, self._keeper)
                seconds = time.monotonic() - began
                with self._work:
                    self._usual_s += (seconds - self._usual_s) / 8
                    recordable = result is not None and run in self._held
                    if recordable:
                        self._done.append((run, result[1]))  # type: ignore[index]
                if not recordable:
                    self._forget(run)
                self._listener.nudge()

    def _next_run(self) -> _Run | None:
        with self._work:
            while not self._waiting:
                if self._over:
                    return None
                self._work.wait()
            return self._waiting.popleft()


def _settle(run: _Run) -> None:
    """The handler has ended: a time-out that is on its way must not hit what comes after it."""
    with run.lock:
        thread, run.thread, run.deadline = run.thread, None, None
        if run.overdue and thread is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)


def _end_overdue(run: _Run, now: float) -> None:
    """Raise TimedOut in the thread of a run that is over its time; once, and said once."""
    if run.overdue or run.deadline is None or now < run.deadline:
        return
    with run.lock:
        if run.thread is None:  # not begun, or ended by now
            return
        run.overdue = True
        run.context.cancelled = True
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(run.thread), ctypes.py_object(TimedOut)
        )
    logger.warning("task_overdue", extra=_fields("task_overdue", run.claim))


def _is_interrupt(error: BaseException) -> bool:
    """Whether somebody wants the program to end, and not only a handler."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    )


def _storable(result: Any) -> Any:
    """A result as it can be kept: what is no JSON, or too large, as the beginning of its text.

    A copy: the handler may go on to change what it has returned.
    """
    if result is None:
        return None
    try:
        return json.loads(encode_json(result, "result", MAX_RESULT_BYTES))
    except Exception:  # also what methods of the result raise
        logger.debug("a result is kept as text", exc_info=True)
    try:
        return repr(result)[:SHOWN_RESULT].encode("utf-8", "replace").decode()
    except Exception:
        return f"a {type(result).__name__} that cannot be shown"


def _text(error: BaseException) -> str:
    """What an error says; also of one that cannot say it."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be read)"


def _fields(event: str, claim: Claim) -> dict[str, object]:
    return {"event": event, "task": claim.task.task_id, "user": claim.task.user_id}


def _log(event: str, level: int = logging.INFO, **fields: object) -> None:
    logger.log(level, event, extra={"event": event, **fields})
