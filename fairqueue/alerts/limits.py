"""When an alert is told: deduplication, rates, limits that are passed, and who is told next.

All of it is decided as a plain function of the moment.
"""

import math
from collections import Counter as Tally
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fairqueue.alerts.alert import LIMIT_KINDS, MAX_DETAILS, SEVERITIES, SUMMARY, Alert
from fairqueue.errors import (
    ConfigurationError,
)
from fairqueue.models import QueueSnapshot
from fairqueue.validation import (
    check_count,
    check_number,
)

REMEMBERED = 10_000  # alerts that the deduplication knows; the oldest is told again if it is raised
# Alerts that wait for one recipient, or `per_minute` if that is more; beyond, the oldest go.
PENDING = 100
TRIES = 8  # with the back-off below, about two minutes until an alert is given up
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
MINUTE_S = 60.0
BUCKETS = 10  # parts of the error rate's window: it is exact to a tenth of itself
# Failures further apart than this are not one outage: workers try Redis every few seconds.
OUTAGE_GAP_S = 60.0


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
