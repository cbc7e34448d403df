"""Fill a queue with what a month of use would have left in it, for demos and tests.

A small world is played event by event, on a clock that jumps from one to the next: schedules are
added, the scheduler ticks, workers claim, finish and bury, people pause and retry. All of it goes
through the library itself, so that the history is what workers and people would have written.
"""

import copy
import functools
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock, from_ms, to_ms
from fairqueue.demo.school import (
    ADMIN,
    BACKOFF,
    IMPORT,
    JOBS,
    PAUSES,
    RETRIES,
    ROLES,
    TENANTS,
    USER_SETTINGS,
    ZONE,
    Job,
    staff,
)
from fairqueue.errors import ConfigurationError, InvalidInput
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.models import Claim, Task
from fairqueue.queue.claim import CLAIM_LIMIT
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Failure, LogLine, Report
from fairqueue.recurrence.kinds import compile_recurrence
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.outcomes import task_id_of
from fairqueue.schedules.store import MAX_ADDED
from fairqueue.validation import check_count, check_tenant

SECOND_MS, MINUTE_MS, HOUR_MS, DAY_MS = 1000, 60_000, 3_600_000, 86_400_000
MONTH_MS = 30 * DAY_MS
# Ended runs are kept for so long, and so many besides the seeded ones: otherwise a lively queue
# would drop the past month within minutes.
KEEP_FOR = timedelta(days=90)
KEEP_MORE = 100_000
MOST_RUNS = 10_000
TO_RETRY = 5  # failed runs that nobody has run again yet
FAILED_PART, TIMED_OUT_PART, TRIGGERED_PART = 0.15, 0.05, 0.04
SECOND_TRY_PART = 0.06  # runs that succeed at their second attempt
WORKERS = ("worker-a", "worker-b")
LEASE_S = 7200.0  # longer than any run
SUCCEEDED, FAILED, TIMED_OUT = "succeeded", "failed", "timed_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seeded:
    """What there is in a queue that was seeded.

    to_retry: the failed runs that nobody has run again; all the others of `failed` were.
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
    """Fill an empty queue with the ten jobs of a school platform and their past month.

    Of the runs, 80 % have succeeded, 15 % failed and 5 % timed out; five failed ones stand there to
    be run again, all others that failed were. Nothing is later than `now` (default: the queue's
    time). The same arguments make the same past, but for the random ids of retries and of runs that
    people triggered. Settings of the queue are changed so that none of it is dropped at once.

    Raises ConfigurationError for a queue that has schedules or tasks, unless `force` empties it
    first, and InvalidInput for an argument that cannot be used.
    """
    if not tenants:
        raise InvalidInput("tenants are none: give at least one name")
    names = tuple(check_tenant(tenant, InvalidInput) for tenant in tenants)
    check_count(runs, "runs", least=1, most=MOST_RUNS)
    now_ms = queue.link.now_ms() if now is None else to_ms(now, "now")
    prepare(queue, runs, force=force)
    plan = Plan(now_ms, names, runs, random.Random(random_seed))  # noqa: S311 - no secret
    return World(queue, plan).play()


def prepare(queue: TaskQueue, runs: int, *, force: bool) -> None:
    """See that the queue is empty, and let it keep so many runs and more."""
    if force:
        queue.destroy()
    found = queue.inspect()
    waiting = found.ready + found.delayed
    if found.schedules or waiting or History(queue).runs(limit=1):
        raise ConfigurationError(
            f"queue {queue.name!r} has {found.schedules} schedules, {waiting} waiting tasks, and "
            "maybe others that ended: seed an empty one, or empty it by force"
        )
    keep = runs + KEEP_MORE
    queue.configure(
        keep_finished=keep, keep_dead=keep, keep_finished_for=KEEP_FOR, keep_dead_for=KEEP_FOR
    )


def at_times(queue: TaskQueue, clock: ManualClock) -> TaskQueue:
    """The same queue, on a clock of its own."""
    past = copy.copy(queue)
    past.link = copy.copy(queue.link)
    past.link.clock = clock
    return past


# --- what is to happen ----------------------------------------------------------------------------


@dataclass(slots=True)
class Story:
    """One run that is to be: when it comes up, and how it goes.

    kind: "scheduled", "triggered" or "queued". retried_at: when somebody runs it again, in ms.
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
        """How long it may go on, if it fails at each attempt."""
        delays = sum(BACKOFF[:RETRIES])
        return round(((RETRIES + 1) * self.job.timeout + delays) * 1000) + MINUTE_MS


