"""Take tasks from a queue and run them: in the caller's thread, in threads, or in processes."""

import logging
import math
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar, Unpack

from prometheus_client import REGISTRY, CollectorRegistry

from fairqueue.alerts import Alerts
from fairqueue.errors import ConfigurationError, FairQueueError, kind_of, shown
from fairqueue.logs import event_logger
from fairqueue.metrics.collectors import worker_metrics
from fairqueue.metrics.processes import Tally
from fairqueue.models import Task, new_id
from fairqueue.queue.claim import DEFAULT_POOLS, check_pools
from fairqueue.queue.end import FINISH_CHUNK
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.settings import check_limits
from fairqueue.runtime.fork import reset_in_child
from fairqueue.runtime.processes import ProcessGroup, wait_for
from fairqueue.runtime.signals import StopSignals
from fairqueue.validation import check_count, check_items, check_name, check_seconds
from fairqueue.worker.batches import batch_size, units
from fairqueue.worker.core import NO_LIMITS, WorkerCore
from fairqueue.worker.dispatch import RegisteredTask, unwrapped
from fairqueue.worker.event_loop import Runner
from fairqueue.worker.executor import Executor, Slot
from fairqueue.worker.handlers import (
    Handler,
    HandlerOptions,
    Handlers,
    HandlerSettings,
    handler_classes,
)
from fairqueue.worker.hooks import Hookable, Hooks
from fairqueue.worker.isolation import check_findable, check_isolated, check_not_starting
from fairqueue.worker.lease_keeper import ActiveRun
from fairqueue.worker.pool import DRAIN_S, ThreadPool, leave

_log = event_logger("fairqueue.worker")

P = ParamSpec("P")
R = TypeVar("R")

MOST_PROCESSES = 10_000
MEMORY_CHECK_S = 5.0  # how often the memory of the processes is checked
# Seconds beyond the time to finish: to release unfinished tasks, and to send the last alerts.
RELEASE_S, LAST_ALERTS_S = 5.0, 2.0

# What a worker and its processes share: the deadline for all to end, on the monotonic clock, which
# is the same for all processes; and whether any process had to release a task by then.
_ENDING = struct.Struct("d?")


