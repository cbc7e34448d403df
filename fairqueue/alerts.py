"""Tell people what needs them, once and not too often, without ever hurting who raises the alert.

Whoever raises an alert only passes decisions in memory: `Dedup`, `RateLimit` and `LimitWatch` are
plain functions of the moment. One daemon thread does the rest. It hands alerts to the `Lane` of
each recipient and never waits for one: each delivery has a short-lived thread of its own, at most
one for a recipient, so that one who hangs holds up nobody else.
"""

import functools
import hashlib
import hmac
import http.client
import json
import logging
import math
import os
import queue
import re
import smtplib
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
import weakref
from collections import Counter as Tally
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime
from typing import Any, Concatenate, ParamSpec, Protocol, Self
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter

from fairqueue.errors import (
    ConfigurationError,
    FairQueueError,
    InvalidInput,
    TimedOut,
    kind_of,
    shown,
)
from fairqueue.logs import log_event
from fairqueue.metrics.collectors import made_once
from fairqueue.models import QueueSnapshot, Task, new_id
from fairqueue.queue.workers import Notice, StaleRun
from fairqueue.validation import (
    check_count,
    check_items,
    check_name,
    check_number,
    check_seconds,
)

logger = logging.getLogger("fairqueue.alerts")

# What is told once for each thing it happens to.
EVENT_KINDS = (
    "task_failed",
    "task_timed_out",
    "stale_run",
    "schedule_disabled",
    "schedule_broken",
)
# What is told when a value reaches its limit, and again when it has come back.
LIMIT_KINDS = (
    "error_rate",
    "lock_failures",
    "lateness",
    "backlog",
    "oldest_wait",
    "redis_unreachable",
)
SUMMARY = "summary"  # stands for the alerts that were too many for a minute
KINDS = (*EVENT_KINDS, *LIMIT_KINDS, SUMMARY)
OUTCOMES = ("sent", "suppressed", "limited", "dropped", "failed")
SEVERITIES = {
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}

# Characters that are kept: an alert is a hint where to look, not the record itself.
MAX_SUMMARY, MAX_SUBJECT, MAX_KEY, MAX_DETAIL = 300, 150, 500, 500
MAX_DETAILS = 20  # fields
MAX_INTEGER = 2**63  # a longer number may not be written as JSON by Python, or read by others

REMEMBERED = 10_000  # alerts that the deduplication knows; the oldest is told again if it is raised
# Alerts that wait for one recipient, or `per_minute` if that is more; beyond, the oldest go.
PENDING = 100
TRIES = 8  # with the back-off below, about two minutes until an alert is given up
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
MINUTE_S = 60.0
LOOK_AGAIN_S = 5.0  # while a limit is passed, so often is it looked at whether it still is
BUCKETS = 10  # parts of the error rate's window: it is exact to a tenth of itself
# Failures further apart than this are not one outage: workers try Redis every few seconds.
OUTAGE_GAP_S = 60.0

_KIND = re.compile(r"[a-z][a-z0-9_]{0,49}")
_BROKEN_LINE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]+")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*")
_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]+@[A-Za-z0-9.-]+")

Parameters = ParamSpec("Parameters")


class AlertNotSent(FairQueueError):
    """A recipient could not be told; the message has no secret and nothing that it answered."""


