"""Fill a queue with many schedules, runs and users, for measurements."""

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock, from_ms
from fairqueue.demo.jobs import JOBS, ZONE
from fairqueue.demo.seeder import DAY_MS, WORKERS, at_times, prepare
from fairqueue.models import Claim, Task
from fairqueue.queue.claim import CLAIM_LIMIT
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.reports import Report
from fairqueue.scheduler.scheduler import TaskScheduler
from fairqueue.schedules.store import MAX_ADDED
from fairqueue.validation import check_count


def seed_large(
    queue: TaskQueue,
    schedules: int = 10_000,
    runs: int = 100_000,
    users: int = 500,
    *,
    random_seed: int = 1,
    force: bool = False,
) -> None:
    """Fill an empty queue with many schedules, ended runs and users, for load tests.

    The users belong to ten tenants. The runs ended evenly over the past day; 2 % have failed.
    Raises as `seed` does.
    """
    check_count(schedules, "schedules", most=1_000_000)
    check_count(runs, "runs", most=10_000_000)
    check_count(users, "users", least=1, most=1_000_000)
    now_ms = queue.link.now_ms()
    prepare(queue, runs, force=force)
    # On the present clock: their first fire times are in the future, and nothing is overdue.
    scheduler = TaskScheduler(queue, "seeder", registry=CollectorRegistry())
    for part in _parts(_many_schedules(schedules, users), MAX_ADDED // 2):
        scheduler.add_schedules(part)
    clock = ManualClock(from_ms(now_ms))
    past = at_times(queue, clock)
    chance = random.Random(random_seed)
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
