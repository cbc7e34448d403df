"""Add schedules and read their stored records."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, cast

import pytest
import redis

from fairqueue.clock import from_ms, to_ms
from fairqueue.link.connection import Link
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
    """Return a schedule, which must exist."""
    schedule = scheduler.get_schedule(schedule_id)
    assert schedule is not None
    return schedule


def add(scheduler: TaskScheduler, schedule_id: str = "nine", **fields: Any) -> str:
    """Add a schedule, by default daily at nine."""
    given = {"cron_expr": "0 9 * * *", "user_id": "alice"} | fields
    return scheduler.add_schedule(schedule_id=schedule_id, **given)


def ms(moment: datetime) -> int:
    """Convert a time to milliseconds, as stored."""
    return to_ms(moment, "moment")


def fire_id(schedule_id: str, moment: datetime) -> str:
    """The id of the task that a schedule fires at a moment."""
    return f"{schedule_id}:{ms(moment)}"


def keys_of(queue: TaskQueue, key: str) -> list[bytes]:
    """A key in each partition of a queue."""
    return [part.keys[key] for part in queue.link.parts or (queue.link,)]


def key_with(client: redis.Redis, queue: TaskQueue, key: str, schedule_id: str) -> bytes:
    """A hash or sorted set in the partition that has a schedule; in the first if none has."""
    places = zip(keys_of(queue, "schedules"), keys_of(queue, key), strict=True)
    has = [name for schedules, name in places if client.hexists(schedules, schedule_id)]
    return (has or keys_of(queue, key))[0]


def record(client: redis.Redis, queue: TaskQueue, key: str, schedule_id: str) -> Any:
    """Read the field of a schedule in a hash, parsed if it is JSON; None if absent."""
    name = key_with(client, queue, key, schedule_id)
    text = cast(bytes | None, client.hget(name, schedule_id))
    if text is None:
        return None
    return json.loads(text) if text.startswith(b"{") else text.decode()


def tamper(
    client: redis.Redis, queue: TaskQueue, schedule_id: str, key: str = "schedules", **fields: Any
) -> None:
    """Change fields of the stored record of a schedule directly in Redis."""
    stored = record(client, queue, key, schedule_id) | fields
    client.hset(key_with(client, queue, key, schedule_id), schedule_id, json.dumps(stored))


def due_at(client: redis.Redis, queue: TaskQueue, schedule_id: str) -> float | None:
    """The time at which the loop reads a schedule, in ms; None if never."""
    return client.zscore(key_with(client, queue, "due", schedule_id), schedule_id)


def fired_ids(client: redis.Redis, queue: TaskQueue) -> list[str]:
    """The ids of all tasks that are stored, sorted."""
    names = [name for key in keys_of(queue, "tasks") for name in client.hkeys(key)]
    return sorted(name.decode() for name in cast(list[bytes], names))


def noted(client: redis.Redis, queue: TaskQueue, schedule_id: str = "nine") -> list[Noted]:
    """The ranges of times that were not fired: first, last, count and reason."""
    found = []
    for key in keys_of(queue, "moments"):
        for member, _ in client.zscan_iter(key):
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
    """Call `do` before a script is sent, up to `times` times; return the list of sent scripts."""
    sent: list[str] = []

    def hook(link: Link) -> None:
        command = link.command_of

        def hooked(call: Call) -> Any:
            sent.append(call.script)
            if call.script == script and sent.count(script) <= times:
                do()
            return command(call)

        monkeypatch.setattr(link, "command_of", hooked)

    for part in queue.link.parts or (queue.link,):
        hook(part)
    return sent