# --- what is told ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that a person should know.

    Alerts with the same `kind` and `key` are the same news. All texts become single lines of
    bounded length, and `details` plain values, so that any recipient can show them. Never put
    payloads into it. The last four fields are filled in on the way to the recipient: `suppressed`
    is how many of the same news were kept back since the last one, `dropped` how many alerts this
    recipient did not get.

    Raises InvalidInput for an unusable `kind`, `severity` or `details`.
    """

    kind: str
    summary: str
    key: str = ""
    details: Mapping[str, Any] = field(default_factory=dict)
    severity: str = "error"
    resolved: bool = False
    at: datetime = field(default_factory=lambda: datetime.now(UTC))
    alert_id: str = field(default_factory=new_id)
    source: str = ""
    suppressed: int = 0
    dropped: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not _KIND.fullmatch(self.kind):
            raise InvalidInput(
                f"kind {shown(self.kind):.80} cannot be used: a word such as 'task_failed', of up "
                "to 50 small letters, digits and underscores"
            )
        if self.severity not in SEVERITIES:
            known = ", ".join(SEVERITIES)
            raise InvalidInput(f"severity {shown(self.severity):.80} is none of {known}")
        if not isinstance(self.details, Mapping):
            raise InvalidInput(f"details must be a dict, not {kind_of(self.details)}")
        details = list(self.details.items())[:MAX_DETAILS]
        cleaned = {_line(name, 50): _plain(value) for name, value in details}
        object.__setattr__(self, "summary", _line(self.summary, MAX_SUMMARY))
        object.__setattr__(self, "key", _line(self.key, MAX_KEY))
        object.__setattr__(self, "details", cleaned)

    def headline(self) -> str:
        """The summary, and what was not told, in one line."""
        text = self.summary
        if self.suppressed:
            text += f" [{self.suppressed} more of these since the last alert]"
        if self.dropped:
            text += f" [{self.dropped} alerts before this one were not delivered]"
        return text

    def text(self) -> str:
        """Everything about it in lines, for people."""
        lines = [self.headline(), ""]
        lines += [f"{name}: {value}" for name, value in self.details.items()]
        lines += [f"kind: {self.kind}", f"severity: {self.severity}"]
        lines += [f"at: {self.at.isoformat(timespec='seconds')}", f"source: {self.source}"]
        return "\n".join(lines) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """Everything about it as JSON can hold it, for programs."""
        return {
            "id": self.alert_id,
            "kind": self.kind,
            "key": self.key,
            "state": "resolved" if self.resolved else "raised",
            "severity": self.severity,
            "summary": self.summary,
            "details": dict(self.details),
            "at": self.at.isoformat(timespec="milliseconds"),
            "source": self.source,
            "suppressed": self.suppressed,
            "dropped": self.dropped,
        }


def _line(value: object, most: int) -> str:
    """A value as one line of bounded length: a header or a log line cannot be forged with it."""
    try:
        text = str(value)
    except Exception:  # the value's own code
        text = f"a {type(value).__name__} that cannot be shown"
    text = _BROKEN_LINE.sub(" ", text[: 2 * most]).strip()
    return text if len(text) <= most else text[: most - 1] + "…"


def _plain(value: object) -> object:
    """A detail as JSON can hold it."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < MAX_INTEGER:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    return _line(value, MAX_DETAIL)


def _error_text(error: BaseException | str) -> str:
    if isinstance(error, str):
        return _line(error, MAX_DETAIL)
    return _line(f"{type(error).__name__}: {_line(error, MAX_DETAIL)}", MAX_DETAIL)


# --- decisions, each a function of the moment -----------------------------------------------------


class Dedup:
    """Which news is new: one alert for each kind and key, then silence for a while.

    It knows what this process has told. Whoever wants one memory for many processes gives this
    class another home.
    """

    def __init__(self, repeat_after: float, most: int = REMEMBERED) -> None:
        self._repeat_after = repeat_after
        self._most = most
        # (kind, key) -> (when it was told, how many were suppressed since); oldest first.
        self._told: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def admit(self, kind: str, key: str, now: float) -> int | None:
        """How many were suppressed since this was last told, or None: it is suppressed, too."""
        told_at, suppressed = self._told.get((kind, key), (-math.inf, 0))
        if now - told_at < self._repeat_after:
            self._told[kind, key] = (told_at, suppressed + 1)
            return None
        self._told[kind, key] = (now, 0)
        self._told.move_to_end((kind, key))
        if len(self._told) > self._most:
            self._told.popitem(last=False)
        return suppressed