class Worker(Hookable):
    """Runs tasks of a queue in `concurrency` threads, each task under a lease.

    `handler` gets every task that has no handler of its own, as a `Task` that also has `cancelled`
    and `lease_lost`. If a worker dies, other workers take its tasks when their leases expire.

    Only tasks of `pools` are taken; from several, users are served as `TaskQueue.claim` says.

    `modules` are registered as by `register_module`. With `capture_logs`, records logged in the
    thread of a running handler are kept in the history of its task, as lines of `context.log`
    always are. `alerts` sends notifications about failures.

    With `processes`, `start` starts that many processes with `concurrency` threads each, under a
    supervisor that replaces a process that ends. A process is also replaced after `max_tasks`
    tasks, or when it uses more than `max_memory` bytes; it may first finish its running tasks, for
    up to ten minutes or half a minute. The processes are forks of this one, so start them before
    other threads. Their metrics are added up in those that this process exposes (`serve_metrics`),
    and each has its own `worker_id`, which ends in ":0", ":1" and so on.
    """

    def __init__(
        self,
        queue: TaskQueue,
        handler: Callable[[Task], Any] | None = None,
        concurrency: int = 8,
        lease: float = 30.0,
        worker_id: str | None = None,
        *,
        pools: Iterable[str] = DEFAULT_POOLS,
        registry: CollectorRegistry | None = None,
        capture_logs: bool = False,
        modules: Iterable[str] = (),
        alerts: Alerts | None = None,
        processes: int | None = None,
        max_tasks: int | None = None,
        max_memory: int | None = None,
    ) -> None:
        """Open no connection. Raises ConfigurationError naming the argument."""
        if not isinstance(queue, TaskQueue):
            raise ConfigurationError(f"queue must be a TaskQueue, not {kind_of(queue)}")
        self.queue = queue
        self.concurrency = check_count(
            concurrency, "concurrency", ConfigurationError, least=1, most=FINISH_CHUNK
        )
        self.pools = check_pools(pools, ConfigurationError)
        self.lease = check_seconds(lease, "lease", ConfigurationError, least=0.1, most=86_400)
        self._given_id = worker_id
        self._max_tasks = _check_restarts(processes, max_tasks, max_memory)
        _check_worker_id(worker_id, processes)
        _check_types(capture_logs, alerts)
        self.capture_logs = capture_logs
        self._handlers = Handlers(handler)
        self._hooks = Hooks()
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
                grace=DRAIN_S + RELEASE_S,
                memory_interval=MEMORY_CHECK_S,
            )
        for module in check_items(modules, "modules", "names of modules", ConfigurationError):
            self.register_module(module)
        self._reset()
        reset_in_child(self, Worker._reset)

    def _reset(self) -> None:
        """Become a worker that has not run: in the constructor, and in a forked child.

        In a child the threads are gone, the lock may be held, and the id is the parent's.
        """
        self._set_id(_new_worker_id() if self._given_id is None else self._given_id)
        # Re-entrant: a signal handler may stop what the main thread is starting or stopping. Held
        # until everything has ended, so that a `start` or `stop` meanwhile waits.
        self._lifecycle = threading.RLock()
        self._pool: ThreadPool | None = None
        self._last_failure: str | None = None  # of a pool that is gone
        self._reported = False  # that the supervisor of its processes has died

    def _set_id(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self._core = WorkerCore(
            queue=self.queue,
            worker_id=worker_id,
            concurrency=self.concurrency,
            pools=self.pools,
            lease=self.lease,
            capture_logs=self.capture_logs,
            handlers=self._handlers,
            executor=self._executor,
            alerts=self._alerts,
        )
        self._heartbeat = self._core.new_heartbeat()  # of `run_once`; a pool has its own

    # --- handlers ---------------------------------------------------------------------------------

    def task(
        self, name: str, **options: Unpack[HandlerOptions]
    ) -> Callable[[Callable[P, R]], RegisteredTask[P, R]]:
        """Register a function, `async def` or class with a method `handle` for tasks of a name.

        It gets the payload, or the payload and a `TaskContext`. Its return value is the result. The
        decorated name can be called as before, and has `push`, `delay`, `at`, `options` to enqueue
        tasks, and `before`, `then`, `catch`, `finally_` to attach hooks.

        retries, backoff, backoff_cap, backoff_multiplier, jitter: when it raises, the task is
            retried up to `retries` times (5), after `backoff` seconds (2) that are multiplied by
            `backoff_multiplier` (2) each time, up to `backoff_cap` (60), with jitter "full" or
            "none"; or after a list of delays, which are exact unless jitter is "full". Then it goes
            to the dead letters. `Retry` and `Discard` override this. A task's own policy wins.
        timeout: seconds after which `TimedOut` is raised inside it. Code that does not return to
            Python, or that catches it, keeps its slot: see `isolation`.
        slots, rate: how many run at a time (0: any number), and start per second, over all workers.
        when, skip: one callable or several, called with (payload, context) or (payload). The task
            runs if all of `when` return true and all of `skip` return false; otherwise it is
            finished with the result {"skipped": name of the filter}, and no hook is called. If one
            raises, the run has failed.
        before, then, catch, finally_: hooks, one or several; see `Hookable`.
        pool: where the tasks go that `push` enqueues, unless `options(pool=...)` says otherwise. A
            worker takes the tasks of its own `pools`, whatever those of its handlers are.
        batch: the handler gets a list of up to so many payloads in one call, or that list and the
            list of their contexts. It returns None, or a list with a result for each task, or the
            exception with which it failed; what the handler raises, all tasks have failed with.
            Filters, hooks, retries and records are those of each task.
        batch_wait: seconds that a batch waits for more tasks while it is not complete (0).
        batch_by: "user" or "tenant" for calls that have tasks of one user or tenant only.
        isolation: "thread", or "process" to run each task in its own process, which is killed at
            the time-out, on cancel and when the lease is lost. The handler must be defined at the
            top level of a module; its hooks and filters run in the worker. See `isolation`.

        Raises ConfigurationError naming the value.
        """
        settings = HandlerSettings.create(**options)

        def register(target: Callable[P, R]) -> RegisteredTask[P, R]:
            return self._register(name, target, settings)

        return register

    def register(
        self, name: str, target: Callable[P, R], **options: Unpack[HandlerOptions]
    ) -> RegisteredTask[P, R]:
        """Register a callable that is defined elsewhere, as `task` does."""
        return self._register(name, target, HandlerSettings.create(**options))

    def register_module(self, module: str) -> list[str]:
        """Import a module and register its handlers; return the names of their tasks.

        Each class that is defined there and has a method `handle` handles the tasks of its dotted
        path, such as `myapp.jobs.SendReport`. Abstract classes and those whose name begins with an
        underscore are left out. The attributes retries, backoff, backoff_cap, backoff_multiplier,
        jitter, timeout, slots, rate, pool, batch, batch_wait, batch_by and isolation of a class are
        options. No module is ever
        imported because a task names it.
        Raises ConfigurationError if the module cannot be imported, has no such class, or if an
        attribute is not a valid option.
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
        check_limits(**{**NO_LIMITS, **settings.limits})
        if settings.isolated:
            check_isolated(target)
        self._handlers.add(handler)
        return RegisteredTask(self.queue, handler, target)

    def handler_limits(self) -> dict[str, dict[str, float | None]]:
        """Return the slots, rate and timeout of each task name that has any of them."""
        limits = {handler.name: handler.settings.limits for handler in self._handlers.named()}
        return {name: limit for name, limit in limits.items() if limit}

    @property
    def alerts(self) -> Alerts:
        """The alerts of this worker; without recipients if none were given."""
        return self._alerts

    def _check_isolation(self) -> None:
        """Raise ConfigurationError if a handler could not run in its own process."""
        check_not_starting()
        for handler in self._handlers.named():
            if handler.settings.isolated:
                check_findable(handler)

    # --- in the caller's thread -------------------------------------------------------------------

    def run_once(self) -> int:
        """Run up to `concurrency` tasks or batches that are ready now; return how many tasks.

        They run in this thread, one after the other, and batches do not wait for more tasks. Runs
        none after the worker was asked to drain (`WorkerStore.drain`), until `stop`.
        """
        self._check_isolation()
        self._heartbeat.beat(())
        done = calls = 0
        if self._heartbeat.is_draining:
            return done
        with self._slot() as slot:
            while calls < self.concurrency:
                wanted = self._heartbeat.claim_filter
                claims = self.queue.claim(
                    self.worker_id,
                    1,
                    self.lease,
                    names=wanted.names,
                    avoid=wanted.avoid,
                    pools=wanted.pools,
                )
                if not claims:
                    break
                run = self._core.new_run(claims[0], slot.keeper)
                done += self._run_now([run, *self._rest_of_batch(run, slot)], slot)
                calls += 1
        return done

    def _rest_of_batch(self, run: ActiveRun, slot: Slot) -> list[ActiveRun]:
        """Claim what a batch takes besides its first task."""
        most = batch_size(run) - 1
        if most < 1:
            return []
        name, pools = run.claim.task.name, self.pools
        slot.keeper.add([run])
        claims = self.queue.claim(self.worker_id, most, self.lease, names=[name], pools=pools)
        return [self._core.new_run(claim, slot.keeper) for claim in claims]

    def _run_now(self, runs: list[ActiveRun], slot: Slot) -> int:
        """Run a task or a batch; return the number of tasks."""
        slot.keeper.add(runs)
        for unit in units(runs, time.monotonic()):
            if unit.is_batch:
                ends = self._executor.execute_batch(unit.runs, slot)
            else:
                ends = [self._executor.execute(run, slot) for run in unit.runs]
            slot.keeper.remove(unit.runs)
            found = [
                (run, end) for run, end in zip(unit.runs, ends, strict=True) if end is not None
            ]
            if found:
                words = self.queue.finish_many([end for _, end in found])
                self._executor.recorded([run for run, _ in found], words)
        return len(runs)

    def run_until_empty(self) -> int:
        """Run tasks in this thread until none is ready; return how many. Delayed tasks stay."""
        total = 0
        while count := self.run_once():
            total += count
        return total

    @contextmanager
    def _slot(self) -> Iterator[Slot]:
        capture = self._core.new_log_capture()
        keeper = self._core.new_lease_keeper(self._heartbeat)
        try:
            with Runner() as runner:
                yield Slot(runner=runner, keeper=keeper, capture=capture)
        finally:
            keeper.stop()
            if capture is not None:
                capture.detach()

    # --- start and stop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads, or the processes, unless they run already.

        Waits for a `stop` that another thread has begun.
        """
        self._check_isolation()
        if self._group is not None:
            started = self._start_group(self._group)
        else:
            started = self._start_pool(math.inf)
        if started:
            self._reported = False
            _log("worker_started", worker=self.worker_id, slots=self.concurrency)

    def stop(self, timeout: float = 30.0) -> bool:
        """Claim no more tasks, wait for running ones, and end; True if all ended in time.

        False also if the worker had failed before: see `state`. Tasks that have not ended within
        `timeout` seconds are released for other workers; their handlers see `context.cancelled`,
        and their results are not recorded. If another thread is stopping the worker, this waits.
        """
        timeout = check_seconds(timeout, "timeout", ConfigurationError)
        deadline = time.monotonic() + timeout
        failure = self._failure()
        if self._group is not None and failure is not None and not self._reported:
            self._reported = True
            _log("worker_broken", logging.ERROR, worker=self.worker_id, reason=failure)
        ended = self._group is None or self._stop_group(self._group, timeout)
        ended = self._stop_pool(deadline) and ended
        _log("worker_stopped", worker=self.worker_id, in_time=ended)
        return ended and failure is None

    def forever(
        self, timeout: float = 30.0, *, started: Callable[[], object] = lambda: None
    ) -> bool:
        """Start, wait for SIGINT, SIGTERM or `stop`, then stop as `stop(timeout)` does.

        `started` is called when the worker has started and catches these signals; if it raises, the
        worker is stopped and the error is raised.
        Also returns when the worker has ended because it was asked to drain, and returns False when
        it has failed: when one of its threads, or the supervisor of its processes, is gone.
        It replaces the handlers of these two signals until it returns, so it must be called in the
        main thread. Raises ConfigurationError elsewhere.
        """
        check_seconds(timeout, "timeout", ConfigurationError)
        if threading.current_thread() is not threading.main_thread():
            raise ConfigurationError("forever() waits for signals: call it in the main thread")
        with StopSignals() as signals:
            self.start()
            try:
                started()
            except BaseException:
                self.stop(timeout)
                raise
            while self._is_alive() and not signals.wait(1.0):
                pass
            return self.stop(timeout)

    @property
    def state(self) -> str:
        """The state of a started worker: "running", "draining", "stopped" or "failed".

        A worker drains after it was asked to (`WorkerStore.drain`): it claims no more tasks, and
        ends when the running ones have finished. A worker with processes is "running" until the
        last of them has ended. A failed worker has lost one of its threads, or the supervisor of
        its processes, and ends by itself; it can be started again.
        """
        if self._failure() is not None:
            return "failed"
        if not self._is_alive():
            return "stopped"
        pool = self._pool
        return "draining" if pool is not None and pool.is_draining() else "running"

    def _failure(self) -> str | None:
        """Why the worker has ended without being asked, or None."""
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
        with self._lifecycle:
            if self._pool is not None and self._pool.is_alive():
                return False
            self._last_failure = None
            self._pool = ThreadPool(self._core, most, ended)
            self._pool.start()
            return True

    def _stop_pool(self, deadline: float) -> bool:
        with self._lifecycle:
            pool, self._pool = self._pool, None
            in_time = True
            if pool is not None:
                in_time = pool.stop(lambda: min(deadline, self._deadline()))
                self._last_failure = pool.failure
            heartbeat, self._heartbeat = self._heartbeat, self._core.new_heartbeat()
            leave(heartbeat)
            return in_time

    # --- in processes -----------------------------------------------------------------------------

    def _start_group(self, group: ProcessGroup) -> bool:
        """Start the processes; False if they run already."""
        if self._tally is None or not self._tally.is_ours:
            self._tally = Tally(self._processes, self.registry)
        before = group.supervisor_pid
        group.start()
        return group.supervisor_pid != before

    def _stop_group(self, group: ProcessGroup, timeout: float) -> bool:
        # After the deadline the processes release what they run, if there is time.
        self._set_ending(min(self._deadline(), time.monotonic() + timeout))
        try:
            killed = not group.stop(timeout + RELEASE_S)
            return not killed and not _ENDING.unpack(self._ending[:])[1]
        finally:
            self._set_ending(math.inf)

    def _set_ending(self, deadline: float) -> None:
        self._ending[:] = _ENDING.pack(deadline, False)

    def _deadline(self) -> float:
        """When all processes must have ended, according to `stop`."""
        return math.inf if self._group is None else float(_ENDING.unpack(self._ending[:])[0])

    def _serve(self, stop: threading.Event, index: int) -> bool:
        """Run one of the processes until it is to end; True if it is not to be replaced."""
        with nullcontext() if self._tally is None else self._tally.reporting(index):
            if self._given_id is not None:
                self._set_id(f"{self._given_id}:{index}")
            self._start_pool(math.inf if self._max_tasks is None else self._max_tasks, stop.set)
            wait_for(stop)
            pool = self._pool
            if not self._stop_pool(time.monotonic() + DRAIN_S) and self._deadline() < math.inf:
                self._ending[-1] = True
            self._alerts.close(LAST_ALERTS_S)
            if self._last_failure is not None:
                raise FairQueueError(self._last_failure)  # replaced like a process that crashed
            return pool is not None and pool.is_draining()


def _new_worker_id() -> str:
    return f"{socket.gethostname()}:{os.getpid()}:{new_id()[:6]}"


def _check_worker_id(worker_id: object, processes: int | None) -> None:
    if worker_id is not None:
        check_name(worker_id, "worker_id", ConfigurationError)
        if processes is not None:
            check_name(f"{worker_id}:{processes - 1}", "worker_id", ConfigurationError)


def _check_types(capture_logs: object, alerts: object) -> None:
    if not isinstance(capture_logs, bool):
        raise ConfigurationError(f"capture_logs must be True or False, not {shown(capture_logs)}")
    if alerts is not None and not isinstance(alerts, Alerts):
        raise ConfigurationError(f"alerts must be an Alerts, not {kind_of(alerts)}")


def _check_restarts(processes: object, max_tasks: object, max_memory: object) -> int | None:
    """Check the settings of processes and return `max_tasks`. Raises ConfigurationError."""
    for value, name in ((max_tasks, "max_tasks"), (max_memory, "max_memory")):
        if value is not None and processes is None:
            raise ConfigurationError(
                f"{name} {shown(value)} needs worker processes: pass processes=1 or more"
            )
    if processes is not None:
        check_count(processes, "processes", ConfigurationError, least=1, most=MOST_PROCESSES)
    if max_tasks is None:
        return None
    return check_count(max_tasks, "max_tasks", ConfigurationError, least=1)