class Plan:
    """Who does what, and when: random, but the same for the same seed."""

    def __init__(
        self, now_ms: int, tenants: tuple[str, ...], runs: int, chance: random.Random
    ) -> None:
        self.now_ms = now_ms
        self.tenants = tenants
        self.chance = chance
        self._recurrences = {job.name: compile_recurrence(job.cron, ZONE) for job in JOBS}
        self.created: dict[str, int] = {}
        self.stories: list[Story] = []
        failed, timed_out = round(FAILED_PART * runs), round(TIMED_OUT_PART * runs)
        left = min(TO_RETRY, failed)
        retried = failed + timed_out - left
        for job in JOBS:
            self._add_scheduled(job, round(job.share * runs / 100))
        self._add_triggered(round(TRIGGERED_PART * runs))
        self._add_queued(runs - retried - len(self.stories))
        self.stories.sort(key=lambda story: story.at_ms)
        self._add_failures(failed, timed_out, left)

    def paused_at(self, job: Job) -> int | None:
        """When somebody paused its schedule, well after one of its moments; None: nobody has."""
        if job.name not in PAUSES:
            return None
        moment_ms = self._recurrences[job.name].latest_ms(
            self.now_ms - PAUSES[job.name][0] * DAY_MS
        )
        return (moment_ms or 0) + 4 * HOUR_MS

    def clear_of(self, job: Job, at_ms: int) -> int:
        """That moment, or soon after the next one of its schedule if a run could last until then.

        Its overlap is "skip", and no moment should be skipped here.
        """
        if not job.cron:
            return at_ms
        next_ms = self._recurrences[job.name].next_ms(at_ms)
        room_ms = round(job.seconds[1] * 1000) + MINUTE_MS
        if next_ms is None or next_ms - at_ms > room_ms:
            return at_ms
        return next_ms + room_ms

    def _add_scheduled(self, job: Job, count: int) -> None:
        """The last so many moments of a job; its schedule was added just before them."""
        # A moment of this very second is left to whoever runs a scheduler next.
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
        self.stories += [self._story(moment, "scheduled", job) for moment in moments]

    def _add_triggered(self, count: int) -> None:
        for job in itertools.islice(itertools.cycle(JOBS), 2, 2 + 3 * count, 3):
            since_ms = self.created[job.name] + MINUTE_MS
            last_ms = max(since_ms, self.now_ms - HOUR_MS)
            at_ms = self.clear_of(job, self.chance.randint(since_ms, last_ms))
            self.stories.append(self._story(at_ms, "triggered", job))

    def _add_queued(self, count: int) -> None:
        for _ in range(count):
            at_ms = self.now_ms - self.chance.randint(HOUR_MS, MONTH_MS)
            job = self.chance.choice((IMPORT, IMPORT, JOBS[0], JOBS[6]))
            story = self._story(at_ms, "queued", job)
            if job is not IMPORT:
                story.tenant = self.chance.choice(self.tenants)
                story.user = f"{story.tenant}.{job.role}"
            self.stories.append(story)

    def _story(self, at_ms: int, kind: str, job: Job) -> Story:
        return Story(at_ms, kind, job, job.user(self.tenants), job.tenant(self.tenants))

    def _add_failures(self, failed: int, timed_out: int, left: int) -> None:
        """Let so many fail; all but a few of the last ones were run again by somebody."""
        # Not those that were triggered at any time: with their retries they would go on until the
        # next moment of their schedule.
        settled = [
            story
            for story in self.stories
            if story.kind != "triggered"
            and story.at_ms + story.longest_ms + 15 * MINUTE_MS < self.now_ms
        ]
        unlucky = self.chance.sample(settled, failed + timed_out)
        unlucky.sort(key=lambda story: story.at_ms)
        # The last one of each job first: what stands there to be run again is of several kinds.
        last = {story.job.name: story for story in unlucky}
        others = [story for story in unlucky if last[story.job.name] is not story]
        retried = (others + sorted(last.values(), key=lambda story: story.at_ms))[: -left or None]
        for story in unlucky:
            story.outcome, story.attempts = FAILED, RETRIES + 1
        for story in self.chance.sample(retried, min(timed_out, len(retried))):
            story.outcome = TIMED_OUT
        for story in retried:
            ended_ms = story.at_ms + story.longest_ms
            soon_ms = ended_ms + self.chance.randint(MINUTE_MS, 9 * MINUTE_MS)
            story.retried_at = self.clear_of(story.job, soon_ms)
        lucky = [story for story in settled if story.outcome == SUCCEEDED]
        second = round(SECOND_TRY_PART * len(self.stories))
        for story in self.chance.sample(lucky, min(second, len(lucky))):
            story.attempts = 2


# --- how it is played -----------------------------------------------------------------------------


