"""Send alerts to recipients without blocking or failing the code that raises them.

Raising an alert only takes decisions in memory: `Dedup`, `RateLimit` and `LimitWatch`. One daemon
thread does the rest. It puts alerts into the `Lane` of each recipient and never waits for one: each
delivery has its own short-lived thread, at most one for a recipient, so a recipient that hangs does
not delay the others.
"""

import functools
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, Self

from prometheus_client import CollectorRegistry, Counter

from fairqueue.alerts.alert import KINDS, Alert, error_text, log_warning
from fairqueue.alerts.limits import PENDING, AlertLimits, Dedup, Lane, LimitWatch, RateLimit
from fairqueue.alerts.recipients import Recipient, check_timeout
from fairqueue.errors import ConfigurationError, TimedOut, kind_of, plural
from fairqueue.metrics.collectors import made_once
from fairqueue.models import QueueSnapshot, Task
from fairqueue.queue.workers import Notice, StaleRun, WorkerInfo
from fairqueue.runtime.fork import reset_in_child
from fairqueue.validation import check_count, check_items, check_name, check_seconds, check_type

OUTCOMES = ("sent", "suppressed", "limited", "dropped", "failed")
LOOK_AGAIN_S = 5.0  # how often an exceeded limit is checked again
Parameters = ParamSpec("Parameters")


# --- metrics --------------------------------------------------------------------------------------


