"""Take tasks from a queue and run them, in this thread or in threads of a worker's own."""

import functools
import logging
import math
import mmap
import os
import random
import signal
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ParamSpec, TypeVar, Unpack

from prometheus_client import REGISTRY, CollectorRegistry

from fairqueue.alerts import Alerts
from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    RedisUnavailable,
    kind_of,
    shown,
)
from fairqueue.link.connection import Listener
from fairqueue.logs import error_line, log_event
from fairqueue.metrics.collectors import worker_metrics
from fairqueue.metrics.processes import Tally
from fairqueue.models import Claim, Task, new_id
from fairqueue.queue.claim import LONGEST_WAIT_S, Answer
from fairqueue.queue.end import FINISH_CHUNK
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.settings import check_limits
from fairqueue.runtime.processes import ProcessGroup, wait_for
from fairqueue.runtime.threads import keep_going
from fairqueue.validation import check_count, check_items, check_name, check_seconds
from fairqueue.worker.context import LogCapture, TaskContext
from fairqueue.worker.dispatch import RegisteredTask, unwrapped
from fairqueue.worker.event_loop import Stage
from fairqueue.worker.executor import Done, Executor, Slot
from fairqueue.worker.handlers import (
    Handler,
    HandlerOptions,
    Handlers,
    HandlerSettings,
    handler_classes,
)
from fairqueue.worker.heartbeat import Facts, Presence
from fairqueue.worker.hooks import Hookable, Hooks
from fairqueue.worker.isolation import check_findable, check_isolated, check_not_starting
from fairqueue.worker.lease_keeper import Keeper, Run, about

logger = logging.getLogger("fairqueue.worker")
_log = partial(log_event, logger)

P = ParamSpec("P")
R = TypeVar("R")

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 5.0
QUIET_S = 1.0  # how long a worker that gives up waits for the answer to its last claim
QUICK_S = 0.005  # tasks that usually take less than this are claimed ahead of free slots
AHEAD = 240  # so many: some are run while Redis is asked for the others
LOOK_S = 0.2  # so often one that stops looks whether it has less time by now
# One that waits for a slot for longer goes back to the others; so does one that has waited for so
# much of its lease, since the time until its task is ended as overdue counts from the claim.
UNBEGUN_S, UNBEGUN_PART = 0.5, 0.5
MOST_PROCESSES = 10_000
MEMORY_LOOK_S = 5.0  # so often the memory of the processes is looked at
# How long a process that is replaced, or whose parent died, may go on with what it runs; and one
# that has run its `max_tasks`. What has not ended by then is given back.
DRAIN_S, WORN_OUT_S = 30.0, 600.0
# Beyond the time to finish: to give back what has not been finished, and to send the last alerts.
GIVE_BACK_S, LAST_ALERTS_S = 5.0, 2.0

# What a worker and its processes share: when all must have ended, on the monotonic clock, which is
# the same for all processes; and whether one of them had to give something back by then.
_ENDING = struct.Struct("d?")
_NO_LIMITS = {"slots": None, "rate": None, "timeout": None}


