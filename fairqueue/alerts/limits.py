"""Decide which alerts are sent, and when: duplicates, rates, limits, and the queue of a recipient.

Time is passed in: nothing here reads a clock or starts a thread.
"""

import math
from collections import Counter as Tally
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fairqueue.alerts.alert import LIMIT_KINDS, MAX_DETAILS, SEVERITIES, SUMMARY, Alert
from fairqueue.errors import ConfigurationError
from fairqueue.models import QueueSnapshot
from fairqueue.queue.pools import PoolInfo, pool_infos
from fairqueue.queue.workers import WorkerInfo
from fairqueue.validation import check_count, check_number

REMEMBERED = 10_000  # alerts remembered to find duplicates; the oldest are forgotten
# Alerts that wait for one recipient, or `per_minute` if that is more; then the oldest is dropped.
PENDING = 100
TRIES = 8  # with the back-off below, an alert is given up after about two minutes
FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 1.0, 300.0
MINUTE_S = 60.0
BUCKETS = 10  # parts of the window of the error rate, which is exact to a tenth of it
# Failures further apart than this are two outages: workers try Redis every few seconds.
OUTAGE_GAP_S = 60.0


class Dedup:
    """Suppresses duplicates: one alert for each kind and key in `repeat_after` seconds.

    It knows only the alerts of this process.
    """

    def __init__(self, repeat_after: float, most: int = REMEMBERED) -> None:
        self._repeat_after = repeat_after
        self._most = most
        # (kind, key) -> (when it was sent, duplicates suppressed since); oldest first.
        self._sent: OrderedDict[tuple[str, str], tuple[float, int]] = OrderedDict()

    def admit(self, kind: str, key: str, now: float) -> int | None:
        """Return the number of duplicates suppressed before, or None to suppress this one too."""
        sent_at, suppressed = self._sent.get((kind, key), (-math.inf, 0))
        if now - sent_at < self._repeat_after:
            self._sent[kind, key] = (sent_at, suppressed + 1)
            return None
        self._sent[kind, key] = (now, 0)
        self._sent.move_to_end((kind, key))
        if len(self._sent) > self._most:
            self._sent.popitem(last=False)
        return suppressed


class RateLimit:
    """Limits alerts per minute; those beyond the limit are counted in one summary."""

    def __init__(self, per_minute: int) -> None:
        self._sent: deque[float] = deque(maxlen=per_minute)
        self._more: Tally[str] = Tally()
        self._worst = "info"
        self._since = 0.0

    def admit(self, alert: Alert, now: float) -> bool:
        """Return whether it may be sent now; if not, the next summary counts it."""
        if len(self._sent) < (self._sent.maxlen or 0) or now - self._sent[0] >= MINUTE_S:
            self._sent.append(now)
            return True
        if not self._more:
            self._since, self._worst = now, "info"
        self._more[f"{alert.kind} resolved" if alert.resolved else alert.kind] += 1
        self._worst = max(self._worst, alert.severity, key=SEVERITIES.__getitem__)
        return False

    @property
    def due(self) -> float | None:
        """When the summary is due: a minute after the first alert that it counts."""
        return self._since + MINUTE_S if self._more else None

    def summary(self, now: float) -> Alert | None:
        """Return the summary if it is due. It is not limited itself: there is one a minute."""
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
    """The values at which alerts are raised; None means never.

    error_rate: the share of failed runs in the last `window` seconds, from
        `error_rate_least_runs` runs on.
    lock_failures: terms of leadership lost, or not renewed in time, in the last `window` seconds.
    lateness: seconds by which a schedule fires late.
    backlog: tasks that wait for a worker. oldest_wait: the longest wait of these in seconds.
    expired_tasks: tasks that expired in the last `window` seconds before any worker started them.
    pool_unserved: seconds for which tasks wait in a pool that no live worker serves; judged for
        each pool.
    redis_unreachable: seconds without a successful call to Redis.
    quiet: seconds below its limit after which a value counts as resolved.

    Raises ConfigurationError naming the value.
    """

    error_rate: float | None = 0.5
    error_rate_least_runs: int = 20
    lock_failures: int | None = 5
    lateness: float | None = 60.0
    backlog: int | None = 10_000
    oldest_wait: float | None = 600.0
    expired_tasks: int | None = 100
    pool_unserved: float | None = 60.0
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
        for name in ("backlog", "expired_tasks"):
            if getattr(self, name) is not None:
                check_count(getattr(self, name), name, error, least=1)
        for name in ("lateness", "oldest_wait", "pool_unserved", "redis_unreachable"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), name, error, least=0.001, most=1e9)
        for name in ("window", "quiet"):
            check_number(getattr(self, name), name, error, least=0.001, most=1e6)