class RateLimit:
    """How many alerts a minute may bring; what is beyond becomes one summary."""

    def __init__(self, per_minute: int) -> None:
        self._told: deque[float] = deque(maxlen=per_minute)
        self._more: Tally[str] = Tally()
        self._worst = "info"
        self._since = 0.0

    def admit(self, alert: Alert, now: float) -> bool:
        """Whether it may be told now; if not, the next summary counts it."""
        if len(self._told) < (self._told.maxlen or 0) or now - self._told[0] >= MINUTE_S:
            self._told.append(now)
            return True
        if not self._more:
            self._since, self._worst = now, "info"
        self._more[f"{alert.kind} resolved" if alert.resolved else alert.kind] += 1
        self._worst = max(self._worst, alert.severity, key=SEVERITIES.__getitem__)
        return False

    @property
    def due(self) -> float | None:
        """When the summary is to be told: a minute after the first alert that it counts."""
        return self._since + MINUTE_S if self._more else None

    def summary(self, now: float) -> Alert | None:
        """The summary, if it is due by now; told even if the minute is full: there is one each."""
        if self.due is None or now < self.due:
            return None
        counts = dict(self._more.most_common(MAX_DETAILS))
        total = self._more.total()
        self._more.clear()
        shown = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        return Alert(
            kind=SUMMARY,
            summary=f"{total} more: {shown}",
            details=counts,
            severity=self._worst,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertLimits:
    """From which values on people are told; None: never.

    error_rate: part of the runs in the last `window` seconds that failed; judged once there were
        `error_rate_least_runs` of them.
    lock_failures: terms of leadership lost, or lost sight of, in the last `window` seconds.
    lateness: seconds by which a schedule fires late.
    backlog: tasks that wait for a worker. oldest_wait: seconds that the oldest of them has waited.
    redis_unreachable: seconds for which no call to Redis went well.
    quiet: seconds within its limit after which a value is called resolved; a shorter dip is not.

    Raises ConfigurationError naming the value.
    """

    error_rate: float | None = 0.5
    error_rate_least_runs: int = 20
    lock_failures: int | None = 5
    lateness: float | None = 60.0
    backlog: int | None = 10_000
    oldest_wait: float | None = 600.0
    redis_unreachable: float | None = 30.0
    window: float = 300.0
    quiet: float = 60.0

    def __post_init__(self) -> None:
        error = ConfigurationError
        if self.error_rate is not None:
            check_number(self.error_rate, "error_rate", error, least=0.0001, most=1.0)
        check_count(self.error_rate_least_runs, "error_rate_least_runs", error, least=1)
        if self.lock_failures is not None:
            check_count(self.lock_failures, "lock_failures", error, least=1, most=10_000)
        if self.backlog is not None:
            check_count(self.backlog, "backlog", error, least=1)
        for name in ("lateness", "oldest_wait", "redis_unreachable"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), name, error, least=0.001, most=1e9)
        for name in ("window", "quiet"):
            check_number(getattr(self, name), name, error, least=0.001, most=1e6)


