"""Estimate when a task starts, from its place and from how fast tasks were served of late."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from fairqueue.clock import from_ms
from fairqueue.queue.records import moment_of, user_settings
from fairqueue.queue.workers import ANY, GONE_AFTER_S, WorkerInfo

RECENT_MS = 600_000  # a pace that is older says nothing, and so does an older claim
# The range of an estimate: this part of the wait, and more while few tasks were measured or are
# before it. `python -m benchmarks quotes` says how often the truth is in it.
SPREAD = 0.35


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """When a task starts: about then, and probably between `earliest` and `latest`.

    All three are None if it cannot be said; `reason` says why. The estimate supposes that tasks go
    on to be served as fast as in the last half minute in which tasks had to wait, and that others
    push no more than now.
    """

    starts_about: datetime | None = None
    earliest: datetime | None = None
    latest: datetime | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast the tasks of a pool are served.

    tasks, ms: how many were claimed in how much time, while tasks waited. last_ms: when the last
    was claimed. is_busy: whether tasks waited after it.
    """

    tasks: float = 0.0
    ms: float = 0.0
    last_ms: int = 0
    is_busy: bool = False

    @classmethod
    def read(cls, text: bytes | None) -> "Pace":
        """Read the pace of a pool; none if it is malformed."""
        try:
            tasks, ms, last_ms, busy = (text or b"").split()
            found = cls(
                tasks=float(tasks), ms=float(ms), last_ms=int(last_ms), is_busy=busy == b"1"
            )
        except ValueError:
            return cls()
        return found if math.isfinite(found.tasks + found.ms) else cls()

    @classmethod
    def together(cls, paces: "Iterable[Pace]") -> "Pace":
        """The pace of several partitions: they are served at the same time."""
        known = [pace for pace in paces if pace.per_ms is not None]
        listed = known or list(paces)
        rate = sum(pace.per_ms or 0.0 for pace in known)
        tasks = sum(pace.tasks for pace in known)
        return cls(
            tasks=tasks,
            ms=tasks / rate if rate else 0.0,
            last_ms=max((pace.last_ms for pace in listed), default=0),
            is_busy=any(pace.is_busy for pace in listed),
        )

    @property
    def text(self) -> bytes:
        """The pace as `read` takes it."""
        return f"{self.tasks:.6g} {self.ms:.6g} {self.last_ms} {int(self.is_busy)}".encode()

    def is_recent(self, now_ms: int, span_ms: int = RECENT_MS) -> bool:
        """Whether a task was claimed not long ago."""
        return self.last_ms > 0 and abs(now_ms - self.last_ms) <= span_ms

    @property
    def per_ms(self) -> float | None:
        """Tasks per ms; None if not known."""
        return self.tasks / self.ms if self.tasks > 0 and self.ms > 0 else None


def claim_counts_ms(running: int, alive: Iterable[WorkerInfo]) -> int:
    """For how long a claim tells that a pool is served, although no live worker serves it.

    A program that calls `claim` itself sends no heartbeats. It claims again at once unless it is
    busy with tasks that no live worker has.
    """
    has_others = running > sum(worker.running for worker in alive)
    return RECENT_MS if has_others else round(GONE_AFTER_S * 1000)


def free_slots(workers: Iterable[WorkerInfo], pool: str, name: str) -> int | None:
    """How many tasks of a name and a pool live workers could take; None if there is no worker.

    As of their last heartbeats.
    """
    takers = [
        worker
        for worker in workers
        if not worker.draining and pool in worker.pools and {name, ANY} & {*worker.names}
    ]
    if not takers:
        return None
    return sum(max(0, worker.slots - worker.running) for worker in takers)


def quote(fields: Mapping[str, Any], slots: int | None, not_before_ms: int | None = None) -> Quote:
    """Make a quote from the answer of the scripts `quote` or `explain`, by name.

    slots: see `free_slots`. not_before_ms: when the task becomes ready, if that is later.
    """
    now_ms = int(fields["now"])
    pace = Pace.read(fields.get("pace"))
    start_ms = now_ms if not_before_ms is None else max(now_ms, not_before_ms)
    if slots is None and not pace.is_recent(now_ms):
        return Quote(reason="no worker takes such tasks")
    for prefix, what in (("", "user"), ("tenant_", "tenant")):
        if prefix + "settings" not in fields:
            continue
        settings = user_settings(fields[prefix + "settings"] or b"{}", now_ms)
        if settings.paused and settings.paused_until is None:
            return Quote(reason=f"the {what} is paused")
        most, running = settings.max_running, int(fields[prefix + "running"] or 0)
        if most is not None and running >= most and not_before_ms is None:
            return Quote(reason=f"as many tasks of the {what} run as max_running allows")
        parked = moment_of(fields[prefix + "parked"]) if _is_time(fields, prefix) else None
        for moment in (parked, settings.paused_until):
            if moment is not None:
                start_ms = max(start_ms, round(moment.timestamp() * 1000))
        if settings.rate is not None:
            free_ms = max(now_ms, int(fields[prefix + "free"] or 0))
            own = 0 if prefix else int(fields["own"])
            start_ms = max(start_ms, free_ms + round(own / settings.rate * 1000))
    if fields.get("full") == 1:
        return Quote(reason="the limits of its name or of its keys are reached")
    return _from_place(int(fields["before"] or 0), pace, slots, start_ms, now_ms)


def _from_place(before: int, pace: Pace, slots: int | None, start_ms: int, now_ms: int) -> Quote:
    if not pace.is_busy:
        before = max(0, before - (slots or 0))  # free slots take the first ones at once
        if before == 0:
            return _around(start_ms, 0.0, 0.0)
    if pace.per_ms is None or not pace.is_recent(now_ms):
        return Quote(reason="no task was served lately while others waited")
    wait_ms = (before + (0.5 if pace.is_busy else 0.0)) / pace.per_ms
    spread = SPREAD + 1 / math.sqrt(before + 1) + 1 / math.sqrt(pace.tasks + 1)
    return _around(start_ms, wait_ms, min(spread, 1.0))


def _around(start_ms: int, wait_ms: float, spread: float) -> Quote:
    about = from_ms(start_ms) + timedelta(milliseconds=wait_ms)
    margin = timedelta(milliseconds=wait_ms * spread)
    return Quote(starts_about=about, earliest=about - margin, latest=about + margin)


def _is_time(fields: Mapping[str, Any], prefix: str) -> bool:
    return fields.get(prefix + "parked") not in (None, b"inf")
