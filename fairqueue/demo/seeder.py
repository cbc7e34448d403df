"""Fill a queue with the history of a month of use, for demos and tests.

A simulation runs event by event, on a clock that jumps from one to the next: schedules are added,
the scheduler ticks, workers claim, finish and bury, people pause and retry. All of it uses the
library itself, so that the history is what workers and people would have left.
"""

import copy
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock, from_ms, to_ms
from fairqueue.demo.jobs import (
    ADMIN,
    BACKOFF,
    IMPORT,
    JOBS,
    KEY_LIMITS,
    PAUSES,
    POOLS,
    RETRIES,
    ROLES,
    TENANT_SETTINGS,
    TENANTS,
    USER_SETTINGS,
    ZONE,
    Job,
    staff,
)
from fairqueue.errors import ConfigurationError, InvalidInput
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.link.connection import Link
from fairqueue.link.whole import WholeLink
from fairqueue.models import Claim
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, LogLine, Report
from fairqueue.recurrence.kinds import compile_recurrence
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.outcomes import task_id_of
from fairqueue.validation import check_count, check_tenant

SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1000, 60_000, 3_600_000, 86_400_000
MONTH_MS = 30 * DAY_MS
# How long ended runs are kept, and how many besides the seeded ones: a busy queue would otherwise
# drop the seeded month within minutes.
KEEP_FOR = timedelta(days=90)
KEEP_MORE = 100_000
MOST_RUNS = 10_000
TO_RETRY = 5  # failed runs that were not retried
FAILED_PART, TIMED_OUT_PART, TRIGGERED_PART = 0.15, 0.05, 0.04
SECOND_TRY_PART = 0.06  # part of the runs that succeeds at the second attempt
WORKERS = ("worker-a", "worker-b")
LEASE_S = 7200.0  # longer than any run
SUCCEEDED, FAILED, TIMED_OUT = "succeeded", "failed", "timed_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    """The contents of a seeded queue.

    to_retry: the failed runs that were not retried; all others of `failed` were.
    """

    now: datetime
    tenants: tuple[str, ...]
    users: tuple[str, ...]
    schedules: tuple[str, ...]
    paused: tuple[str, ...]
    succeeded: tuple[str, ...]
    failed: tuple[str, ...]
    timed_out: tuple[str, ...]
    to_retry: tuple[str, ...]


def seed(
    queue: TaskQueue,
    *,
    now: datetime | None = None,
    tenants: Sequence[str] = TENANTS,
    runs: int = 100,
    random_seed: int = 1,
    force: bool = False,
) -> Seeded:
    """Fill an empty queue with the ten jobs of a school platform and a month of their runs.

    80 % of the runs have succeeded, 15 % failed and 5 % timed out; all but five of the failed ones
    were retried. Nothing is later than `now` (default: the queue's time). The same arguments
    produce the same history, except for the random ids of retries and triggered runs. The settings
    of the queue are changed so that it keeps these runs.

    Raises ConfigurationError for a queue that has schedules or tasks, unless `force` empties it
    first, and InvalidInput for an invalid argument.
    """
    if not tenants:
        raise InvalidInput("tenants must have at least one name")
    names = tuple(check_tenant(tenant, InvalidInput) for tenant in tenants)
    check_count(runs, "runs", least=1, most=MOST_RUNS)
    now_ms = queue.link.now_ms() if now is None else to_ms(now, "now")
    prepare(queue, runs, force=force)
    plan = SeedPlan(now_ms, names, runs, random.Random(random_seed))  # noqa: S311 - no secret
    return Simulation(queue, plan).run()


def prepare(queue: TaskQueue, runs: int, *, force: bool) -> None:
    """Check that the queue is empty, and let it keep `runs` runs and more."""
    if force:
        queue.destroy()
    found = queue.inspect()
    waiting = found.ready + found.delayed
    if found.schedules or waiting or History(queue).runs(limit=1):
        raise ConfigurationError(
            f"queue {queue.name!r} is not empty: it has {found.schedules} schedules, {waiting} "
            "waiting tasks, and maybe ended ones; seed an empty queue, or empty this one by force"
        )
    keep = runs + KEEP_MORE
    queue.configure(
        keep_finished=keep, keep_dead=keep, keep_finished_for=KEEP_FOR, keep_dead_for=KEEP_FOR
    )


def at_times(queue: TaskQueue, clock: ManualClock) -> TaskQueue:
    """Return the same queue with another clock."""

    def at(link: Link) -> Link:
        other = copy.copy(link)
        other.clock = clock
        return other

    past = copy.copy(queue)
    past.__dict__["_twins"] = {}  # of other links
    past.link = at(queue.link)
    if isinstance(past.link, WholeLink):
        past.link.join(list(map(at, queue.link.parts)), queue.link.record)
    return past


# --- the plan -------------------------------------------------------------------------------------


@dataclass(slots=True)
class PlannedRun:
    """One run of the simulation: when it is due, and how it goes.

    kind: "scheduled", "triggered" or "queued". retried_at: when it is retried, in ms.
    """

    at_ms: int
    kind: str
    job: Job
    user: str
    tenant: str | None
    outcome: str = SUCCEEDED
    attempts: int = 1
    retried_at: int | None = None

    @property
    def longest_ms(self) -> int:
        """How long it may take, if it fails at each attempt."""
        delays = sum(BACKOFF[:RETRIES])
        return round(((RETRIES + 1) * self.job.timeout + delays) * 1000) + MINUTE_MS


class SeedPlan:
    """All runs of the simulation: random, but the same for the same seed."""

    def __init__(
        self, now_ms: int, tenants: tuple[str, ...], runs: int, chance: random.Random
    ) -> None:
        self.now_ms = now_ms
        self.tenants = tenants
        self.chance = chance
        self._recurrences = {job.name: compile_recurrence(job.cron, ZONE) for job in JOBS}
        self.created: dict[str, int] = {}
        self.runs: list[PlannedRun] = []
        failed, timed_out = round(FAILED_PART * runs), round(TIMED_OUT_PART * runs)
        left = min(TO_RETRY, failed)
        retried = failed + timed_out - left
        for job in JOBS:
            self._add_scheduled(job, round(job.share * runs / 100))
        self._add_triggered(round(TRIGGERED_PART * runs))
        self._add_queued(runs - retried - len(self.runs))
        self.runs.sort(key=lambda run: run.at_ms)
        self._add_failures(failed, timed_out, left)

    def paused_at(self, job: Job) -> int | None:
        """Return when its schedule was paused, well after a fire time; None if it was not."""
        if job.name not in PAUSES:
            return None
        moment_ms = self._recurrences[job.name].latest_ms(
            self.now_ms - PAUSES[job.name][0] * DAY_MS
        )
        return (moment_ms or 0) + 4 * HOUR_MS

    def clear_of(self, job: Job, at_ms: int) -> int:
        """Return that time, or one after the next fire time if a run could last until then.

        Its overlap is "skip", and no fire time should be skipped here.
        """
        if not job.cron:
            return at_ms
        next_ms = self._recurrences[job.name].next_ms(at_ms)
        room_ms = round(job.seconds[1] * 1000) + MINUTE_MS
        if next_ms is None or next_ms - at_ms > room_ms:
            return at_ms
        return next_ms + room_ms

    def _add_scheduled(self, job: Job, count: int) -> None:
        """Add runs at the last `count` fire times of a job; its schedule is created before."""
        # A fire time in the current second is left to the next scheduler.
        until_ms = self.paused_at(job) or self.now_ms - SECOND_MS
        recurrence = self._recurrences[job.name]
        moments: list[int] = []
        moment = recurrence.latest_ms(until_ms)
        while moment is not None and len(moments) < count and moment > self.now_ms - MONTH_MS:
            moments.append(moment)
            moment = recurrence.previous_ms(moment)
        first_ms = min(moments, default=until_ms)
        gap_ms = min(first_ms - (moment or 0), HOUR_MS)
        self.created[job.name] = first_ms - gap_ms // 2
        self.runs += [self._planned(moment, "scheduled", job) for moment in moments]

    def _add_triggered(self, count: int) -> None:
        for job in itertools.islice(itertools.cycle(JOBS), 2, 2 + 3 * count, 3):
            since_ms = self.created[job.name] + MINUTE_MS
            last_ms = max(since_ms, self.now_ms - HOUR_MS)
            at_ms = self.clear_of(job, self.chance.randint(since_ms, last_ms))
            self.runs.append(self._planned(at_ms, "triggered", job))

    def _add_queued(self, count: int) -> None:
        for _ in range(count):
            at_ms = self.now_ms - self.chance.randint(HOUR_MS, MONTH_MS)
            job = self.chance.choice((IMPORT, IMPORT, JOBS[0], JOBS[6]))
            run = self._planned(at_ms, "queued", job)
            if job is not IMPORT:
                run.tenant = self.chance.choice(self.tenants)
                run.user = f"{run.tenant}.{job.role}"
            self.runs.append(run)

    def _planned(self, at_ms: int, kind: str, job: Job) -> PlannedRun:
        return PlannedRun(at_ms, kind, job, job.user(self.tenants), job.tenant(self.tenants))

    def _add_failures(self, failed: int, timed_out: int, left: int) -> None:
        """Let some runs fail or time out; all but the last few of them are retried."""
        # Not triggered runs: with their retries they could last until the next fire time of their
        # schedule.
        settled = [
            run
            for run in self.runs
            if run.kind != "triggered" and run.at_ms + run.longest_ms + 15 * MINUTE_MS < self.now_ms
        ]
        unlucky = self.chance.sample(settled, failed + timed_out)
        unlucky.sort(key=lambda run: run.at_ms)
        # The last one of each job comes last, so that runs that are not retried differ in kind.
        last = {run.job.name: run for run in unlucky}
        others = [run for run in unlucky if last[run.job.name] is not run]
        retried = (others + sorted(last.values(), key=lambda run: run.at_ms))[: -left or None]
        for run in unlucky:
            run.outcome, run.attempts = FAILED, RETRIES + 1
        for run in self.chance.sample(retried, min(timed_out, len(retried))):
            run.outcome = TIMED_OUT
        for run in retried:
            ended_ms = run.at_ms + run.longest_ms
            soon_ms = ended_ms + self.chance.randint(MINUTE_MS, 9 * MINUTE_MS)
            run.retried_at = self.clear_of(run.job, soon_ms)
        lucky = [run for run in settled if run.outcome == SUCCEEDED]
        second = round(SECOND_TRY_PART * len(self.runs))
        for run in self.chance.sample(lucky, min(second, len(lucky))):
            run.attempts = 2


# --- the simulation -------------------------------------------------------------------------------


class Simulation:
    """Executes a plan: a clock, a scheduler, workers, people."""

    def __init__(self, queue: TaskQueue, plan: SeedPlan) -> None:
        self._plan = plan
        self._chance = plan.chance
        self._clock = ManualClock(from_ms(plan.now_ms - 2 * MONTH_MS))
        self._queue = at_times(queue, self._clock)
        # A registry of its own: the metrics of this process are about the present.
        self._scheduler = TaskScheduler(self._queue, "scheduler-a", registry=CollectorRegistry())
        self._inspector = Inspector(self._queue, ADMIN)
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._runs: dict[str, PlannedRun] = {}
        self._ended: dict[str, list[str]] = {SUCCEEDED: [], FAILED: [], TIMED_OUT: []}
        self._to_retry: list[str] = []

    def run(self) -> Seeded:
        """Execute all events in order."""
        for job in JOBS:
            self._expect_schedule(job)
        users = self._expect_users()
        for run in self._plan.runs:
            self._expect(run)
        while self._events:
            at_ms, _, act = heapq.heappop(self._events)
            self._clock.set(from_ms(at_ms))
            act()
        return Seeded(
            now=from_ms(self._plan.now_ms),
            tenants=self._plan.tenants,
            users=users,
            schedules=tuple(job.schedule_id for job in JOBS),
            paused=tuple(job.schedule_id for job in JOBS if job.name in PAUSES),
            succeeded=tuple(self._ended[SUCCEEDED]),
            failed=tuple(self._ended[FAILED]),
            timed_out=tuple(self._ended[TIMED_OUT]),
            to_retry=tuple(self._to_retry),
        )

    def _at(self, at_ms: int, act: Callable[[], object]) -> None:
        heapq.heappush(self._events, (at_ms, next(self._numbers), act))

    def _after(self, seconds: float, act: Callable[[], object]) -> None:
        self._at(self._clock.now_ms() + round(seconds * 1000), act)

    # --- people -----------------------------------------------------------------------------------

    def _expect_users(self) -> tuple[str, ...]:
        tenants = self._plan.tenants
        start_ms = self._plan.now_ms - MONTH_MS - DAY_MS
        users: dict[str, str | None] = {
            f"{tenant}.{role}": tenant for tenant in tenants for role in ROLES
        }
        users |= {job.user(tenants): job.tenant(tenants) for job in (*JOBS, IMPORT)}
        for number, (user, tenant) in enumerate(sorted(users.items())):
            change = dict(USER_SETTINGS[user.rpartition(".")[2]])
            if tenant is not None:
                change["tenant"] = tenant
            act = functools.partial(self._inspector.users.set, user, **change)
            self._at(start_ms + number * MINUTE_MS, act)
        for tenant, change in zip(tenants, TENANT_SETTINGS, strict=False):
            self._at(start_ms, functools.partial(self._inspector.tenants.set, tenant, **change))
        for key, limits in KEY_LIMITS.items():
            self._at(start_ms, functools.partial(self._inspector.system.set_limit, key, **limits))
        return tuple(sorted(users))

    def _expect_schedule(self, job: Job) -> None:
        spec = job.schedule(
            self._plan.tenants,
            cron_expr=job.cron,
            schedule_id=job.schedule_id,
            priority=job.priority,
            metadata={"description": job.title},
            overlap="skip",
            retries=RETRIES,
            backoff=BACKOFF,
            timeout=job.timeout,
        )
        self._at(self._plan.created[job.name], lambda: self._inspector.schedules.add(**spec))
        paused_ms = self._plan.paused_at(job)
        if paused_ms is not None:
            self._at(paused_ms, lambda: self._pause(job))

    def _pause(self, job: Job) -> None:
        people = self._inspector.acting_as(staff(job.tenant(self._plan.tenants)))
        people.schedules.pause(job.schedule_id, note=PAUSES[job.name][1])

    def _trigger(self, run: PlannedRun) -> None:
        people = self._inspector.acting_as(staff(run.tenant))
        task_id = people.schedules.trigger(run.job.schedule_id)
        self._runs[task_id] = run
        self._claim_soon()

    def _retry(self, run: PlannedRun, task_id: str) -> None:
        people = self._inspector.acting_as(staff(run.tenant))
        again = replace(run, outcome=SUCCEEDED, attempts=1, retried_at=None)
        self._runs[people.failed.retry(task_id)] = again
        self._claim_soon()

    # --- the scheduler and workers ----------------------------------------------------------------

    def _expect(self, run: PlannedRun) -> None:
        if run.kind == "scheduled":
            self._runs[task_id_of(run.job.schedule_id, run.at_ms)] = run
            self._at(run.at_ms, self._tick)
        elif run.kind == "triggered":
            self._at(run.at_ms, lambda: self._trigger(run))
        else:
            self._at(run.at_ms, lambda: self._push(run))

    def _tick(self) -> None:
        self._scheduler.tick()
        self._scheduler.stop()  # its term would have ended by the next tick
        self._claim_soon()

    def _push(self, run: PlannedRun) -> None:
        task_id = f"seeded-{next(self._numbers):05d}"
        self._runs[task_id] = run
        self._queue.push(run.job.task(run.user, run.tenant, task_id=task_id))
        self._claim_soon()

    def _claim_soon(self) -> None:
        room = (self._plan.now_ms - self._clock.now_ms()) / 1000
        self._after(min(self._chance.uniform(0.02, 0.9), room / 10), self._claim)

    def _claim(self) -> None:
        worker = self._chance.choice(WORKERS)
        for claim in self._queue.claim(worker, limit=10, lease=LEASE_S, pools=POOLS):
            run = self._runs[claim.task.task_id]
            attempt = SimulatedAttempt(run, claim, self._seconds(run), self._chance)
            self._after(attempt.seconds, functools.partial(self._end, attempt))
        if self._queue.size():
            self._after(1.0, self._claim)  # a user or a key has reached a limit

    def _seconds(self, run: PlannedRun) -> float:
        """Return how long an attempt takes; none ends later than now."""
        job = run.job
        if run.outcome == TIMED_OUT:
            return job.timeout + self._chance.uniform(0.0, 0.4)
        room = (self._plan.now_ms - self._clock.now_ms()) / 1000
        return min(self._chance.uniform(*job.seconds), 0.8 * room)

    def _end(self, attempt: "SimulatedAttempt") -> None:
        claim, run = attempt.claim, attempt.run
        if attempt.outcome == SUCCEEDED:
            self._queue.finish_many([(claim, attempt.result(), attempt.report())])
        elif claim.attempt < run.attempts:
            delay = BACKOFF[claim.attempt - 1]
            self._queue.retry(claim, attempt.error, delay, report=attempt.report())
            self._after(delay, self._claim)
        else:
            self._queue.bury(claim, attempt.error, report=attempt.report())
            self._buried(run, claim.task.task_id)
        if attempt.is_last:
            self._ended[attempt.outcome].append(claim.task.task_id)

    def _buried(self, run: PlannedRun, task_id: str) -> None:
        if run.retried_at is None:
            self._to_retry.append(task_id)
        else:
            self._at(run.retried_at, lambda: self._retry(run, task_id))


class SimulatedAttempt:
    """One attempt at a run: its outcome, and its report."""

    def __init__(
        self, run: PlannedRun, claim: Claim, seconds: float, chance: random.Random
    ) -> None:
        self.run, self.claim, self.seconds = run, claim, seconds
        self.is_last = claim.attempt == run.attempts
        self.outcome = run.outcome
        if not self.is_last and run.outcome == SUCCEEDED:
            self.outcome = FAILED
        self._number = chance.randint(3, 900)
        self._began_ms = to_ms(claim.lease_until, "lease") - round(LEASE_S * 1000)

    @property
    def error(self) -> str:
        """The error as a worker would record it."""
        failure = self._failure()
        kind = "timed out" if self.outcome == TIMED_OUT else failure.type
        return f"{kind}: {failure.message}"

    def result(self) -> dict[str, Any]:
        """Return the result of the handler."""
        return {self.run.job.result: self._number}

    def report(self) -> Report:
        """Return the report of a worker."""
        job = self.run.job
        if self.outcome == SUCCEEDED:
            return Report(seconds=self.seconds, log=self._log(job.lines))
        report = Report.of_failure(
            job.name,
            self._failure(),
            seconds=self.seconds,
            timed_out=self.outcome == TIMED_OUT,
        )
        return replace(report, log=self._log(job.lines[:1], self.error))

    def _failure(self) -> Failure:
        job = self.run.job
        if self.outcome == FAILED:
            return job.fault.failure()
        return Failure(type="TimedOut", message=f"ran for more than {job.timeout:g} s")

    def _log(self, lines: Sequence[str], error: str = "") -> tuple[LogLine, ...]:
        levelled = [("debug", f"attempt {self.claim.attempt}")]
        levelled += [("info", line.format(n=self._number)) for line in lines]
        if error:
            levelled += [("warning", "this takes longer than usual"), ("error", error)]
        step_ms = self.seconds * 1000 / len(levelled)
        return tuple(
            LogLine(self._began_ms + round(number * step_ms), level, text)
            for number, (level, text) in enumerate(levelled)
        )