class RunWindow:
    """How many runs ended in the last seconds, and how many of them failed."""

    def __init__(self, seconds: float) -> None:
        self._width = seconds / BUCKETS
        self._buckets: deque[list[int]] = deque()  # [number of the bucket, runs, failures]
        self.runs = self.failed = 0

    def add(self, failed: bool, now: float) -> None:
        """A run ended."""
        number = int(now // self._width)
        if not self._buckets or self._buckets[-1][0] != number:
            self.expire(now)
            self._buckets.append([number, 0, 0])
        bucket = self._buckets[-1]
        bucket[1] += 1
        bucket[2] += failed
        self.runs += 1
        self.failed += failed

    def expire(self, now: float) -> None:
        """Forget what is too long ago."""
        oldest = int(now // self._width) - BUCKETS + 1
        while self._buckets and self._buckets[0][0] < oldest:
            _, runs, failed = self._buckets.popleft()
            self.runs -= runs
            self.failed -= failed


@dataclass(slots=True)
class Breach:
    """Whether one value is past its limit, since when, and when that was last told."""

    quiet: float
    repeat_after: float
    since: float | None = None
    told_at: float = 0.0
    within_since: float | None = None

    def over(self, now: float) -> bool:
        """The value is past its limit; True if that is to be told: at first, and as a reminder."""
        self.within_since = None
        if self.since is None:
            self.since = now
        elif now - self.told_at < self.repeat_after:
            return False
        self.told_at = now
        return True

    def within(self, now: float) -> None:
        """The value is within its limit."""
        if self.since is not None and self.within_since is None:
            self.within_since = now

    def end(self, now: float) -> float | None:
        """For how many seconds it was past its limit, if that has just ended; said once."""
        if self.since is None or self.within_since is None or now - self.within_since < self.quiet:
            return None
        seconds = self.within_since - self.since
        self.since = self.within_since = None
        return seconds


# kind -> (what is told of a value past its limit, what of the limit afterwards, how bad that is)
_LIMIT_TEXTS = {
    "error_rate": ("{:.0%} of the runs failed", "fewer than {:.0%} of the runs fail", "error"),
    "lock_failures": ("{:.0f} lock failures", "fewer than {:.0f} lock failures", "warning"),
    "lateness": ("a schedule is {:.1f} s late", "no schedule is {:g} s late", "warning"),
    "backlog": ("{:,.0f} tasks wait", "fewer than {:,.0f} tasks wait", "warning"),
    "oldest_wait": ("a task waits for {:.0f} s", "no task waits for {:g} s", "warning"),
    "redis_unreachable": ("Redis is out of reach for {:.0f} s", "Redis answers", "critical"),
}


class LimitWatch:
    """Which limits are passed: fed with what happens, says each breach once, and its end once."""

    def __init__(self, limits: AlertLimits, repeat_after: float) -> None:
        self._limits = limits
        self._breaches = {kind: Breach(limits.quiet, repeat_after) for kind in LIMIT_KINDS}
        self._runs = RunWindow(limits.window)
        self._lock_failures: deque[float] = deque(maxlen=limits.lock_failures or 1)
        self._down_since: float | None = None
        self._down_last = 0.0

    @property
    def is_over(self) -> bool:
        """Whether any limit is passed."""
        return any(breach.since is not None for breach in self._breaches.values())

    @property
    def redis_is_fine(self) -> bool:
        """Whether `redis_ok` has nothing to change."""
        breach = self._breaches["redis_unreachable"]
        return self._down_since is None and (
            breach.since is None or breach.within_since is not None
        )

    def run_ended(self, failed: bool, now: float) -> Sequence[Alert]:
        """A run of a task ended."""
        self._runs.add(failed, now)
        return self._judge_runs(now) if failed else ()

    def lock_failed(self, now: float) -> Sequence[Alert]:
        """A term of leadership was lost."""
        self._lock_failures.append(now)
        return self._judge_locks(now)

    def late(self, seconds: float, now: float) -> Sequence[Alert]:
        """A schedule fired so late."""
        return self._judge("lateness", seconds, now)

    def redis_failed(self, now: float) -> Sequence[Alert]:
        """A call to Redis failed."""
        if self._down_since is None or now - self._down_last > max(
            OUTAGE_GAP_S, self._limits.redis_unreachable or 0.0
        ):
            self._down_since = now
        self._down_last = now
        seconds = now - self._down_since
        if self._breaches["redis_unreachable"].since is not None:
            # It came back for a moment only: that is still the same outage.
            seconds = max(seconds, self._limits.redis_unreachable or 0.0)
        return self._judge("redis_unreachable", seconds, now)

    def redis_ok(self, now: float) -> None:
        """A call to Redis went well."""
        self._down_since = None
        self._breaches["redis_unreachable"].within(now)

    def watch(self, snapshot: QueueSnapshot, now: float) -> Sequence[Alert]:
        """Look at the counts of a queue."""
        return [
            *self._judge("backlog", snapshot.ready, now),
            *self._judge("oldest_wait", snapshot.oldest_wait, now),
            *self._judge("lateness", snapshot.overdue, now),
        ]

    def look_again(self, now: float) -> Sequence[Alert]:
        """What time alone has changed: windows that have passed, and breaches that have ended."""
        alerts: list[Alert] = []
        if self._breaches["error_rate"].since is not None:
            alerts += self._judge_runs(now)
        if self._breaches["lock_failures"].since is not None:
            alerts += self._judge_locks(now)
        for kind, breach in self._breaches.items():
            seconds = breach.end(now)
            if seconds is not None:
                alerts.append(self._resolved(kind, seconds))
        return alerts

    def _judge_runs(self, now: float) -> Sequence[Alert]:
        self._runs.expire(now)
        # Of too few runs nothing is said, also not that all is well again.
        if self._runs.runs < self._limits.error_rate_least_runs:
            return ()
        return self._judge("error_rate", self._runs.failed / self._runs.runs, now)

    def _judge_locks(self, now: float) -> Sequence[Alert]:
        recent = sum(now - moment < self._limits.window for moment in self._lock_failures)
        return self._judge("lock_failures", recent, now)

    def _judge(self, kind: str, value: float, now: float) -> Sequence[Alert]:
        limit: float | None = getattr(self._limits, kind)
        breach = self._breaches[kind]
        if limit is None:
            return ()
        if value < limit:
            breach.within(now)
            return ()
        if not breach.over(now):
            return ()
        text, _, severity = _LIMIT_TEXTS[kind]
        details: dict[str, object] = {"value": value, "limit": limit}
        if breach.since is not None and breach.since < now:
            details["over_for_s"] = round(now - breach.since)
        summary = f"{text.format(value)} (limit: {limit:g})"
        return [Alert(kind=kind, summary=summary, details=details, severity=severity)]

    def _resolved(self, kind: str, seconds: float) -> Alert:
        limit: float = getattr(self._limits, kind)
        return Alert(
            kind=kind,
            summary=f"resolved after {seconds:.0f} s: {_LIMIT_TEXTS[kind][1].format(limit)} again",
            details={"limit": limit, "over_for_s": round(seconds)},
            severity="info",
            resolved=True,
        )


class Lane:
    """What waits for one recipient, and when that one is tried (again)."""

    def __init__(self, timeout: float, most: int) -> None:
        self._timeout = timeout
        self._most = most
        self._pending: deque[tuple[Alert, int]] = deque()  # with how often each was tried
        self._sending: tuple[Alert, int] | None = None
        self._began = 0.0
        self._overdue = False
        self._not_before = -math.inf
        self._failures = 0  # in a row
        self._dropped = 0  # since the last alert that was delivered
        self._closing = False

    @property
    def undelivered(self) -> int:
        """How many alerts wait or are on their way."""
        return len(self._pending) + (self._sending is not None)

    def offer(self, alert: Alert) -> Alert | None:
        """Let it wait; the oldest one that waits, if that had to be dropped for it."""
        self._pending.append((alert, 0))
        if len(self._pending) <= self._most:
            return None
        self._dropped += 1
        return self._pending.popleft()[0]

    def take(self, now: float) -> Alert | None:
        """The alert that is to be sent now, if any; `ended` must follow."""
        if self._sending is not None or not self._pending or now < self._not_before:
            return None
        self._began, self._overdue = now, False
        self._sending = self._pending.popleft()
        return replace(self._sending[0], dropped=self._dropped)

    def overdue(self, now: float) -> Alert | None:
        """The alert whose delivery has just passed its time-out; said once."""
        if self._sending is None or self._overdue or now < self._began + self._timeout:
            return None
        self._overdue = True
        return self._sending[0]

    def ended(self, sent: Alert, told: bool, now: float) -> str:
        """The delivery of what `take` gave ended: sent, retry, late (after its time), given_up."""
        tries = 1 + (self._sending[1] if self._sending is not None else 0)
        self._sending = None
        if told:
            self._dropped -= sent.dropped
            if not self._overdue:
                self._failures = 0
                return "sent"
        self._back_off(now)
        if self._overdue:
            # Not repeated: it may well have arrived.
            self._dropped += not told
            return "late"
        if self._closing or tries >= TRIES or len(self._pending) >= self._most:
            self._dropped += 1
            return "given_up"
        self._pending.appendleft((sent, tries))
        return "retry"

    def _back_off(self, now: float) -> None:
        doublings = min(self._failures, 20)
        self._failures += 1
        if not self._closing:
            self._not_before = now + min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**doublings)

    def hurry(self) -> None:
        """The end is near: try each alert at once, and none twice."""
        self._closing = True
        self._not_before = -math.inf

    @property
    def due(self) -> float | None:
        """When to look at this again, if nobody says anything before."""
        if self._sending is not None:
            return None if self._overdue else self._began + self._timeout
        return self._not_before if self._pending else None


# --- recipients -----------------------------------------------------------------------------------


class Recipient(Protocol):
    """Somebody who can be told.

    `send` may take `timeout` seconds; whatever it raises is a failure and is tried again. It is
    called in a thread of its own, never twice at once. `name` is shown in logs: no secrets in it.
    """

    name: str
    timeout: float

    def send(self, alert: Alert) -> None:
        """Tell it, or raise."""


class LogRecipient:
    """Writes alerts to a logger, `fairqueue.alerts` if none is given, at the level they have."""

    def __init__(self, to: logging.Logger | None = None, timeout: float = 10.0) -> None:
        """Raises ConfigurationError naming the argument."""
        if to is not None and not isinstance(to, logging.Logger):
            raise ConfigurationError(f"to {shown(to):.80} is no logging.Logger")
        self._logger = logger if to is None else to
        self.name = f"log {self._logger.name}"
        self.timeout = _check_timeout(timeout)

    def __repr__(self) -> str:
        return f"LogRecipient({self._logger.name!r})"

    def send(self, alert: Alert) -> None:
        """Write one line; the parts of the alert are fields of the record."""
        self._logger.log(
            SEVERITIES[alert.severity],
            "alert %s: %s",
            alert.kind,
            alert.headline(),
            extra={"event": "alert", "alert": alert.as_dict()},
        )


class CallableRecipient:
    """Calls a function with each alert."""

    def __init__(
        self, function: Callable[[Alert], object], timeout: float = 10.0, name: str | None = None
    ) -> None:
        """`name` is what logs call it. Raises ConfigurationError naming the argument."""
        if not callable(function):
            raise ConfigurationError(f"function {shown(function):.80} cannot be called")
        self._function = function
        if name is None:
            # Not its repr: that of a partial shows arguments, which may be secrets.
            name = str(getattr(function, "__qualname__", type(function).__qualname__))
        self.name = check_name(name, "name", ConfigurationError)
        self.timeout = _check_timeout(timeout)

    def __repr__(self) -> str:
        return f"CallableRecipient({self.name})"

    def send(self, alert: Alert) -> None:
        """Call the function; what it returns is ignored."""
        self._function(alert)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object, **more: object) -> None:
        """None: a redirect is an answer like any other that is not 2xx, and a failure."""


