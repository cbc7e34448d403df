"""Plain data that REST API, dashboard and CLI show, built from several records."""

import hashlib
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any

from fairqueue.models import QueueSnapshot, ScheduledTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one run ended."""

    task_id: str
    status: str
    ended_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleView:
    """A schedule with its state and last outcomes.

    state: active, paused, disabled (by the scheduler, with a reason), completed or inactive.
    sentence: the rule in words. outcomes: of the last runs, newest first. An update can be made
    conditional on the first half of `etag`.
    """

    schedule: ScheduledTask
    state: str
    sentence: str
    outcomes: list[Outcome]

    @property
    def etag(self) -> str:
        """The revision, which a user's change renews, and a digest of what runs change."""
        task = self.schedule
        counts = (task.run_count, task.missed_count, task.skipped_count, task.failures_in_a_row)
        seen = repr((counts, task.last_run, task.next_run, self.state, self.outcomes)).encode()
        return f"{task.revision}.{hashlib.sha256(seen).hexdigest()[:16]}"

    @property
    def tenant(self) -> str | None:
        """The tenant of the schedule."""
        return self.schedule.tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """What a rule means: in words, and its next runs in its time zone.

    warnings: effects of clock changes on these runs, and other surprises.
    """

    rule: str
    sentence: str
    timezone: str
    runs: list[datetime]
    warnings: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Upcoming:
    """A schedule that fires soon, and when."""

    at: datetime
    schedule: ScheduledTask


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEntry:
    """A log line of a run."""

    task_id: str
    attempt: int
    at: datetime
    level: str
    message: str
    context: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class DayCount:
    """How the runs of one day (UTC) ended."""

    day: date
    succeeded: int = 0
    failed: int = 0
    timed_out: int = 0
    cancelled: int = 0
    expired: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Something that an operator should look at.

    kind: schedule, failed, expired, leader, workers, pool, redis, partition or user. target: the id
    of the object, if any.
    """

    level: str
    kind: str
    target: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderInfo:
    """The leading scheduler; `seconds_left` until its term ends, unless it renews it."""

    scheduler: str | None
    until: datetime | None
    seconds_left: float
    terms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisInfo:
    """The Redis server of the queue, as far as it reports."""

    version: str
    server: str
    used_memory: int
    max_memory: int
    policy: str
    appendonly: bool
    appendfsync: str
    last_save_ok: bool
    replicas: int
    clients: int
    uptime: float
    round_trip: float
    clock_skew: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """The state of a queue.

    Counts that exist only for the whole queue are None for an actor of one tenant. wait_p95: of
    recently ended runs, in seconds. runs_today: ended since midnight UTC, by outcome, as far as
    history goes back.
    """

    at: datetime
    ready: int | None
    delayed: int | None
    running: int | None
    dead: int | None
    oldest_wait: float | None
    wait_p50: float | None
    wait_p95: float | None
    mean_seconds: float | None
    due_within_hour: int | None
    failures_last_hour: int
    runs_today: dict[str, int]
    schedules: int
    active_schedules: int | None
    workers: int | None
    worker_slots: int | None
    leader: LeaderInfo | None
    jain: float | None
    active_users: int | None
    snapshot: QueueSnapshot | None