class World:
    """Plays a plan: a clock, a scheduler, workers, people."""

    def __init__(self, queue: TaskQueue, plan: Plan) -> None:
        self._plan = plan
        self._chance = plan.chance
        self._clock = ManualClock(from_ms(plan.now_ms - 2 * MONTH_MS))
        self._queue = at_times(queue, self._clock)
        # Metrics of its own: those of this process are not about the past.
        self._scheduler = TaskScheduler(self._queue, "scheduler-a", registry=CollectorRegistry())
        self._inspector = Inspector(self._queue, ADMIN)
        self._events: list[tuple[int, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._stories: dict[str, Story] = {}
        self._ended: dict[str, list[str]] = {SUCCEEDED: [], FAILED: [], TIMED_OUT: []}
        self._to_retry: list[str] = []

    def play(self) -> Seeded:
        """Let everything happen, in order."""
        for job in JOBS:
            self._expect_schedule(job)
        users = self._expect_users()
        for story in self._plan.stories:
            self._expect(story)
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
        return tuple(sorted(users))

    def _expect_schedule(self, job: Job) -> None:
        tenants = self._plan.tenants
        spec: dict[str, Any] = {
            "cron_expr": job.cron,
            "user_id": job.user(tenants),
            "tenant": job.tenant(tenants),
            "name": job.name,
            "schedule_id": job.schedule_id,
            "timezone": ZONE,
            "priority": job.priority,
            "payload": job.payload,
            "metadata": {"description": job.title},
            "overlap": "skip",
            "retries": RETRIES,
            "backoff": BACKOFF,
            "timeout": job.timeout,
        }
        self._at(self._plan.created[job.name], lambda: self._inspector.schedules.add(**spec))
        paused_ms = self._plan.paused_at(job)
        if paused_ms is not None:
            self._at(paused_ms, lambda: self._pause(job))

    def _pause(self, job: Job) -> None:
        people = self._inspector.acting_as(staff(job.tenant(self._plan.tenants)))
        people.schedules.pause(job.schedule_id, note=PAUSES[job.name][1])

    def _trigger(self, story: Story) -> None:
        people = self._inspector.acting_as(staff(story.tenant))
        task_id = people.schedules.trigger(story.job.schedule_id)
        self._stories[task_id] = story
        self._claim_soon()

    def _retry(self, story: Story, task_id: str) -> None:
        people = self._inspector.acting_as(staff(story.tenant))
        again = replace(story, outcome=SUCCEEDED, attempts=1, retried_at=None)
        self._stories[people.failed.retry(task_id)] = again
        self._claim_soon()

    # --- the scheduler and workers ----------------------------------------------------------------

    def _expect(self, story: Story) -> None:
        if story.kind == "scheduled":
            self._stories[task_id_of(story.job.schedule_id, story.at_ms)] = story
            self._at(story.at_ms, self._tick)
        elif story.kind == "triggered":
            self._at(story.at_ms, lambda: self._trigger(story))
        else:
            self._at(story.at_ms, lambda: self._push(story))

    def _tick(self) -> None:
        self._scheduler.tick()
        self._scheduler.stop()  # its term would be over by the next tick
        self._claim_soon()

    def _push(self, story: Story) -> None:
        task_id = f"seeded-{next(self._numbers):05d}"
        self._stories[task_id] = story
        self._queue.push(
            Task.create(
                user_id=story.user,
                tenant=story.tenant,
                name=story.job.name,
                payload=story.job.payload,
                task_id=task_id,
                triggered_by=story.user,
            )
        )
        self._claim_soon()

    def _claim_soon(self) -> None:
        room = (self._plan.now_ms - self._clock.now_ms()) / 1000
        self._after(min(self._chance.uniform(0.02, 0.9), room / 10), self._claim)

    def _claim(self) -> None:
        for claim in self._queue.claim(self._chance.choice(WORKERS), limit=10, lease=LEASE_S):
            story = self._stories[claim.task.task_id]
            attempt = Attempt(story, claim, self._seconds(story, claim), self._chance)
            self._after(attempt.seconds, functools.partial(self._end, attempt))
        if self._queue.size():
            self._after(1.0, self._claim)  # a user has reached a limit

    def _seconds(self, story: Story, claim: Claim) -> float:
        """How long an attempt takes: nothing ends later than now."""
        job = story.job
        if story.outcome == TIMED_OUT:
            return job.timeout + self._chance.uniform(0.0, 0.4)
        room = (self._plan.now_ms - self._clock.now_ms()) / 1000
        return min(self._chance.uniform(*job.seconds), 0.8 * room)

    def _end(self, attempt: "Attempt") -> None:
        claim, story = attempt.claim, attempt.story
        if attempt.outcome == SUCCEEDED:
            self._queue.finish_many([(claim, attempt.result(), attempt.report())])
        elif claim.attempt < story.attempts:
            delay = BACKOFF[claim.attempt - 1]
            self._queue.retry(claim, attempt.error, delay, report=attempt.report())
            self._after(delay, self._claim)
        else:
            self._queue.bury(claim, attempt.error, report=attempt.report())
            self._buried(story, claim.task.task_id)
        if attempt.is_last:
            self._ended[attempt.outcome].append(claim.task.task_id)

    def _buried(self, story: Story, task_id: str) -> None:
        if story.retried_at is None:
            self._to_retry.append(task_id)
        else:
            self._at(story.retried_at, lambda: self._retry(story, task_id))


class Attempt:
    """One attempt at a run: how it goes, and what it leaves."""

    def __init__(self, story: Story, claim: Claim, seconds: float, chance: random.Random) -> None:
        self.story, self.claim, self.seconds = story, claim, seconds
        self.is_last = claim.attempt == story.attempts
        self.outcome = story.outcome
        if not self.is_last and story.outcome == SUCCEEDED:
            self.outcome = FAILED
        self._number = chance.randint(3, 900)
        self._began_ms = to_ms(claim.lease_until, "lease") - round(LEASE_S * 1000)

    @property
    def error(self) -> str:
        """What a worker would say of it."""
        failure = self._failure()
        kind = "timed out" if self.outcome == TIMED_OUT else failure.type
        return f"{kind}: {failure.message}"

    def result(self) -> dict[str, Any]:
        """What the handler returns."""
        return {self.story.job.result: self._number}

    def report(self) -> Report:
        """What a worker would report of it."""
        job = self.story.job
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
        job = self.story.job
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


# --- many -----------------------------------------------------------------------------------------


def seed_large(
    queue: TaskQueue,
    schedules: int = 10_000,
    runs: int = 100_000,
    users: int = 500,
    *,
    random_seed: int = 1,
    force: bool = False,
) -> None:
    """Fill an empty queue with many schedules, ended runs and users, for tests of scale.

    The users belong to ten tenants. The runs ended evenly over the past day, two of a hundred have
    failed. Raises as `seed` does.
    """
    check_count(schedules, "schedules", most=1_000_000)
    check_count(runs, "runs", most=10_000_000)
    check_count(users, "users", least=1, most=1_000_000)
    now_ms = queue.link.now_ms()
    prepare(queue, runs, force=force)
    # At present: their first moments are to come, and nothing is overdue.
    scheduler = TaskScheduler(queue, "seeder", registry=CollectorRegistry())
    for part in _parts(_many_schedules(schedules, users), MAX_ADDED // 2):
        scheduler.add_schedules(part)
    clock = ManualClock(from_ms(now_ms))
    past = at_times(queue, clock)
    chance = random.Random(random_seed)  # noqa: S311 - no secret
    step_ms = DAY_MS // max(1, -(-runs // CLAIM_LIMIT))
    for number, tasks in enumerate(_parts(_many_tasks(runs, users), CLAIM_LIMIT)):
        clock.set(from_ms(now_ms - DAY_MS + number * step_ms))
        past.push_many(tasks)
        clock.advance(1.5)
        claims = past.claim(WORKERS[number % 2], limit=CLAIM_LIMIT)
        clock.advance(0.5)
        _end_many(past, claims, chance)


def _parts(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while part := list(itertools.islice(items, size)):
        yield part


def _many_schedules(count: int, users: int) -> Iterator[dict[str, Any]]:
    for number in range(count):
        job = JOBS[number % len(JOBS)]
        user = number % users
        yield {
            "cron_expr": f"{number % 60} {number // 60 % 24} * * *",
            "user_id": f"user-{user:04d}",
            "tenant": f"tenant-{user % 10}",
            "name": job.name,
            "schedule_id": f"{job.schedule_id}-{number:06d}",
            "timezone": ZONE,
            "payload": {"number": number},
        }


def _many_tasks(count: int, users: int) -> Iterator[Task]:
    for number in range(count):
        user = number % users
        yield Task.create(
            user_id=f"user-{user:04d}",
            tenant=f"tenant-{user % 10}",
            name=JOBS[number % len(JOBS)].name,
            task_id=f"run-{number:07d}",
        )


def _end_many(queue: TaskQueue, claims: Iterable[Claim], chance: random.Random) -> None:
    done = []
    for claim in claims:
        if chance.random() >= 0.02:
            done.append((claim, None, Report(seconds=chance.uniform(0.01, 0.5))))
            continue
        job = next(job for job in JOBS if job.name == claim.task.name)
        failure = job.fault.failure()
        report = Report.of_failure(job.name, failure, seconds=0.5)
        queue.bury(claim, f"{failure.type}: {failure.message}", report=report)
    queue.finish_many(done)