class WebhookRecipient:
    """Posts each alert as JSON to a URL that the operator has chosen.

    With `secret` the body is signed: `FairQueue-Signature: t=<seconds since 1970>,v1=<hex>`, the
    HMAC-SHA256 of `<t>.<body>`. Redirects are not followed, and proxies that the environment names
    are not used. Any answer but 2xx is a failure.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        secret: str | bytes | None = None,
        timeout: float = 10.0,
        allow_http: bool = False,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`context` is for a certificate authority of your own.

        Raises ConfigurationError; it shows neither path nor query of the URL, nor header values,
        which are often secrets.
        """
        self._url, shown = _check_url(url, allow_http)
        self._headers = _check_headers({} if headers is None else headers)
        self._secret = _check_secret(secret)
        self.name = f"webhook {shown}"
        self.timeout = _check_timeout(timeout)
        self._opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}),
            urllib.request.HTTPSHandler(context=_check_context(context)),
            _NoRedirect(),
        )

    def __repr__(self) -> str:
        return f"WebhookRecipient({self.name.removeprefix('webhook ')!r})"

    def send(self, alert: Alert) -> None:
        """Post it. Raises AlertNotSent."""
        body = json.dumps(alert.as_dict(), ensure_ascii=False, separators=(",", ":")).encode()
        headers = {"User-Agent": "FairQueue", **self._headers, "Content-Type": "application/json"}
        if self._secret is not None:
            headers["FairQueue-Signature"] = _signature(self._secret, int(time.time()), body)
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            self._url, data=body, headers=headers, method="POST"
        )
        try:
            self._opener.open(request, timeout=self.timeout).close()
        except urllib.error.HTTPError as error:
            error.close()
            raise AlertNotSent(f"{self.name} answered {error.code}, not 2xx") from None
        except (OSError, http.client.HTTPException) as error:
            raise AlertNotSent(f"{self.name} was not reached: {_safe_reason(error)}") from None


