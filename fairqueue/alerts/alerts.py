"""Tell people what needs them, once and not too often, without ever hurting who raises the alert.

Whoever raises an alert only passes decisions in memory: `Dedup`, `RateLimit` and `LimitWatch` are
plain functions of the moment. One daemon thread does the rest. It hands alerts to the `Lane` of
each recipient and never waits for one: each delivery has a short-lived thread of its own, at most
one for a recipient, so that one who hangs holds up nobody else.
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
from fairqueue.errors import (
    ConfigurationError,
    InvalidInput,
    TimedOut,
    shown,
)
from fairqueue.metrics.collectors import made_once
from fairqueue.models import QueueSnapshot, Task
from fairqueue.queue.workers import Notice, StaleRun
from fairqueue.runtime.fork import reset_in_child
from fairqueue.validation import (
    check_count,
    check_items,
    check_name,
    check_seconds,
)

OUTCOMES = ("sent", "suppressed", "limited", "dropped", "failed")
LOOK_AGAIN_S = 5.0  # while a limit is passed, so often is it looked at whether it still is
Parameters = ParamSpec("Parameters")


# --- metrics --------------------------------------------------------------------------------------


class AlertMetrics:
    """What alerts tell Prometheus about themselves; a kind that is not ours is labelled `other`."""

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
        """One more."""
        self._alerts.labels(alert.kind if alert.kind in KINDS else "other", outcome).inc()


def alert_metrics(registry: CollectorRegistry | None = None) -> AlertMetrics:
    """The metrics of alerts in a registry (Prometheus' own one if None), made once."""
    return made_once(AlertMetrics, registry)


# --- the shell ------------------------------------------------------------------------------------


def _harmless(
    method: Callable[Concatenate["Alerts", Parameters], None],
) -> Callable[Concatenate["Alerts", Parameters], None]:
    """Whatever goes wrong in it is logged, and is not the caller's problem."""

    @functools.wraps(method)
    def guarded(self: "Alerts", /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        if not self._recipients:
            return
        try:
            method(self, *args, **kwargs)
        except TimedOut:
            raise  # the time-out of a handler that raises an alert: it is the worker's
        except Exception as error:
            log_warning("alert_not_raised", error=error_text(error))

    return guarded


@dataclass(frozen=True, slots=True)
class _Ended:
    """What a delivery says to the thread when it is over."""

    lane: Lane
    recipient: Recipient
    alert: Alert
    error: BaseException | None


class Alerts:
    """Tells recipients what needs a person. May be shared by all threads of a process.

    Methods that report something never raise and never wait for a recipient. The thread starts
    with the first alert; a forked child has one of its own, and a memory of its own. Without
    recipients nothing happens at all.
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
        """`source` says in each alert where it is from: host and process if None.

        Raises ConfigurationError naming the argument. Starts no thread, opens no connection.
        """
        listed = check_items(recipients, "recipients", "recipients", ConfigurationError)
        self._recipients = [_check_recipient(recipient) for recipient in listed]
        if limits is not None and not isinstance(limits, AlertLimits):
            raise ConfigurationError(f"limits {shown(limits):.80} is no AlertLimits")
        self._limits = AlertLimits() if limits is None else limits
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
        """Whether anybody is told."""
        return bool(self._recipients)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _begin_life(self) -> None:
        """Remember nothing: in the constructor, and in a child after a fork.

        There the thread is gone, the lock may be held for good, and what waits is the parent's.
        """
        # A lock that a signal handler may take again. No I/O and no foreign code under it.
        self._lock = threading.RLock()
        self._dedup = Dedup(self._repeat_after)
        self._rate = RateLimit(self._per_minute)
        self._watch = LimitWatch(self._limits, self._repeat_after)
        most = max(PENDING, self._per_minute)  # what a minute may bring must have room
        self._lanes = [(Lane(each.timeout, most), each) for each in self._recipients]
        # Wakes the thread. A Condition could stay locked when a time-out hits who notifies it.
        self._words: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._flushes: list[threading.Event] = []
        self._thread: threading.Thread | None = None
        self._ending = False
        self._source = self._given_source or f"{socket.gethostname()}:{os.getpid()}"

    # --- what happened ----------------------------------------------------------------------------

    @_harmless
    def raise_(self, alert: Alert) -> None:
        """Tell it, unless the same was told within `repeat_after` seconds."""
        if not isinstance(alert, Alert):
            raise InvalidInput(f"{shown(alert):.80} is no Alert")
        with self._lock:
            now = self._monotonic()
            suppressed = self._dedup.admit(alert.kind, alert.key, now)
            if suppressed is None:
                self._metrics.count(alert, "suppressed")
            else:
                self._tell([replace(alert, suppressed=suppressed)], now)

    @_harmless
    def task_failed(
        self, task: Task, attempt: int, error: BaseException | str, fingerprint: str = ""
    ) -> None:
        """A task failed and is not tried again. The same news: same name and `fingerprint`.

        Without one, what stands before the first colon of the error: its type.
        """
        text = error_text(error)
        self.raise_(
            Alert(
                kind="task_failed",
                key=f"{task.name}:{fingerprint or text.partition(':')[0]}",
                summary=f"{task.name} failed for good on attempt {attempt}: {text}",
                details=_about(task, attempt, error=text, fingerprint=fingerprint or None),
            )
        )

    @_harmless
    def task_timed_out(self, task: Task, attempt: int, timeout: float) -> None:
        """A run was ended by its time-out. The same news: same name."""
        self.raise_(
            Alert(
                kind="task_timed_out",
                key=task.name,
                summary=f"{task.name} ran for more than {timeout:g} s",
                details=_about(task, attempt, timeout_s=timeout),
                severity="warning",
            )
        )

    @_harmless
    def stale_run(self, run: StaleRun) -> None:
        """A run did not end when it had to, and was ended without it. The same news: same name."""
        self.raise_(
            Alert(
                kind="stale_run",
                key=run.name,
                summary=f"{run.name} ran for {run.seconds:g} s and did not end; it may still go on",
                details={
                    "task": run.task_id,
                    "name": run.name,
                    "user": run.user_id,
                    "worker": run.worker_id,
                    "seconds": run.seconds,
                },
                severity="warning",
            )
        )

    @_harmless
    def task_given_up(self, notice: Notice) -> None:
        """A task ended for good without a word of its worker. The same news: name and outcome."""
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
        self.raise_(
            Alert(
                kind="task_failed",
                key=f"{notice.name}:{notice.outcome}",
                summary=f"{notice.name} failed for good on attempt {notice.attempt}: "
                f"{notice.error}",
                details=details,
            )
        )

    @_harmless
    def schedule_set_aside(self, schedule_id: str, reason: str, *, broken: bool = False) -> None:
        """A schedule fires no more: its record is `broken`, or it has no next moment."""
        what = "cannot be read" if broken else "was disabled"
        self.raise_(
            Alert(
                kind="schedule_broken" if broken else "schedule_disabled",
                key=schedule_id,
                summary=f"schedule {schedule_id} {what}: {reason}",
                details={"schedule": schedule_id, "reason": reason},
            )
        )

    @_harmless
    def run_ended(self, failed: bool) -> None:
        """A run of a task ended; for the error rate. Cheap: for each run."""
        with self._lock:
            now = self._monotonic()
            self._tell(self._watch.run_ended(failed, now), now)

    @_harmless
    def lock_failed(self) -> None:
        """A term of leadership was lost, or Redis could not be asked about it."""
        with self._lock:
            now = self._monotonic()
            self._tell(self._watch.lock_failed(now), now)

    @_harmless
    def late(self, seconds: float) -> None:
        """A schedule fired so many seconds after its moment."""
        with self._lock:
            now = self._monotonic()
            self._tell(self._watch.late(seconds, now), now)

    @_harmless
    def redis_failed(self) -> None:
        """Redis did not answer a call."""
        with self._lock:
            now = self._monotonic()
            self._tell(self._watch.redis_failed(now), now)

    @_harmless
    def redis_ok(self) -> None:
        """Redis answered a call. Costs next to nothing while it always did."""
        if not self._watch.redis_is_fine:
            with self._lock:
                self._watch.redis_ok(self._monotonic())

    @_harmless
    def watch(self, snapshot: QueueSnapshot) -> None:
        """Compare the counts of a queue with the limits."""
        with self._lock:
            now = self._monotonic()
            self._tell(self._watch.watch(snapshot, now), now)

    # --- the end ----------------------------------------------------------------------------------

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until nothing waits for a recipient; False if that took longer than `timeout`."""
        timeout = check_seconds(timeout, "timeout", ConfigurationError)
        done = threading.Event()
        with self._lock:
            if self._thread is None:
                return True
            self._flushes.append(done)
            self._words.put(None)
        return done.wait(timeout)

    def close(self, timeout: float = 5.0) -> bool:
        """Send what waits, each alert once more at once, and end the thread.

        False if that took longer than `timeout`: the rest is not sent. Later alerts are dropped.
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

    def _tell(self, alerts: Sequence[Alert], now: float) -> None:
        """Hand out alerts as far as the rate allows. Under the lock."""
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
        if self._words.empty():  # otherwise it looks again anyway
            self._words.put(None)
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="fairqueue-alerts", daemon=True)
            thread.start()
            self._thread = thread

    def _run(self) -> None:
        """Hand out what waits and hear how deliveries ended; waits for no recipient."""
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
        """Do what is due; how many seconds nothing will be, None: before somebody says a word."""
        with self._lock:
            now = self._monotonic()
            self._tell(self._watch.look_again(now), now)
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
        except RuntimeError as error:  # no more threads can be had
            self._words.put(_Ended(lane, recipient, alert, error))

    def _hear(self, word: _Ended) -> None:
        with self._lock:
            told = word.error is None
            outcome = word.lane.ended(word.alert, told, self._monotonic())
        if outcome != "late":  # that was counted when its time was over
            self._metrics.count(word.alert, "sent" if told else "failed")
        if outcome == "given_up" or (outcome == "late" and not told):
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
    """Tell one recipient. All there is in the thread of a delivery."""
    error: BaseException | None = None
    try:
        recipient.send(alert)
    except BaseException as raised:  # also SystemExit: it ends nothing but this delivery
        error = raised
    words.put(_Ended(lane, recipient, alert, error))


def _about(task: Task, attempt: int, **more: object) -> dict[str, object]:
    """What may be said of a task: never its payload, which may hold personal data."""
    details = {
        "task": task.task_id,
        "name": task.name,
        "user": task.user_id,
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
        f"recipient of type {type(recipient).__name__} has no name, time-out and method send: "
        "wrap a function in CallableRecipient"
    )