class Worker(Hookable):
    """Runs tasks of a queue in `concurrency` threads, each task under a lease.

    `handler` gets every task that has no handler of its own, as a `Task` that also has `cancelled`
    and `lease_lost`. A worker that dies leaves its tasks to the others when their leases end.

    `modules` are registered as by `register_module`. With `capture_logs`, what the logging module
    is told in the thread of a running handler is kept in the history of its task, as lines of
    `context.log` always are. `alerts` tells people what goes wrong.

    With `processes`, `start` makes so many processes that each have `concurrency` threads, under a
    parent that replaces one that ends. A process is replaced after `max_tasks` tasks, or when it
    has taken more than `max_memory` bytes; before that it finishes what it runs, for up to ten
    minutes or half a minute. They are copies of this process, so start them before other threads;
    what they count is added up in the metrics that this process serves (`serve_metrics`), and each
    has a `worker_id` of its own: with ":0", ":1" and so on at its end.
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
        capture_logs: bool = False,
        modules: Iterable[str] = (),
        alerts: Alerts | None = None,
        processes: int | None = None,
        max_tasks: int | None = None,
        max_memory: int | None = None,
    ) -> None:
        """Raises ConfigurationError naming the argument. Opens no connection."""
        if not isinstance(queue, TaskQueue):
            raise ConfigurationError(f"queue must be a TaskQueue, not {kind_of(queue)}")
        self.queue = queue
        self.concurrency = check_count(
            concurrency, "concurrency", ConfigurationError, least=1, most=FINISH_CHUNK
        )
        self.lease = check_seconds(lease, "lease", ConfigurationError, least=0.1, most=86_400)
        self._given_id = worker_id
        self._max_tasks = _check_restarts(processes, max_tasks, max_memory)
        _check_worker_id(worker_id, processes)
        if not isinstance(capture_logs, bool):
            raise ConfigurationError(
                f"capture_logs must be True or False, not {shown(capture_logs)}"
            )
        self.capture_logs = capture_logs
        self._handlers = Handlers(handler)
        self._hooks = Hooks()
        if alerts is not None and not isinstance(alerts, Alerts):
            raise ConfigurationError(f"alerts must be an Alerts, not {kind_of(alerts)}")
        self._alerts = alerts or Alerts()
        self.registry = REGISTRY if registry is None else registry
        self._executor = Executor(
            queue, self._handlers, self._hooks, worker_metrics(registry), self._alerts
        )
        self._group: ProcessGroup | None = None
        self._processes = processes or 0
        self._tally: Tally | None = None
        if processes is not None:
            self._ending = mmap.mmap(-1, _ENDING.size)
            self._set_ending(math.inf)
            self._group = ProcessGroup(
                self._serve,
                processes,
                name="worker",
                max_memory=max_memory,
                grace=DRAIN_S + GIVE_BACK_S,
                memory_interval=MEMORY_LOOK_S,
            )
        for module in check_items(modules, "modules", "names of modules", ConfigurationError):
            self.register_module(module)
        self._begin_life()
        _workers.add(self)

    def _begin_life(self) -> None:
        """Be a worker that has not run: in the constructor, and in a child after a fork.

        There the threads are gone, the lock may be held for good, and the name is the parent's.
        """
        self.worker_id = _new_worker_id() if self._given_id is None else self._given_id
        # Re-entrant: a signal handler may stop what the main thread just starts or stops. Held
        # until all has ended: whoever starts or stops it meanwhile waits for that.
        self._life = threading.RLock()
        self._pool: _Pool | None = None
        self._last_failure: str | None = None  # of a pool that is gone
        self._is_told = False  # that the supervisor of its processes has died
        self._presence = self._new_presence()  # of `run_once`; threads have one of their own

    # --- handlers ---------------------------------------------------------------------------------

    def task(
        self, name: str, **options: Unpack[HandlerOptions]
    ) -> Callable[[Callable[P, R]], RegisteredTask[P, R]]:
        """Register a function, `async def` or class with a method `handle` for tasks of a name.

        It gets the payload, or the payload and a `TaskContext`. What it returns is the result. The
        decorated name can be called as before, and has `push`, `delay`, `at`, `options` to enqueue
        tasks, and `before`, `then`, `catch`, `finally_` to attach hooks.

        retries, backoff, backoff_cap, backoff_multiplier, jitter: when it raises, the task is
            offered again up to `retries` times (5), after `backoff` seconds (2) that are multiplied
            by `backoff_multiplier` (2) each time, up to `backoff_cap` (60), with jitter "full" or
            "none"; or after a list of delays, which are exact unless jitter is "full". Then it goes
            to the dead letters. `Retry` and `Discard` decide themselves. A task's own policy wins.
        timeout: after so many seconds `TimedOut` is raised inside it. Code that does not return to
            Python, or catches it, goes on in its slot: see `isolation`.
        slots, rate: how many run at a time (0: any number), and begin per second, over all workers.
        when, skip: one callable or several, called with (payload, context) or (payload). The task
            runs if all of `when` and none of `skip` say yes; otherwise it is finished with the
            result {"skipped": name of the filter}, and no hook is called. One that raises has
            failed the run.
        before, then, catch, finally_: hooks, one or several; see `Hookable`.
        isolation: "thread", or "process" to run each task in a process of its own, which is killed
            at the time-out, on cancel and when the lease is lost. The handler must stand at the
            top level of a module, its hooks and filters run in the worker. See `isolation`.

        Raises ConfigurationError naming the value.
        """
        settings = HandlerSettings.create(**options)

        def register(target: Callable[P, R]) -> RegisteredTask[P, R]:
            return self._register(name, target, settings)

        return register

    def register(
        self, name: str, target: Callable[P, R], **options: Unpack[HandlerOptions]
    ) -> RegisteredTask[P, R]:
        """The same as `task`, for what is defined elsewhere."""
        return self._register(name, target, HandlerSettings.create(**options))

    def register_module(self, module: str) -> list[str]:
        """Import a module and register its handlers; the names of their tasks.

        Each class that is defined there and has a method `handle` handles the tasks of its dotted
        path, such as `myapp.jobs.SendReport`; not abstract ones and those whose name begins with an
        underscore. Its attributes retries, backoff, backoff_cap, backoff_multiplier, jitter,
        timeout, slots, rate and isolation are options, where it has them. Nothing is ever imported
        because a task names it.
        Raises ConfigurationError if the module cannot be imported, has no such class, or one has an
        attribute that is no such option.
        """
        registered = []
        for name, (target, options) in handler_classes(module).items():
            try:
                self.register(name, target, **options)
            except ConfigurationError as error:
                raise ConfigurationError(f"class {name}: {error}") from None
            registered.append(name)
        return registered

    def _register(
        self, name: str, target: Callable[P, R], settings: HandlerSettings
    ) -> RegisteredTask[P, R]:
        target = unwrapped(target)
        handler = Handler(name, target, settings)
        check_limits(**{**_NO_LIMITS, **settings.limits})
        if settings.isolated:
            check_isolated(target)
        self._handlers.add(handler)
        return RegisteredTask(self.queue, handler, target)

    def handler_limits(self) -> dict[str, dict[str, float | None]]:
        """The slots, rate and timeout of each task name that has any of them."""
        limits = {handler.name: handler.settings.limits for handler in self._handlers.named()}
        return {name: limit for name, limit in limits.items() if limit}

    def _facts(self) -> Facts:
        declared = self.handler_limits()
        return Facts(
            worker_id=self.worker_id,
            slots=self.concurrency,
            limits={
                handler.name: check_limits(**{**_NO_LIMITS, **declared.get(handler.name, {})})
                for handler in self._handlers.named()
            },
            takes_any=self._handlers.takes_any,
            http={
                handler.name: policy
                for handler in self._handlers.named()
                if (policy := _http_policy(handler.target)) is not None
            },
        )

    # --- without threads of its own ---------------------------------------------------------------

    def run_once(self) -> int:
        """Run what is ready now, at most `concurrency` tasks, in this thread; how many.

        None after somebody has asked this worker to drain (`WorkerStore.drain`), until `stop`.
        """
        self._check_isolation()
        self._presence.beat(())
        done = 0
        if self._presence.is_draining:
            return done
        with self._slot() as slot:
            while done < self.concurrency:
                choice = self._presence.choice
                claims = self.queue.claim(
                    self.worker_id, 1, self.lease, names=choice.names, avoid=choice.avoid
                )
                if not claims:
                    break
                run = self._new_run(claims[0], slot.keeper)
                slot.keeper.add([run])
                result = self._executor.execute(run, slot)
                slot.keeper.remove([run])
                if result is not None:
                    self._executor.recorded([run], self.queue.finish_many([result]))
                done += 1
        return done

    def run_until_empty(self) -> int:
        """Run tasks in this thread until none is ready; how many. Delayed ones are left."""
        total = 0
        while count := self.run_once():
            total += count
        return total

    @contextmanager
    def _slot(self) -> Iterator[Slot]:
        capture = self._new_capture()
        keeper = self._new_keeper(self._presence)
        try:
            with Stage() as stage:
                yield Slot(stage=stage, keeper=keeper, capture=capture)
        finally:
            keeper.stop()
            if capture is not None:
                capture.detach()

    @property
    def alerts(self) -> Alerts:
        """Whom it tells what goes wrong; an Alerts without recipients if none was given."""
        return self._alerts

    # --- with threads -----------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, or the processes; nothing happens if they run already.

        Waits for a `stop` that another thread has begun.
        """
        self._check_isolation()
        if self._group is not None:
            started = self._start_group(self._group)
        else:
            started = self._start_pool(math.inf)
        if started:
            self._is_told = False
            _log("worker_started", worker=self.worker_id, slots=self.concurrency)

    def stop(self, timeout: float = 30.0) -> bool:
        """Take no more tasks, wait for those that run, and end; True if all ended in time.

        False also if the worker had failed before: see `state`. What has not ended within `timeout`
        seconds is given back for others to run; its handler sees `context.cancelled`, and what it
        does afterwards is not recorded. If another thread stops it already, this waits for that.
        """
        timeout = check_seconds(timeout, "timeout", ConfigurationError)
        deadline = time.monotonic() + timeout
        failure = self._failure()
        if self._group is not None and failure is not None and not self._is_told:
            self._is_told = True
            _log("worker_broken", logging.ERROR, worker=self.worker_id, reason=failure)
        ended = self._group is None or self._stop_group(self._group, timeout)
        ended = self._stop_pool(deadline) and ended
        _log("worker_stopped", worker=self.worker_id, in_time=ended)
        return ended and failure is None

    def forever(
        self, timeout: float = 30.0, *, started: Callable[[], object] = lambda: None
    ) -> bool:
        """Start, and go on until SIGINT, SIGTERM or `stop`; then stop, as `stop(timeout)` does.

        `started` is called when it has started and heeds these signals: what it raises stops the
        worker, and is raised.
        It also returns when the worker has ended because it was asked to drain, and False when it
        has failed: when one of its threads, or the supervisor of its processes, is gone.
        In the main thread only: it takes these two signals over until it returns. Raises
        ConfigurationError elsewhere.
        """
        check_seconds(timeout, "timeout", ConfigurationError)
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("forever() waits for signals: call it in the main thread")
        awake, waker = socket.socketpair()
        waker.setblocking(False)
        # The file first: a signal that finds the handlers must find it too.
        written_to = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        before = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            self.start()
            try:
                started()
            except BaseException:
                self.stop(timeout)
                raise
            # A signal writes its number; other ones may be on their way to other handlers.
            awake.settimeout(1.0)
            while self._is_alive():
                with suppress(TimeoutError):
                    if set(awake.recv(16)) & before.keys():
                        break
            return self.stop(timeout)
        finally:
            signal.set_wakeup_fd(written_to)
            for number, handler in before.items():  # None: it was not Python's, and is lost
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
            awake.close()
            waker.close()

    @property
    def state(self) -> str:
        """What became of `start`: "running", "draining", "stopped" or "failed".

        It drains after somebody has asked it to (`WorkerStore.drain`): it takes no more tasks, and
        ends when it has finished those that run. A worker with processes is "running" until the
        last of them has ended. One that has
        failed has lost a thread that it cannot do without, or the supervisor of its processes, and
        ends by itself; it can be started again.
        """
        if self._failure() is not None:
            return "failed"
        if not self._is_alive():
            return "stopped"
        pool = self._pool
        return "draining" if pool is not None and pool.is_draining() else "running"

    def _failure(self) -> str | None:
        """Why the worker has ended although nobody asked it to."""
        if self._group is not None and self._group.has_died():
            return "the supervisor of its processes has died"
        pool = self._pool
        return self._last_failure if pool is None else pool.failure

    def _is_alive(self) -> bool:
        if self._group is not None:
            return self._group.is_alive()
        pool = self._pool
        return pool is not None and pool.is_alive()

    def _start_pool(self, most: float, ended: Callable[[], None] = lambda: None) -> bool:
        """Start the threads; False if they run already."""
        with self._life:
            if self._pool is not None and self._pool.is_alive():
                return False
            self._last_failure = None
            self._pool = _Pool(self, most, ended)
            self._pool.start()
            return True

    def _stop_pool(self, deadline: float) -> bool:
        with self._life:
            pool, self._pool = self._pool, None
            in_time = True if pool is None else pool.stop(lambda: min(deadline, self._deadline()))
            self._last_failure = self._last_failure if pool is None else pool.failure
            presence, self._presence = self._presence, self._new_presence()
            _leave(presence)
            return in_time

    # --- with processes ---------------------------------------------------------------------------

    def _start_group(self, group: ProcessGroup) -> bool:
        """Start the processes; False if they run already."""
        if self._tally is None or not self._tally.is_ours:
            self._tally = Tally(self._processes, self.registry)
        before = group.supervisor_pid
        group.start()
        return group.supervisor_pid != before

    def _stop_group(self, group: ProcessGroup, timeout: float) -> bool:
        # What they have not finished by then they give back, if that can be done in time.
        self._set_ending(min(self._deadline(), time.monotonic() + timeout))
        try:
            killed = not group.stop(timeout + GIVE_BACK_S)
            return not killed and not _ENDING.unpack(self._ending[:])[1]
        finally:
            self._set_ending(math.inf)

    def _set_ending(self, deadline: float) -> None:
        self._ending[:] = _ENDING.pack(deadline, False)

    def _deadline(self) -> float:
        """When `stop` wants all processes to have ended."""
        return math.inf if self._group is None else float(_ENDING.unpack(self._ending[:])[0])

    def _serve(self, stop: threading.Event, index: int) -> bool:
        """Be one of the processes, until it is to end; True if it is not to be replaced then."""
        if self._tally is None:
            return self._serve_tasks(stop, index)
        with self._tally.reporting(index):
            return self._serve_tasks(stop, index)

    def _serve_tasks(self, stop: threading.Event, index: int) -> bool:
        if self._given_id is not None:
            self.worker_id = f"{self._given_id}:{index}"
        self._start_pool(math.inf if self._max_tasks is None else self._max_tasks, stop.set)
        wait_for(stop)
        pool = self._pool
        if not self._stop_pool(time.monotonic() + DRAIN_S) and self._deadline() < math.inf:
            self._ending[-1] = True
        self._alerts.close(LAST_ALERTS_S)
        if self._last_failure is not None:
            raise FairQueueError(self._last_failure)  # replaced as one that has crashed
        return pool is not None and pool.is_draining()

    # --- what both need ---------------------------------------------------------------------------

    def _check_isolation(self) -> None:
        """Raises ConfigurationError where a handler could not run in a process of its own."""
        check_not_starting()
        for handler in self._handlers.named():
            if handler.settings.isolated:
                check_findable(handler)

    def _new_presence(self, on_drain: Callable[[], None] = lambda: None) -> Presence:
        return Presence(self.queue, self._facts, self._alerts, on_drain)

    def _new_keeper(
        self, presence: Presence, on_death: Callable[[str], None] = lambda reason: None
    ) -> Keeper:
        return Keeper(self.queue, self.lease, self._executor.stuck_gauge, presence, on_death)

    def _new_capture(self) -> LogCapture | None:
        if not self.capture_logs:
            return None
        capture = LogCapture()
        capture.attach()
        return capture

    def _new_run(self, claim: Claim, keeper: Keeper) -> Run:
        beat = functools.partial(keeper.beat, claim)
        context = TaskContext(claim.task, claim.attempt, beat=beat)
        return Run(claim, context, self._handlers.find(claim.task))


