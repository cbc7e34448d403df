"""Run one claimed task: its filters, hooks and handler, and the record of how it ended."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from fairqueue.alerts import Alerts
from fairqueue.errors import FairQueueError, LeaseLost, TimedOut
from fairqueue.logs import error_line, event_logger
from fairqueue.metrics.collectors import WorkerMetrics
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, Report, storable
from fairqueue.retry_policy import RetryPolicy
from fairqueue.worker.context import LogCapture
from fairqueue.worker.event_loop import Runner
from fairqueue.worker.handlers import Discard, Handler, Handlers, Retry
from fairqueue.worker.hooks import Hook, Hooks
from fairqueue.worker.isolation import run_isolated
from fairqueue.worker.lease_keeper import ActiveRun, LeaseKeeper, about

_log = event_logger("fairqueue.worker")

# The outcome that a call that ends a claim is counted as.
OUTCOMES = {"retry": "retried", "release": "released", "bury": "buried"}
# The outcomes that count for the error rate.
ENDINGS = {"finished", "retried", "buried"}
# How long a task without a handler here waits for a worker that has one.
UNKNOWN = RetryPolicy(retries=5, backoff=5.0, cap=300.0, jitter="none")

Done = tuple[Claim, Any, Report]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """What a thread needs to run tasks."""

    runner: Runner
    keeper: LeaseKeeper
    capture: LogCapture | None


class Executor:
    """Runs the tasks of a worker in the calling thread."""

    def __init__(
        self,
        queue: TaskQueue,
        handlers: Handlers,
        hooks: Hooks,
        metrics: WorkerMetrics,
        alerts: Alerts,
    ) -> None:
        self._queue = queue
        self._handlers = handlers
        self._hooks = hooks
        self._metrics = metrics
        self._alerts = alerts
        # Cached: looking up a series costs more than the rest of the work for a quick task.
        self._seconds: dict[str, Histogram] = {}
        self._counters: dict[tuple[str, str], Counter] = {}

    def execute(self, run: ActiveRun, slot: Slot) -> Done | None:
        """Run a task; return what is to be recorded, or None if its end is recorded already.

        Raises nothing except KeyboardInterrupt in the main thread.
        """
        if run.handler is None:
            text = f"no handler for task {run.claim.task.name!r} here"
            failure = Failure(type="UnknownTask", message=text)
            self._retry(run, text, UNKNOWN, None, self._report(run, failure))
            return None
        try:
            return self._execute(run, run.handler, slot)
        except BaseException:  # only an interrupt gets here
            self.end(self._queue.release, run.claim)
            raise

    def execute_batch(self, runs: Sequence[ActiveRun], slot: Slot) -> list[Done | None]:
        """Run tasks with one call of their handler; return what is to be recorded of each.

        Each has its own filters, hooks, result and end; None if that is recorded already. Raises
        nothing except KeyboardInterrupt in the main thread.
        """
        ends: dict[ActiveRun, Done | None] = {}
        slot.runner.begin()
        try:
            self._execute_batch(runs, slot, ends)
        except BaseException:  # only an interrupt gets here
            for run in runs:
                if run not in ends:
                    self.end(self._queue.release, run.claim)
            raise
        return [ends[run] for run in runs]

    def _execute_batch(
        self, runs: Sequence[ActiveRun], slot: Slot, ends: dict[ActiveRun, Done | None]
    ) -> None:
        ready = []
        for run in runs:
            if run.context.cancelled:  # while it waited for the others
                ends[run] = run.claim, None, Report(seconds=0.0)
                continue
            try:
                skipped = self._prepare(run, handler_of(run), slot)
            except BaseException as error:
                self._failed(run, handler_of(run), slot, error)
                ends[run] = None
                continue
            if skipped is None:
                ready.append(run)
            else:
                ends[run] = skipped
        if not ready:
            return
        results: Sequence[Any]
        try:
            results = self._call(ready, handler_of(ready[0]), slot)
        except BaseException as error:
            ready[0].settle()
            results = [error] * len(ready)
            for run in ready:
                run.overdue = ready[0].overdue
        logged: set[int] = set()  # errors that were logged with their traceback
        for run, result in zip(ready, results, strict=True):
            if isinstance(result, BaseException):
                is_new = id(result) not in logged
                logged.add(id(result))
                self._failed(run, handler_of(run), slot, result, is_new=is_new)
                ends[run] = None
            else:
                ends[run] = self._succeeded(run, handler_of(run), slot, result)

    def _execute(self, run: ActiveRun, handler: Handler, slot: Slot) -> Done | None:
        slot.runner.begin()
        try:
            skipped = self._prepare(run, handler, slot)
            if skipped is not None:
                return skipped
            (result,) = self._call([run], handler, slot)
        except BaseException as error:  # including SystemExit, which comes from the handler
            run.settle()  # again, because TimedOut may have interrupted the first call
            self._failed(run, handler, slot, error)
            return None
        return self._succeeded(run, handler, slot, result)

    def _prepare(self, run: ActiveRun, handler: Handler, slot: Slot) -> Done | None:
        """Call filters and hooks before a run; return what is to be recorded if it is skipped."""
        claim, context = run.claim, run.context
        for each in handler.filters:
            if each.refuses(slot.runner, claim.task.payload, context):
                run.skipped = True
                self._clear(run, slot)
                return claim, {"skipped": each.hook.name}, Report(seconds=0.0)
        for hook in self._hooks.before + handler.hooks.before:
            hook(slot.runner, claim.task.payload, context)
        return None

    def _succeeded(self, run: ActiveRun, handler: Handler, slot: Slot, result: Any) -> Done:
        context = run.context
        self._call_hooks(handler.hooks.then + self._hooks.then, run, slot, result, context)
        self._call_hooks(handler.hooks.finally_ + self._hooks.finally_, run, slot, context)
        self._clear(run, slot)
        lines = context.logged
        log, dropped = ((), 0) if lines is None else lines.kept()
        report = Report(seconds=run.seconds, log=log, log_dropped=dropped, cost=context.spent)
        return run.claim, storable(result), report

    def _call(self, runs: Sequence[ActiveRun], handler: Handler, slot: Slot) -> list[Any]:
        """Call the handler, with its time-out; return a result for each run.

        The runs share the time of the call. Raises what the handler raises.
        """
        began = time.monotonic()
        try:
            if slot.capture is None:
                return self._call_timed(runs, handler, slot)
            with slot.capture.of(runs[0].context):
                return self._call_timed(runs, handler, slot)
        finally:
            seconds = (time.monotonic() - began) / len(runs)
            for run in runs:
                run.seconds = seconds
                self._observe(run)

    def _call_timed(self, runs: Sequence[ActiveRun], handler: Handler, slot: Slot) -> list[Any]:
        first = runs[0]
        if handler.settings.isolated:
            contexts = [run.context for run in runs]
            return run_isolated(handler, contexts, capture=slot.capture is not None)
        if handler.timeout is None:
            return _results(runs, handler, slot)
        try:
            first.mates = runs[1:]
            deadline = time.monotonic() + handler.timeout
            slot.keeper.expect(deadline)
            first.begin(deadline)
            return _results(runs, handler, slot)
        finally:
            first.settle()

    # --- after the handler ------------------------------------------------------------------------

    def _failed(
        self,
        run: ActiveRun,
        handler: Handler,
        slot: Slot,
        error: BaseException,
        *,
        is_new: bool = True,
    ) -> None:
        """Call the hooks and record the failure. Raises the error if it is an interrupt.

        is_new: False if the error was logged before, for another task.
        """
        if _is_interrupt(error):
            self._call_hooks(handler.hooks.finally_ + self._hooks.finally_, run, slot, run.context)
            raise error
        failure = Failure.of(error)
        if isinstance(error, TimedOut) and not failure.message:
            text = f"ran for more than {handler.timeout or 0:g} s"
            failure = Failure(type=failure.type, message=text, traceback=failure.traceback)
        elif not isinstance(error, Retry | Discard | TimedOut):
            fields = about(run.claim) | {"error": f"{failure.type}: {failure.message}"}
            _log("task_failed", logging.WARNING, exc_info=error if is_new else None, **fields)
        self._call_hooks(handler.hooks.catch + self._hooks.catch, run, slot, error, run.context)
        self._call_hooks(handler.hooks.finally_ + self._hooks.finally_, run, slot, run.context)
        self._clear(run, slot)  # before other workers can take the task
        timed_out = run.overdue or isinstance(error, TimedOut)
        if timed_out:
            self._alerts.task_timed_out(run.claim.task, run.claim.attempt, handler.timeout or 0)
        report = self._report(run, failure, timed_out=timed_out)
        if isinstance(error, Discard):
            self._bury(run, failure.message or "the handler discarded it", report)
            return
        text, delay = f"{failure.type}: {failure.message}", None
        if isinstance(error, Retry):
            text, delay = failure.message or "the handler asked for a retry", error.in_
        elif isinstance(error, TimedOut):
            text = f"timed out: {failure.message}"
        self._retry(run, text, handler.policy, delay, report)

    def _report(self, run: ActiveRun, failure: Failure, *, timed_out: bool = False) -> Report:
        name, lines = run.claim.task.name, run.context.logged
        return Report.of_failure(
            name, failure, seconds=run.seconds, lines=lines, timed_out=timed_out
        )

    def _call_hooks(
        self, hooks: Iterable[Hook], run: ActiveRun, slot: Slot, *arguments: Any
    ) -> None:
        """Call hooks whose errors are only logged."""
        for hook in hooks:
            try:
                hook(slot.runner, *arguments)
            except BaseException as error:
                if _is_interrupt(error):
                    raise
                fields = about(run.claim) | {"hook": hook.name, "error": error_line(error)}
                _log("hook_failed", logging.WARNING, exc_info=True, **fields)

    def _clear(self, run: ActiveRun, slot: Slot) -> None:
        """End what the run has left in the event loop of its slot, and log it."""
        left = slot.runner.clear() or run.context.left
        if left is not None:
            fields = about(run.claim) | {"left": ", ".join(left.names), "count": left.count}
            _log("left_running", logging.WARNING, **fields, ended=left.ended)

    # --- recording --------------------------------------------------------------------------------

    def _retry(
        self, run: ActiveRun, error: str, policy: RetryPolicy, delay: float | None, report: Report
    ) -> None:
        """Retry the task as its policy says, or bury it."""
        wait = policy.delay(run.claim.attempt)
        if wait is None:
            self._bury(run, error, report)
        else:
            wait = wait if delay is None else delay
            cost = run.context.spent
            self.end(self._queue.retry, run.claim, error, wait, report=report, cost=cost)

    def _bury(self, run: ActiveRun, error: str, report: Report) -> None:
        claim = run.claim
        # Otherwise the lease was lost, or the task is offered again when it expires.
        cost = run.context.spent
        if self.end(self._queue.bury, claim, error, report=report, cost=cost) == "buried":
            self._alerts.task_failed(claim.task, claim.attempt, error, report.fingerprint)

    def end(
        self, action: Callable[..., None], claim: Claim, *arguments: object, **named: object
    ) -> str:
        """Record the end of a claim; return the outcome, or "not_recorded" if that failed."""
        outcome = OUTCOMES[action.__name__]
        try:
            action(claim, *arguments, **named)
        except LeaseLost:
            outcome = "lost_lease"
            _log("lease_lost", logging.WARNING, **about(claim))
        except FairQueueError as error:
            # The lease expires, and the task is offered again.
            outcome = "not_recorded"
            _log("not_recorded", logging.WARNING, **about(claim), error=str(error))
        self._count(claim, outcome)
        return outcome

    def recorded(self, runs: Sequence[ActiveRun], words: Sequence[str]) -> None:
        """Count the answers to runs that were recorded as finished."""
        for run, word in zip(runs, words, strict=True):
            self._count(run.claim, "skipped" if run.skipped and word == "finished" else word)
            if word == "lost_lease":
                _log("lease_lost", logging.WARNING, **about(run.claim))

    def _count(self, claim: Claim, outcome: str) -> None:
        if outcome in ENDINGS:
            self._alerts.run_ended(failed=outcome != "finished")
        label = self._handlers.label(claim.task.name)
        counter = self._counters.get((label, outcome))
        if counter is None:
            counter = self._metrics.runs.labels(self._queue.name, label, outcome)
            self._counters[label, outcome] = counter
        counter.inc()

    def _observe(self, run: ActiveRun) -> None:
        label = self._handlers.label(run.claim.task.name)
        histogram = self._seconds.get(label)
        if histogram is None:
            histogram = self._metrics.run_seconds.labels(self._queue.name, label)
            self._seconds[label] = histogram
        histogram.observe(run.seconds)

    def stuck_gauge(self, run: ActiveRun) -> Gauge:
        """Return the gauge for a run that goes on after its time-out."""
        label = self._handlers.label(run.claim.task.name)
        return self._metrics.stuck_runs.labels(self._queue.name, label)


def handler_of(run: ActiveRun) -> Handler:
    """Return the handler of a run of a batch, which has one."""
    assert run.handler is not None  # noqa: S101 - only tasks with a handler are batched
    return run.handler


def _results(runs: Sequence[ActiveRun], handler: Handler, slot: Slot) -> list[Any]:
    contexts = [run.context for run in runs]
    if handler.settings.batch:
        return handler.run_batch(contexts, slot.runner)
    return [handler.run(contexts[0], slot.runner)]


def _is_interrupt(error: BaseException) -> bool:
    """Whether the program is interrupted, and not only a handler."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    )