class AlertMetrics:
    """The Prometheus metrics of alerts; kinds of the application are labelled `other`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._alerts = Counter(
            "fairqueue_alerts",
            "Alerts suppressed and limited; deliveries sent, dropped and failed.",
            ["kind", "outcome"],
            registry=registry,
        )
        for kind in (*KINDS, "other"):
            for outcome in OUTCOMES:
                self._alerts.labels(kind, outcome)

    def count(self, alert: Alert, outcome: str) -> None:
        """Count an alert."""
        self._alerts.labels(alert.kind if alert.kind in KINDS else "other", outcome).inc()


def alert_metrics(registry: CollectorRegistry | None = None) -> AlertMetrics:
    """Return the metrics of alerts in a registry (the default one if None), made once."""
    return made_once(AlertMetrics, registry)


# --- sending --------------------------------------------------------------------------------------


def _harmless(
    method: Callable[Concatenate["Alerts", Parameters], None],
) -> Callable[Concatenate["Alerts", Parameters], None]:
    """Log the errors of a method instead of raising them."""

    @functools.wraps(method)
    def guarded(self: "Alerts", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        if not self._recipients:
            return
        try:
            method(self, *args, **kwargs)
        except TimedOut:
            raise  # the time-out of the handler that raises the alert: the worker needs it
        except Exception as error:
            log_warning("alert_not_raised", error=error_text(error))

    return guarded


@dataclass(frozen=True, slots=True)
class _Ended:
    """The message of a delivery to the thread when it has ended."""

    lane: Lane
    recipient: Recipient
    alert: Alert
    error: BaseException | None


class Alerts:
    """Sends alerts to recipients. May be shared by all threads of a process.

    Methods that report something never raise and never wait for a recipient. The thread starts with
    the first alert; a forked child has its own thread and state. Without recipients, nothing
    happens.
    """

    def __init__(
        self,
        recipients: Iterable[Recipient] = (),
        *,
        limits: AlertLimits | None = None,
        repeat_after: float = 3600.0,
        per_minute: int = 30,
        source: str | None = None,
        registry: CollectorRegistry | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raise ConfigurationError for a bad argument. Start no thread and open no connection.

        `source` names the origin in each alert: host and process id by default.
        """
        listed = check_items(recipients, "recipients", "recipients", ConfigurationError)
        self._recipients = [_check_recipient(recipient) for recipient in listed]
        limits = AlertLimits() if limits is None else limits
        self._limits = check_type(limits, "limits", AlertLimits, ConfigurationError)
        self._repeat_after = check_seconds(repeat_after, "repeat_after", ConfigurationError)
        self._per_minute = check_count(
            per_minute, "per_minute", ConfigurationError, least=1, most=10_000
        )
        self._given_source = (
            None if source is None else check_name(source, "source", ConfigurationError)
        )
        self._monotonic = monotonic
        self._metrics = alert_metrics(registry)
        self._closed = False
        self._begin_life()
        reset_in_child(self, Alerts._begin_life)

    def __repr__(self) -> str:
        return f"Alerts({self._recipients!r})"

    @property
    def has_recipients(self) -> bool:
        """Whether there are recipients."""
        return bool(self._recipients)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _begin_life(self) -> None:
        """Reset the state: in the constructor, and in a child after a fork.

        In a child the thread is gone, the lock may be held forever, and waiting alerts belong to
        the parent.
        """
        # Reentrant, for signal handlers. No I/O and no foreign code while it is held.
        self._lock = threading.RLock()
        self._dedup = Dedup(self._repeat_after)
        self._rate = RateLimit(self._per_minute)
        self._watch = LimitWatch(self._limits, self._repeat_after)
        most = max(PENDING, self._per_minute)  # room for all alerts of a minute
        self._lanes = [(Lane(each.timeout, most), each) for each in self._recipients]
        # Wakes the thread. A Condition could stay locked if a time-out hits the notifying thread.
        self._words: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._flushes: list[threading.Event] = []
        self._thread: threading.Thread | None = None
        self._ending = False
        self._source = self._given_source or f"{socket.gethostname()}:{os.getpid()}"

    # --- events -----------------------------------------------------------------------------------

    @_harmless
    def raise_(self, alert: Alert) -> None:
        """Send an alert, unless a duplicate was sent within `repeat_after` seconds."""
        check_type(alert, "alert", Alert)
        with self._lock:
            now = self._monotonic()
            suppressed = self._dedup.admit(alert.kind, alert.key, now)
            if suppressed is None:
                self._metrics.count(alert, "suppressed")
            else:
                self._send([replace(alert, suppressed=suppressed)], now)

    def _raise(
        self, kind: str, key: str, summary: str, details: dict[str, Any], **more: Any
    ) -> None:
        self.raise_(Alert(kind=kind, key=key, summary=summary, details=details, **more))

    @_harmless
    def task_failed(
        self, task: Task, attempt: int, error: BaseException | str, fingerprint: str = ""
    ) -> None:
        """Report a task that failed on its last attempt.

        Duplicates have the same name and `fingerprint`; without one, the same type of error.
        """
        text = error_text(error)
        self._raise(
            "task_failed",
            f"{task.name}:{fingerprint or text.partition(':')[0]}",
            f"{task.name} failed after {plural(attempt, 'attempt')}: {text}",
            _about(task, attempt, error=text, fingerprint=fingerprint or None),
        )

    @_harmless
    def task_timed_out(self, task: Task, attempt: int, timeout: float) -> None:
        """Report a run that was ended by its time-out. Duplicates have the same name."""
        self._raise(
            "task_timed_out",
            task.name,
            f"{task.name} ran for more than {timeout:g} s",
            _about(task, attempt, timeout_s=timeout),
            severity="warning",
        )

    @_harmless
    def stale_run(self, run: StaleRun) -> None:
        """Report a run that ignored its time-out and was given up. Duplicates: same name."""
        self._raise(
            "stale_run",
            run.name,
            f"{run.name} ran for {run.seconds:g} s and did not end; it may still be running",
            {
                "task": run.task_id,
                "name": run.name,
                "user": run.user_id,
                "worker": run.worker_id,
                "seconds": run.seconds,
            },
            severity="warning",
        )

    @_harmless
    def task_given_up(self, notice: Notice) -> None:
        """Report a task that ended without its worker. Duplicates: same name and outcome."""
        details = {
            "task": notice.task_id,
            "name": notice.name,
            "user": notice.user_id,
            "attempt": notice.attempt,
            "worker": notice.worker_id,
            "error": notice.error,
        }
        if notice.schedule_id is not None:
            details["schedule"] = notice.schedule_id
        summary = f"{notice.name} failed after {plural(notice.attempt, 'attempt')}: {notice.error}"
        self._raise("task_failed", f"{notice.name}:{notice.outcome}", summary, details)

    @_harmless
    def schedule_set_aside(self, schedule_id: str, reason: str, *, broken: bool = False) -> None:
        """Report a schedule that was disabled, or whose record is `broken`."""
        what = "is damaged" if broken else "was disabled"
        self._raise(
            "schedule_broken" if broken else "schedule_disabled",
            schedule_id,
            f"schedule {schedule_id} {what}: {reason}",
            {"schedule": schedule_id, "reason": reason},
        )

    @_harmless
    def run_ended(self, failed: bool) -> None:
        """Report the end of a run, for the error rate. Cheap enough for each run."""
        self._observe(lambda now: self._watch.run_ended(failed, now))

    @_harmless
    def lock_failed(self) -> None:
        """Report that a term of leadership was lost, or that Redis did not answer about it."""
        self._observe(self._watch.lock_failed)

    @_harmless
    def late(self, seconds: float) -> None:
        """Report by how many seconds a schedule fired late."""
        self._observe(lambda now: self._watch.late(seconds, now))

    @_harmless
    def redis_failed(self) -> None:
        """Report that Redis did not answer a call."""
        self._observe(self._watch.redis_failed)

    @_harmless
    def redis_ok(self) -> None:
        """Report that Redis answered a call. Almost free unless it failed before."""
        if not self._watch.redis_is_fine:
            with self._lock:
                self._watch.redis_ok(self._monotonic())

    @_harmless
    def watch(self, snapshot: QueueSnapshot, workers: Iterable[WorkerInfo] | None = None) -> None:
        """Compare the counts of a queue with the limits.

        `workers` are its live ones: without them, pools are not judged. They are needed only if
        the snapshot has `idle_pools`.
        """
        self._observe(lambda now: self._watch.watch(snapshot, now, workers))

    def _observe(self, judge: Callable[[float], Sequence[Alert]]) -> None:
        with self._lock:
            now = self._monotonic()
            self._send(judge(now), now)

    # --- the end ----------------------------------------------------------------------------------

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all alerts are delivered; return False if that takes longer than `timeout`."""
        timeout = check_seconds(timeout, "timeout", ConfigurationError)
        done = threading.Event()
        with self._lock:
            if self._thread is None:
                return True
            self._flushes.append(done)
            self._words.put(None)
        return done.wait(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Send the waiting alerts, each once more at once, and end the thread.

        Return False if that takes longer than `timeout`: the rest is not sent. Later alerts are
        dropped.
        """
        check_seconds(timeout, "timeout", ConfigurationError)
        with self._lock:
            summary = self._rate.summary(math.inf)
            if summary is not None:
                self._hand_out(summary)
            self._closed = True
            for lane, _ in self._lanes:
                lane.hurry()
        in_time = self.flush(timeout)
        with self._lock:
            thread, self._thread = self._thread, None
            self._ending = True
            left = sum(lane.undelivered for lane, _ in self._lanes)
            self._words.put(None)
        if thread is not None:
            thread.join(timeout)
        if left:
            log_warning("alerts_undelivered", count=left)
        return in_time

    # --- the thread -------------------------------------------------------------------------------

    def _send(self, alerts: Sequence[Alert], now: float) -> None:
        """Hand out alerts as far as the rate allows. The caller holds the lock."""
        for alert in alerts:
            if self._closed:
                self._metrics.count(alert, "dropped")
            elif self._rate.admit(alert, now):
                self._hand_out(alert)
            else:
                self._metrics.count(alert, "limited")
                self._wake()

    def _hand_out(self, alert: Alert) -> None:
        alert = replace(alert, source=self._source)
        for lane, _ in self._lanes:
            dropped = lane.offer(alert)
            if dropped is not None:
                self._metrics.count(dropped, "dropped")
        self._wake()

    def _wake(self) -> None:
        if self._words.empty():  # or else the thread wakes up anyway
            self._words.put(None)
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="fairqueue-alerts", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        """Start deliveries and record how they ended; never wait for a recipient."""
        word: _Ended | None = None
        while not self._ending:
            wait: float | None = LOOK_AGAIN_S
            try:
                if word is not None:
                    self._hear(word)
                wait = self._step()
            except Exception as error:  # must not end this thread
                log_warning("alerts_step_failed", error=error_text(error))
            try:
                word = self._words.get(timeout=wait)
            except queue.Empty:
                word = None

    def _step(self) -> float | None:
        """Do everything that is due; return the seconds until the next step, None if none is."""
        with self._lock:
            now = self._monotonic()
            self._send(self._watch.look_again(now), now)
            summary = self._rate.summary(now)
            if summary is not None:
                self._hand_out(summary)
            overdue = [(who, alert) for lane, who in self._lanes if (alert := lane.overdue(now))]
            ready = [(lane, who, alert) for lane, who in self._lanes if (alert := lane.take(now))]
            dues = [lane.due for lane, _ in self._lanes] + [self._rate.due]
            if self._watch.is_over:
                dues.append(now + LOOK_AGAIN_S)
            if not any(lane.undelivered for lane, _ in self._lanes):
                flushes, self._flushes = self._flushes, []
                for done in flushes:
                    done.set()
        for who, alert in overdue:
            self._metrics.count(alert, "failed")
            log_warning("alert_overdue", recipient=who.name, kind=alert.kind, timeout=who.timeout)
        for lane, who, alert in ready:
            self._start_delivery(lane, who, alert)
        return min((max(0.0, due - now) for due in dues if due is not None), default=None)

    def _start_delivery(self, lane: Lane, recipient: Recipient, alert: Alert) -> None:
        thread = threading.Thread(
            target=_deliver,
            args=(self._words, lane, recipient, alert),
            name="fairqueue-alert",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # the limit of threads is reached
            self._words.put(_Ended(lane, recipient, alert, error))

    def _hear(self, word: _Ended) -> None:
        with self._lock:
            delivered = word.error is None
            outcome = word.lane.ended(word.alert, delivered, self._monotonic())
        if outcome != "late":  # counted when its time-out passed
            self._metrics.count(word.alert, "sent" if delivered else "failed")
        if outcome == "given_up" or (outcome == "late" and not delivered):
            self._metrics.count(word.alert, "dropped")
        if word.error is not None:
            error = error_text(word.error)
            log_warning(
                "alert_not_sent", recipient=word.recipient.name, outcome=outcome, error=error
            )
        elif outcome == "late":
            log_warning("alert_late", recipient=word.recipient.name, kind=word.alert.kind)


def _deliver(
    words: "queue.SimpleQueue[_Ended | None]", lane: Lane, recipient: Recipient, alert: Alert
) -> None:
    """Send an alert to one recipient, in the thread of the delivery."""
    error: BaseException | None = None
    try:
        recipient.send(alert)
    except BaseException as raised:  # also SystemExit, which ends only this delivery
        error = raised
    words.put(_Ended(lane, recipient, alert, error))


def _about(task: Task, attempt: int, **more: object) -> dict[str, Any]:
    """Return the details of a task, without its payload, which may contain personal data."""
    details = {
        "task": task.task_id,
        "name": task.name,
        "user": task.user_id,
        "tenant": task.tenant,
        "attempt": attempt,
        "schedule": task.schedule_id,
        "scheduled_for": None if task.scheduled_for is None else task.scheduled_for.isoformat(),
        **more,
    }
    return {name: value for name, value in details.items() if value is not None}


def _check_recipient(recipient: Any) -> Recipient:
    if callable(getattr(recipient, "send", None)) and isinstance(
        getattr(recipient, "name", None), str
    ):
        check_timeout(getattr(recipient, "timeout", None))  # type: ignore[arg-type]
        checked: Recipient = recipient
        return checked
    raise ConfigurationError(
        f"recipient must have a name, a timeout and a method send, not be {kind_of(recipient)}: "
        "wrap a function in CallableRecipient"
    )
