"""The world of most tests: one queue, a clock that the test moves, and what works on them."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry

from fairqueue.clock import ManualClock
from fairqueue.history.runs import History
from fairqueue.inspection import Inspector
from fairqueue.link.keys import Keys
from fairqueue.models import Claim, ScheduledTask, TaskInfo
from fairqueue.queue.queue import TaskQueue
from fairqueue.queue.workers import WorkerStore
from fairqueue.scheduler.firing import TickReport
from fairqueue.scheduler.scheduler import TaskScheduler
from helpers import schedules, tasks, waiting
from helpers import state as stored
from helpers.state import State


@dataclass
class World:
    """The queue of a test and everything that shares its server and its clock.

    The methods call the functions of `helpers.tasks`, `helpers.schedules` and `helpers.state` with
    this queue.
    """

    redis: redis.Redis
    clock: ManualClock
    queue: TaskQueue
    registry: CollectorRegistry
    monkeypatch: pytest.MonkeyPatch
    opened: list[TaskQueue] = field(default_factory=list)

    @property
    def keys(self) -> Keys:
        """The keys of the queue; of one with partitions, those of the first."""
        return self.queue.keys

    def keys_with(self, task_id: str) -> Keys:
        return stored.keys_with(self.queue, task_id)

    def keys_of(self, user_id: str, tenant: str | None = None) -> Keys:
        return stored.keys_of(self.queue, user_id, tenant)

    @cached_property
    def scheduler(self) -> TaskScheduler:
        """A scheduler that acts only when the test ticks it."""
        return TaskScheduler(self.queue, "one", registry=self.registry)

    @cached_property
    def other(self) -> TaskScheduler:
        """A second scheduler with its own connections, as in another process."""
        queue = TaskQueue(self.redis, clock=self.clock, partitions=self.queue.partitions)
        self.opened.append(queue)
        return TaskScheduler(queue, "two", registry=CollectorRegistry())

    @cached_property
    def history(self) -> History:
        return History(self.queue)

    @cached_property
    def workers(self) -> WorkerStore:
        return WorkerStore(self.queue.link)

    @cached_property
    def inspector(self) -> Inspector:
        return Inspector(self.queue)

    def patch(self, *target_and_value: Any, **options: Any) -> None:
        """Replace an attribute until the end of the test, as `monkeypatch.setattr` does."""
        self.monkeypatch.setattr(*target_and_value, **options)

    def close(self) -> None:
        for queue in self.opened:
            queue.close()

    # --- time -------------------------------------------------------------------------------------

    def now(self) -> datetime:
        return self.clock.now()

    def advance(self, seconds: float | timedelta) -> None:
        self.clock.advance(seconds)

    def tick(self, **arguments: Any) -> TickReport:
        return self.scheduler.tick(**arguments)

    def tick_at(self, moment: datetime | float) -> TickReport:
        """Set the clock, then tick."""
        self.clock.set(moment)
        return self.scheduler.tick()

    def tick_after(self, seconds: float | timedelta) -> TickReport:
        """Advance the clock, then tick."""
        self.clock.advance(seconds)
        return self.scheduler.tick()

    # --- tasks ------------------------------------------------------------------------------------

    def push(self, *task_ids: str, **fields: Any) -> list[str]:
        return tasks.push(self.queue, *task_ids, **fields)

    def fill(self, user_id: str, count: int, **fields: Any) -> None:
        tasks.fill(self.queue, user_id, count, **fields)

    def claim_one(self, lease: float = 30.0, worker: str = "w") -> Claim:
        return tasks.claim_one(self.queue, lease, worker)

    def push_and_claim(
        self, task_id: str, *, lease: float = 30.0, worker: str = "w", **fields: Any
    ) -> Claim:
        """Push a task, then claim the one that is offered next."""
        self.push(task_id, **fields)
        return self.claim_one(lease, worker)

    def info(self, task_id: str) -> TaskInfo:
        return tasks.info_of(self.queue, task_id)

    def served_users(self, count: int, **options: Any) -> list[str]:
        return tasks.served_users(self.queue, count, **options)

    def beat(self, *arguments: Any, **options: Any) -> None:
        tasks.beat(self.queue, *arguments, **options)

    # --- schedules --------------------------------------------------------------------------------

    def add(self, schedule_id: str = "nine", **fields: Any) -> str:
        return schedules.add(self.scheduler, schedule_id, **fields)

    def schedule(self, schedule_id: str) -> ScheduledTask:
        return schedules.get(self.scheduler, schedule_id)

    def record(self, key: str, schedule_id: str) -> Any:
        return schedules.record(self.redis, self.queue, key, schedule_id)

    def tamper(self, schedule_id: str, key: str = "schedules", **fields: Any) -> None:
        schedules.tamper(self.redis, self.queue, schedule_id, key, **fields)

    def due_at(self, schedule_id: str) -> float | None:
        return schedules.due_at(self.redis, self.queue, schedule_id)

    def fired_ids(self) -> list[str]:
        return schedules.fired_ids(self.redis, self.queue)

    def noted(self, schedule_id: str = "nine") -> list[schedules.Noted]:
        return schedules.noted(self.redis, self.queue, schedule_id)

    def before_script(self, script: str, do: Callable[[], object], times: int = 1) -> list[str]:
        return schedules.before_script(self.queue, self.monkeypatch, script, do, times=times)

    # --- what is stored ---------------------------------------------------------------------------

    def dump(self) -> State:
        return stored.dump(self.redis)

    def state(self, **options: Any) -> State:
        return stored.state_of(self.redis, **options)

    def places(self) -> dict[str, list[str]]:
        return stored.places(self.redis)

    def status_of(self, task_id: str) -> dict[str, Any]:
        return stored.status_of(self.redis, task_id)

    def stats(self) -> dict[str, int]:
        return stored.stats(self.redis)

    def check(self) -> None:
        """Compare every count and index with what can be computed from the others."""
        stored.check_consistency(self.redis)

    def spoil(self, key: str) -> None:
        stored.spoil(self.redis, self.queue, key)

    def count_commands(self) -> Counter[str]:
        return stored.count_commands(self.redis)

    def until_blocked(self, count: int = 1) -> None:
        waiting.until_blocked(self.redis, count)