def _signature(secret: bytes, seconds: int, body: bytes) -> str:
    digest = hmac.new(secret, b"%d." % seconds + body, hashlib.sha256).hexdigest()
    return f"t={seconds},v1={digest}"


def _safe_reason(error: Exception) -> str:
    """What went wrong, in words of this machine: those of the other side may repeat secrets."""
    reason = getattr(error, "reason", error)  # a URLError wraps the error of the socket
    if isinstance(reason, smtplib.SMTPResponseException):
        return f"{type(reason).__name__} {reason.smtp_code}"
    if isinstance(reason, smtplib.SMTPException | http.client.HTTPException):
        return type(reason).__name__
    return _error_text(reason)


TLS_PORTS = {"starttls": 587, "ssl": 465, "none": 25}


class EmailRecipient:
    """Sends each alert as a plain text mail by SMTP.

    `tls` is "starttls", "ssl" (encrypted from the first byte) or "none". The server's certificate
    and host name are checked. A password is never sent without encryption.
    """

    def __init__(
        self,
        *,
        host: str,
        sender: str,
        to: Sequence[str],
        port: int | None = None,
        username: str | None = None,
        password: str | None = None,
        tls: str = "starttls",
        timeout: float = 10.0,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """`port` is that of `tls` if None; `context` is for a certificate authority of your own.

        Raises ConfigurationError naming the argument; the password is never shown.
        """
        if not isinstance(tls, str) or tls not in TLS_PORTS:
            raise ConfigurationError(f"tls {shown(tls):.80} is none of {', '.join(TLS_PORTS)}")
        self._tls = tls
        self._host = check_name(host, "host", ConfigurationError)
        self._port = check_count(
            TLS_PORTS[tls] if port is None else port,
            "port",
            ConfigurationError,
            least=1,
            most=65535,
        )
        addresses = check_items(to, "to", "addresses", ConfigurationError)
        if not addresses:
            raise ConfigurationError("to must be a list of addresses, not an empty one")
        self._sender = _check_address(sender, "sender")
        self._to = [_check_address(address, "to") for address in addresses]
        self._login = _check_login(username, password, tls)
        self._context = _check_context(context)
        self.name = f"e-mail by {self._host}:{self._port}"
        self.timeout = _check_timeout(timeout)

    def __repr__(self) -> str:
        return f"EmailRecipient({self._host}:{self._port}, {self._sender!r}, to={self._to!r})"

    def send(self, alert: Alert) -> None:
        """Send one mail to all addresses. Raises AlertNotSent if no address was accepted."""
        message = self._message(alert)
        try:
            with self._connect() as smtp:
                if self._tls == "starttls":
                    smtp.starttls(context=self._context)
                if self._login is not None:
                    smtp.login(*self._login)
                refused = smtp.send_message(message, self._sender, self._to)
                with suppress(OSError):  # the mail is accepted: how they part does not matter
                    smtp.quit()
        except OSError as error:  # also SMTPException
            raise AlertNotSent(f"{self.name} failed: {_safe_reason(error)}") from None
        if refused:
            _log("alert_address_refused", recipient=self.name, addresses=sorted(refused))

    def _connect(self) -> smtplib.SMTP:
        # smtplib would ask the name servers who we are, for as long as they take.
        name = socket.gethostname()
        me = name if "." in name and name.isascii() else "[127.0.0.1]"
        if self._tls == "ssl":
            return smtplib.SMTP_SSL(
                self._host, self._port, me, timeout=self.timeout, context=self._context
            )
        return smtplib.SMTP(self._host, self._port, me, timeout=self.timeout)

    def _message(self, alert: Alert) -> EmailMessage:
        message = EmailMessage()
        message["Subject"] = _line(f"[FairQueue] {alert.severity}: {alert.headline()}", MAX_SUBJECT)
        message["From"] = self._sender
        message["To"] = ", ".join(self._to)
        message["Date"] = format_datetime(alert.at)
        # The same for each try, so that a mail that arrives twice can be recognised.
        message["Message-ID"] = f"<{alert.alert_id}@{self._sender.partition('@')[2]}>"
        message["Auto-Submitted"] = "auto-generated"  # no answers by robots
        message.set_content(alert.text())
        return message


def _check_timeout(timeout: float) -> float:
    return check_seconds(timeout, "timeout", ConfigurationError, least=0.001, most=600)


def _check_context(context: ssl.SSLContext | None) -> ssl.SSLContext:
    if context is None:
        return ssl.create_default_context()
    if not isinstance(context, ssl.SSLContext):
        raise ConfigurationError(f"context {shown(context):.80} is no ssl.SSLContext")
    return context


def _check_url(url: object, allow_http: bool) -> tuple[str, str]:
    """A URL that can be posted to, and what may be shown of it."""
    if not isinstance(url, str) or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigurationError("the url of a webhook is no text of printable ASCII characters")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise ConfigurationError("the url of a webhook cannot be read") from None
    schemes = ("https", "http") if allow_http else ("https",)
    if parts.scheme not in schemes or not host:
        raise ConfigurationError(
            f"the url of a webhook begins with {parts.scheme}://{host or ''}: it has to be "
            f"{' or '.join(schemes)} with a host (allow_http=True takes http)"
        )
    if "@" in parts.netloc:
        raise ConfigurationError(f"the url of webhook {host} has a user: use headers for that")
    return url, f"{parts.scheme}://{host}" + (f":{port}" if port else "")


def _check_headers(headers: Mapping[str, str]) -> dict[str, str]:
    if not isinstance(headers, Mapping):
        raise ConfigurationError(f"headers must be a dict, not {kind_of(headers)}")
    for name, value in headers.items():
        if not isinstance(name, str) or not _HEADER_NAME.fullmatch(name):
            raise ConfigurationError(f"header name {shown(name):.80} cannot be used")
        if not isinstance(value, str) or not _HEADER_VALUE.fullmatch(value):
            raise ConfigurationError(
                f"the value of header {shown(name)} cannot be used: a string without control "
                "characters"
            )
    return dict(headers)


def _check_secret(secret: str | bytes | None) -> bytes | None:
    if secret is None:
        return None
    if not isinstance(secret, str | bytes) or not secret:
        raise ConfigurationError("the secret of a webhook is empty or no text: give str or bytes")
    return secret.encode() if isinstance(secret, str) else secret


def _check_address(address: object, what: str) -> str:
    if isinstance(address, str) and len(address) <= 254 and _ADDRESS.fullmatch(address):
        return address
    raise ConfigurationError(f"{what} {shown(address):.80} is no address such as ops@example.org")


def _check_login(username: object, password: object, tls: str) -> tuple[str, str] | None:
    if username is None and password is None:
        return None
    for what, value in (("username", username), ("password", password)):
        if not isinstance(value, str) or not value.isascii() or not value:
            raise ConfigurationError(f"{what} is no ASCII text: username and password go together")
    if tls == "none":
        raise ConfigurationError("a password needs encryption: tls 'starttls' or 'ssl', not 'none'")
    return str(username), str(password)


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
            _log("alert_not_raised", error=_error_text(error))

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
        _all_alerts.add(self)

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
        text = _error_text(error)
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
            _log("alerts_undelivered", count=left)
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
                _log("alerts_step_failed", error=_error_text(error))
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
            _log("alert_overdue", recipient=who.name, kind=alert.kind, timeout=who.timeout)
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
            error = _error_text(word.error)
            _log("alert_not_sent", recipient=word.recipient.name, outcome=outcome, error=error)
        elif outcome == "late":
            _log("alert_late", recipient=word.recipient.name, kind=word.alert.kind)


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
        _check_timeout(getattr(recipient, "timeout", None))  # type: ignore[arg-type]
        checked: Recipient = recipient
        return checked
    raise ConfigurationError(
        f"recipient of type {type(recipient).__name__} has no name, time-out and method send: "
        "wrap a function in CallableRecipient"
    )


def _log(event: str, **fields: object) -> None:
    """A warning; a handler of the application that raises is not our caller's problem."""
    with suppress(Exception):
        log_event(logger, event, logging.WARNING, **fields)


# Weak: one that nobody uses any more is not kept for this.
_all_alerts: "weakref.WeakSet[Alerts]" = weakref.WeakSet()


def _begin_in_child() -> None:
    for alerts in list(_all_alerts):
        alerts._begin_life()


os.register_at_fork(after_in_child=_begin_in_child)