class _Pool:
    """The threads of a started worker: one that claims and records, and one for each slot.

    They run `most` tasks and end by themselves then, as they do when the worker was asked to drain;
    `ended` is called when they take no more.
    """

    def __init__(self, worker: Worker, most: float, ended: Callable[[], None]) -> None:
        self._worker = worker
        self._ended = ended
        self._executor = worker._executor
        self._listener: Listener = worker.queue.link.listener("wake")
        self._alerts = worker._alerts
        self._presence = worker._new_presence(self._listener.nudge)
        self._capture = worker._new_capture()
        self._talking = threading.Lock()  # while a claim is on its way
        self._work = threading.Condition()
        # All of these under _work. A run is held from its claim until its end is recorded.
        self._held: set[Run] = set()
        self._waiting: deque[Run] = deque()
        self._done: deque[tuple[Run, Done]] = deque()
        self._usual_s = QUICK_S  # nothing is claimed ahead before tasks have shown to be quick
        self._stopping = False
        self._over = False
        self._left = most  # so many more runs may end here
        self.failure: str | None = None  # why it has ended, or will soon, although nobody asked
        self._unbegun_s = min(UNBEGUN_S, UNBEGUN_PART * worker.lease)
        self._patience = math.inf  # when what still runs is not waited for any more
        self._threads = [
            threading.Thread(target=self._slot, name=f"fairqueue-slot-{i}", daemon=True)
            for i in range(worker.concurrency)
        ]
        self._dispatcher = threading.Thread(
            target=self._dispatch, name="fairqueue-worker", daemon=True
        )
        self._keeper = worker._new_keeper(self._presence, self._fail)  # last: it begins at once

    def start(self) -> None:
        for thread in (*self._threads, self._dispatcher):
            thread.start()

    def is_alive(self) -> bool:
        return self._dispatcher.is_alive()

    def is_draining(self) -> bool:
        """Whether somebody has asked the worker to end."""
        return self._presence.is_draining

    def stop(self, deadline: Callable[[], float]) -> bool:
        """Drain; True if everything ended in time. The deadline may come closer meanwhile."""
        self._take_no_more()
        self._listener.nudge()
        while self._dispatcher.is_alive() and (left := deadline() - time.monotonic()) > 0:
            self._dispatcher.join(min(left, LOOK_S))
        in_time = not self._give_back_held()
        self._end()
        return in_time

    def _take_no_more(self) -> None:
        with self._work:
            self._stopping = True
            # What no slot has begun is given back at once.
            unbegun = list(self._waiting)
            self._waiting.clear()
        self._give_back(unbegun)

    def _fail(self, reason: str) -> None:
        """One of the threads is gone: end the worker, which would only look alive without it.

        What runs may end; not for longer than its leases hold, since nobody may be left to extend
        them.
        """
        if self.failure is not None:
            return
        self.failure = reason
        _log("worker_broken", logging.ERROR, worker=self._worker.worker_id, reason=reason)
        with self._work:
            self._patience = time.monotonic() + min(DRAIN_S, self._worker.lease)
        self._take_no_more()
        _leave(self._presence)
        self._listener.nudge()

    def _end(self) -> None:
        """End the threads, and say that the worker is gone. May be called again."""
        with self._work:
            self._over = True
            self._work.notify_all()
        self._listener.nudge()
        self._keeper.stop()
        _leave(self._presence)
        if self._capture is not None:
            self._capture.detach()

    def _give_back_held(self) -> bool:
        """Give back what has not ended; whether there was any."""
        if not self._dispatcher.is_alive() and not self._held:
            return False
        # A claim that is on its way would take again what is given back here.
        quiet = self._talking.acquire(timeout=QUIET_S)
        try:
            with self._work:
                left = list(self._held)
            self._give_back(left)
        finally:
            if quiet:
                self._talking.release()
        return True

    def _give_back(self, runs: list[Run]) -> None:
        """Release runs for others; once Redis cannot be told, the leases end by themselves."""
        told = True
        for run in runs:
            if told:
                word = self._executor.end(self._worker.queue.release, run.claim)
                told = word != "not_recorded"
            # After that: a run that is killed now must not be recorded as one that has failed.
            run.context.stop()
            self._forget(run, has_run=False)

    def _forget(self, run: Run, *, has_run: bool) -> None:
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
                self._give_back_held()
            if self.failure is not None or self.is_draining():
                self._end()  # nobody may ever call `stop`
            self._ended()

    def _take_turns(self) -> None:
        backoff = FIRST_BACKOFF_S
        while not self._is_drained():
            try:
                self._turn()
                backoff = FIRST_BACKOFF_S
            except Exception as error:  # Redis is away, or worse: go on when it is back
                if isinstance(error, RedisUnavailable):
                    self._alerts.redis_failed()
                _log(
                    "worker_failed",
                    logging.WARNING,
                    worker=self._worker.worker_id,
                    queue=self._worker.queue.name,
                    error=error_line(error),
                )
                time.sleep(backoff * random.uniform(0.5, 1.0))  # noqa: S311 - jitter
                backoff = min(2 * backoff, LONGEST_BACKOFF_S)

    def _is_drained(self) -> bool:
        with self._work:
            if self._stopping and (not self._held or time.monotonic() >= self._patience):
                return True
            return self._over

    def _turn(self) -> None:
        """Record what is done, take as many as there is room for, wait if there was nothing."""
        self._presence.begin()
        if self.is_draining():
            self._take_no_more()
            if self._is_drained():
                return
        with self._talking:
            with self._work:
                done = list(self._done)[:FINISH_CHUNK]
                room = 0 if self._stopping else self._room(len(done))
            if done or room:
                claims, hint, wake = self._talk(done, room)
        if not done and not room:
            self._listener.wait_for_nudge(self._return_unbegun())
        elif not done and not claims:
            self._listener.listen_to(self._worker.queue.keys[wake])
            self._listener.wait(min(hint, self._return_unbegun()))

    def _talk(self, done: list[tuple[Run, Done]], room: int) -> Answer:
        choice = self._presence.choice
        words, answer = self._worker.queue.exchange(
            [each for _, each in done],
            self._worker.worker_id,
            room,
            self._worker.lease,
            names=choice.names,
            avoid=choice.avoid,
        )
        self._alerts.redis_ok()
        self._recorded([run for run, _ in done], words)
        if answer.claims:
            self._hand_out([self._worker._new_run(claim, self._keeper) for claim in answer.claims])
        return answer

    def _room(self, done: int) -> int:
        """How many may be claimed while so many are recorded as done.

        More than there are slots while tasks take no time at all, but never one more than is to be
        run here.
        """
        ahead = AHEAD if self._usual_s < QUICK_S else 0
        room = self._worker.concurrency + ahead + done - len(self._held)
        return max(0, int(min(room, self._left - len(self._held))))

    def _return_unbegun(self) -> float:
        """Give back what waits for a slot for too long; how many seconds until the next look."""
        with self._work:
            if not self._waiting:
                return LONGEST_WAIT_S
            wait = self._waiting[0].since + self._unbegun_s - time.monotonic()
            late = list(self._waiting) if wait <= 0 else []
            if late:
                self._waiting.clear()
                self._usual_s = QUICK_S  # they are not so quick any more
        self._give_back(late)
        return max(0.001, wait)

    def _recorded(self, runs: list[Run], words: list[str]) -> None:
        self._executor.recorded(runs, words)
        with self._work:
            for run in runs:
                self._done.popleft()
                self._held.discard(run)
            self._left -= len(runs)
        self._keeper.remove(runs)

    def _hand_out(self, runs: list[Run]) -> None:
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
        try:
            keep_going(self._run_tasks, lambda: self._over)
        finally:
            if not self._over:
                self._fail(f"{threading.current_thread().name} has ended")

    def _run_tasks(self) -> None:
        with Stage() as stage:
            slot = Slot(stage=stage, keeper=self._keeper, capture=self._capture)
            while (run := self._next_run()) is not None:
                self._run_task(run, slot)

    def _run_task(self, run: Run, slot: Slot) -> None:
        began = time.monotonic()
        result = None
        try:
            result = self._executor.execute(run, slot)
        except Exception as error:
            said = about(run.claim) | {"error": error_line(error)}
            _log("slot_failed", logging.ERROR, exc_info=True, **said)
        finally:
            # Whatever was raised: then the lease is no longer kept, and the task is offered again
            # when that has ended.
            seconds = time.monotonic() - began
            with self._work:
                self._usual_s += (seconds - self._usual_s) / 8
                recordable = result is not None and run in self._held
                if result is not None and recordable:
                    self._done.append((run, result))
            if not recordable:
                self._forget(run, has_run=True)
            self._listener.nudge()

    def _next_run(self) -> Run | None:
        with self._work:
            while not self._waiting:
                if self._over:
                    return None
                self._work.wait()
            run = self._waiting.popleft()
            if not self._waiting and self._left <= len(self._held):
                # That was the last one to begin here.
                self._stopping, self._patience = True, time.monotonic() + WORN_OUT_S
            return run


