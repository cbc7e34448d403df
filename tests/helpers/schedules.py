"""What tests of schedules share: a known Thursday, records as plain data, waits with an end."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest
import redis

from fairqueue.clock import from_ms, to_ms
from fairqueue.link.operation import Call
from fairqueue.models import ScheduledTask
from fairqueue.queue.queue import TaskQueue
from fairqueue.scheduler.scheduler import TaskScheduler

THURSDAY = datetime(2026, 3, 5, 8, 59, 30, tzinfo=UTC)  # half a minute before nine

Noted = tuple[datetime, datetime, int, str]


def at(day: int, hour: int, minute: int = 0, second: int = 0) -> datetime:
    """A moment in March 2026, UTC; the 5th is a Thursday."""
    return datetime(2026, 3, day, hour, minute, second, tzinfo=UTC)


def get(scheduler: TaskScheduler, schedule_id: str) -> ScheduledTask:
    """A schedule that is there."""
    schedule = scheduler.get_schedule(schedule_id)
    assert schedule is not None
    return schedule


def add(scheduler: TaskScheduler, schedule_id: str = "nine", **fields: Any) -> str:
    """Add a schedule, daily at nine unless told otherwise."""
    given = {"cron_expr": "0 9 * * *", "user_id": "alice"} | fields
    return scheduler.add_schedule(schedule_id=schedule_id, **given)


def ms(moment: datetime) -> int:
    """The moment as the records have it."""
    return to_ms(moment, "moment")


def fire_id(schedule_id: str, moment: datetime) -> str:
    """The id of the task that a schedule fires at a moment."""
    return f"{schedule_id}:{ms(moment)}"


def record(client: redis.Redis, queue: TaskQueue, key: str, schedule_id: str) -> Any:
    """What a hash has of a schedule, JSON read; None if nothing."""
    text = cast(bytes | None, client.hget(queue.keys[key], schedule_id))
    if text is None:
        return None
    return json.loads(text) if text.startswith(b"{") else text.decode()


def tamper(
    client: redis.Redis, queue: TaskQueue, schedule_id: str, key: str = "schedules", **fields: Any
) -> None:
    """Write other values into the stored record of a schedule, behind everybody's back."""
    stored = record(client, queue, key, schedule_id) | fields
    client.hset(queue.keys[key], schedule_id, json.dumps(stored))


def due_at(client: redis.Redis, queue: TaskQueue, schedule_id: str) -> float | None:
    """When the loop looks at a schedule, ms; None if never."""
    return client.zscore(queue.keys["due"], schedule_id)


def fired_ids(client: redis.Redis, queue: TaskQueue) -> list[str]:
    """The ids of all tasks that are stored, sorted."""
    return sorted(name.decode() for name in cast(list[bytes], client.hkeys(queue.keys["tasks"])))


def noted(client: redis.Redis, queue: TaskQueue, schedule_id: str = "nine") -> list[Noted]:
    """The stretches of moments that were not fired: first, last, how many, and why."""
    found = []
    for member, _ in client.zscan_iter(queue.keys["moments"]):
        schedule, last, first, count, reason = member.decode().split("\0")
        if schedule == schedule_id:
            found.append((from_ms(int(first)), from_ms(int(last)), int(count), reason))
    return sorted(found)


def before_script(
    queue: TaskQueue,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    do: Callable[[], object],
    *,
    times: int = 1,
) -> list[str]:
    """Do something right before a script is sent, the first so many times; all that are sent."""
    command = queue.link._command
    sent: list[str] = []

    def hooked(call: Call) -> Any:
        sent.append(call.script)
        if call.script == script and sent.count(script) <= times:
            do()
        return command(call)

    monkeypatch.setattr(queue.link, "_command", hooked)
    return sent