class RunWindow:
    """Counts the runs that ended in the last seconds, and the failed ones among them."""

    def __init__(self, seconds: float) -> None:
        self._width = seconds / BUCKETS
        self._buckets: deque[list[int]] = deque()  # [number of the bucket, runs, failures]
        self.runs = self.failed = 0

    def add(self, failed: bool, now: float) -> None:
        """Count a run."""
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
        """Drop the runs that are too old."""
        oldest = int(now // self._width) - BUCKETS + 1
        while self._buckets and self._buckets[0][0] < oldest:
            _, runs, failed = self._buckets.popleft()
            self.runs -= runs
            self.failed -= failed


class CounterWindow:
    """By how much a counter of a queue has grown in the last seconds, from what was read of it."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._step = seconds / BUCKETS
        self._read: deque[tuple[float, int]] = deque()  # (when, count), at least a step apart

    def add(self, count: int, now: float) -> int:
        """Record what the counter is now; return by how much it has grown in the window."""
        if self._read and count < self._read[-1][1]:
            self._read.clear()  # it was reset
        if not self._read or now - self._read[-1][0] >= self._step:
            self._read.append((now, count))
        # The oldest one that is kept is from before the window, if there is one.
        while len(self._read) > 1 and now - self._read[1][0] >= self._seconds:
            self._read.popleft()
        return count - self._read[0][1]


@dataclass(slots=True)
class Breach:
    """The state of one limit: since when it is exceeded, and when that was last sent."""

    quiet: float
    repeat_after: float
    since: float | None = None
    sent_at: float = 0.0
    within_since: float | None = None

    def over(self, now: float) -> bool:
        """Record a value over the limit; return whether to send it, first or as a reminder."""
        self.within_since = None
        if self.since is None:
            self.since = now
        elif now - self.sent_at < self.repeat_after:
            return False
        self.sent_at = now
        return True

    def within(self, now: float) -> None:
        """Record a value within the limit."""
        if self.since is not None and self.within_since is None:
            self.within_since = now

    def end(self, now: float) -> float | None:
        """Return for how many seconds the limit was exceeded, once, when that has ended."""
        if self.since is None or self.within_since is None or now - self.within_since < self.quiet:
            return None
        seconds = self.within_since - self.since
        self.since = self.within_since = None
        return seconds


# kind -> (text for a value over the limit, text for the limit when resolved, severity); `key` says
# what was judged
_LIMIT_TEXTS = {
    "error_rate": ("{:.0%} of the runs failed", "fewer than {:.0%} of the runs fail", "error"),
    "lock_failures": ("{:.0f} lock failures", "fewer than {:.0f} lock failures", "warning"),
    "lateness": ("a schedule is {:.1f} s late", "no schedule is {:g} s late", "warning"),
    "backlog": ("{:,.0f} tasks wait", "fewer than {:,.0f} tasks wait", "warning"),
    "oldest_wait": ("a task has waited {:.0f} s", "no task has waited {:g} s", "warning"),
    "expired_tasks": ("{:,.0f} tasks expired", "fewer than {:,.0f} tasks expire", "warning"),
    "pool_unserved": (
        "tasks wait in the pool {key!r}, which no live worker has served for {:.0f} s",
        "the pool {key!r} is served, or nothing waits in it",
        "error",
    ),
    "redis_unreachable": ("Redis has been unreachable for {:.0f} s", "Redis answers", "critical"),
}


class LimitWatch:
    """Compares events and values with the limits; returns one alert for each breach and its end."""

    def __init__(self, limits: AlertLimits, repeat_after: float) -> None:
        self._limits = limits
        self._repeat_after = repeat_after
        # By kind and key; those with a key are dropped when they end.
        self._breaches = {(kind, ""): self._breach() for kind in LIMIT_KINDS}
        self._runs = RunWindow(limits.window)
        self._expired = CounterWindow(limits.window)
        self._unserved_since: dict[str, float] = {}  # by pool
        self._lock_failures: deque[float] = deque(maxlen=limits.lock_failures or 1)
        self._down_since: float | None = None
        self._down_last = 0.0

    def _breach(self) -> Breach:
        return Breach(self._limits.quiet, self._repeat_after)

    @property
    def is_over(self) -> bool:
        """Whether any limit is exceeded."""
        return any(breach.since is not None for breach in self._breaches.values())

    @property
    def redis_is_fine(self) -> bool:
        """Whether `redis_ok` has nothing to change."""
        breach = self._breaches["redis_unreachable", ""]
        return self._down_since is None and (
            breach.since is None or breach.within_since is not None
        )

    def run_ended(self, failed: bool, now: float) -> Sequence[Alert]:
        """Record the end of a run."""
        self._runs.add(failed, now)
        return self._judge_runs(now) if failed else ()

    def lock_failed(self, now: float) -> Sequence[Alert]:
        """Record a lost term of leadership."""
        self._lock_failures.append(now)
        return self._judge_locks(now)

    def late(self, seconds: float, now: float) -> Sequence[Alert]:
        """Record by how many seconds a schedule fired late."""
        return self._judge("lateness", seconds, now)

    def redis_failed(self, now: float) -> Sequence[Alert]:
        """Record a failed call to Redis."""
        if self._down_since is None or now - self._down_last > max(
            OUTAGE_GAP_S, self._limits.redis_unreachable or 0.0
        ):
            self._down_since = now
        self._down_last = now
        seconds = now - self._down_since
        if self._breaches["redis_unreachable", ""].since is not None:
            # Redis came back only briefly: this is still the same outage.
            seconds = max(seconds, self._limits.redis_unreachable or 0.0)
        return self._judge("redis_unreachable", seconds, now)

    def redis_ok(self, now: float) -> None:
        """Record a successful call to Redis."""
        self._down_since = None
        self._breaches["redis_unreachable", ""].within(now)

    def watch(
        self, snapshot: QueueSnapshot, now: float, workers: Iterable[WorkerInfo] | None = None
    ) -> Sequence[Alert]:
        """Compare the counts of a queue with the limits; its pools only if `workers` are given."""
        expired = self._expired.add(snapshot.counters.get("expired_tasks", 0), now)
        alerts = [
            *self._judge("backlog", snapshot.ready, now),
            *self._judge("oldest_wait", snapshot.oldest_wait, now),
            *self._judge("lateness", snapshot.overdue, now),
            *self._judge("expired_tasks", expired, now),
        ]
        if workers is not None:
            alerts += self._judge_pools(pool_infos(snapshot, workers), now)
        return alerts

    def look_again(self, now: float) -> Sequence[Alert]:
        """Return the alerts that time alone causes: windows have passed, breaches have ended."""
        alerts: list[Alert] = []
        if self._breaches["error_rate", ""].since is not None:
            alerts += self._judge_runs(now)
        if self._breaches["lock_failures", ""].since is not None:
            alerts += self._judge_locks(now)
        for (kind, key), breach in list(self._breaches.items()):
            seconds = breach.end(now)
            if seconds is not None:
                alerts.append(self._resolved(kind, key, seconds))
                if key:
                    del self._breaches[kind, key]
        return alerts

    def _judge_pools(self, pools: Sequence[PoolInfo], now: float) -> Sequence[Alert]:
        unserved = {pool.pool: pool for pool in pools if pool.is_unserved}
        since = {name: self._unserved_since.get(name, now) for name in unserved}
        alerts: list[Alert] = []
        for name in self._unserved_since.keys() - since.keys():
            if ("pool_unserved", name) in self._breaches:
                self._breaches["pool_unserved", name].within(now)
        self._unserved_since = since
        for name, pool in unserved.items():
            more = {"pool": name, "waiting": pool.waiting}
            alerts += self._judge("pool_unserved", now - since[name], now, name, more)
        return alerts

    def _judge_runs(self, now: float) -> Sequence[Alert]:
        self._runs.expire(now)
        # Too few runs decide nothing, not even that the breach has ended.
        if self._runs.runs < self._limits.error_rate_least_runs:
            return ()
        return self._judge("error_rate", self._runs.failed / self._runs.runs, now)

    def _judge_locks(self, now: float) -> Sequence[Alert]:
        recent = sum(now - moment < self._limits.window for moment in self._lock_failures)
        return self._judge("lock_failures", recent, now)

    def _judge(
        self,
        kind: str,
        value: float,
        now: float,
        key: str = "",
        more: Mapping[str, object] | None = None,
    ) -> Sequence[Alert]:
        """Compare a value with its limit; `more` are details besides the value."""
        limit: float | None = getattr(self._limits, kind)
        if limit is None:
            return ()
        breach = self._breaches.get((kind, key))
        if value < limit:
            if breach is not None:
                breach.within(now)
            return ()
        breach = breach or self._breaches.setdefault((kind, key), self._breach())
        if not breach.over(now):
            return ()
        text, _, severity = _LIMIT_TEXTS[kind]
        details: dict[str, object] = {"value": value, "limit": limit, **(more or {})}
        if breach.since is not None and breach.since < now:
            details["over_for_s"] = round(now - breach.since)
        summary = f"{text.format(value, key=key)} (limit: {limit:g})"
        return [Alert(kind=kind, key=key, summary=summary, details=details, severity=severity)]

    def _resolved(self, kind: str, key: str, seconds: float) -> Alert:
        limit: float = getattr(self._limits, kind)
        text = _LIMIT_TEXTS[kind][1].format(limit, key=key)
        return Alert(
            kind=kind,
            key=key,
            summary=f"resolved after {seconds:.0f} s: {text}{'' if key else ' again'}",
            details={"limit": limit, "over_for_s": round(seconds)},
            severity="info",
            resolved=True,
        )


class Lane:
    """The queue of alerts for one recipient, with retries and back-off."""

    def __init__(self, timeout: float, most: int) -> None:
        self._timeout = timeout
        self._most = most
        self._pending: deque[tuple[Alert, int]] = deque()  # with the number of tries
        self._sending: tuple[Alert, int] | None = None
        self._began = 0.0
        self._overdue = False
        self._not_before = -math.inf
        self._failures = 0  # in a row
        self._dropped = 0  # since the last delivered alert
        self._closing = False

    @property
    def undelivered(self) -> int:
        """The number of alerts that wait or are being sent."""
        return len(self._pending) + (self._sending is not None)

    def offer(self, alert: Alert) -> Alert | None:
        """Add an alert; return the oldest one if it had to be dropped."""
        self._pending.append((alert, 0))
        if len(self._pending) <= self._most:
            return None
        self._dropped += 1
        return self._pending.popleft()[0]

    def take(self, now: float) -> Alert | None:
        """Return the alert to send now, or None; `ended` must follow."""
        if self._sending is not None or not self._pending or now < self._not_before:
            return None
        self._began, self._overdue = now, False
        self._sending = self._pending.popleft()
        return replace(self._sending[0], dropped=self._dropped)

    def overdue(self, now: float) -> Alert | None:
        """Return the alert whose delivery has exceeded its time-out, once."""
        if self._sending is None or self._overdue or now < self._began + self._timeout:
            return None
        self._overdue = True
        return self._sending[0]

    def ended(self, sent: Alert, delivered: bool, now: float) -> str:
        """Record the end of a delivery; return "sent", "retry", "late" or "given_up"."""
        tries = 1 + (self._sending[1] if self._sending is not None else 0)
        self._sending = None
        if delivered:
            self._dropped -= sent.dropped
            if not self._overdue:
                self._failures = 0
                return "sent"
        self._back_off(now)
        if self._overdue:
            # Not repeated: it may have arrived.
            self._dropped += not delivered
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
        """Before the end: try each alert at once, and only once."""
        self._closing = True
        self._not_before = -math.inf

    @property
    def due(self) -> float | None:
        """When this lane needs attention next; None if only after an event."""
        if self._sending is not None:
            return None if self._overdue else self._began + self._timeout
        return self._not_before if self._pending else None