def _http_policy(target: object) -> dict[str, object] | None:
    """Where the tasks of a handler may go, if it is one of an `HttpTasks`."""
    policy = getattr(getattr(target, "__self__", None), "http_policy", None)
    return policy if isinstance(policy, dict) else None


def _new_worker_id() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{new_id()[:6]}"


def _check_worker_id(worker_id: object, processes: int | None) -> None:
    if worker_id is not None:
        check_name(worker_id, "worker_id", ConfigurationError)
        if processes is not None:
            check_name(f"{worker_id}:{processes - 1}", "worker_id", ConfigurationError)


def _leave(presence: Presence) -> None:
    with suppress(FairQueueError):  # it counts as gone after a while
        presence.leave()


def _check_restarts(processes: object, max_tasks: object, max_memory: object) -> int | None:
    """Raises ConfigurationError where there would be no process to replace."""
    for value, name in ((max_tasks, "max_tasks"), (max_memory, "max_memory")):
        if value is not None and processes is None:
            raise ConfigurationError(
                f"{name} {shown(value)} needs processes that can be replaced: pass processes=1 or "
                "more"
            )
    if processes is not None:
        check_count(processes, "processes", ConfigurationError, least=1, most=MOST_PROCESSES)
    if max_tasks is None:
        return None
    return check_count(max_tasks, "max_tasks", ConfigurationError, least=1)


# Weak: a worker that nobody uses any more is not kept for this.
_workers: "weakref.WeakSet[Worker]" = weakref.WeakSet()


def _begin_in_child() -> None:
    for worker in list(_workers):
        worker._begin_life()


os.register_at_fork(after_in_child=_begin_in_child)
